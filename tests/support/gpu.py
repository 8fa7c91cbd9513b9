"""Shared by the tests on a GPU: the check for a GPU, random problems, comparisons, and kernels compiled
ahead."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from support.kernels import compile_bag
from support.reference import assert_close_to_reference, tolerance
from support.reference import embedding_bag as reference

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
MODES = ("sum", "mean", "max")


def _missing() -> str | None:
    if torch.version.hip is not None:
        return "torch is built for ROCm; these tests are for CUDA"
    return None if torch.cuda.is_available() else "no CUDA GPU here (torch.cuda.is_available() is False)"


MISSING = _missing()
"""The reason why these tests cannot run; None: they can."""
MARKS = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("no_error_left"),
]
"""Marks of each of their files."""
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in this machine")


def used() -> range:
    """GPUs that these tests use."""
    return range(min(torch.cuda.device_count(), 2) if DEVICE.type == "cuda" else 0)


def synchronize() -> None:
    """Waits for all of them."""
    for device in used():
        torch.cuda.synchronize(device)


def forget_errors() -> None:
    """Raises the errors that kernels have recorded so far, and drops them."""
    for device in used():
        left = True
        while left:  # each call raises the errors of one table's calls
            try:
                recfuse.check(device)
                left = False
            except (IndexError, ValueError):
                pass


def needs_memory(gigabytes: float) -> str | None:
    """Returns the reason why a test of that much GPU memory cannot run; None: it can."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(DEVICE)[0] / 2**30
    return None if free >= gigabytes + 1 else f"needs {gigabytes} GiB of GPU memory, {free:.1f} are free"


def arch() -> str:
    """Returns the compiler's name of the GPU's architecture."""
    major, minor = torch.cuda.get_device_capability(DEVICE)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


LENGTHS = (0, 1, 2, 150, 31, 32, 33, 0, 0, 300, 7, 5, 64, 129, 3, 16, 0)
"""Of bags: empty, one, around a warp and around a segment, long bags next to short ones."""


