"""fused_embedding_bag on a GPU against the reference: types, dims, schedules, work shared out anyhow."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recfuse
from recfuse import _C
from support import gpu
from support.fused import Problem, every_mode
from support.gpu import DTYPES, INTEGERS, pooled
from support.gpu_fused import OPS, Fused, bags_of, precompile, shifted
from support.reference import Feature, assert_close_to_reference

pytestmark = gpu.MARKS

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
DIMS = (4, 8, 16, 32, 64, 128, 1, 3, 17, 100, 0, 300, 2048)
BAGS = (1, 2, 13, 130)
TYPES = list(itertools.product(DTYPES, INTEGERS, INTEGERS))


def heterogeneous(dtype: torch.dtype, dims: tuple[int, ...] = DIMS) -> Problem:
    """Every dim and pooling, tables that are shared, padding rows."""
    torch.manual_seed(3)
    specs = [(20 + dim % 97, dim, dtype) for dim in dims]
    return Problem(specs, every_mode(specs))


def sums(dtype: torch.dtype, dims: tuple[int, ...] = DIMS, **options: int) -> Problem:
    """A sum a table."""
    torch.manual_seed(4)
    return Problem([(20 + dim % 97, dim, dtype) for dim in dims], **options)


@pytest.fixture(scope="module")
def problems() -> dict[torch.dtype, dict[str, Fused]]:
    """By the facts that are known before the batch."""
    made = {}
    for dtype in DTYPES:
        problem = heterogeneous(dtype)
        offsets = problem.lookups(64)[1]
        made[dtype] = {"expected": Fused(problem).expecting(offsets), "nothing": Fused(problem)}
    known = [ways["expected"] for ways in made.values()]
    precompile(known, INTEGERS, INTEGERS)
    precompile(known, check=(False,))
    precompile([ways["nothing"] for ways in made.values()])
    return made


@pytest.mark.parametrize(("dtype", "index", "offset"), TYPES, ids=str)
def test_agrees_bit_for_bit_again(problems, dtype, index, offset) -> None:
    one = problems[dtype]["expected"]
    for bags in BAGS:
        indices, offsets = one.problem.lookups(bags)
        given = indices.to(index), offsets.to(offset)
        got = one.run_and_check(*given)
        assert torch.equal(one.run(*given), got)
        assert torch.equal(one.run(*given, mapping=one.map(offsets)), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_where_nothing_is_known_of_the_batch(problems, dtype) -> None:
    one = problems[dtype]["nothing"]
    for bags, longest in itertools.product(BAGS, (1, 6, 60)):
        indices, offsets = one.problem.lookups(bags, longest)
        got = one.run_and_check(indices, offsets)
        assert torch.equal(one.run(indices, offsets), got)
        mapped = one.run_and_check(indices, offsets, mapping=one.map(offsets))
        torch.testing.assert_close(mapped, got, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unchecked_bounds_change_nothing(problems, dtype) -> None:
    one = problems[dtype]["expected"]
    given = one.problem.lookups(40)
    assert torch.equal(one.run(*given, bounds_check="off"), one.run(*given))


def test_batches_of_many_sizes(problems) -> None:
    """The partition rounds sizes."""
    one = problems[FLOAT32]["expected"]
    for bags in (0, 3, 31, 32, 33, 63, 65, 257, 1000):
        one.run_and_check(*one.problem.lookups(bags, 3))


def test_batches_that_are_not_as_expected(problems) -> None:
    one = problems[FLOAT32]["expected"]
    for longest in (0, 1, 400):
        one.run_and_check(*one.problem.lookups(9, longest))


@pytest.mark.parametrize("leads", ((1, 0), (0, 1), (1, 3), (3, 2), (2, 1)), ids=str)
def test_indices_and_offsets_anywhere(problems, leads) -> None:
    """The kernel loads four indices at once; those before the first are not used."""
    one = problems[FLOAT32]["expected"]
    for index, offset in itertools.product(INTEGERS, INTEGERS):
        indices, offsets = one.problem.lookups(9)
        given = shifted(indices.to(index), leads[0]), shifted(offsets.to(offset), leads[1])
        one.check(one.run(*given), indices, offsets)
        strided = torch.stack((given[0], given[0]), 1)[:, 0], torch.stack((given[1], given[1]), 1)[:, 0]
        one.check(one.run(*strided), indices, offsets)


def test_concurrent_launches_equal_a_single_launch(problems) -> None:
    calls = [(ways["expected"], ways["expected"].problem.lookups(50)) for ways in problems.values()]
    calls = [(one, [part.to(gpu.DEVICE) for part in lookups]) for one, lookups in calls]
    one_by_one = []
    for one, lookups in calls:
        one_by_one.append(one.run(*lookups))
        gpu.synchronize()
    streams = [torch.cuda.Stream(gpu.DEVICE) for _ in range(3)]
    noise, together = torch.randn(1024, 1024, device=gpu.DEVICE), []
    gpu.synchronize()
    for turn in range(6):
        for number, (one, lookups) in enumerate(calls):
            with torch.cuda.stream(streams[(turn + number) % 3]):
                noise @ noise
                together.append((number, one.run(*lookups)))
    gpu.synchronize()
    assert all(torch.equal(got, one_by_one[number]) for number, got in together)


def test_mixed_dtypes_give_float32() -> None:
    specs = [(9, 4, FLOAT16), (7, 5, FLOAT32), (5, 3, BFLOAT16), (6, 64, FLOAT16), (8, 128, BFLOAT16)]
    one = Fused(Problem(specs, every_mode(specs)))
    given = one.problem.lookups(30)
    assert one.expecting(given[1]).run_and_check(*given).dtype == FLOAT32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_sample_weights(dtype: torch.dtype) -> None:
    one = Fused(sums(dtype))
    indices, offsets = one.problem.lookups(30)
    one.expecting(offsets)
    for factors_dtype in DTYPES:
        factors = torch.randn(indices.numel()).to(factors_dtype)
        got = one.run_and_check(indices, offsets, factors)
        assert torch.equal(one.run(indices, offsets, factors, mapping=one.map(offsets)), got)
    ones = torch.ones(indices.numel())
    torch.testing.assert_close(
        one.run(indices, offsets, ones), one.run(indices, offsets), rtol=1e-2, atol=0.1
    )


SHAPES = [(1, FLOAT32), (3, FLOAT16), (4, FLOAT32), (8, BFLOAT16), (17, FLOAT32), (32, FLOAT32),
          (64, FLOAT16), (100, FLOAT16), (128, FLOAT32), (300, FLOAT32), (2048, FLOAT16)]  # fmt: skip


@pytest.fixture(scope="module")
def candidates() -> dict[tuple, Fused]:
    """Each feature by another schedule, all over one table."""
    made = {}
    for (dim, dtype), (mode, padding) in itertools.product(
        SHAPES, (("sum", None), ("mean", 2), ("max", None), ("max", 1))
    ):
        if mode != "sum" and dim not in (4, 17, 64, 300):
            continue
        torch.manual_seed(5)
        single = Fused(Problem([(50, dim, dtype)], [Feature(0, mode, padding)], lead=0))
        found = _C.fused_embedding_bag_candidates(single.call(), 0)
        assert len(set(found)) == len(found) and all(one[4] == 0 for one in found)
        found = [(*one[:4], 160) for one in found][:100]
        torch.manual_seed(5)
        problem = Problem([(50, dim, dtype)], [Feature(0, mode, padding)] * len(found), lead=0)
        made[dim, dtype, mode, padding] = Fused(problem, schedules=found)
    precompile(made.values())
    precompile([one for key, one in made.items() if key[2] == "sum"], weighted=(True,))
    return made


@pytest.mark.parametrize(("dim", "dtype"), SHAPES, ids=str)
def test_every_schedule(candidates, dim, dtype) -> None:
    """One launch has them all. Those that agree in the order of sums need not agree in bits with others."""
    for key, one in candidates.items():
        if key[:2] != (dim, dtype):
            continue
        features = len(one.problem.features)
        for lengths in ((0, 1, 2, 150, 31, 33, 0, 7, 300, 3), (1,) * 50, (0, 0, 0), (10,) * 13, (1000, 0)):
            indices, offsets = bags_of([lengths] * features, [50] * features)
            got = one.run_and_check(indices, offsets)
            for _ in range(2):
                assert torch.equal(one.run(indices, offsets), got)
            if key[2] == "sum" and max(lengths) > 100:
                one.run_and_check(indices, offsets, torch.randn(indices.numel()))


@pytest.mark.parametrize("warps", (2, 8, 24, 64))
def test_occupancy_changes_no_bit(warps: int) -> None:
    problem = heterogeneous(FLOAT32, (4, 32, 128, 17))
    given = problem.lookups(100)
    want = Fused(problem).expecting(given[1]).run(*given)
    assert torch.equal(Fused(problem, warps=warps).expecting(given[1]).run_and_check(*given), want)


@pytest.mark.parametrize("lead", (1, 2, 3, 4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_anywhere(dtype: torch.dtype, lead: int) -> None:
    """Buffers and tables that are aligned to an element, or little more."""
    for gap in (1, 4):
        torch.manual_seed(6)
        specs = [(9, dim, dtype) for dim in (4, 8, 64, 17)]
        one = Fused(Problem(specs, every_mode(specs), lead=lead, gap=gap), lead=lead)
        given = one.problem.lookups(20)
        one.expecting(given[1]).run_and_check(*given)


def test_adversarial_bags() -> None:
    problem = Problem([(1, 8, FLOAT32), (300, 16, FLOAT32), (4, 33, FLOAT32), (50, 128, FLOAT32)])
    nothing, expected = Fused(problem), Fused(problem).expecting(torch.arange(0, 401, 10))
    rows = [1, 300, 4, 50]
    for lengths in (
        [[0, 0], [5000, 0], [0, 0], [0, 0]], [[0, 0]] * 4, [[1, 1]] * 4, [[7, 0], [0, 0], [0, 2000], [0, 1]],
        [[0] * 700] * 3 + [[0] * 699 + [9]], [[1] * 700] * 4, [[0]] * 3 + [[30_000]],
    ):  # fmt: skip
        given = bags_of(lengths, rows)
        for one in (nothing, expected):
            one.run_and_check(*given)
            one.run_and_check(*given, mapping=one.map(given[1]))


@pytest.mark.parametrize("split", (1, 4, 64))
def test_one_bag_of_a_million_lookups(split: int) -> None:
    """Of small integers, whose sums are exact."""
    rows = [[1, 64, 8, split, 16 * 10**6], [0, 0, 0, 0, 16]]
    problem = Problem([(5000, 16, FLOAT32), (7, 4, FLOAT32)])
    for table, place in zip(problem.tables, problem.places, strict=True):
        table.copy_(torch.randint(0, 8, table.shape))
        problem.weights[place[0]].view(-1)[place[1] : place[1] + table.numel()] = table.reshape(-1)
    one = Fused(problem, schedules=rows)
    for lengths in ([10**6, 0, 7], [10**6]):
        indices, offsets = bags_of([lengths, [1] * len(lengths)], [5000, 7])
        got = one.run(indices, offsets).cpu()
        own, table = indices[: 10**6], problem.tables[0].double()
        assert torch.equal(got[0, :16].double(), torch.bincount(own, minlength=5000).double() @ table)
        assert torch.equal(got[:, 16:], problem.tables[1][indices[-len(lengths) :]])
        assert torch.equal(one.run(indices, offsets, mapping=one.map(offsets)).cpu(), got)


def test_nothing_to_do() -> None:
    for specs in ([(0, 8, FLOAT32), (3, 0, FLOAT32), (0, 4, FLOAT32)], [(3, 0, FLOAT32)], [(0, 5, FLOAT16)]):
        one = Fused(Problem(specs))
        features, columns = len(specs), sum(dim for _, dim, _ in specs)
        nothing = torch.zeros(0, dtype=torch.int64)
        for bags in (0, 1, 40):
            offsets = torch.zeros(features * bags + 1, dtype=torch.int64)
            got = one.run(nothing, offsets)
            assert torch.equal(got.cpu(), torch.zeros(bags, columns, dtype=got.dtype))
    got = OPS.fused_embedding_bag(
        [torch.zeros(3, device=gpu.DEVICE)], torch.zeros(0, 7, dtype=torch.int64), nothing.to(gpu.DEVICE),
        torch.zeros(1, dtype=torch.int64, device=gpu.DEVICE), 0,
    )  # fmt: skip
    assert got.shape == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype: torch.dtype) -> None:
    """As first, last or only value of a bag; a maximum keeps a NaN that comes first."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.0, 0.0, -1e-7, 2.0])
    features = [Feature(n, mode, None) for n, mode in enumerate(gpu.MODES)]
    problem = Problem([(12, 24, dtype)] * 3, features)
    for table, place in zip(problem.tables, problem.places, strict=True):
        table.copy_(special[torch.randint(0, 8, (12, 24))])
        problem.weights[place[0]].view(-1)[place[1] : place[1] + table.numel()] = table.reshape(-1)
    one = Fused(problem)
    for longest in (1, 3, 9):
        indices, offsets = problem.lookups(60, longest)
        got = one.run(indices, offsets)
        want = problem.expected(indices, offsets)
        assert_close_to_reference(got.cpu(), want, 0.2 if dtype == BFLOAT16 else 0.05)
        assert_close_to_reference(got[:, 48:].cpu(), want[:, 48:], 0.0)


