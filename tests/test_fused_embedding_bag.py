"""fused_embedding_bag: against the reference, its gradients, and bad arguments."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support.fused import MIXED_DIMS, POOLING, Problem, every_mode
from support.reference import DTYPES, Feature, assert_close_to_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_agrees_with_the_reference(dtype, integer):
    specs = [(20 + dim, dim, dtype) for dim in MIXED_DIMS]
    problem = Problem(specs, every_mode(specs))
    for bags in (1, 2, 13):
        problem.check(*problem.lookups(bags, integer=integer))


def test_indices_and_offsets_of_different_types():
    problem = Problem([(9, 4, torch.float32), (7, 8, torch.float32)])
    indices, offsets = problem.lookups(5)
    assert torch.equal(problem.run(indices.int(), offsets), problem.run(indices, offsets.int()))


def test_mixed_dtypes_give_float32():
    problem = Problem([(9, 4, torch.float16), (7, 5, torch.float32), (5, 3, torch.bfloat16)])
    assert problem.check(*problem.lookups(6)).dtype == torch.float32


@pytest.mark.parametrize("factors_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_sample_weights(dtype, factors_dtype):
    problem = Problem([(9, dim, dtype) for dim in (4, 5, 64)])
    indices, offsets = problem.lookups(6)
    problem.check(indices, offsets, torch.randn(indices.numel()).to(factors_dtype))


def test_adversarial_bags():
    problem = Problem([(1, 8, torch.float32), (300, 16, torch.float32), (4, 33, torch.float32)])
    for lengths in ([0, 0, 5000, 0, 0, 0], [0] * 6, [1] * 6, [7, 0, 0, 0, 0, 2000]):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        indices = torch.cat(
            [torch.randint(0, (1, 300, 4)[n // 2], (count,)) for n, count in enumerate(lengths)]
        )
        problem.check(indices, offsets)
    assert problem.check(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).shape == (
        0,
        57,
    )


def test_empty_tables_and_no_columns():
    problem = Problem([(0, 8, torch.float32), (3, 0, torch.float32)])
    got = problem.check(torch.tensor([2, 0]), torch.tensor([0, 0, 0, 1, 2]))
    assert torch.equal(got, torch.zeros(2, 8))


def test_same_bits_from_run_to_run_and_for_any_number_of_threads(threads):
    specs = [(500, dim, torch.float32) for dim in (4, 8, 16, 32, 64, 128) * 3]
    problem = Problem(specs, every_mode(specs))
    indices, offsets = problem.lookups(40, 50)
    results = []
    for count in (1, 2, 5, 1):
        threads(count)
        results.append(problem.run(indices, offsets))
    assert all(torch.equal(results[0], other) for other in results[1:])
    for options in ({"prefetch_distance": 0}, {"prefetch_distance": 9}, {"bounds_check": "off"}):
        assert torch.equal(problem.run(indices, offsets, **options), results[0])


def test_infinity_and_nan_in_a_table():
    problem = Problem([(4, 5, torch.float32)] * 3, [Feature(n, mode, None) for n, mode in enumerate(POOLING)])
    for table in problem.tables:
        table[0], table[1], table[2] = torch.inf, torch.nan, -torch.inf
    problem.put_tables()
    bags = [[0], [1], [2], [0, 2], [3, 1], [1, 3]]
    indices = torch.tensor([row for bag in bags for row in bag] * 3)
    lengths = torch.tensor([len(bag) for bag in bags] * 3)
    problem.check(indices, torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))))


def weight_gradients(problem, tables):
    """The tables' gradients in their places in the matrices."""
    found = [torch.zeros(weight.shape, dtype=torch.float64) for weight in problem.weights]
    for (group, start, *_), table in zip(problem.places, tables, strict=True):
        if table.grad is not None:
            found[group].view(-1)[start : start + table.numel()] = table.grad.reshape(-1)
    return found


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("kind", ("sum", "factors", "modes", "shared", "mixed"))
def test_gradients_agree_with_the_reference(sparse, kind):
    specs = [(9, 4, torch.float32), (5, 8, torch.float32), (7, 4, torch.float32), (3, 0, torch.float32)]
    features = None
    if kind == "modes":
        modes = ("mean", "sum", "mean", "sum") if sparse else ("mean", "max", "sum", "max")
        features = [Feature(n, mode, n if n < 3 else None) for n, mode in enumerate(modes)]
    if kind == "shared":
        features = [Feature(n, "mean" if n == 1 else "sum", None) for n in (0, 1, 0, 2, 1, 3, 0)]
    if kind == "mixed":
        specs[1] = (5, 8, torch.bfloat16)
    problem = Problem(specs, features)
    indices, offsets = problem.lookups(6)
    factors = torch.rand(indices.numel(), requires_grad=True) if kind == "factors" else None
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    out = problem.run(indices, offsets, factors, weights, sparse=sparse)
    scale = torch.arange(1, out.numel() + 1).view(out.shape).cos()
    (out * scale).sum().backward()
    factors_grad = None if factors is None else factors.grad

    tables = [table.double().requires_grad_() for table in problem.tables]
    again = None if factors is None else factors.detach().clone().requires_grad_()
    (problem.expected(indices, offsets, again, tables) * scale).sum().backward()
    for weight, want in zip(weights, weight_gradients(problem, tables), strict=True):
        assert weight.grad.is_sparse == sparse and (not sparse or weight.grad.is_coalesced())
        assert weight.grad.dtype == weight.dtype
        got = weight.grad.to_dense().double()
        allowed = (1e-5 if weight.dtype == torch.float32 else 2e-2) * (1 + want.abs())
        assert_close_to_reference(got, want, allowed)
    if factors is not None:
        torch.testing.assert_close(factors_grad, again.grad)


