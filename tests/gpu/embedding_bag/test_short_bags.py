"""Short bags on a GPU, several per warp: against the reference, invalid contents, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recfuse
from support import gpu
from support.gpu import DTYPES, INTEGERS, Case, Problem
from support.reference import assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference

pytestmark = gpu.MARKS

FLOAT32, FLOAT16, BFLOAT16 = DTYPES
FEW_ROWS = {"rows": 6, "padding": 5}  # so that whole bags are padding
STATES = ({}, {"mode": "mean"}, FEW_ROWS, {"mode": "mean", **FEW_ROWS})
LENGTHS = ((1,) * 1000, (1, 0) * 300, (1, 0, 2) * 100 + (40, 1, 3), gpu.LENGTHS, (0,) * 70)
BAGS = {1: 32, 3: 32, 4: 32, 8: 32, 16: 16, 32: 8, 64: 4, 100: 8, 128: 2, 132: 1, 256: 4, 300: 2, 1000: 4}
"""By dim: from one bag to eight bags per group of lanes."""


def _cases() -> Iterator[Case]:
    for number, (dim, bags) in enumerate(BAGS.items()):
        for turn, lengths in enumerate(LENGTHS):
            types = {"index": INTEGERS[turn % 2], "offset": INTEGERS[number % 2]}
            case = Case(dim=dim, dtype=DTYPES[(number + turn) % 3], lengths=lengths, **types)
            yield case.but(schedule=f"bags={bags}", **STATES[(number + turn) % 4])
    for state in STATES:
        for lengths in LENGTHS[:3]:  # by default
            yield Case(lengths=lengths, **state)
            yield Case(dim=16, dtype=FLOAT16, lengths=lengths * 20, lead=3, gap=1, **state)
    yield Case(schedule="bags=8 block=64 warps=16")


CASES = list(_cases())
DRAWN = [
    Case(dim=32, schedule="bags=16 block=64"),
    Case(dim=50, dtype=FLOAT16, mode="mean", padding=2, index=torch.int32, schedule="bags=8 block=128"),
]


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_made() -> None:
    gpu.precompile([*CASES, *DRAWN, *(case.but(bounds="off") for case in CASES[::7])])


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
def test_agrees_with_the_reference_bit_for_bit_again(case: Case) -> None:
    Problem(case).check_twice()


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_unchecked_bounds_change_nothing(case: Case) -> None:
    Problem(case).check_unchecked()


@given(st.sampled_from(DRAWN), st.lists(st.integers(0, 3) | st.integers(0, 50), max_size=90),
       st.integers(4, 300), st.integers(0, 9), st.booleans(), st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bags(case: Case, lengths: list[int], rows: int, behind: int, last: bool, seed: int) -> None:
    """Also without the last offset, and with lookups past it."""
    problem = Problem(case.but(rows=rows, lengths=tuple(lengths)), seed)
    inputs = problem.on_device
    if last:
        indices = torch.cat((inputs["indices"], inputs["indices"].new_full((behind,), 10**6)))
        problem.check(problem.run(indices=indices))
    else:
        problem.check(problem.run(include_last_offset=False, offsets=inputs["offsets"][:-1]))


@pytest.mark.parametrize("bags", (1000, 20_000))
def test_equal_counts_do_not_imply_one_lookup_a_bag(bags: int) -> None:
    """By default: the first bag has all of them, every second bag has two, and all but two bags have one."""
    torch.manual_seed(0)
    table = torch.randn(bags, 32, device=gpu.DEVICE)
    indices = torch.randint(0, bags, (bags,), device=gpu.DEVICE)
    ones, twos = torch.ones(bags, dtype=torch.int64), torch.tensor([2, 0]).repeat(bags // 2)
    first = torch.zeros(bags, dtype=torch.int64)
    first[0] = bags
    swapped = ones.clone()
    swapped[bags // 2], swapped[bags // 2 + 1] = 0, 2
    for lengths in (ones, twos, first, swapped):
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(gpu.DEVICE)
        got = recfuse.embedding_bag(indices, table, offsets, mode="sum", include_last_offset=True)
        want = gpu.pooled(indices, table, offsets)
        assert_close_to_reference(got.cpu(), want.cpu(), 3e-2 if lengths is first else 1e-5)


@pytest.mark.parametrize("mode", ("sum", "mean"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(mode: str, dtype: torch.dtype) -> None:
    problem = Problem(Case(dim=24, dtype=dtype, mode=mode, rows=12, schedule="bags=8"))
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.0, 0.0, 2.0, -1e-7])
    problem.weight = special[torch.randint(0, 8, (12, 24))].to(dtype)
    problem.table = problem.weight.to(gpu.DEVICE)
    finite = problem.weight.nan_to_num(0, 0, 0).abs()
    allowed = tolerance(
        reference(problem.indices, finite, problem.offsets, mode, None, True),
        max(problem.case.lengths),
        dtype,
    )
    assert_close_to_reference(problem.run().cpu(), problem.expected(), allowed)


def ten_rows(
    indices: list[int], offsets: list[int], schedule: str = "bags=16", **options: object
) -> torch.Tensor:
    table = torch.arange(1.0, 11, device=gpu.DEVICE)[:, None].expand(10, 16).contiguous()
    at, ends = (torch.tensor(one, device=gpu.DEVICE) for one in (indices, offsets))
    return recfuse.embedding_bag(at, table, ends, mode="sum", schedule=schedule, **options)


@pytest.mark.parametrize("value", (10, -1, 2**31, 2**32, -(2**63)))
@pytest.mark.parametrize("position", (0, 40, 99))
@pytest.mark.parametrize("length", (1, 2))
def test_a_bad_index_is_named_and_counts_as_no_row(value: int, position: int, length: int) -> None:
    indices = [number % 10 for number in range(100)]
    indices[position] = value
    got = ten_rows(indices, list(range(0, 100, length)))
    with pytest.raises(
        IndexError, match=rf"indices\[{position}\] is {value}, for bag {position // length}; "
    ):
        recfuse.check()
    recfuse.check()
    rows = [index + 1 if index != value else 0 for index in indices]
    assert got[:, 0].tolist() == [sum(rows[at : at + length]) for at in range(0, 100, length)]


BAD_OFFSETS = {
    "first": ([1, 2], r"offsets\[0\] is 1; expected 0, where the first bag begins"),
    "decreasing": ([0, 3, 2], r"offsets\[2\] is 2, for bag 1; expected 3 .* to 4 \(the number of"),
    "beyond": ([0, 5], r"offsets\[1\] is 5, for bag [01]; expected 0 .* to 4 "),
    "huge": ([0, 2**40], r"offsets\[1\] is 1099511627776, for bag [01]; "),
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_a_bad_offset_is_named(name: str) -> None:
    offsets, text = BAD_OFFSETS[name]
    ten_rows([0, 1, 2, 3], offsets)
    with pytest.raises(ValueError, match=rf"^recfuse\.embedding_bag: {text}"):
        recfuse.check()
    recfuse.check()


@pytest.mark.parametrize("columns", (1, 2, 40, 0))
def test_two_dimensional_input_is_one_kernel(columns: int) -> None:
    """No offsets are created or read; an error names an invalid index by its position among all."""
    table, square = torch.randn(300, 20), torch.randint(0, 300, (500, columns))
    weight, indices = table.to(gpu.DEVICE), square.to(gpu.DEVICE)
    for mode in gpu.MODES:
        recfuse.embedding_bag(indices, weight, mode=mode)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            got = recfuse.embedding_bag(indices, weight, mode=mode)
            gpu.synchronize()
        assert_close_to_reference(got.cpu(), reference(square, table, mode=mode), 1e-5)
        kernels = [event.key for event in profile.key_averages() if event.self_device_time_total > 0]
        assert len(kernels) == 1 and kernels[0] in ("rf_short_bags", "rf_embedding_bag"), kernels
    if columns:
        indices[7, columns - 1] = 300
        recfuse.embedding_bag(indices, weight, mode="sum")
        with pytest.raises(IndexError, match=rf"indices\[{8 * columns - 1}\] is 300, for bag 7; "):
            recfuse.check()


def test_refused_schedules() -> None:
    problem = Problem(Case())
    for schedule, changes, text in (
        ("bags=16", {}, "bags is 16; expected 1 to 8 for rows of 512 bytes"),
        ("bags=4", {"mode": "max"}, "bags is 4, which is for sums and means without"),
        ("bags=4 parts=1", {}, "bags is 4, with which there is no station, distance, threads, parts or"),
    ):
        with pytest.raises(ValueError, match=rf"^recfuse\.embedding_bag: schedule: {text}"):
            problem.run(schedule=schedule, **changes)
