"""Fused calls on a GPU with bad arguments, bad contents, odd memory and threads: no harm."""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support import gpu
from support.dlrm import DLRM_Net, batch_of
from support.fused import Problem, every_mode
from support.gpu import moved
from support.gpu_fused import BAGS, FEATURES, GOOD, OFFSETS, RESULT, ROWS, SCHEDULES, Fused, bags_of, ones
from support.reference import Feature

pytestmark = gpu.MARKS

WAYS = ("pool", "columns", "one lookup", "default", "device", "mapped", "wide bags", "split")


@functools.cache
def tables(mode: str, way: str) -> Fused:
    """The same tables for all calls, because a call raises the errors of earlier calls with its tables."""
    return Fused(ones(mode), schedules=[SCHEDULES[way]] * FEATURES if way in SCHEDULES else None)


def call(
    indices: list[int], offsets: list[int], way: str, dtype: torch.dtype = torch.int64, mode: str = "sum",
    **options: Any,
) -> Tensor:  # fmt: skip
    """Returns a value per bag and feature, which all of its columns have."""
    one = tables(mode, way)
    if mode == "max" and way in ("wide bags", "split"):
        pytest.skip("a maximum is taken by few threads")
    if way == "mapped":
        options["mapping"] = one.map(torch.tensor(OFFSETS))
    got = one.run(torch.tensor(indices, dtype=dtype), torch.tensor(offsets, dtype=dtype), **options)
    parts = got.split([16, 4, 33], dim=1)
    assert all(torch.equal(part, part[:, :1].expand_as(part)) for part in parts)
    return torch.cat([part[:, :1] for part in parts], 1)


# The position, the value, and its feature and bag.
BAD_INDICES = {
    "rows": (1, 10, 0, 0),
    "of another table": (3, 7, 1, 1),
    "negative": (4, -1, 1, 1),
    "last": (9, 8, 2, 1),
    "largest": (6, 2**31 - 1, 2, 0),
    "least": (0, -(2**31), 0, 0),
    "huge": (2, 2**40, 0, 1),
    "wraps": (5, 2**32, 1, 1),  # 0 in 32 bits
    "most": (9, 2**63 - 1, 2, 1),
    "lowest": (8, -(2**63), 2, 1),
}


def expected(indices: list[int], skipped: set[tuple[int, int]] = frozenset()) -> list[list[float]]:
    """Sums of good lookups; bags that are skipped are zeros."""
    out = [[0.0] * FEATURES for _ in range(BAGS)]
    for feature, bag in itertools.product(range(FEATURES), range(BAGS)):
        place = feature * BAGS + bag
        own = indices[OFFSETS[place] : OFFSETS[place + 1]]
        if (feature, bag) not in skipped:
            out[bag][feature] = float(sum(one + 1 for one in own if 0 <= one < ROWS[feature]))
    return out


@pytest.mark.parametrize("way", WAYS)
def test_good_calls(way: str) -> None:
    for dtype in gpu.INTEGERS:
        assert call(GOOD, OFFSETS, way, dtype).tolist() == RESULT == expected(GOOD)
    recfuse.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("dtype", gpu.INTEGERS, ids=str)
def test_a_bad_index_is_named_once_and_counts_as_no_row(dtype: torch.dtype, mode: str, way: str) -> None:
    for position, value, feature, bag in BAD_INDICES.values():
        if dtype == torch.int32 and not -(2**31) <= value < 2**31:
            continue
        indices = list(GOOD)
        indices[position] = value
        got = call(indices, OFFSETS, way, dtype, mode)
        rows = ROWS[feature]
        text = (
            rf"^recfuse\.fused_embedding_bag: indices\[{position}\] is {value}, for feature {feature}, bag "
            rf"{bag}; expected 0 to {rows - 1}, less than the {rows} rows of its table \(found on the GPU"
        )
        with pytest.raises(IndexError, match=text) as raised:
            recfuse.check()
        assert isinstance(raised.value, RuntimeError)
        recfuse.check()
        if mode == "sum":
            assert got.tolist() == expected(indices)
    assert call(GOOD, OFFSETS, way).tolist() == RESULT
    recfuse.check()