def test_gradients_of_nothing():
    problem = Problem(
        [(9, 4, torch.float32), (5, 8, torch.float32)], [Feature(0, "max", None), Feature(1, "mean", 2)]
    )
    for offsets in (torch.zeros(1, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)):
        weights = [weight.clone().requires_grad_() for weight in problem.weights]
        problem.run(torch.zeros(0, dtype=torch.int64), offsets, weights=weights).sum().backward()
        for weight in weights:
            assert torch.equal(weight.grad, torch.zeros_like(weight))


BAD_CONTENTS = {
    "negative": (lambda i, o: i.__setitem__(8, -1), IndexError, ("feature 1", "bag 0", "-1", "5")),
    "rows": (lambda i, o: i.__setitem__(11, 5), IndexError, ("feature 1", "bag 1", "5")),
    "huge": (lambda i, o: i.__setitem__(0, 2**40), IndexError, ("feature 0", "bag 0", str(2**40))),
    "falling": (lambda i, o: o.__setitem__(3, 3), ValueError, ("feature 1", "3", "8")),
    "first": (lambda i, o: o.__setitem__(0, 1), ValueError, ("1", "0")),
    "beyond": (lambda i, o: o.__setitem__(-1, 99), ValueError, ("99", "12")),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
def test_bad_contents_name_the_place(case):
    change, kind, words = BAD_CONTENTS[case]
    problem = Problem([(9, 4, torch.float32), (5, 8, torch.float32)])
    indices, offsets = torch.ones(12, dtype=torch.int64), torch.tensor([0, 4, 8, 10, 12])
    change(indices, offsets)
    with pytest.raises(kind, match=r"recfuse\.fused_embedding_bag: ") as caught:
        problem.run(indices, offsets)
    assert isinstance(caught.value, RuntimeError)
    for word in words:
        assert word in str(caught.value)


def _with_field(column, value):
    def change(arguments):
        arguments["features"][1, column] = value

    return change


def _replaced(name, value):
    def change(arguments):
        arguments[name] = value

    return change


BAD_ARGUMENTS = {
    "weight number": (_with_field(0, 2), ValueError),
    "weight number below": (_with_field(0, -1), ValueError),
    "table behind its weight": (_with_field(1, 10**6), ValueError),
    "table before its weight": (_with_field(1, -1), ValueError),
    "overflowing rows": (_with_field(2, 2**62), ValueError),
    "negative rows": (_with_field(2, -1), ValueError),
    "negative dim": (_with_field(3, -1), ValueError),
    "pooling": (_with_field(4, 3), ValueError),
    "column": (_with_field(6, 5), ValueError),
    "column behind": (_with_field(6, 2**40), ValueError),
    "features int32": (_replaced("features", torch.zeros(2, 7, dtype=torch.int32)), TypeError),
    "features' width": (_replaced("features", torch.zeros(2, 6, dtype=torch.int64)), ValueError),
    "weights empty": (_replaced("weights", []), ValueError),
    "weight float64": (_replaced("weights", [torch.zeros(20, 4, dtype=torch.float64)] * 2), TypeError),
    "weight 3-D": (_replaced("weights", [torch.zeros(20, 10, 1)] * 2), ValueError),
    "weight of another dim": (_replaced("weights", [torch.zeros(20, 5)] * 2), ValueError),
    "weight strided": (_replaced("weights", [torch.zeros(40, 8)[::2]] * 2), ValueError),
    "offsets count": (_replaced("offsets", torch.zeros(4, dtype=torch.int64)), ValueError),
    "offsets none": (_replaced("offsets", torch.zeros(0, dtype=torch.int64)), ValueError),
    "offsets float": (_replaced("offsets", torch.zeros(5)), TypeError),
    "indices float": (_replaced("indices", torch.zeros(12)), TypeError),
    "indices 2-D": (_replaced("indices", torch.zeros(3, 4, dtype=torch.int64)), ValueError),
    "output_dim": (_replaced("output_dim", 11), ValueError),
    "output_dim below": (_replaced("output_dim", -1), ValueError),
    "factors' length": (_replaced("per_sample_weights", torch.ones(11)), ValueError),
    "factors int": (_replaced("per_sample_weights", torch.ones(12, dtype=torch.int64)), TypeError),
    "bounds_check": (_replaced("bounds_check", "sometimes"), ValueError),
    "prefetch_distance": (_replaced("prefetch_distance", -2), ValueError),
    "sparse str": (_replaced("sparse", "yes"), TypeError),
    "indices list": (_replaced("indices", [1, 2]), TypeError),
}


def _arguments():
    problem = Problem([(9, 4, torch.float32), (5, 8, torch.float32)])
    return {
        "weights": problem.weights,
        "features": problem.rows,
        "indices": torch.ones(12, dtype=torch.int64),
        "offsets": torch.tensor([0, 4, 8, 10, 12]),
        "output_dim": problem.output_dim,
    }


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case):
    change, kind = BAD_ARGUMENTS[case]
    arguments = _arguments()
    recfuse.fused_embedding_bag(**arguments)
    change(arguments)
    with pytest.raises(kind, match=r"recfuse\.fused_embedding_bag: "):
        recfuse.fused_embedding_bag(**arguments)


