"""The gradient operators of fused calls on the CPU: against autograd of the float64 reference."""

from __future__ import annotations

import pytest
import torch

import recfuse
from recfuse.ops import gradients
from support import gpu
from support.backward.calls import BAD, CHUNKS, check_random_calls
from support.fused import Groups
from support.reference import DTYPES, Feature, assert_close_to_reference
from support.reference import fused_embedding_bag as reference

_ops = torch.ops.recfuse
POOLING = {"sum": 0, "mean": 1, "max": 2}


def modes(kind, tables):
    if kind == "sum":
        return [Feature(table, "sum", (None, 1)[table % 2]) for table in range(tables)]
    features = [
        Feature(table, ("sum", "mean", "max")[table % 3], (None, 0, 2)[table % 3]) for table in range(tables)
    ]
    return [*features, Feature(0, "max", 1), Feature(1, "sum", None), Feature(0, "max", None)]


GROUPS = {
    "one": [(torch.float32, 8, (9, 30, 4))],
    "dims": [(torch.float32, dim, (5 + dim % 7, 12)) for dim in (1, 3, 4, 16, 17, 48, 64, 100, 128, 300)],
    "half": [(torch.float16, 12, (9, 7)), (torch.float16, 40, (6, 5))],
    "bfloat16": [(torch.bfloat16, 12, (9, 7)), (torch.bfloat16, 64, (6, 5))],
    "mixed": [(torch.float32, 8, (9, 7)), (torch.bfloat16, 8, (6,)), (torch.float16, 5, (6, 5))],
    "empty": [(torch.float32, 0, (4, 0)), (torch.float32, 8, (0, 9)), (torch.float32, 4, ())],
}


@pytest.mark.parametrize("by_freq", (False, True))
@pytest.mark.parametrize("kind", ("sum", "modes"))
@pytest.mark.parametrize("name", GROUPS)
def test_agrees_with_the_reference(name, kind, by_freq):
    problem = Groups(GROUPS[name], modes(kind, sum(len(sizes) for _, _, sizes in GROUPS[name])))
    if by_freq and any(feature.padding_idx is not None for feature in problem.features):
        problem.features = [feature._replace(padding_idx=None) for feature in problem.features]
        problem.rows[:, 5] = -1
    for integer, bags in ((torch.int64, 7), (torch.int32, 1), (torch.int64, 0), (torch.int32, 33)):
        indices, offsets = problem.lookups(bags, integer=integer)
        grad = torch.randn(bags, problem.output_dim).to(DTYPES[bags % 3])
        problem.check(grad, indices, offsets, by_freq=by_freq)
        if kind == "sum":
            problem.check(grad, indices, offsets, torch.randn(indices.numel()), by_freq)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_gradients_and_updates(monkeypatch, threads, chunk):
    """Those of the GPU's test, which has a thousand a chunk."""
    threads(1)  # for cases as small as these
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    check_random_calls(chunk, 20)


def test_many_lookups_of_few_and_of_many_rows():
    problem = Groups(
        [(torch.float32, 8, (3, 5000, 70_000))], [Feature(t, "mean", None) for t in (0, 1, 2, 1)]
    )
    indices, offsets = problem.lookups(400, 20)
    problem.check(torch.randn(400, 32), indices, offsets)


def test_same_bits_for_any_number_of_threads(threads):
    problem = Groups(
        [(torch.float32, 16, (7, 900, 20_000))],
        [Feature(0, "mean", None), Feature(1, "sum", 3), Feature(2, "sum", None), Feature(1, "max", None)],
    )
    indices, offsets = problem.lookups(500, 30)
    grad = torch.randn(500, 64)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append((problem.dense(grad, indices, offsets)[0], *problem.sparse(grad, indices, offsets)[0]))
    for other in results[1:]:
        assert all(torch.equal(one, same) for one, same in zip(results[0], other, strict=True))


def _strided(values, how):
    if how == "column":
        return values[:, None].repeat(1, 3)[:, 1]
    if how == "every second":
        return values.repeat_interleave(2)[::2]
    return values


