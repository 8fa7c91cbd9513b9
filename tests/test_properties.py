"""Both operators under arguments of every kind: the reference's result, or an exception that is allowed."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recfuse
from support.inputs import odd, poisoned
from support.reference import DTYPES, POOLING_NAMES, Feature, assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference
from support.reference import fused_embedding_bag as fused_reference

# The allowed errors of an invalid argument: each has a text that names the operator.
ALLOWED = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, AttributeError)
INTEGERS = st.sampled_from((torch.int32, torch.int64))
FLOATS = st.sampled_from(DTYPES)

quick = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def jagged(draw, rows, bags):
    """Lookups of a table of `rows` rows, and the bounds of `bags` bags."""
    lengths = draw(st.lists(st.integers(0, 6 if rows else 0), min_size=bags, max_size=bags))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    indices = draw(st.lists(st.integers(0, max(rows - 1, 0)), min_size=bounds[-1], max_size=bounds[-1]))
    return torch.tensor(indices, dtype=torch.int64), torch.tensor(bounds, dtype=torch.int64)


def laid_out(draw, values):
    """Returns the same values, with a drawn layout."""
    way = draw(st.sampled_from(("plain", "odd", "strided", "transposed", "expanded")))
    if way == "odd":
        return odd(values)
    if way == "strided" and values.dim() == 2:
        return poisoned(values, draw(st.integers(0, 5)), draw(st.integers(0, 9)))
    if way == "strided":
        return torch.stack((values, values + 1000), dim=-1)[..., 0]
    if way == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if way == "expanded" and values.dim() == 2 and values.shape[0]:
        values.copy_(values[:1].clone().expand_as(values))
        return values[:1].expand_as(values)
    return values


@st.composite
def valid_call(draw):
    rows, dim, bags = draw(st.integers(0, 12)), draw(st.integers(0, 70)), draw(st.integers(0, 6))
    indices, bounds = draw(jagged(rows, bags))
    dtype = draw(FLOATS)
    weight = laid_out(
        draw, torch.randn(rows, dim, generator=torch.Generator().manual_seed(rows * 71 + dim)).to(dtype)
    )
    last = draw(st.booleans())
    mode = draw(st.sampled_from(POOLING_NAMES))
    call = {
        "input": laid_out(draw, indices.to(draw(INTEGERS))),
        "weight": weight,
        "offsets": laid_out(draw, (bounds if last else bounds[:-1]).to(draw(INTEGERS))),
        "mode": mode,
        "include_last_offset": last,
        "padding_idx": draw(st.none() | st.integers(-rows, rows - 1)) if rows else None,
    }
    if mode == "sum" and draw(st.booleans()):
        call["per_sample_weights"] = laid_out(draw, torch.linspace(-2, 2, indices.numel()).to(dtype))
    if bags and draw(st.booleans()) and indices.numel() % bags == 0:
        call.update(input=indices.view(bags, -1), offsets=None, include_last_offset=False)
        if "per_sample_weights" in call:
            call["per_sample_weights"] = call["per_sample_weights"].reshape(bags, -1)
    return call


@given(valid_call(), st.integers(-1, 40), st.sampled_from(("on", "off")))
@quick
def test_valid_calls_give_the_reference(call, distance, bounds_check):
    got = recfuse.embedding_bag(**call, prefetch_distance=distance, bounds_check=bounds_check)
    factors = call.get("per_sample_weights")
    absolute = {
        **call,
        "weight": call["weight"].abs(),
        "per_sample_weights": None if factors is None else factors.abs(),
    }
    allowed = tolerance(reference(**absolute), call["input"].numel(), got.dtype)
    assert_close_to_reference(got, reference(**call), allowed)


def anything():
    """Values that belong nowhere in particular."""
    shapes = st.lists(st.integers(0, 5), max_size=3)
    dtypes = st.sampled_from(
        (
            *DTYPES,
            torch.float64,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.uint8,
        )
    )
    devices = st.sampled_from(("cpu", "cpu", "cpu", "meta"))

    def tensor(shape, dtype, device):
        numbers = (
            torch.arange(-2, 123)[: max(1, int(torch.tensor(shape).prod()))] if shape else torch.tensor([1])
        )
        numel = 1
        for size in shape:
            numel *= size
        return numbers.repeat(2)[:numel].reshape(shape).to(dtype).to(device)

    tensors = st.builds(tensor, shapes, dtypes, devices)
    huge = st.sampled_from((2**31, 2**40, 2**62, -(2**63), 10**30))
    others = st.sampled_from((None, True, "sum", "on", 1.5, float("nan"), [1, 2], object()))
    return tensors | st.integers(-3, 12) | huge | others


ARGUMENTS = (
    "input",
    "weight",
    "offsets",
    "mode",
    "include_last_offset",
    "padding_idx",
    "per_sample_weights",
    "sparse",
)


@given(valid_call(), st.dictionaries(st.sampled_from(ARGUMENTS), anything(), min_size=1, max_size=2))
@quick
def test_invalid_calls_raise_or_agree_with_torch(call, changes):
    call.update(changes)
    try:
        got = recfuse.embedding_bag(**call)
    except ALLOWED as error:
        assert str(error)
        return
    try:
        want = F.embedding_bag(**call)
    except ALLOWED:
        return  # torch refuses more: a table of dim 0, 2-D input of width 0
    assert got.shape == want.shape
    assert got.dtype == want.dtype


def _changed(tensor, position, value):
    out = tensor.clone()
    out[position % out.numel()] = value
    return out


@given(
    valid_call(),
    st.sampled_from(("input", "offsets")),
    st.integers(0, 99),
    st.integers(-(2**63), 2**63 - 1),
    st.data(),
)
@quick
def test_bad_contents_raise_or_are_valid(call, name, position, value, data):
    if call["offsets"] is None or call[name].numel() == 0:
        return
    value = data.draw(st.sampled_from((value, -1, 0, 1, 5, call["weight"].shape[0], 2**40)))
    call[name] = _changed(call[name].long(), position, value)
    rows, count = call["weight"].shape[0], call["input"].numel()
    bounds = call["offsets"].tolist()
    ends = bounds if call["include_last_offset"] else [*bounds, count]
    rising = (ends[0] == 0 if bounds else True) and all(a <= b for a, b in itertools.pairwise(ends))
    used = call["input"].reshape(-1).tolist()[: ends[-1]] if bounds else []
    no_bags = len(ends) == 1  # then there is nothing to look at
    valid = no_bags or (rising and ends[-1] <= count and all(0 <= row < rows for row in used))
    if valid:
        recfuse.embedding_bag(**call)
        return
    with pytest.raises((IndexError, ValueError), match=r"recfuse\.embedding_bag: "):
        recfuse.embedding_bag(**call)


@st.composite
def fused_call(draw):
    count, bags = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    dtypes = draw(st.lists(FLOATS, min_size=count, max_size=count))
    dims = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    tables, rows_of_features, columns = [], [], 0
    kinds = list(dict.fromkeys(zip(dtypes, dims, strict=True)))
    used = [draw(st.integers(0, 3)) for _ in kinds]  # rows
    weighted = draw(st.booleans())
    features = []
    for number, (dtype, dim) in enumerate(zip(dtypes, dims, strict=True)):
        rows = draw(st.integers(0, 9))
        table = torch.randn(rows, dim, generator=torch.Generator().manual_seed(number)).to(dtype)
        mode = "sum" if weighted else draw(st.sampled_from(POOLING_NAMES))
        padding_idx = draw(st.none() | st.integers(0, rows - 1)) if rows else None
        kind = kinds.index((dtype, dim))
        tables.append(table)
        features.append(Feature(number, mode, padding_idx))
        rows_of_features.append(
            [
                kind,
                used[kind] * dim,
                rows,
                dim,
                POOLING_NAMES.index(mode),
                -1 if padding_idx is None else padding_idx,
                columns,
            ]
        )
        used[kind] += rows + draw(st.integers(0, 3))
        columns += dim
    weights = [
        torch.full((n, dim), torch.nan, dtype=dtype) for n, (dtype, dim) in zip(used, kinds, strict=True)
    ]
    for table, (kind, start, *_) in zip(tables, rows_of_features, strict=True):
        weights[kind].view(-1)[start : start + table.numel()] = table.reshape(-1)
    parts = [draw(jagged(table.shape[0], bags)) for table in tables]
    lengths = torch.cat([bounds.diff() for _, bounds in parts])
    indices = torch.cat([indices for indices, _ in parts])
    call = {
        "weights": weights,
        "features": torch.tensor(rows_of_features),
        "indices": laid_out(draw, indices.to(draw(INTEGERS))),
        "offsets": laid_out(draw, torch.cat((torch.zeros(1).long(), lengths.cumsum(0))).to(draw(INTEGERS))),
        "output_dim": columns,
        "per_sample_weights": laid_out(draw, torch.linspace(-1, 1, indices.numel())) if weighted else None,
    }
    return call, tables, features


@given(fused_call(), st.integers(-1, 40), st.sampled_from(("on", "off")))
@quick
def test_valid_fused_calls_give_the_reference(problem, distance, bounds_check):
    call, tables, features = problem
    got = recfuse.fused_embedding_bag(**call, prefetch_distance=distance, bounds_check=bounds_check)
    factors = call["per_sample_weights"]
    rest = features, call["indices"], call["offsets"]
    magnitude = fused_reference([t.abs() for t in tables], *rest, None if factors is None else factors.abs())
    want = fused_reference(tables, *rest, factors)
    assert_close_to_reference(got, want, tolerance(magnitude, call["indices"].numel(), got.dtype))


FUSED_ARGUMENTS = ("weights", "features", "indices", "offsets", "output_dim", "per_sample_weights", "sparse")


@given(fused_call(), st.dictionaries(st.sampled_from(FUSED_ARGUMENTS), anything(), min_size=1, max_size=2))
@quick
def test_invalid_fused_calls_raise(problem, changes):
    call = {**problem[0], **changes}
    try:
        got = recfuse.fused_embedding_bag(**call)
    except ALLOWED as error:
        assert str(error)
        return
    assert got.shape[1] == call["output_dim"]


@given(fused_call(), st.data())
@quick
def test_bad_numbers_in_a_fused_call_raise_or_are_valid(problem, data):
    call = problem[0]
    name = data.draw(st.sampled_from(("features", "indices", "offsets")))
    if call[name].numel() == 0:
        return
    flat = call[name].long().reshape(-1)
    value = data.draw(st.sampled_from((-1, 0, 1, 3, 50, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1)))
    call[name] = _changed(flat, data.draw(st.integers(0, flat.numel() - 1)), value).view(call[name].shape)
    try:
        got = recfuse.fused_embedding_bag(**call)
    except (ValueError, IndexError, TypeError) as error:
        assert "recfuse.fused_embedding_bag: " in str(error)
        return
    assert got.shape[1] == call["output_dim"]