BAD_OFFSETS = {
    "first": ({0: 1}, {(0, 0)}, r"offsets\[0\] is 1; expected 0, where the first bag begins"),
    "first negative": ({0: -3}, {(0, 0)}, r"offsets\[0\] is -3; expected 0, where the first bag begins"),
    "falls": ({4: 2}, {(1, 1)}, r"offsets\[4\] is 2, for feature 1, bag 1; expected 3 .* to 10 "),
    "beyond": ({6: 11}, {(2, 1)}, r"offsets\[6\] is 11, for feature 2, bag 1; expected 8 .* to 10 "),
    "between features": ({2: 77}, {(0, 1), (1, 0)}, r"offsets\[2\] is 77, for feature [01], bag [01]; "),
    "below": ({3: -2}, {(1, 0), (1, 1)}, r"offsets\[3\] is -2, for feature 1, bag [01]; "),
    "huge": ({5: 2**31 - 1}, {(2, 0), (2, 1)}, r"offsets\[5\] is 2147483647, for feature 2, bag [01]; "),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_a_bad_offset_is_named_and_its_bags_are_zeros(name: str, way: str) -> None:
    changes, skipped, text = BAD_OFFSETS[name]
    offsets = list(OFFSETS)
    for place, value in changes.items():
        offsets[place] = value
    for dtype, mode in itertools.product(gpu.INTEGERS, ("sum", "mean")):
        got = call(GOOD, offsets, way, dtype, mode)
        with pytest.raises(ValueError, match=rf"^recfuse\.fused_embedding_bag: {text}"):
            recfuse.check()
        recfuse.check()
        for feature, bag in skipped:
            assert got[bag, feature] == 0
        if mode == "sum" and name not in ("falls",):  # the next bag has another begin
            assert got.tolist() == expected(GOOD, skipped)
    assert call(GOOD, OFFSETS, way).tolist() == RESULT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", (2**31, 2**40, -(2**62), 2**63 - 1, -(2**63)))
def test_huge_offsets(value: int, way: str) -> None:
    for place in range(len(OFFSETS)):
        offsets = list(OFFSETS)
        offsets[place] = value
        call(GOOD, offsets, way)
        with pytest.raises(ValueError, match=r"recfuse\.fused_embedding_bag: offsets\[\d\] is "):
            recfuse.check()


@pytest.mark.parametrize("way", WAYS)
def test_random_contents_do_no_harm(way: str) -> None:
    """Any bits at all; then a good call has the right result."""
    random = np.random.default_rng(3)
    for dtype, _ in itertools.product((np.int32, np.int64), range(10)):
        indices = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 10, dtype, endpoint=True)
        offsets = random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 7, dtype, endpoint=True)
        kind = torch.int32 if dtype == np.int32 else torch.int64
        call(indices.tolist(), offsets.tolist(), way, kind)
        gpu.forget_errors()
        small = random.integers(-3, 14, 10).tolist(), random.integers(-3, 14, 7).tolist()
        call(*small, way, kind)
        gpu.forget_errors()
    assert call(GOOD, OFFSETS, way).tolist() == RESULT


def test_the_next_call_raises_and_the_one_after_works() -> None:
    bad = [10, *GOOD[1:]]
    call(bad, OFFSETS, "default")
    gpu.synchronize()
    with pytest.raises(IndexError, match=r"recfuse\.fused_embedding_bag: indices\[0\] is 10"):
        call(GOOD, OFFSETS, "default")
    assert call(GOOD, OFFSETS, "default").tolist() == RESULT
    call(bad, OFFSETS, "default")
    gpu.synchronize()
    table, zeros = torch.ones(3, 4, device=gpu.DEVICE), torch.zeros(2, dtype=torch.int64, device=gpu.DEVICE)
    recfuse.embedding_bag(zeros, table, zeros[:1])  # the other operator's calls, of another table, run
    with pytest.raises(IndexError, match=r"^recfuse\.fused_embedding_bag: indices\[0\] is 10"):
        recfuse.check()


def test_an_unchecked_call_neither_looks_nor_raises() -> None:
    call([10, *GOOD[1:]], OFFSETS, "default")
    gpu.synchronize()
    assert call(GOOD, OFFSETS, "default", bounds_check="off").tolist() == RESULT
    with pytest.raises(IndexError, match="is 10"):
        recfuse.check()


