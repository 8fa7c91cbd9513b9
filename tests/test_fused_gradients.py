"""Gradients of fused calls as the GPU computes them, here on the CPU: against those of the CPU itself."""

from __future__ import annotations

import pytest
import torch

from recfuse import _backward_cuda, _fused_backward_cuda
from recfuse._fused_backward import FusedLayout, slot_weights
from reference import Feature
from test_fused_embedding_bag import Problem, every_mode

DIMS = ((4, 8, 3, 8, 0, 4), (8, 8, 8))
WAITS = (True, False)


@pytest.fixture(params=WAITS, ids=("waiting", "captured"))
def _waits(request, monkeypatch):
    """As while a graph is captured, or not."""
    monkeypatch.setattr(_fused_backward_cuda, "_capturing", lambda device: not request.param)
    return request.param


def problem_of(dims, kind):
    specs = [(9 + number, dim, torch.float32) for number, dim in enumerate(dims)]
    if kind == "modes":
        return Problem(specs, every_mode(specs))
    modes = ("sum",) if kind == "weighted" else ("sum", "mean")
    order = [number for number in (0, 2, 1, 0, *range(3, len(dims)), 2)]
    features = [Feature(n, modes[place % len(modes)], (None, 1)[place % 2]) for place, n in enumerate(order)]
    return Problem(specs, features)


def tensors_of(problem, kind, bags=6):
    indices, offsets = problem.lookups(bags)
    factors = torch.rand(indices.numel()) if kind == "weighted" else None
    layout = FusedLayout(problem.rows)
    grad = torch.randn(bags, problem.output_dim)
    return layout, grad, indices, offsets, factors, slot_weights(layout, problem.buffers)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kind", ("shared", "weighted", "modes"))
def test_dense(dims, kind, _waits):
    problem = problem_of(dims, kind)
    for bags in (1, 6):
        layout, *given, weights = tensors_of(problem, kind, bags)
        got = _fused_backward_cuda.dense_grads(problem.rows, *given, weights)[1]
        for one, other in zip(got, layout.dense_grads(*given, weights), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("kind", ("shared", "weighted"))
def test_sparse(dims, kind):
    problem = problem_of(dims, kind)
    layout, *given, _ = tensors_of(problem, kind)
    got = _fused_backward_cuda.sparse_grads(problem.rows, *given)[1]
    for one, other in zip(got, layout.sparse_grads(*given), strict=True):
        assert torch.equal(one[0], other[0])
        torch.testing.assert_close(one[1], other[1])


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("chunk", (7, 1 << 16))
def test_sample_weights(dims, chunk, _waits, monkeypatch):
    monkeypatch.setattr(_backward_cuda, "_CHUNK", chunk)
    problem = problem_of(dims, "weighted")
    layout, grad, indices, offsets, _, weights = tensors_of(problem, "weighted")
    got = _fused_backward_cuda.sample_weights_grad(problem.rows, grad, indices, offsets, weights)
    torch.testing.assert_close(got, layout.sample_weights_grad(grad, indices, offsets, weights))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_precision(dtype):
    problem = problem_of(DIMS[0], "shared")
    layout, grad, indices, offsets, _, weights = tensors_of(problem, "shared")
    grad = grad.to(dtype)
    got = _fused_backward_cuda.dense_grads(problem.rows, grad.float(), indices, offsets, None, weights)[1]
    want = layout.dense_grads(grad, indices, offsets, None, weights)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_mean_of_more_lookups_than_float16_has():
    problem = Problem([(5, 4, torch.float16)], [Feature(0, "mean", None)])
    count = 70_000
    given = torch.full((1, 4), 8.0, dtype=torch.float16), torch.ones(count, dtype=torch.int64)
    offsets = torch.tensor([0, count])
    for found in (
        FusedLayout(problem.rows).sparse_grads(*given, offsets, None),
        _fused_backward_cuda.sparse_grads(problem.rows, *given, offsets, None)[1],
    ):
        torch.testing.assert_close(found[0][1], torch.full((count, 4), 8 / count, dtype=torch.float16))


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
@pytest.mark.parametrize("kind", ("shared", "weighted", "modes"))
def test_what_is_bad_does_not_count(name, kind, _waits):
    """The same as if the bad lookups, or all those of bags with bad offsets, were not there."""
    problem = problem_of(DIMS[0], kind)
    layout, grad, indices, offsets, factors, weights = tensors_of(problem, kind)
    bags, lookups = 6, indices.numel()
    bad_indices, bad_offsets = indices.clone(), offsets.clone()
    BAD[name](bad_indices, bad_offsets)
    keep, lengths = [], []
    for bag in range(bags * len(problem.features)):
        begin, end = bad_offsets[bag].item(), bad_offsets[bag + 1].item()
        good = 0 <= begin <= end <= lookups and (bag or begin == 0)
        rows = problem.tables[problem.features[bag // bags].table].shape[0]
        own = [at for at in range(begin, end) if 0 <= bad_indices[at] < rows] if good else []
        keep += own
        lengths.append(len(own))
    kept = torch.tensor(keep, dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    left = None if factors is None else factors[kept]
    got = _fused_backward_cuda.dense_grads(problem.rows, grad, bad_indices, bad_offsets, factors, weights)[1]
    want = layout.dense_grads(grad, indices[kept], ends, left, weights)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    if kind == "modes":
        return
    got = _fused_backward_cuda.sparse_grads(problem.rows, grad, bad_indices, bad_offsets, factors)[1]
    for one, other in zip(got, layout.sparse_grads(grad, indices[kept], ends, left), strict=True):
        assert torch.equal(one[0], other[0])
        torch.testing.assert_close(one[1], other[1])
    if kind == "weighted":
        got = _fused_backward_cuda.sample_weights_grad(problem.rows, grad, bad_indices, bad_offsets, weights)
        want = torch.zeros(lookups)
        want[kept] = layout.sample_weights_grad(grad, indices[kept], ends, weights)
        torch.testing.assert_close(got, want)


def test_nothing(_waits):
    problem = problem_of(DIMS[0], "modes")
    weights = slot_weights(FusedLayout(problem.rows), problem.buffers)
    for bags in (0, 3):
        offsets = torch.zeros(len(problem.features) * bags + 1, dtype=torch.int64)
        given = problem.rows, torch.randn(bags, problem.output_dim), offsets[:0], offsets
        for one, table in zip(
            _fused_backward_cuda.dense_grads(*given, None, weights)[1], weights, strict=True
        ):
            assert torch.equal(one, torch.zeros_like(table))
        assert _fused_backward_cuda.sample_weights_grad(*given, weights).shape == (0,)
    sums = problem_of(DIMS[0], "shared")
    offsets = torch.zeros(len(sums.features) * 3 + 1, dtype=torch.int64)
    found = _fused_backward_cuda.sparse_grads(
        sums.rows, torch.randn(3, sums.output_dim), offsets[:0], offsets, None
    )[1]
    assert [values.shape for _, values in found] == [(0, slot.dim) for slot in FusedLayout(sums.rows).slots]


def test_sparse_gradients_of_max_are_refused():
    problem = Problem([(9, 4, torch.float32)], [Feature(0, "max", None)])
    with pytest.raises(ValueError, match="sparse"):
        _fused_backward_cuda.sparse_grads(problem.rows, torch.randn(3, 4), *problem.lookups(3), None)