def lookups(rows: int, lengths: Sequence[int], first_row: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random indices from ``first_row`` on, and offsets with the last one, on the CPU."""
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    return torch.randint(first_row, rows, (int(offsets[-1]),)), offsets


@dataclass(frozen=True)
class Case:
    """A call: the variant of its kernel, and the memory layout of its table."""

    dim: int = 128
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    offset: torch.dtype = torch.int64
    mode: str = "sum"
    weighted: bool = False
    padding: int = -1
    schedule: str = ""
    bounds: str = "on"
    lead: int = 0
    """Elements in front of the table."""
    gap: int = 0
    """Elements between its rows."""
    rows: int = 97
    lengths: tuple[int, ...] = LENGTHS

    def but(self, **changes: Any) -> Case:
        """Returns the same with other values of some fields."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """Returns the difference from the first case, for the name of a test."""
        plain = Case()
        named = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        named.pop("lengths", None)
        texts = (str(value).removeprefix("torch.") if name != "schedule" else value
                 for name, value in named.items())  # fmt: skip
        return ",".join(f"{name}={text}" for name, text in zip(named, texts, strict=True)) or "plain"

    def alignment(self) -> int:
        """Bytes to which rows and output are aligned; torch's memory is aligned to at least 16."""
        size = self.dtype.itemsize
        every = 16 | self.dim * size | (self.dim + self.gap) * size | self.lead * size
        return every & -every

    def compile_arguments(self, target: str) -> tuple[Any, ...]:
        """For `_C.embedding_bag_lower`."""
        codes = DTYPES.index(self.dtype), INTEGERS.index(self.index), INTEGERS.index(self.offset)
        shape = (target, self.dim, self.dim + self.gap, self.alignment(), *codes, MODES.index(self.mode))
        state = (self.weighted, self.padding >= 0, self.bounds == "on")
        return (*shape, *state, sum(self.lengths), len(self.lengths), self.schedule, self.rows)


class Problem:
    """The tensors of a case: on the CPU, and on the device surrounded by NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.weight = torch.randn(case.rows, case.dim).to(case.dtype)
        first = min(1, case.rows - 1)
        self.indices, self.offsets = lookups(case.rows, case.lengths, first)
        if first:
            self.weight[0] = torch.nan  # never looked up, though slots without a row may stand at it
        self.factors = torch.randn(self.indices.numel()).to(case.dtype) if case.weighted else None
        self.table = self._placed()
        self.on_device = {
            "indices": self.indices.to(DEVICE, case.index),
            "offsets": self.offsets.to(DEVICE, case.offset),
            "per_sample_weights": None if self.factors is None else self.factors.to(DEVICE),
        }

    def _placed(self) -> Tensor:
        case, pitch = self.case, self.case.dim + self.case.gap
        storage = torch.full((case.lead + case.rows * pitch + 8,), torch.nan, dtype=case.dtype, device=DEVICE)
        view = storage[case.lead : case.lead + case.rows * pitch].view(case.rows, pitch)[:, : case.dim]
        view.copy_(self.weight)
        return view

    def run(self, **changes: Any) -> Tensor:
        """The operator on the device."""
        case = self.case
        arguments: dict[str, Any] = {
            "weight": self.table,
            **self.on_device,
            "mode": case.mode,
            "include_last_offset": True,
            "padding_idx": case.padding,
            "bounds_check": case.bounds,
            "schedule": case.schedule,
        }
        return torch.ops.recfuse.embedding_bag(**{**arguments, **changes})

    def expected(self, magnitude: bool = False) -> Tensor:
        """The reference, or that of the absolute values."""
        case, factors, weight = self.case, self.factors, self.weight
        if magnitude:
            weight, factors = weight.abs(), None if factors is None else factors.abs()
        padding = case.padding if case.padding >= 0 else None
        return reference(self.indices, weight, self.offsets, case.mode, factors, True, padding)

    def check(self, got: Tensor) -> None:
        """Compares with the reference; a maximum must be exact."""
        allowed = 0.0 if self.case.mode == "max" else self.allowed()
        assert got.dtype == self.case.dtype and got.device == self.table.device and got.is_contiguous()
        assert_close_to_reference(got.cpu(), self.expected(), allowed)

    def check_twice(self) -> None:
        """Compares, and the same bits come again."""
        got = self.run()
        self.check(got)
        assert torch.equal(self.run(), got)

    def check_unchecked(self) -> None:
        """Unchecked bounds change nothing."""
        assert torch.equal(self.run(bounds_check="off"), self.run())

    def allowed(self) -> Tensor:
        """Returns the tolerance of a sum or mean."""
        return tolerance(self.expected(True), max(self.case.lengths, default=0), self.case.dtype)


def run_and_check(case: Case, seed: int = 0) -> Tensor:
    """One case, from random tensors to the comparison."""
    problem = Problem(case, seed)
    got = problem.run()
    problem.check(got)
    return got


def pooled(indices: Tensor, weight: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """Returns [bags, dim] float64 on the device, for large problems without NaN; ``offsets`` with the last
    one."""
    sizes = offsets.long().diff()
    bag_of = torch.repeat_interleave(sizes)
    kept = indices[: bag_of.numel()].long()
    out = torch.zeros(sizes.numel(), weight.shape[1], dtype=torch.float64, device=weight.device)
    if mode == "max":
        out.fill_(-torch.inf)
    for part, bags in zip(kept.split(1 << 18), bag_of.split(1 << 18), strict=True):
        rows = weight[part].double()
        if mode == "max":
            out.scatter_reduce_(0, bags[:, None].expand_as(rows), rows, "amax")
        else:
            out.index_add_(0, bags, rows)
    if mode == "mean":
        out /= sizes.clamp(min=1)[:, None]
    return torch.where((sizes > 0)[:, None], out, 0.0)


def sparsely_filled(rows: int, dim: int, picks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A large float16 table of which a few rows are set, 2000 lookups of them in bags of 5, offsets."""
    table = torch.empty(rows, dim, dtype=torch.float16, device=DEVICE)
    chosen = torch.cat((torch.tensor(picks), torch.randint(0, rows, (500,)))).unique().to(DEVICE)
    table[chosen] = torch.randn(chosen.numel(), dim, device=DEVICE).half()
    indices = chosen[torch.randint(0, chosen.numel(), (2000,), device=DEVICE)]
    indices[: len(picks)] = torch.tensor(picks, device=DEVICE)
    return table, indices, torch.arange(0, 2001, 5, device=DEVICE)


def precompile(cases: Iterable[Case]) -> None:
    """Compiles the kernels of cases into the cache on disk, with a thread per core.

    A failure repeats, and is reported, when the case runs.
    """
    if DEVICE.type != "cuda":
        return
    target = arch()
    jobs = dict.fromkeys(case.compile_arguments(target) for case in cases)

    def make(job: tuple[Any, ...]) -> None:
        with contextlib.suppress(Exception):
            compile_bag(*job)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, jobs))


def run_in_threads(work: Callable[[int], Any], count: int = 8) -> list[Any]:
    """Returns the results of threads that begin at once, each with its number and its own stream."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        stream = torch.cuda.Stream(DEVICE)
        start.wait(30)
        with torch.cuda.stream(stream):
            result = work(number)
        stream.synchronize()
        return result

    pool = ThreadPoolExecutor(count)
    try:
        return list(pool.map(run, range(count), timeout=200))
    finally:
        pool.shutdown(wait=False)


def run_alone(
    script: str, *arguments: str, environment: dict[str, str] | None = None, timeout: float = 120
) -> str:
    """Runs a script in a new process, which can import the tests' modules; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True, text=True, env=child_environment(environment), timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_command(*arguments: str) -> str:
    """Runs recfuse's command line in a new process; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "recfuse", *arguments],
        capture_output=True, text=True, env=child_environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def child_environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process that finds this process's imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(changes or {})}


def moved(value: Any, device: torch.device | None = None) -> Any:
    """Returns the same with every tensor in it on the GPU."""
    if isinstance(value, Tensor):
        return value.detach().to(device or DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(one, device) for one in value)
    return value