FIXED = torch.tensor([[0, 0, 0, 0, 32]] * 6, dtype=torch.int32)


@given(st.lists(st.lists(st.integers(0, 4) | st.integers(0, 90), min_size=6, max_size=6), max_size=20),
       st.booleans(), st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bags(lengths: list[list[int]], known: bool, seed: int) -> None:
    problem = heterogeneous(FLOAT32, (4, 17, 32, 128))
    torch.manual_seed(seed)
    one = Fused(problem, schedules=FIXED if known else None)
    sizes = torch.tensor(lengths, dtype=torch.int64).reshape(-1, 6).t().tolist()
    one.run_and_check(*bags_of(sizes, [problem.tables[f.table].shape[0] for f in problem.features]))


def many_features(count: int) -> Problem:
    specs = [(5 + number % 13, (4, 8, 16, 32, 64, 128)[number % 6], FLOAT32) for number in range(count)]
    modes = ("sum", "mean", "max")
    return Problem(specs, [Feature(n, modes[n // 7 % 3], None) for n in range(count)], lead=0, gap=12)


@pytest.mark.parametrize("count", (1000, 10_000))
def test_many_features(count: int) -> None:
    one = Fused(many_features(count))
    for bags in (1, 7):
        given = one.problem.lookups(bags, 4)
        one.run_and_check(*given)
    one.expecting(given[1]).run_and_check(*given)


def test_a_large_batch() -> None:
    one = Fused(heterogeneous(FLOAT16, (8, 64, 33)))
    indices, offsets = one.problem.lookups(20_000, 3)
    one.expecting(offsets)
    got, bags = one.run(indices, offsets), 20_000
    for number, feature in enumerate(one.problem.features):
        column, dim = int(one.problem.rows[number, 6]), one.problem.tables[feature.table].shape[1]
        if feature.padding_idx is not None:
            continue
        own = offsets[number * bags : (number + 1) * bags + 1]
        part = indices[own[0] : own[-1]].to(gpu.DEVICE)
        table = one.problem.tables[feature.table].to(gpu.DEVICE)
        want = pooled(part, table, (own - own[0]).to(gpu.DEVICE), feature.mode)
        assert_close_to_reference(
            got[:, column : column + dim].cpu(), want.cpu(), 0.0 if feature.mode == "max" else 0.02
        )


@pytest.mark.parametrize(
    ("rows", "dim", "gigabytes"),
    (((1 << 22) + 1000, 1024, 9), ((1 << 31) + 1000, 1, 5), ((1 << 32) + 1000, 1, 9)),
    ids=("more elements than int32", "more rows than int32", "more rows than uint32"),
)
def test_large_tables(rows: int, dim: int, gigabytes: float) -> None:
    """The next table is more than 2^31 elements into the buffer."""
    if reason := gpu.needs_memory(2 * gigabytes):
        pytest.skip(reason)
    middle = rows // 2
    picks = [0, middle, rows - 1, rows - 2, min((1 << 31) - 1, rows - 3)]
    table, indices, ends = gpu.sparsely_filled(rows, dim, picks)
    behind = torch.randn(10, 4, device=gpu.DEVICE).half()
    flat = torch.cat((table.view(-1), behind.view(-1)))
    features = torch.tensor([[0, 0, rows, dim, 0, -1, 0], [0, rows * dim, 10, 4, 2, -1, dim]])
    lookups = torch.cat((indices, indices % 10))
    offsets = torch.cat((ends[:-1], ends + 2000))
    got = OPS.fused_embedding_bag([flat], features, lookups, offsets, dim + 4)
    want = pooled(indices, table, ends)
    assert_close_to_reference(got[:, :dim].cpu(), want.cpu(), 0.02)
    want = pooled(indices % 10, behind, ends, "max")
    assert_close_to_reference(got[:, dim:].cpu(), want.cpu(), 0.0)
    if rows < 1 << 31:
        narrow = OPS.fused_embedding_bag([flat], features, lookups.int(), offsets.int(), dim + 4)
        assert torch.equal(narrow, got)


def test_an_output_of_more_elements_than_int32() -> None:
    if reason := gpu.needs_memory(10):
        pytest.skip(reason)
    bags, dim = (1 << 20) + 500, 1024
    tables = torch.randn(2, 500, dim, device=gpu.DEVICE).half()
    features = torch.tensor([[0, n * 500 * dim, 500, dim, 0, -1, n * dim] for n in range(2)])
    indices = torch.randint(0, 500, (2 * bags,), device=gpu.DEVICE)
    offsets = torch.arange(2 * bags + 1, device=gpu.DEVICE)
    schedules = torch.tensor([[0, 0, 0, 0, 16]] * 2, dtype=torch.int32)
    got = OPS.fused_embedding_bag([tables.view(-1)], features, indices, offsets, 2 * dim, schedules=schedules)
    for first in range(0, bags, 1 << 18):
        for number in range(2):
            rows = indices[
                number * bags + first : min(number * bags + first + (1 << 18), (number + 1) * bags)
            ]
            assert torch.equal(
                got[first : first + (1 << 18), number * dim : (number + 1) * dim], tables[number][rows]
            )


def test_more_lookups_than_int32() -> None:
    if reason := gpu.needs_memory(20):
        pytest.skip(reason)
    bag, count = 4096, (1 << 19) + 2
    lookups = bag * count
    flat = torch.tensor([1.0] * 4 + [0.5] * 4, device=gpu.DEVICE)
    features = torch.tensor([[0, 0, 2, 4, 0, -1, 0], [0, 0, 2, 4, 0, -1, 4]])
    indices = torch.zeros(lookups, dtype=torch.int32, device=gpu.DEVICE)
    indices[-bag:] = 1
    offsets = torch.arange(0, lookups + 1, bag, device=gpu.DEVICE)
    got = OPS.fused_embedding_bag([flat], features, indices, offsets, 8)
    assert (got[:, :4] == bag).all() and (got[:-1] == bag).all() and (got[-1, 4:] == bag / 2).all()


@pytest.mark.parametrize("bags", (10, 132, 5000))
def test_overlapping_launches_see_earlier_results(bags: int) -> None:
    """Each output is the next call's buffer, and its memory is reused: back to back, and one by one."""
    dim = 64
    start = torch.randn(bags * 2 * dim, device=gpu.DEVICE)
    features = torch.tensor([[0, 0, bags, 2 * dim, 0, -1, 0]])
    indices = torch.randint(0, bags, (8 * bags,), device=gpu.DEVICE)
    offsets = torch.arange(0, 8 * bags + 1, 8, device=gpu.DEVICE)
    factors = torch.randn(8 * bags, device=gpu.DEVICE) / 8**0.5
    for schedules in (None, torch.tensor([[0, 0, 0, 0, 128]], dtype=torch.int32),
                      torch.tensor([[1, 64, 0, 4, 128]], dtype=torch.int32)):  # fmt: skip

        def chain(wait: bool, schedules: torch.Tensor | None = schedules) -> torch.Tensor:
            now = start
            for _ in range(40):
                now = OPS.fused_embedding_bag(
                    [now.view(-1)], features, indices, offsets, 2 * dim, factors, schedules=schedules
                )
                if wait:
                    gpu.synchronize()
            return now

        one_by_one = chain(True)
        assert one_by_one.isfinite().all() and one_by_one.abs().amax() > 0
        for _ in range(3):
            assert torch.equal(chain(False), one_by_one)


def test_the_python_function_takes_schedules_and_mappings() -> None:
    one = Fused(heterogeneous(FLOAT32, (4, 32)))
    indices, offsets = one.problem.lookups(20)
    one.expecting(offsets)
    moved = indices.to(gpu.DEVICE), offsets.to(gpu.DEVICE)
    want = one.run(*moved)
    for options in ({}, {"mapping": one.map(offsets)}, {"bounds_check": "off"}, {"prefetch_distance": 3}):
        got = recfuse.fused_embedding_bag(
            one.weights, one.problem.rows, *moved, one.problem.output_dim, schedules=one.schedules, **options
        )
        assert torch.equal(got, want)
