"""embedding_bag on a GPU against the reference: every type, station and schedule, odd memory, odd bags."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recfuse
from recfuse import _C
from support import gpu
from support.gpu import DTYPES, INTEGERS, Case, Problem, pooled, run_and_check
from support.library_cases import LAYOUTS, OPS, expected_one, one_table
from support.reference import assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference

pytestmark = gpu.MARKS

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
PLAIN = Case()
FEW_ROWS = {"rows": 6, "padding": 5}  # so that whole bags are padding
STATES = (
    {},
    {"weighted": True, **FEW_ROWS},
    {"mode": "mean"},
    {"mode": "max", **FEW_ROWS},
    {"weighted": True},
    {"mode": "mean", **FEW_ROWS},
    {"mode": "max"},
    dict(FEW_ROWS),
)


def _types() -> Iterator[Case]:
    for number, (dtype, index, state) in enumerate(itertools.product(DTYPES, INTEGERS, STATES)):
        dim, offset = (128, 7, 128, 20)[number % 4], INTEGERS[(number // 3) % 2]
        yield Case(dim=dim, dtype=dtype, index=index, offset=offset, **state)


def _dims() -> Iterator[Case]:
    for number, dim in enumerate((1, 2, 3, 4, 8, 16, 32, 50, 64, 100, 132, 256, 300, 1000)):
        for turn in range(2):
            yield Case(dim=dim, dtype=DTYPES[(number + turn) % 3], **STATES[(number + 3 * turn) % 8])


SCHEDULES = (
    "station=none",
    "station=register distance=3",
    "station=shared",
    "station=shared distance=7 threads=128 block=512",
    "station=local distance=4",
    "station=l1 distance=16",
    "parts=2",
    "parts=4 threads=32",
    "parts=8 segment=256",
    "parts=16 station=shared distance=2",
    "parts=16 station=l1 threads=128",
    "threads=256",
    "threads=1024",
    "block=32 threads=32",
    "block=1024 segment=32",
    "block=64 threads=64 segment=64",
    "segment=32",
    "segment=256",
    "distance=1",
    "distance=64 block=128",
    "warps=1 block=32 threads=32",
    "warps=8 block=256",
    "warps=16 station=l1",
    "warps=64",
)


def _schedules() -> Iterator[Case]:
    shapes = ((128, FLOAT32), (32, FLOAT16), (300, FLOAT32), (6, BFLOAT16))
    for number, schedule in enumerate(SCHEDULES):
        for turn in range(2):
            dim, dtype = shapes[(number + 2 * turn + number // 4) % 4]
            if dim == 300 and "distance=64" in schedule:
                dim = 64
            yield Case(dim=dim, dtype=dtype, schedule=schedule, **STATES[(number + 5 * turn) % 8])


def _narrow() -> Iterator[Case]:
    """Few threads per bag, with short lists; and the defaults for short bags."""
    for dim, schedule in ((4, "threads=1 segment=1 block=32"), (8, "threads=2 segment=2"),
                          (1, "threads=1 segment=4 parts=2"), (16, "threads=4 segment=8 parts=16"),
                          (3, "threads=16 segment=16 block=256 station=l1")):  # fmt: skip
        for state in STATES[1:4]:
            yield Case(dim=dim, schedule=schedule, **state)
    for dim, dtype in ((4, FLOAT32), (2, FLOAT16), (1, BFLOAT16)):
        yield Case(dim=dim, dtype=dtype, lengths=(1,) * 3000, weighted=True)
        yield Case(dim=dim, dtype=dtype, lengths=(1, 0, 2) * 700, mode="mean", **FEW_ROWS)


def _memory() -> Iterator[Case]:
    """Tables that begin at any address, with gaps between rows."""
    for lead, gap, dtype in ((1, 0, FLOAT32), (2, 0, FLOAT32), (0, 3, FLOAT32), (3, 4, FLOAT32),
                             (1, 0, FLOAT16), (2, 2, FLOAT16), (4, 0, BFLOAT16), (0, 1, BFLOAT16),
                             (5, 3, FLOAT16), (8, 8, BFLOAT16)):  # fmt: skip
        yield Case(lead=lead, gap=gap, dtype=dtype)
    for dim, lead, gap in ((33, 7, 2), (1, 1, 1), (64, 1, 0), (100, 2, 0)):
        yield Case(dim=dim, lead=lead, gap=gap, mode="max", dtype=FLOAT16)
    for lead in (1, 2, 4):  # copies of 4, 8 and 16 bytes
        yield Case(lead=lead, dim=64, schedule="station=shared distance=4")


def _bags() -> Iterator[Case]:
    for state in ({}, {"weighted": True, **FEW_ROWS}, {"mode": "max"}, {"mode": "mean", **FEW_ROWS}):
        case = Case(dim=36, **state)
        yield case.but(lengths=(0,) * 50 + (500,) + (0,) * 80)
        yield case.but(lengths=(0,) * 9)
        yield case.but(lengths=())
        yield case.but(lengths=(3000,))
        yield case.but(lengths=(1,) * 1000)
    yield PLAIN.but(rows=2, lengths=(700, 1, 0, 90))  # always the same row
    yield PLAIN.but(rows=1, lengths=(700, 1, 0, 90), mode="max")
    yield PLAIN.but(dim=0)


CASES = [*_types(), *_dims(), *_schedules(), *_narrow(), *_memory(), *_bags()]
# Complete schedules, so that the kernel does not depend on hypothesis' choices.
DRAWN = [
    Case(schedule="station=register distance=4 threads=64 block=256 parts=1 segment=64"),
    Case(dim=64, dtype=FLOAT16, mode="max", padding=3, index=torch.int32, offset=torch.int32,
         schedule="station=register distance=2 threads=16 block=64 parts=4 segment=32"),
    Case(dim=20, mode="mean", padding=1,
         schedule="station=shared distance=5 threads=128 block=128 parts=1 segment=32"),
    Case(dim=130, dtype=BFLOAT16, weighted=True, offset=torch.int32,
         schedule="station=l1 distance=8 threads=64 block=128 parts=16 segment=128"),
    Case(dim=8, weighted=True, padding=2, schedule="station=none threads=4 block=32 parts=2 segment=32"),
    Case(dim=12, mode="max", schedule="station=local distance=3 threads=256 block=256 parts=1 segment=32"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_made() -> None:
    unchecked = [case.but(bounds="off") for case in CASES[::29]]
    gpu.precompile([*CASES, *DRAWN, *unchecked])


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
def test_agrees_with_the_reference_bit_for_bit_again(case: Case) -> None:
    Problem(case).check_twice()


@pytest.mark.parametrize("case", CASES[::29], ids=str)
def test_unchecked_bounds_change_nothing(case: Case) -> None:
    Problem(case).check_unchecked()


@given(st.sampled_from(DRAWN), st.lists(st.integers(0, 4) | st.integers(0, 200), max_size=40),
       st.integers(4, 300), st.integers(0, 9), st.booleans(), st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bags(case: Case, lengths: list[int], rows: int, behind: int, last: bool, seed: int) -> None:
    """Also without the last offset, and with lookups past it."""
    problem = Problem(case.but(rows=rows, lengths=tuple(lengths)), seed)
    inputs = problem.on_device
    if last:
        for name in ("indices", "per_sample_weights"):
            if inputs[name] is not None:
                inputs[name] = torch.cat((inputs[name], inputs[name].new_full((behind,), 10**6)))
        got = problem.run(bounds_check="off") if behind else problem.run()
    else:
        got = problem.run(include_last_offset=False, offsets=inputs["offsets"][:-1])
    problem.check(got)


def test_lookups_after_the_last_offset_are_ignored() -> None:
    problem = Problem(PLAIN)
    behind = torch.tensor([-5, 10**9, 97], device=gpu.DEVICE)
    problem.check(problem.run(indices=torch.cat((problem.on_device["indices"], behind))))


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(mode: str, dtype: torch.dtype) -> None:
    """As first, last or only value of a bag; a maximum keeps a NaN that comes first."""
    for schedule in ("", "threads=128 block=128 parts=4"):
        problem = Problem(Case(dim=24, dtype=dtype, mode=mode, rows=12, schedule=schedule))
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.0, 0.0, 65504.0, -1e-7])
        values = special[torch.randint(0, 8, (12, 24))].to(dtype)
        if mode != "max":
            values[values == 65504] = 2
        problem.weight = values
        problem.table = values.to(gpu.DEVICE)
        sizes = max(problem.case.lengths)
        finite = reference(
            problem.indices, values.nan_to_num(0, 0, 0).abs(), problem.offsets, mode, None, True
        )
        allowed = tolerance(finite, sizes, dtype)
        assert_close_to_reference(problem.run().cpu(), problem.expected(), allowed)


def test_sums_beyond_float16_are_infinite() -> None:
    table = torch.full((4, 16), 60000.0, dtype=FLOAT16, device=gpu.DEVICE)
    table[2:] = -60000.0
    indices = torch.tensor([0, 1, 2, 3, 0, 2, 1], device=gpu.DEVICE)
    offsets = torch.tensor([0, 2, 4], device=gpu.DEVICE)
    got = recfuse.embedding_bag(indices, table, offsets, mode="sum")
    assert got[:, 0].tolist() == [torch.inf, -torch.inf, 60000.0]  # sums are in float32


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    """The same strides, copied to the device."""
    arguments = one_table(**LAYOUTS[name])
    want = expected_one(arguments)
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            base = value.detach().to(gpu.DEVICE)
            arguments[key] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=gpu.DEVICE
            ) if 0 not in value.stride() else base[:1].expand(value.shape)  # fmt: skip
            if 0 not in value.stride() and name != "weight overlapping":
                arguments[key].copy_(base)
            elif name == "weight overlapping":
                arguments[key] = base
    got = OPS.embedding_bag(**arguments)
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu(), want.to(got.dtype), check_stride=False)


def test_two_dimensional_input() -> None:
    weight = torch.randn(30, 6)
    square = torch.randint(0, 30, (50, 4))
    table = weight.to(gpu.DEVICE)
    for mode in gpu.MODES:
        want = reference(square, weight, mode=mode)
        for given_ in (square.to(gpu.DEVICE), square.to(gpu.DEVICE).int(), square.t().to(gpu.DEVICE).t()):
            got = recfuse.embedding_bag(given_, table, mode=mode)
            assert_close_to_reference(got.cpu(), want, 1e-5)
    factors = torch.rand(50, 4)
    got = recfuse.embedding_bag(
        square.to(gpu.DEVICE), table, mode="sum", per_sample_weights=factors.to(gpu.DEVICE)
    )
    assert_close_to_reference(
        got.cpu(), reference(square, weight, mode="sum", per_sample_weights=factors), 1e-5
    )
    assert recfuse.embedding_bag(square[:, :0].to(gpu.DEVICE), table).tolist() == [[0.0] * 6] * 50
    assert recfuse.embedding_bag(square[:0].to(gpu.DEVICE), table).shape == (0, 6)


def test_nothing_to_do() -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=gpu.DEVICE)
    for bags, rows, dim in ((0, 5, 3), (3, 5, 0), (3, 0, 4), (0, 0, 0), (3, 5, 4)):
        table = torch.randn(rows, dim, device=gpu.DEVICE)
        for mode in gpu.MODES:
            got = OPS.embedding_bag(table, nothing, nothing.new_zeros(bags), mode)
            assert got.tolist() == [[0.0] * dim] * bags
            assert OPS.embedding_bag(table, nothing, nothing.new_zeros(1), mode, None, True).shape == (0, dim)


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("sizes", ((10**6,), (1,) * 100_000, (0, 400_000, 0, 3, 200_000)), ids=len)
def test_large_batches(mode: str, sizes: tuple[int, ...]) -> None:
    for dim, dtype in ((16, FLOAT32), (4, FLOAT16)):
        weight = torch.rand(5000, dim, device=gpu.DEVICE).to(dtype)  # positive: errors stay relative
        indices, offsets = (one.to(gpu.DEVICE) for one in gpu.lookups(5000, sizes))
        if mode == "sum" and dtype == FLOAT16:
            weight /= 64  # within its range
        got = OPS.embedding_bag(weight, indices, offsets, mode, None, True)
        want = pooled(indices, weight, offsets, mode)
        largest = want.abs().amax(dim=1, keepdim=True)
        allowed = 0.0 if mode == "max" else largest * (4096 * 2.0**-23 + torch.finfo(dtype).eps)
        assert_close_to_reference(got.cpu(), want.cpu(), allowed if mode == "max" else allowed.cpu())


def _measured_output(problem: Problem, output: torch.Tensor) -> None:
    """Pools into memory that the test has chosen."""
    case, inputs, stream = problem.case, problem.on_device, torch.cuda.current_stream(gpu.DEVICE)
    table = (problem.table.data_ptr(), case.rows, case.dim, case.dim + case.gap, DTYPES.index(case.dtype))
    batch = (
        inputs["indices"].data_ptr(), inputs["indices"].numel(), INTEGERS.index(case.index),
        inputs["offsets"].data_ptr(), len(case.lengths), INTEGERS.index(case.offset), True, 0,
        output.data_ptr(),
    )  # fmt: skip
    times = _C.embedding_bag_measure(
        0, stream.cuda_stream, table, [batch], gpu.MODES.index(case.mode), -1, True, [case.schedule], 2, None
    )
    assert times.shape == (1, 2) and (times > 0).all()
    gpu.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", (1, 2, 3, 8))
def test_an_output_anywhere_and_nothing_around_it(dtype: torch.dtype, lead: int) -> None:
    for dim in (100, 128, 5):
        problem = Problem(Case(dim=dim, dtype=dtype))
        bags = len(problem.case.lengths)
        memory = torch.full((lead + bags * dim + 8,), torch.nan, dtype=dtype, device=gpu.DEVICE)
        output = memory[lead : lead + bags * dim].view(bags, dim)
        _measured_output(problem, output)
        assert_close_to_reference(output.cpu(), problem.expected(), problem.allowed())
        assert memory[:lead].isnan().all() and memory[lead + bags * dim :].isnan().all()


def _check_large(table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, schedule: str) -> None:
    for mode, allowed in (("sum", 0.02), ("max", 0.0)):  # float16 sums of five
        got = OPS.embedding_bag(table, indices, offsets[:-1], mode, schedule=schedule)
        assert_close_to_reference(got.cpu(), pooled(indices, table, offsets, mode).cpu(), allowed)


@pytest.mark.parametrize("schedule", ("", "parts=16"))
def test_a_table_of_more_elements_than_int32(schedule: str) -> None:
    if reason := gpu.needs_memory(9):
        pytest.skip(reason)
    rows = (1 << 22) + 1000
    table, indices, offsets = gpu.sparsely_filled(rows, 1024, [0, 1 << 21, rows - 1, rows - 2])
    _check_large(table, indices.int(), offsets, schedule)


@pytest.mark.parametrize("schedule", ("", "parts=4"))
def test_a_table_of_more_rows_than_int32(schedule: str) -> None:
    if reason := gpu.needs_memory(5):
        pytest.skip(reason)
    rows, most = (1 << 31) + 1000, (1 << 31) - 1
    table, indices, offsets = gpu.sparsely_filled(rows, 1, [0, most - 1, most, most + 1, rows - 1])
    _check_large(table, indices, offsets, schedule)
    narrow = indices[indices < most][:1000].int()
    _check_large(table[:most], narrow, offsets[offsets <= 1000].int(), schedule)


def test_an_output_of_more_elements_than_int32() -> None:
    if reason := gpu.needs_memory(6):
        pytest.skip(reason)
    bags = (1 << 21) + 1000
    table = torch.randn(1000, 1024, device=gpu.DEVICE).half()
    indices = torch.randint(0, 1000, (bags,), device=gpu.DEVICE)
    got = OPS.embedding_bag(table, indices, torch.arange(bags, device=gpu.DEVICE), "sum")
    for first in range(0, bags, 1 << 18):
        part = slice(first, first + (1 << 18))
        assert torch.equal(got[part], table[indices[part]])


def test_more_lookups_than_int32() -> None:
    if reason := gpu.needs_memory(10):
        pytest.skip(reason)
    lookups, bag = (1 << 31) + 4096, 4096
    table = torch.tensor([[1.0] * 4, [0.5] * 4], device=gpu.DEVICE)
    indices = torch.zeros(lookups, dtype=torch.int32, device=gpu.DEVICE)
    indices[-bag:] = 1
    offsets = torch.arange(0, lookups, bag, device=gpu.DEVICE)
    got = OPS.embedding_bag(table, indices, offsets, "sum")
    assert (got[:-1] == bag).all() and (got[-1] == bag / 2).all()


SOME = (
    PLAIN,
    Case(dim=50, dtype=FLOAT16, weighted=True, **FEW_ROWS),
    Case(dim=300, mode="mean", schedule="threads=256 parts=4"),
)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bits_do_not_depend_on_other_work(case: Case) -> None:
    """Twenty runs on three streams, with other work between and concurrent."""
    problem = Problem(case)
    first = problem.run()
    gpu.synchronize()
    streams = [torch.cuda.Stream(gpu.DEVICE) for _ in range(3)]
    noise = torch.randn(1024, 1024, device=gpu.DEVICE)
    gpu.synchronize()
    results, products = [], []
    for number in range(20):
        with torch.cuda.stream(streams[(number + 1) % 3]):
            products.append(noise @ noise)
        with torch.cuda.stream(streams[number % 3]):
            results.append(problem.run())
    gpu.synchronize()
    assert all(torch.equal(first, one) for one in results)


@pytest.mark.parametrize("bags", (10, 132, 1000, 20_000))
def test_overlapping_launches_see_earlier_results(bags: int) -> None:
    """Each output is the next call's table, and its memory is reused: back to back, and one by one."""
    table = torch.randn(bags, 64, device=gpu.DEVICE)
    indices = torch.randint(0, bags, (8 * bags,), device=gpu.DEVICE)
    offsets = torch.arange(0, 8 * bags, 8, device=gpu.DEVICE)
    factors = torch.randn(8 * bags, device=gpu.DEVICE) / 8**0.5  # keeps the size of the numbers

    def chain(wait: bool) -> torch.Tensor:
        now = table
        for _ in range(60):
            now = OPS.embedding_bag(now, indices, offsets, "sum", factors)
            if wait:
                gpu.synchronize()
        return now

    one_by_one = chain(True)
    assert one_by_one.isfinite().all() and one_by_one.abs().amax() > 0
    for _ in range(3):
        assert torch.equal(chain(False), one_by_one)


def test_many_concurrent_launches_equal_a_single_launch() -> None:
    problems = [Problem(case, seed) for seed, case in enumerate(CASES[::9])]
    one_by_one = []
    for problem in problems:
        one_by_one.append(problem.run())
        gpu.synchronize()
    together = [[problem.run() for problem in problems] for _ in range(5)]
    for results in together:
        assert all(torch.equal(a, b) for a, b in zip(results, one_by_one, strict=True))


@pytest.mark.parametrize("schedule", ("", "station=l1 distance=3", "parts=8"))
def test_a_schedule_by_the_python_function(schedule: str) -> None:
    case = Case(dim=48, schedule=schedule)
    problem = Problem(case)
    got = recfuse.embedding_bag(
        problem.on_device["indices"], problem.table, problem.on_device["offsets"], mode="sum",
        include_last_offset=True, schedule=schedule,
    )  # fmt: skip
    assert torch.equal(got, problem.run())
    distance = recfuse.embedding_bag(
        problem.on_device["indices"], problem.table, problem.on_device["offsets"], mode="sum",
        include_last_offset=True, prefetch_distance=0,
    )  # fmt: skip
    problem.check(distance)
    assert run_and_check(case).shape == got.shape