@pytest.mark.parametrize("how", ("column", "every second"))
def test_strided_lookups(how):
    problem = Groups(GROUPS["one"], modes("modes", 3))
    indices, offsets = problem.lookups(9)
    grad = torch.randn(9, problem.output_dim)
    want = problem.dense(grad, indices, offsets)
    strided = _strided(indices, how), _strided(offsets, how)
    assert not strided[0].is_contiguous()
    for given in (grad, grad.t().contiguous().t(), grad.repeat(1, 2)[:, : problem.output_dim]):
        assert torch.equal(problem.dense(given, *strided)[0], want[0])
    one = torch.ones(()).expand_as(grad)
    assert torch.equal(
        problem.dense(one, *strided)[0], problem.dense(torch.ones_like(grad), indices, offsets)[0]
    )
    problem.check(grad, *strided)


def test_expanded_indices():
    problem = Groups([(torch.float32, 4, (9,))], [Feature(0, "max", None)])
    indices = torch.tensor([3]).expand(8)
    problem.check(torch.randn(4, 4), indices, torch.arange(0, 9, 2))


def test_a_row_that_wins_twice_counts_once():
    problem = Groups([(torch.float32, 4, (5,))], [Feature(0, "max", None), Feature(0, "max", None)])
    grad = torch.randn(2, 8)
    problem.check(grad, torch.tensor([2, 2, 2, 1, 1, 2, 2]), torch.tensor([0, 3, 4, 6, 7]))


@pytest.mark.parametrize("name", BAD)
def test_bad_contents_do_no_harm(name):
    problem = Groups(GROUPS["one"], modes("modes", 3))
    indices, offsets = problem.lookups(9)
    BAD[name](indices, offsets)
    grad = torch.randn(9, problem.output_dim)
    for found in problem.dense(grad, indices, offsets):
        assert found.isfinite().all()
    problem.sparse(grad, indices, offsets)
    sums = Groups(GROUPS["one"], modes("sum", 3))
    indices, offsets = sums.lookups(9)
    BAD[name](indices, offsets)
    grad = torch.randn(9, sums.output_dim)
    _ops.fused_embedding_bag_sample_weights_backward(grad, sums.weights, sums.rows, indices, offsets)


def _changed(row=None, column=None, value=None, **arguments):
    return row, column, value, arguments


