"""Bad arguments, bad contents and many threads on a GPU: clear errors, and no harm."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse import errors
from support import gpu
from support.library_cases import FREED, ONE_TABLE_ERRORS, OPS, one_table

pytestmark = gpu.MARKS


@functools.cache
def ten_rows(device: torch.device) -> Tensor:
    """One table for all calls, because a call raises the errors of earlier calls with its table."""
    return torch.arange(1.0, 11, device=device)[:, None].expand(10, 16).contiguous()


def call(indices: Any, offsets: Any, dtype: torch.dtype = torch.int64, **options: Any) -> Tensor:
    """A table of ten rows of ones with 16 columns, row k times k + 1; bags are sums."""
    device = options.pop("device", gpu.DEVICE)
    table = ten_rows(torch.device(device))
    indices, offsets = (torch.tensor(one, dtype=dtype, device=device) for one in (indices, offsets))
    return recfuse.embedding_bag(indices, table, offsets, **{"mode": "sum", **options})


GOOD = [0, 1, 2, 3], [0, 2]
BAD_INDICES = {
    "rows": ([0, 1, 2, 10, 4], [0, 2], (3, 10, 1)),
    "negative": ([0, -1, 2, 3], [0, 2], (1, -1, 0)),
    "last": ([0, 1, 2, -(2**31)], [0, 2], (3, -(2**31), 1)),
    "largest": ([0, 1, 2**31 - 1, 3], [0, 2], (2, 2**31 - 1, 1)),
    "huge": ([2**40, 1, 2, 3], [0, 2], (0, 2**40, 0)),
    "wraps": ([0, 2**32, 2, 3], [0, 2], (1, 2**32, 0)),  # 0 in 32 bits
    "most": ([0, 1, 2, 2**63 - 1], [0, 2], (3, 2**63 - 1, 1)),
    "least": ([0, 1, -(2**63), 3], [0, 3], (2, -(2**63), 0)),
}
INDEX_TEXT = (
    r"^recfuse\.embedding_bag: indices\[{}\] is {}, for bag {}; expected 0 to 9, less than the 10 rows of "
    r"its table \(found on the GPU"
)


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("dtype", gpu.INTEGERS, ids=str)
@pytest.mark.parametrize("name", BAD_INDICES)
def test_a_bad_index_is_named_once_and_counts_as_no_row(name: str, dtype: torch.dtype, mode: str) -> None:
    indices, offsets, (position, value, bag) = BAD_INDICES[name]
    if dtype == torch.int32 and not -(2**31) <= value < 2**31:
        pytest.skip("not an int32")
    got = call(indices, offsets, dtype, mode=mode)
    with pytest.raises(IndexError, match=INDEX_TEXT.format(position, value, bag)) as raised:
        recfuse.check()
    assert isinstance(raised.value, RuntimeError)  # torch's own kind
    recfuse.check()
    if mode == "sum":
        ends = [*offsets, len(indices)]
        want = [
            float(sum(one + 1 for one in indices[start:end] if 0 <= one < 10))
            for start, end in itertools.pairwise(ends)
        ]
        assert got[:, 0].tolist() == got[:, 15].tolist() == want
    assert call(*GOOD)[:, 0].tolist() == [3, 7]
    recfuse.check()


BAD_OFFSETS = {
    "first": ([1, 2], False, r"offsets\[0\] is 1; expected 0, where the first bag begins"),
    "first negative": ([-3, 2], False, r"offsets\[0\] is -3; expected 0, where the first bag begins"),
    "decreasing": ([0, 3, 2], False, r"offsets\[2\] is 2, for bag 1; expected 3 .* to 4 \(the number of"),
    "beyond": ([0, 5], False, r"offsets\[1\] is 5, for bag [01]; expected 0 .* to 4 "),
    "last": ([0, 2, 9], True, r"offsets\[2\] is 9, for bag 1; expected 2 .* to 4 "),
    "below": ([0, -2], False, r"offsets\[1\] is -2, for bag [01]; expected 0 .* to 4 "),
}


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("dtype", gpu.INTEGERS, ids=str)
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_a_bad_offset_is_named(name: str, dtype: torch.dtype, mode: str) -> None:
    offsets, last, text = BAD_OFFSETS[name]
    got = call([0, 1, 2, 3], offsets, dtype, mode=mode, include_last_offset=last)
    assert got.shape == (len(offsets) - last, 16)
    with pytest.raises(ValueError, match=rf"^recfuse\.embedding_bag: {text}"):
        recfuse.check()
    recfuse.check()
    assert call(*GOOD)[:, 0].tolist() == [3, 7]


@pytest.mark.parametrize("value", (2**31, 2**40, -(2**62), 2**63 - 1))
def test_huge_offsets(value: int) -> None:
    for offsets in ([0, value], [value, 0], [0, 2, value, 3]):
        call([0, 1, 2, 3], offsets)
        with pytest.raises(ValueError, match=r"recfuse\.embedding_bag: offsets\[\d\] is "):
            recfuse.check()


STATIONS = (
    "station=shared",
    "station=l1 parts=4",
    "threads=256 parts=16",
    "station=none",
    "station=local threads=32",
)


@pytest.mark.parametrize("schedule", STATIONS)
@pytest.mark.parametrize("options", ({}, {"padding_idx": 3}, {"mode": "max"}), ids=str)
def test_bad_indices_with_every_station(schedule: str, options: dict[str, Any]) -> None:
    indices = torch.arange(1000) % 10
    wrong = {17: 10, 333: -1, 334: -1, 600: 2**35, 999: 11}
    for position, value in wrong.items():
        indices[position] = value
    call(indices.tolist(), [0, 20, 900], schedule=schedule, **options)
    with pytest.raises(IndexError) as raised:
        recfuse.check()
    is_named = [
        f"indices[{position}] is {value}, for bag {(position >= 20) + (position >= 900)}" in str(raised.value)
        for position, value in wrong.items()
    ]
    assert is_named.count(True) == 1, str(raised.value)
    recfuse.check()  # the others are gone


def test_the_next_call_raises_and_the_one_after_works() -> None:
    call([0, 99], [0])
    gpu.synchronize()
    with pytest.raises(IndexError, match="is 99, for bag 0"):
        call(*GOOD)
    assert call(*GOOD)[:, 0].tolist() == [3, 7]


def test_a_good_call_of_another_table_runs() -> None:
    call([0, 99], [0])
    gpu.synchronize()
    other, indices = torch.ones(10, 16, device=gpu.DEVICE), torch.tensor([[0, 1]], device=gpu.DEVICE)
    assert recfuse.embedding_bag(indices, other, mode="sum")[0, 0].item() == 2
    recfuse.embedding_bag(indices + 9, other, mode="sum")
    gpu.synchronize()
    with pytest.raises(
        IndexError, match=r"is 99, for bag 0.*since calls with other tables left 1 more|is 10, .*1 more"
    ):
        recfuse.check()
    with pytest.raises(IndexError, match=r"is (99|10), for bag 0") as raised:
        recfuse.check()
    assert "more" not in str(raised.value)
    recfuse.check()


def test_errors_recorded_after_raising_are_kept() -> None:
    """A bad call was in another stream before an error is raised, and runs afterwards, while the stream that
    the error is raised on is busy.
    """
    table, side = ten_rows(gpu.DEVICE), torch.cuda.Stream(gpu.DEVICE)
    bad, good = (torch.tensor([[0, one]], device=gpu.DEVICE) for one in (55, 5))
    for stream in (side, torch.cuda.current_stream(gpu.DEVICE)):  # kernels are compiled before the race
        with torch.cuda.stream(stream):
            call(*GOOD)
            recfuse.embedding_bag(bad * 0, table, mode="sum")
    gpu.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        recfuse.embedding_bag(bad, table, mode="sum")
    call([0, 99], [0])
    torch.cuda.current_stream(gpu.DEVICE).synchronize()
    torch.cuda._sleep(2_000_000_000)
    with pytest.raises(IndexError, match="is 99"):  # at once: nothing here is copied in the busy stream
        recfuse.embedding_bag(good, table, mode="sum")
    assert not side.query()
    side.synchronize()
    with pytest.raises(IndexError, match="is 55"):
        recfuse.check()


def test_an_unchecked_call_neither_looks_nor_raises() -> None:
    call([0, 99], [0])
    gpu.synchronize()
    assert call(*GOOD, bounds_check="off")[:, 0].tolist() == [3, 7]
    with pytest.raises(IndexError, match="is 99"):
        recfuse.check()


def test_a_run_of_bad_calls_without_waiting() -> None:
    raised = 0
    for number in range(50):
        try:
            call([0, 1, 100 + number], [0])
        except IndexError as error:
            assert ", for bag 0; expected 0 to 9" in str(error)
            raised += 1
    with pytest.raises(IndexError):  # of the last ones, or a new one
        for _ in range(2):
            recfuse.check()
            call([0, 1, 77], [0])
    gpu.forget_errors()
    recfuse.check()
    assert raised < 50 and call(*GOOD)[:, 0].tolist() == [3, 7]


def test_a_module_and_its_gradients_survive_a_bad_index() -> None:
    module = recfuse.nn.EmbeddingBag(10, 16, mode="sum").to(gpu.DEVICE)
    indices = torch.tensor([0, 1, 10, 3], device=gpu.DEVICE)
    module(indices, torch.tensor([0, 2], device=gpu.DEVICE)).sum().backward()
    with pytest.raises(IndexError, match=r"indices\[2\] is 10"):
        recfuse.check()
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0]


def _captured(indices: Tensor, table: Tensor, offsets: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = recfuse.embedding_bag(indices, table, offsets, mode="sum")
    return graph, out


def test_a_bad_index_in_a_captured_graph_is_found_after_its_replay() -> None:
    table = torch.ones(10, 16, device=gpu.DEVICE)
    indices = torch.tensor([0, 1, 2, 3], device=gpu.DEVICE)
    offsets = torch.tensor([0, 2], device=gpu.DEVICE)
    graph, out = _captured(indices, table, offsets)
    graph.replay()
    recfuse.check()
    assert out[:, 0].tolist() == [2, 2]
    indices[3] = 12
    graph.replay()
    with pytest.raises(IndexError, match=r"indices\[3\] is 12, for bag 1"):
        recfuse.check()
    assert out[:, 0].tolist() == [2, 1]
    indices[3] = 5
    graph.replay()
    recfuse.check()
    assert out[:, 0].tolist() == [2, 2]


def test_nothing_is_raised_while_capturing() -> None:
    table = torch.ones(10, 16, device=gpu.DEVICE)
    good = torch.tensor([0, 1, 2, 3], device=gpu.DEVICE), torch.tensor([0, 2], device=gpu.DEVICE)
    call([0, 55], [0])
    gpu.synchronize()
    graph, out = _captured(good[0], table, good[1])
    with pytest.raises(IndexError, match=r"indices\[1\] is 55"):
        recfuse.check()
    graph.replay()
    recfuse.check()
    assert out[:, 0].tolist() == [2, 2]


CONTENTS = {"indices range", "indices negative", "offsets fall"}


def test_freed_tensors_are_refused() -> None:
    for which in ("weight", "indices", "offsets"):
        on_device = {name: value.to(gpu.DEVICE) for name, value in one_table().items() if name != "mode"}
        on_device[which].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^.*: {which} has no memory for its elements"):
            OPS.embedding_bag(**on_device)


@pytest.mark.parametrize("name", sorted(ONE_TABLE_ERRORS.keys() - FREED))
def test_bad_arguments_are_the_same_on_every_device(name: str) -> None:
    changes, kind, detail = ONE_TABLE_ERRORS[name]
    moved = {
        key: value.to(gpu.DEVICE) if isinstance(value, Tensor) else value
        for key, value in one_table(**changes).items()
    }
    with pytest.raises(RuntimeError) as raised:
        OPS.embedding_bag(**moved)
        OPS.check(0)
    assert type(raised.value) is errors.BY_NAME[kind]
    assert str(raised.value).startswith(f"recfuse.embedding_bag: {detail}")
    assert ("found on the GPU" in str(raised.value)) == (name in CONTENTS)


def test_tensors_on_different_devices() -> None:
    plain = one_table(per_sample_weights=torch.rand(60))
    for name in ("indices", "offsets", "per_sample_weights"):
        moved = {
            key: value.to(gpu.DEVICE) if isinstance(value, Tensor) and key != name else value
            for key, value in plain.items()
        }
        with pytest.raises(ValueError, match=rf"recfuse\.embedding_bag: {name} is on the CPU"):
            OPS.embedding_bag(**moved)
    with pytest.raises(ValueError, match=r"recfuse\.embedding_bag: indices is not on the CPU"):
        OPS.embedding_bag(plain["weight"], plain["indices"].to(gpu.DEVICE), plain["offsets"])
    weight, indices, offsets = plain["weight"].to(gpu.DEVICE), plain["indices"], plain["offsets"]
    with pytest.raises(RuntimeError, match="device"):  # torch's own
        recfuse.embedding_bag(indices, weight, offsets)
    with pytest.raises(ValueError, match="no kernel takes"):
        recfuse.embedding_bag(indices, weight, offsets, schedule="distance=2")
    with pytest.raises(ValueError, match=r"recfuse\.pin_rows: rows is on the CPU"):
        OPS.pin_rows(weight, indices)


BAD_SCHEDULES = {
    "unknown": ("nonsense=1", {}, 'found "nonsense=1"'),
    "threads": ("threads=16", {}, "threads is 16; expected at least the 32 that read one row of 512 bytes"),
    "block": ("threads=128 block=64", {}, "block is 64; expected at least threads, 128"),
    "warps": ("warps=1 block=64 threads=32", {}, "warps is 1; expected at least the 2 of one block"),
    "shared": (
        "station=shared distance=64 block=1024 threads=32",
        {},
        "distance 64 and segment [0-9]+ with blocks of 1024 threads need [0-9]+ bytes of shared memory, a ",
    ),
    "alignment": (
        "station=shared",
        {"dim": 7, "dtype": torch.float16},
        'station is "shared", but rows or output are aligned',
    ),
}


@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_bad_schedules(name: str) -> None:
    schedule, changes, text = BAD_SCHEDULES[name]
    problem = gpu.Problem(gpu.Case(schedule=schedule, **changes))
    with pytest.raises(ValueError, match=rf"^recfuse\.embedding_bag: schedule: {text}"):
        problem.run()
    problem.check(problem.run(schedule=""))


@pytest.mark.parametrize("distance", (24, 26, 27, 28, 29))
def test_a_block_that_is_just_too_large_is_refused(distance: int) -> None:
    """Rows in flight and lists of rows share one memory: it works, or it is an error of the schedule."""
    schedule = f"station=shared distance={distance} block=512 threads=32 segment=256"
    problem = gpu.Problem(gpu.Case(schedule=schedule))
    try:
        got = problem.run()
    except RuntimeError as error:
        assert str(error).startswith("recfuse.embedding_bag: schedule: "), error
    else:
        problem.check(got)


def test_lists_of_rows_that_are_too_large_say_so() -> None:
    schedule = "block=1024 segment=256 threads=4"
    problem = gpu.Problem(gpu.Case(dim=8, schedule=schedule, weighted=True))
    with pytest.raises(ValueError, match=r"^recfuse\.embedding_bag: schedule: "):
        problem.run()


def test_pinning_rows_that_do_not_exist() -> None:
    table = torch.randn(10, 16, device=gpu.DEVICE)
    for rows, position, value in (
        ([3, 99, 4], 1, 99),
        ([-1], 0, -1),
        ([0, 1, 10], 2, 10),
        ([2**40], 0, 2**40),
    ):
        recfuse.pin_rows(table, rows)
        text = rf"^recfuse\.pin_rows: rows\[{position}\] is {value}; expected 0 to 9"
        with pytest.raises(IndexError, match=text):
            recfuse.check()
        recfuse.unpin(table, rows)
        with pytest.raises(IndexError, match=text):
            recfuse.check()
    recfuse.pin_rows(table, [3, 4])
    recfuse.unpin(table)
    recfuse.check()


@gpu.TWO_GPUS
def test_each_gpu_reports_its_own_errors() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    call([0, 31], [0], device=first)
    call([0, 1, 32], [0], device=second)
    gpu.synchronize()
    with pytest.raises(IndexError, match=r"indices\[2\] is 32"):
        call(*GOOD, device=second)
    assert call(*GOOD, device=second)[:, 0].tolist() == [3, 7]
    with pytest.raises(IndexError, match=r"indices\[1\] is 31"):
        recfuse.check(first)
    recfuse.check(second)
    with pytest.raises(RuntimeError, match="indices is on another GPU"):
        OPS.embedding_bag(
            torch.ones(3, 4, device=first), torch.zeros(2, dtype=torch.int64, device=second),
            torch.zeros(1, dtype=torch.int64, device=first),
        )  # fmt: skip


def test_a_device_that_is_not_there() -> None:
    for ordinal in (torch.cuda.device_count(), -1, 1 << 40):
        with pytest.raises(RuntimeError, match=r"^recfuse"):
            OPS.check(ordinal)


def test_eight_threads_with_new_kernels_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own stream; two of them request each kernel."""
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    dims = (76, 84, 92, 108)
    problems = [gpu.Problem(gpu.Case(dim=dims[number % 4], mode="mean"), number) for number in range(8)]
    gpu.synchronize()
    results = gpu.run_in_threads(lambda number: [problems[(number + step) % 8].run() for step in range(16)])
    want = [problem.run() for problem in problems]
    for number, found in enumerate(results):
        for step, one in enumerate(found):
            assert torch.equal(one, want[(number + step) % 8])
    for problem, one in zip(problems, want, strict=True):
        problem.check(one)
