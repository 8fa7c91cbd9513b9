"""Tables staged in shared memory: agreement, bad contents, and when it is done by default."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import recfuse
from recfuse import _C
from recfuse.nn import Table
from recfuse.nn.mapping import rows_before_lists, staged_features
from support import gpu
from support.fused import Problem
from support.gpu import DTYPES, INTEGERS, moved
from support.gpu_fused import Fused, bags_of, check, on_gpu, precompile
from support.reference import Feature

pytestmark = [
    *gpu.MARKS,
    pytest.mark.skipif(
        gpu.MISSING is None and torch.cuda.get_device_capability()[0] not in (9, 10),
        reason="needs a GPU with room for tables on each SM (compute capability 9.0 or 10.0)",
    ),
]

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
STAGED = 3
MOST_BYTES = 210_944  # of a table
BAGS = (1, 2, 37, 512, 513, 1300)


def tables(dtype: torch.dtype, count: int = 1, seed: int = 5) -> Problem:
    """Rows of 4 to 32 bytes in tables of every size that fits, ``count`` times; NaN between them."""
    torch.manual_seed(seed)
    size = torch.finfo(dtype).bits // 8
    specs = [
        (rows, row_bytes // size, dtype)
        for row_bytes in (4, 8, 16, 32)
        for rows in (8, 1000, MOST_BYTES // row_bytes // 8 * 8)
    ] * count
    features = [Feature(n, ("sum", "mean")[n % 5 % 2], (None, 1)[n % 3 == 0]) for n in range(len(specs))]
    return Problem(specs, features, lead=32, gap=32)


def staged(problem: Problem, threads: int = 0) -> Fused:
    """All tables, by an explicit schedule."""
    return Fused(problem, schedules=[[STAGED, threads, 0, 0, 48]] * len(problem.features))


def n_staged(mapping: Tensor) -> int:
    """Features in the lists of a mapping."""
    return len(staged_features(mapping.numpy()))


@pytest.fixture(scope="module")
def problems() -> dict[torch.dtype, Problem]:
    made = {dtype: tables(dtype) for dtype in DTYPES}
    precompile([staged(problem) for problem in made.values()], INTEGERS, INTEGERS)
    return made


@pytest.mark.parametrize(
    ("dtype", "index", "offset"), list(itertools.product(DTYPES, INTEGERS, INTEGERS)), ids=str
)
def test_agrees_bit_for_bit_again(problems, dtype, index, offset) -> None:
    one = staged(problems[dtype])
    for bags in BAGS:
        indices, offsets = one.problem.lookups(bags, 9)
        given = indices.to(index), offsets.to(offset)
        got = one.run_and_check(*given)
        mapping = one.map(offsets)
        assert n_staged(mapping) == len(one.problem.features)
        for again in (None, mapping):
            assert torch.equal(one.run(*given, mapping=again), got)


@pytest.mark.parametrize("threads", (2, 4, 8, 16, 32))
def test_threads_of_a_bag(problems, threads: int) -> None:
    for dtype in (FLOAT32, FLOAT16):
        one = staged(problems[dtype], threads)
        rows = [table.shape[0] for table in one.problem.tables]
        for lengths in ([0, 1, 500, 3, 4, 5, 31, 33, 127, 129], [0] * 40, [7] * 600, [0, 3000]):
            one.run_and_check(*bags_of([lengths] * len(rows), rows))


def test_weights_and_unchecked_bounds(problems) -> None:
    sums = Problem([(1000, dim, FLOAT32) for dim in (1, 4, 8)], lead=32, gap=32)
    given = sums.lookups(300, 40)
    for dtype in DTYPES:
        staged(sums).run_and_check(*given, torch.randn(given[0].numel()).to(dtype))
    for dtype in DTYPES:
        one = staged(problems[dtype])
        given = one.problem.lookups(70, 20)
        unchecked = one.run_and_check(*given, bounds_check="off")
        assert torch.equal(one.run(*given), unchecked)


def test_many_tables_one_after_another() -> None:
    """More tables than turns in flight: they rotate, and wrap around the ring's end."""
    one = staged(tables(FLOAT32, 40))
    for bags in (3, 520):
        indices, offsets = one.problem.lookups(bags, 3)
        got = one.run_and_check(indices, offsets)
        for _ in range(3):
            assert torch.equal(one.run(indices, offsets), got)


def test_lengths_of_all_kinds() -> None:
    """Bags are sorted by length: many equal, all different, one far longer than the others."""
    problem = Problem([(1000, 8, FLOAT32), (1000, 4, FLOAT32)], lead=32, gap=32)
    one = staged(problem)
    for lengths in ([5] * 512, list(range(512)), [0] * 511 + [100_000], [100_000] + [1] * 511, [70_000] * 3):
        one.run_and_check(*bags_of([lengths, lengths[::-1]], [1000, 1000]))


def test_indices_and_offsets_anywhere(problems) -> None:
    one = staged(problems[FLOAT32])
    indices, offsets = one.problem.lookups(50, 9)
    for lead, index in itertools.product((1, 2, 3), INTEGERS):
        memory = torch.full((indices.numel() + lead,), -1, dtype=index, device=gpu.DEVICE)
        memory[lead:] = indices
        starts = torch.full((offsets.numel() + lead,), -1, dtype=index, device=gpu.DEVICE)
        starts[lead:] = offsets
        one.check(one.run(memory[lead:], starts[lead:]), indices, offsets)