def test_a_bad_index_in_a_captured_graph_is_found_after_its_replay() -> None:
    one = Fused(ones(), schedules=[SCHEDULES["default"]] * FEATURES)
    indices, offsets = (torch.tensor(values, device=gpu.DEVICE) for values in (GOOD, OFFSETS))
    one.run(indices, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one.run(indices, offsets)
    graph.replay()
    recfuse.check()
    indices[4] = 5
    graph.replay()
    with pytest.raises(IndexError, match=r"indices\[4\] is 5, for feature 1, bag 1"):
        recfuse.check()
    indices[4] = 1
    graph.replay()
    recfuse.check()
    assert out[:, 0].tolist() == [11, 5]


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("mode", ("sum", "max"))
def test_gradients_survive_bad_contents(mode: str, sparse: bool) -> None:
    if mode == "max" and sparse:
        pytest.skip("no such gradient")
    specs = [Table(10, 16, mode=mode), Table(5, 4, mode=mode), Table(8, 16, mode=mode)]
    for change, lost in (((0, 10), [(0, 0)]), ((4, -5), [(1, 1)]), ((9, 2**50), [(2, 1)])):
        collection = FusedEmbeddingBagCollection(specs, sparse=sparse, device=gpu.DEVICE)
        with torch.no_grad():
            for weight in collection.parameters():
                weight.fill_(1)
        indices = list(GOOD)
        indices[change[0]] = change[1]
        given = [torch.tensor(values, device=gpu.DEVICE) for values in (indices, OFFSETS)]
        factors = None if mode == "max" else torch.ones(10, device=gpu.DEVICE).requires_grad_()
        collection(*given, factors).sum().backward()
        with pytest.raises(IndexError, match=rf"feature {lost[0][0]}, bag {lost[0][1]}"):
            recfuse.check()
        if mode == "sum":
            for feature, table in enumerate(collection.tables.values()):
                own = indices[OFFSETS[feature * BAGS] : OFFSETS[(feature + 1) * BAGS]]
                kept = torch.tensor([one for one in own if 0 <= one < ROWS[feature]], dtype=torch.int64)
                want = torch.bincount(kept, minlength=ROWS[feature]).float()
                assert torch.equal(table.weight.grad.to_dense()[:, 0].cpu(), want)
            dims = torch.tensor([16.0] * 3 + [4.0] * 3 + [16.0] * 4)
            dims[change[0]] = 0
            assert torch.equal(factors.grad.cpu(), dims)
    gpu.synchronize()


def test_gradients_survive_random_contents() -> None:
    collection = FusedEmbeddingBagCollection(
        [Table(10, 16), Table(5, 4, mode="mean"), Table(8, 16, mode="max")], device=gpu.DEVICE
    )
    random = np.random.default_rng(4)
    for _ in range(30):
        indices = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, 10)).to(gpu.DEVICE)
        offsets = torch.from_numpy(random.integers(-5, 15, 7)).to(gpu.DEVICE)
        for given in ((indices, offsets), (indices.remainder(4), offsets), (indices, indices[:7])):
            with contextlib.suppress(IndexError, ValueError):  # of the previous call
                collection(*given).sum().backward()
            gpu.forget_errors()
    assert all(weight.grad.isfinite().all() for weight in collection.parameters())


def test_a_dlrm_with_bad_contents() -> None:
    """A first offset above 0, and invalid rows with weights."""
    model = DLRM_Net(weighted="learned", sparse=False).to(gpu.DEVICE)
    recfuse.swap(model)
    _, lS_o, lS_i = moved(batch_of(model))
    for table, first in ((0, 1), (2, 1), (3, -4)):
        bad = lS_o.clone()
        bad[table, 0] = first
        out = model.apply_emb(bad, lS_i, model.emb_l, model.v_W_l)
        out[0].sum().backward()
        shown = first if table == 0 and first < 0 else -abs(first)
        with pytest.raises(ValueError, match=rf"offsets\[{table * 16}\] is {shown}"):
            recfuse.check()
        assert out[table][0].eq(0).all()
    for value in (300, -1, 2**40):
        rows = [own.clone() for own in lS_i]
        rows[1][0] = value
        out = model.apply_emb(lS_o, rows, model.emb_l, model.v_W_l)
        out[1].sum().backward()
        with pytest.raises(IndexError, match=rf"is {value}, for feature 1, bag "):
            recfuse.check()
    model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    recfuse.check()


