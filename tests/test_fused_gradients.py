"""Gradients as the GPU computes them, here on the CPU: against the C kernels."""

from __future__ import annotations

import pytest
import torch

import recfuse  # noqa: F401  (loads the operators)
from recfuse._codes import MAX, MEAN, SUM
from recfuse.ops import gradients_cuda as gradients
from support.fused import Groups
from support.reference import DTYPES, Feature

_ops = torch.ops.recfuse
GRADIENTS = ("shared", "weighted", "modes")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def problem_of(kind, dtype=torch.float32):
    """Tables of several dims, one of no columns, one of no rows, some with several features."""
    groups = [(dtype, 4, (9, 7, 12)), (dtype, 8, (5, 11)), (dtype, 3, (6, 0)), (dtype, 0, (3,))]
    modes = {"weighted": ("sum",), "shared": ("sum", "mean"), "modes": ("sum", "max", "mean")}[kind]
    order = (0, 2, 1, 0, 3, 4, 5, 7, 2, 3, 6)
    return Groups(
        groups, [Feature(n, modes[at % len(modes)], (None, 1)[at % 2]) for at, n in enumerate(order)]
    )


def given_of(problem, kind, bags=6, integer=torch.int64):
    indices, offsets = problem.lookups(bags, integer=integer)
    factors = torch.rand(indices.numel()) if kind == "weighted" else None
    return torch.randn(bags, problem.output_dim).to(problem.weights[0].dtype), indices, offsets, factors