WRONG = {
    "dim": (_changed(0, 3, 9), "whole rows"),
    "row in the middle": (_changed(0, 1, 3), "whole rows"),
    "too many rows": (_changed(0, 2, 10**6), "whole rows"),
    "rows that wrap": (_changed(0, 2, 2**63 - 1), "whole rows"),
    "column": (_changed(0, 6, 2**62), "columns"),
    "pooling": (_changed(0, 4, 3), "pooling"),
    "padding": (_changed(0, 5, 99), "padding_idx"),
    "no winners": (_changed(0, 4, 2), "winners"),
    "rows": (_changed(rows=-1), "sizes"),
    "dtype": (_changed(dtype=3), "dtype"),
    "grad of other bags": (_changed(grad=torch.zeros(3, 24)), "bags"),
    "grad of integers": (_changed(grad=torch.zeros(7, 24, dtype=torch.int64)), "int64"),
    "weights": (_changed(per_sample_weights=torch.zeros(3)), "per_sample_weights"),
    "winners": (_changed(winners=torch.zeros(7, 3, dtype=torch.int64)), "winners"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("sparse", (False, True))
def test_wrong_arguments(name, sparse):
    (row, column, value, changes), text = WRONG[name]
    problem = Groups(GROUPS["one"], modes("sum", 3))
    indices, offsets = problem.lookups(7)
    features = problem.rows.clone()
    if row is not None:
        features[row, column] = value
    arguments = {
        "grad": torch.zeros(7, 24),
        "features": features,
        "indices": indices,
        "offsets": offsets,
        "group": 0,
        "rows": problem.weights[0].shape[0],
        "dim": 8,
        "dtype": 0,
        "per_sample_weights": None,
        "winners": None,
    }
    name = "fused_embedding_bag_sparse_backward" if sparse else "fused_embedding_bag_backward"
    with pytest.raises(RuntimeError, match=text):
        getattr(_ops, name)(**{**arguments, **changes})


@pytest.mark.parametrize("dim", (8, 6))
@pytest.mark.parametrize("elements, fits", ((0, True), (1, False), ("row", False)))
def test_a_table_may_end_where_its_weight_does(dim, elements, fits):
    problem = Groups([(torch.float32, dim, (9, 20))], [Feature(0, "sum", None), Feature(1, "sum", None)])
    indices, offsets = problem.lookups(5)
    grad = torch.randn(5, 2 * dim)
    features = problem.rows.clone()
    last = problem.weights[0].shape[0] - int(features[0, 2])
    features[0, 1] = last * dim + (dim if elements == "row" else elements)
    call = grad, features, indices, offsets, 0, problem.weights[0].shape[0], dim, 0, None, None
    if not fits:
        with pytest.raises(RuntimeError, match="whole rows"):
            _ops.fused_embedding_bag_backward(*call)
        return
    found = _ops.fused_embedding_bag_backward(*call)
    lookups = indices[: int(offsets[5])]
    assert set(found[last:].abs().sum(1).nonzero().flatten().tolist()) >= set(lookups.tolist())


def test_forward_takes_matrices():
    problem = Groups(GROUPS["dims"], modes("modes", 20))
    indices, offsets = problem.lookups(5)
    given = problem.rows, indices, offsets, problem.output_dim
    flat = [weight.reshape(-1) for weight in problem.weights]
    want = _ops.fused_embedding_bag(flat, *given)
    assert torch.equal(_ops.fused_embedding_bag(problem.weights, *given), want)
    narrow = [weight.view(-1, 1) for weight in flat]
    with pytest.raises(RuntimeError, match="whole rows of weights"):
        _ops.fused_embedding_bag(narrow, *given)
    shifted = problem.rows.clone()
    shifted[5, 1] -= 1  # a column before a row's first
    with pytest.raises(RuntimeError, match="whole rows of weights"):
        _ops.fused_embedding_bag(problem.weights, shifted, *given[1:])
    with pytest.raises(RuntimeError, match="contiguous"):
        _ops.fused_embedding_bag([problem.weights[5].t()], *given)


@pytest.mark.parametrize("mode", POOLING)
@pytest.mark.parametrize("padding", (None, 0, 2))
def test_lookups_after_the_last_offset_have_no_bag(mode, padding):
    """In every mode, with padding or without. torch's CPU kernels give such lookups to the last bag for max
    and with padding_idx, leave them out of plain sums, divide plain means by their number, and read outside
    the gradient.
    """
    problem = Groups([(torch.float32, 4, (9,))], [Feature(0, mode, padding)])
    indices, offsets = torch.tensor([3, 0, 2, 2, 7, 8, 1]), torch.tensor([0, 1, 4])
    grad = torch.randn(2, 4)
    want = problem.dense(grad, indices[:4], offsets)
    assert torch.equal(problem.dense(grad, indices, offsets)[0], want[0])
    problem.check(grad, indices, offsets)
    weight = problem.tables[0].contiguous()
    got = recfuse.embedding_bag(
        indices, weight, offsets, mode=mode, include_last_offset=True, padding_idx=padding
    )
    assert_close_to_reference(got, reference([weight], problem.features, indices, offsets), 1e-5)
    if mode == "sum" and padding is None:
        pooled = torch.nn.functional.embedding_bag(
            indices, weight, offsets, mode="sum", include_last_offset=True
        )
        torch.testing.assert_close(got, pooled)


@pytest.mark.parametrize("rows", (0, 1, 5))
def test_any_contents_have_a_finite_gradient(rows):
    for _ in range(50):
        indices, offsets = torch.randint(-4, rows + 5, (11,)), torch.randint(-4, 16, (5,))
        weight, grad = torch.randn(rows, 3), torch.randn(4, 3)
        bad = (indices < 0) | (indices >= rows)
        for pooling in POOLING.values():
            features = torch.tensor([[0, 0, rows, 3, pooling, -1, 0]])
            call = features, indices, offsets
            winners = _ops.fused_embedding_bag_winners([weight], *call, 3)
            assert ((winners >= -1) & (winners < max(rows, 1))).all()
            rest = 0, rows, 3, 0, None, winners
            assert _ops.fused_embedding_bag_backward(grad, *call, *rest).isfinite().all()
            found = _ops.fused_embedding_bag_sparse_backward(grad, *call, *rest)[0]
            assert len(found) <= int((~bad).sum())
        features[0, 4] = POOLING["sum"]
        factors = _ops.fused_embedding_bag_sample_weights_backward(grad, [weight], features, indices, offsets)
        assert not factors[bad].any()


def test_a_bad_lookup_adds_no_nan():
    features, grad = torch.tensor([[0, 0, 3, 1, 0, -1, 0]]), torch.tensor([[1.0], [torch.nan]])
    call = features, torch.tensor([2, 0, 7]), torch.tensor([0, 2, 3])
    found = _ops.fused_embedding_bag_backward(grad, *call, 0, 3, 1, 0, None, None)
    assert found.tolist() == [[1.0], [0.0], [1.0]]


def test_a_mean_of_more_lookups_than_float16_has():
    count = 70_000
    features, offsets = torch.tensor([[0, 0, count, 4, POOLING["mean"], -1, 0]]), torch.tensor([0, count])
    grad = torch.full((1, 4), 8.0, dtype=torch.float16)
    call = features, torch.arange(count), offsets
    found = _ops.fused_embedding_bag_backward(grad, *call, 0, count, 4, 1, None, None)
    torch.testing.assert_close(found, torch.full((count, 4), 8 / count, dtype=torch.float16))


@pytest.mark.parametrize("sparse", (False, True))
def test_the_last_offset_of_one_feature_is_optional(sparse):
    problem = Groups([(torch.float32, 4, (9,))], [Feature(0, "mean", None)])
    for integer in (torch.int64, torch.int32):
        indices, offsets = problem.lookups(6, integer=integer)
        grad, call = torch.randn(6, 4), (0, *problem.weights[0].shape, 0, None, None)
        name = "fused_embedding_bag_sparse_backward" if sparse else "fused_embedding_bag_backward"
        found, want = (
            getattr(_ops, name)(grad, problem.rows, indices, ends, *call) for ends in (offsets[:-1], offsets)
        )
        assert torch.equal(found[1], want[1]) and torch.equal(found[0], want[0])


def several(problem, grad, indices, offsets, factors=None):
    """Returns the sparse gradients of a problem's weights, requested at once and in another order."""
    order = list(range(len(problem.weights)))[::-1]
    forms = [(at, *problem.weights[at].shape, DTYPES.index(problem.weights[at].dtype)) for at in order]
    lists = zip(*forms, strict=True)
    call = grad, problem.rows, indices, offsets, *map(list, lists), factors, None
    found = _ops.fused_embedding_bag_sparse_gradients(*call)
    assert len(found) == 2 * len(order)
    return dict(zip(order, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("weighted", (False, True))
def test_sparse_gradients_of_one_call_equal_separate_gradients(weighted):
    specs = [(torch.float32, 8, (9, 40)), (torch.float16, 5, (30,)), (torch.float32, 3, (0, 7))]
    kinds = ("sum",) if weighted else ("sum", "mean")
    problem = Groups(specs, [Feature(table, kinds[table % len(kinds)], None) for table in range(5)])
    indices, offsets = problem.lookups(6)
    grad, factors = torch.randn(6, problem.output_dim), torch.rand(len(indices)) if weighted else None
    found = several(problem, grad, indices, offsets, factors)
    for number, (rows, values) in enumerate(problem.sparse(grad, indices, offsets, factors)):
        assert torch.equal(found[number][0], rows) and torch.equal(found[number][1], values)
    assert _ops.fused_embedding_bag_sparse_gradients(
        grad, problem.rows, indices, offsets, [], [], [], [], factors, None
    ) == []  # fmt: skip


def test_a_collection_asks_for_its_sparse_gradients_at_once(monkeypatch):
    """One call of the operator for several weights, whose results are marked as coalesced; gradients of a
    second call are added."""
    asked = []
    operator = gradients._sparse_weight_grads
    monkeypatch.setattr(
        gradients, "_sparse_weight_grads", lambda *call: asked.append(call) or operator(*call)
    )
    collection = recfuse.nn.FusedEmbeddingBagCollection([(50, 4), (60, 8), (70, 8), (80, 16)], sparse=True)
    frozen = collection.packed_weights()[0].requires_grad_(False)
    indices, offsets = torch.randint(0, 50, (40,)), torch.arange(0, 41, 2)
    want = [torch.zeros_like(weight) for weight in collection.packed_weights()]
    for _ in range(2):
        grad = torch.randn(5, 36)
        collection(indices, offsets).backward(grad)
        first = 4
        for rows, dim, weight in ((60, 8, 1), (70, 8, 1), (80, 16, 2)):
            feature, offset = {60: 1, 70: 2, 80: 3}[rows], 60 * (rows == 70)
            own = indices[10 * feature : 10 * (feature + 1)] + offset
            want[weight].index_add_(0, own, grad[:, first : first + dim].repeat_interleave(2, 0))
            first += dim
    assert [list(call[4]) for call in asked] == [[1, 2]] * 2 and frozen.grad is None
    for weight, right in list(zip(collection.packed_weights(), want, strict=True))[1:]:
        assert weight.grad.layout is torch.sparse_coo
        torch.testing.assert_close(weight.grad.to_dense(), right)