@pytest.mark.parametrize("lead", (1, 2, 3))
def test_nothing_is_read_or_written_around_the_tensors(lead: int) -> None:
    """Invalid indices and offsets surround indices and offsets; NaN surrounds tables and their padding
    rows."""
    torch.manual_seed(2)
    specs = [(9, dim, torch.float32) for dim in (1, 4, 17, 64, 130)]
    features = [Feature(n, mode, 0) for n, mode in enumerate(("sum", "mean", "max", "sum", "mean"))]
    problem = Problem(specs, [*features, *every_mode(specs)[-1:]], lead=lead, gap=7)
    for table, place in zip(problem.tables, problem.places, strict=True):
        table[0] = torch.nan
        problem.weights[place[0]].view(-1)[place[1] : place[1] + table.shape[1]] = torch.nan
    problem.features[-1] = Feature(2, "sum", 0)
    problem.rows[-1, 5] = 0
    one = Fused(problem, lead)
    for bags, longest in ((1, 0), (1, 1), (9, 5), (40, 30)):
        indices, offsets = problem.lookups(bags, longest)
        moved_indices = torch.full((indices.numel() + 2 * lead,), 10**6, dtype=torch.int64, device=gpu.DEVICE)
        moved_indices[lead : lead + indices.numel()] = indices.to(gpu.DEVICE)
        moved_offsets = torch.full((offsets.numel() + 2 * lead,), -9, dtype=torch.int64, device=gpu.DEVICE)
        moved_offsets[lead : lead + offsets.numel()] = offsets.to(gpu.DEVICE)
        given = moved_indices[lead : lead + indices.numel()], moved_offsets[lead : lead + offsets.numel()]
        for mapping in (None, one.map(offsets)):
            got = one.run(*given, mapping=mapping)
            one.check(got, indices, offsets)
    recfuse.check()


def test_an_output_between_others_is_wholly_written() -> None:
    """Memory that is used again is full of NaN before."""
    one = Fused(ones())
    given = bags_of([[0, 3, 0, 1] * 8] * 3, ROWS)
    for _ in range(5):
        poison = torch.full((32, one.problem.output_dim), torch.nan, device=gpu.DEVICE)
        neighbours = [torch.full((64,), 7.0, device=gpu.DEVICE) for _ in range(4)]
        del poison
        one.run_and_check(*given)
        assert all(near.eq(7).all() for near in neighbours)


@gpu.TWO_GPUS
def test_each_gpu_reports_its_own_errors() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    collections = [FusedEmbeddingBagCollection([(9, 4), (9, 8)], device=one) for one in (first, second)]
    offsets = torch.arange(5)
    for module, device, bad in zip(collections, (first, second), (31, 32), strict=True):
        module(torch.tensor([0, 1, bad, 3], device=device), offsets.to(device))
    for device, bad in ((second, 32), (first, 31)):
        with pytest.raises(IndexError, match=rf"indices\[2\] is {bad}, for feature 1, bag 0"):
            recfuse.check(device)
    with pytest.raises(RuntimeError, match=r"another GPU|device"):
        collections[0](torch.zeros(4, dtype=torch.int64, device=second), offsets.to(second))


def test_eight_threads_with_new_kernels_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own stream; two of them request each kernel."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    work = []
    for number in range(8):
        torch.manual_seed(number)
        specs = [(9, dim, torch.float32) for dim in (12 + 4 * (number % 4), 5)]
        one = Fused(Problem(specs, every_mode(specs)))
        given = one.problem.lookups(20)
        work.append((one.expecting(torch.arange(0, 61, 3)), given, moved(given)))
    gpu.synchronize()
    turns = [work[number:] + work[:number] for number in range(8)]
    results = gpu.run_in_threads(lambda number: [one.run(*given) for one, _, given in turns[number] * 2])
    want = [one.run_and_check(*given) for one, given, _ in work]
    for number, found in enumerate(results):
        for step, got in enumerate(found):
            assert torch.equal(got, want[(number + step) % 8])