def ones() -> Fused:
    """Two tables of 16 and 24 rows, of 4 columns, whose row k is k + 1 everywhere."""
    problem = Problem([(16, 4, FLOAT32), (24, 4, FLOAT32)], lead=32, gap=32)
    for table, place in zip(problem.tables, problem.places, strict=True):
        table.copy_(torch.arange(1.0, table.shape[0] + 1)[:, None].expand_as(table))
        problem.weights[place[0]].view(-1)[place[1] : place[1] + table.numel()] = table.reshape(-1)
    return staged(problem)


@pytest.mark.parametrize("mapped", (False, True))
@pytest.mark.parametrize(
    ("position", "value", "feature", "bag"),
    (
        (1, 16, 0, 0),
        (3, 24, 1, 0),
        (4, -1, 1, 1),
        (0, 2**31 - 1, 0, 0),
        (2, 2**32, 0, 1),
        (4, -(2**63), 1, 1),
    ),
)
def test_a_bad_index_is_named_and_counts_as_no_row(position, value, feature, bag, mapped) -> None:
    one = ones()
    offsets = torch.tensor([0, 2, 3, 4, 5])
    indices = torch.tensor([3, 5, 15, 7, 23])
    indices[position] = value
    mapping = one.map(offsets) if mapped else None
    got = one.run(indices, offsets, mapping=mapping)[:, ::4].tolist()
    with pytest.raises(IndexError, match=rf"indices\[{position}\].*for feature {feature}, bag {bag}\b"):
        recfuse.check()
    good = [0.0 if n == position else own + 1.0 for n, own in enumerate((3, 5, 15, 7, 23))]
    assert got == [[good[0] + good[1], good[3]], [good[2], good[4]]]
    one.run_and_check(torch.tensor([3, 5, 15, 7, 23]), offsets)


@pytest.mark.parametrize(
    "offsets", ([1, 2, 3, 4, 5], [0, 2, 1, 4, 5], [0, 2, 3, 4, 9], [0, -5, 3, 4, 5], [0, 2, 2**31, 4, 5])
)
def test_bad_offsets_are_named_and_their_bags_are_empty(offsets: list[int]) -> None:
    one = ones()
    got = one.run(torch.tensor([3, 5, 15, 7, 23]), torch.tensor(offsets))
    with pytest.raises(ValueError, match="offsets"):
        recfuse.check()
    assert torch.isfinite(got).all()
    one.run_and_check(torch.tensor([3, 5, 15, 7, 23]), torch.tensor([0, 2, 3, 4, 5]))


def narrow(dtype: torch.dtype = FLOAT32) -> tuple[Problem, tuple[Tensor, Tensor]]:
    """Three hundred tables of 8 columns, and a batch that reads each row four times."""
    torch.manual_seed(6)
    problem = Problem([(512, 8, dtype)] * 300, lead=32, gap=32)
    lengths = torch.randint(0, 16, (300, 280)).tolist()
    return problem, bags_of(lengths, [512] * 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_default_where_it_pays(dtype: torch.dtype) -> None:
    problem, given = narrow(dtype)
    one = Fused(problem).expecting(given[1])
    assert n_staged(one.map(given[1])) == 300
    got = one.run_and_check(*given)
    assert torch.equal(one.run(*given, mapping=one.map(given[1])), got)
    few = bags_of([[3, 4]] * 300, [512] * 300)
    assert n_staged(one.map(few[1])) == 0
    one.run_and_check(*few)


def test_a_collection_stages_where_it_pays(monkeypatch) -> None:
    collection = on_gpu([Table(512, 8) for _ in range(300)])
    given = moved(bags_of(torch.randint(0, 16, (300, 280)).tolist(), [512] * 300))
    mapping = collection.map(given[1].cpu())
    assert n_staged(mapping.tensor) == 300
    for options in ({}, {"mapping": mapping}):
        check(collection, *given, **options)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # as in a loader's process
    assert n_staged(collection.map(given[1].cpu()).tensor) == 300


def test_a_graph_replays_staged_tables() -> None:
    problem, given = narrow()
    one = Fused(problem).expecting(given[1])
    want = one.run_and_check(*given)
    device = [tensor.to(gpu.DEVICE) for tensor in given]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        got = one.run(*device)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


def test_a_callers_mapping_cannot_do_harm() -> None:
    """Fields of its lists are overwritten by anything; tables of two kinds; the call after it is right."""
    torch.manual_seed(6)
    problem = Problem([(512, (8, 4)[n % 2], FLOAT32) for n in range(300)], lead=32, gap=32)
    given = bags_of(torch.randint(0, 16, (300, 280)).tolist(), [512] * 300)
    one = Fused(problem).expecting(given[1])
    mapping = one.map(given[1])
    assert n_staged(mapping) == 300
    begin = rows_before_lists(mapping) + 1  # of the lists
    schedules = mapping[begin:, 3].unique().tolist()
    random = np.random.default_rng(1)
    for _ in range(40):
        bad = mapping.clone()
        for row in random.integers(begin, len(bad), 60):
            field = random.integers(4)
            bad[row, field] = int(
                random.choice([-1, 0, 1, 17, 279, 281, 299, 300, 2**31 - 1, -(2**31), *schedules])
            )
        with contextlib.suppress(RuntimeError):  # the library refuses the errors that it detects
            one.run(*given, mapping=bad)
        torch.cuda.synchronize()
    one.run_and_check(*given)
    recfuse.check()


def test_staging_an_unsuitable_table_is_refused() -> None:
    problem = Problem([(512, 64, FLOAT32)], lead=32)
    with pytest.raises(
        ValueError, match="kind is 3 \\(staged\\); expected another kind for a table that is not"
    ):
        _C.fused_embedding_bag_describe(staged(problem).call(), staged(problem).sets()[0], 0)