def both(problem, grad, indices, offsets, factors, ends=None, kept=None):
    """Calls each gradient as ATen computes it, and the C kernel; that one with only the good lookups, where
    there are bad ones (`kept`: which, `ends`: their offsets).
    """
    c_indices, c_offsets, c_factors = indices, offsets, factors
    if kept is not None:
        c_indices, c_offsets, c_factors = indices[kept], ends, None if factors is None else factors[kept]
    winners = problem.winners(c_indices, c_offsets)
    found = winners
    if winners is not None:
        found = gradients.winners(problem.weights, problem.rows, indices, offsets, problem.output_dim)
        assert torch.equal(found, winners)
    for group, weight in enumerate(problem.weights):
        rest = group, *weight.shape, DTYPES.index(weight.dtype)
        close = {"rtol": TOLERANCE[weight.dtype], "atol": TOLERANCE[weight.dtype]}
        ours = gradients.weight_grad(grad, problem.rows, indices, offsets, *rest, factors, found)
        theirs = _ops.fused_embedding_bag_backward(
            grad, problem.rows, c_indices, c_offsets, *rest, c_factors, winners
        )
        torch.testing.assert_close(ours, theirs, **close)
        if winners is None:
            ours = gradients.sparse_weight_grad(grad, problem.rows, indices, offsets, *rest, factors, None)
            theirs = _ops.fused_embedding_bag_sparse_backward(
                grad, problem.rows, c_indices, c_offsets, *rest, c_factors, None
            )
            assert torch.equal(ours[0], theirs[0])
            torch.testing.assert_close(ours[1], theirs[1], **close)
    if factors is not None:
        ours = gradients.sample_weights_grad(grad, problem.weights, problem.rows, indices, offsets)
        theirs = _ops.fused_embedding_bag_sample_weights_backward(
            grad, problem.weights, problem.rows, c_indices, c_offsets
        )
        want = theirs if kept is None else torch.zeros_like(ours).index_put((kept,), theirs)
        torch.testing.assert_close(ours, want, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_they_agree(kind, dtype, monkeypatch):
    monkeypatch.setattr(gradients, "_CHUNK", 7)
    problem = problem_of(kind, dtype)
    for bags, integer in ((1, torch.int64), (6, torch.int32)):
        both(problem, *given_of(problem, kind, bags, integer))


def test_one_group_of_one_table():
    problem = Groups([(torch.float32, 5, (8,))], [Feature(0, "mean", 2)])
    both(problem, *given_of(problem, "shared"))


@pytest.mark.parametrize("kind", GRADIENTS)
def test_strided_lookups(kind):
    problem = problem_of(kind)
    grad, indices, offsets, factors = given_of(problem, kind)
    indices, offsets = (torch.stack((one, one + 10**6), 1)[:, 0] for one in (indices, offsets))
    both(problem, grad.t().contiguous().t(), indices, offsets, factors)


@pytest.mark.parametrize("lookups", (0, 5))
def test_nothing(lookups):
    problem = problem_of("modes")
    for bags in (0, 3):
        offsets = torch.zeros(len(problem.features) * bags + 1, dtype=torch.int64)
        indices = torch.zeros(lookups, dtype=torch.int64)
        both(problem, torch.randn(bags, problem.output_dim), indices, offsets, None, offsets, slice(0))


def test_a_mean_of_more_lookups_than_float16_has():
    count = 70_000
    features, offsets = torch.tensor([[0, 0, count, 4, MEAN, -1, 0]]), torch.tensor([0, count])
    grad = torch.full((1, 4), 8.0, dtype=torch.float16)
    found = gradients.weight_grad(
        grad, features, torch.arange(count), offsets, 0, count, 4, DTYPES.index(grad.dtype), None, None
    )
    torch.testing.assert_close(found, torch.full((count, 4), 8 / count, dtype=torch.float16))


BAD = {
    "negative": lambda i, o: i.__setitem__(3, -7),
    "beyond": lambda i, o: i.__setitem__(5, 2**40),
    "largest": lambda i, o: i.__setitem__(5, 2**63 - 1),
    "falling": lambda i, o: o.__setitem__(4, 10**6),
    "below": lambda i, o: o.__setitem__(4, -3),
    "last": lambda i, o: o.__setitem__(-1, 10**9),
    "first": lambda i, o: o.__setitem__(0, 1),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_what_is_bad_does_not_count(name, kind):
    """The same as if the bad lookups, or all those of bags with bad offsets, were not there."""
    problem = problem_of(kind)
    bags = 6
    grad, indices, offsets, factors = given_of(problem, kind, bags)
    lookups = indices.numel()
    BAD[name](indices, offsets)
    keep, lengths = [], []
    for bag in range(bags * len(problem.features)):
        begin, end = offsets[bag].item(), offsets[bag + 1].item()
        good = 0 <= begin <= end <= lookups and (bag or begin == 0)
        rows = problem.places[problem.features[bag // bags].table][2]
        own = [at for at in range(begin, end) if 0 <= indices[at] < rows] if good else []
        keep += own
        lengths.append(len(own))
    both(
        problem, grad, indices, offsets, factors,
        torch.tensor([0, *lengths]).cumsum(0), torch.tensor(keep, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize("rows", (0, 1, 5))
def test_any_contents_have_a_finite_gradient(rows):
    """ATen raises on the CPU what it asserts on the GPU: nothing may be raised here."""
    for _ in range(50):
        indices, offsets = torch.randint(-4, rows + 5, (11,)), torch.randint(-4, 16, (5,))
        weight, grad = torch.randn(rows, 3), torch.randn(4, 3)
        bad = (indices < 0) | (indices >= rows)
        for pooling in (SUM, MEAN, MAX):
            features = torch.tensor([[0, 0, rows, 3, pooling, -1, 0]])
            call = features, indices, offsets
            winners = gradients.winners([weight], *call, 3)
            assert ((winners >= -1) & (winners < max(rows, 1))).all()
            assert gradients.weight_grad(grad, *call, 0, rows, 3, 0, None, winners).isfinite().all()
            found = gradients.sparse_weight_grad(grad, *call, 0, rows, 3, 0, None, None)[0]
            assert len(found) <= int((~bad).sum())
        features[0, 4] = SUM
        assert not gradients.sample_weights_grad(grad, [weight], features, indices, offsets)[bad].any()


def test_a_bad_lookup_adds_no_nan():
    features, grad = torch.tensor([[0, 0, 3, 1, 0, -1, 0]]), torch.tensor([[1.0], [torch.nan]])
    call = features, torch.tensor([2, 0, 7]), torch.tensor([0, 2, 3])
    assert gradients.weight_grad(grad, *call, 0, 3, 1, 0, None, None).tolist() == [[1.0], [0.0], [1.0]]


def test_by_frequency():
    problem = problem_of("shared")
    grad, indices, offsets, _ = given_of(problem, "shared")
    for group, weight in enumerate(problem.weights):
        rest = problem.rows, indices, offsets, group, *weight.shape, 0, None, None, True
        ours = gradients.sparse_weight_grad(grad, *rest)
        theirs = _ops.fused_embedding_bag_sparse_backward(grad, *rest)
        assert torch.equal(ours[0], theirs[0])