def test_factors_are_for_sums_only():
    problem = Problem([(9, 4, torch.float32)] * 2, [Feature(0, "sum", None), Feature(1, "mean", None)])
    indices, offsets = problem.lookups(3)
    with pytest.raises((ValueError, NotImplementedError), match="sum"):
        problem.run(indices, offsets, torch.ones(indices.numel()))


def test_sparse_gradients_of_max_are_refused():
    problem = Problem([(9, 4, torch.float32)], [Feature(0, "max", None)])
    with pytest.raises(ValueError, match="sparse"):
        problem.run(*problem.lookups(3), sparse=True)


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"weights": None}, "weights is a NoneType; expected a list"),
        ({"weights": "abc"}, "weights is a str; expected a list"),
        ({"weights": [1]}, r"weights\[0\] is an int"),
        ({"features": None}, "features is a NoneType"),
        ({"indices": [1]}, "indices is a list"),
        ({"offsets": None}, "offsets is a NoneType"),
        ({"per_sample_weights": 2.0}, "per_sample_weights is a float"),
    ),
    ids=str,
)
def test_other_types_than_tensors_are_named(change, words, gradients):
    arguments = {
        "weights": [torch.randn(5, 2, requires_grad=gradients)],
        "features": torch.tensor([[0, 0, 5, 2, 0, -1, 0]]),
        "indices": torch.tensor([1]),
        "offsets": torch.tensor([0, 1]),
        "output_dim": 2,
    }
    with pytest.raises(TypeError, match=rf"recfuse.fused_embedding_bag: {words}"):
        recfuse.fused_embedding_bag(**{**arguments, **change})
