"""Points of a sweep: the times of contestants at one shape, in turns with a large matmul."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from common.calls import EAGER, time_calls
from common.checks import TOLERANCES, relative_error
from common.settings import Setting
from common.table import Table
from recfuse import timing

MATMUL, RECFUSE = "matmul", "recfuse"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# FLOP of a call -> divisor of the sample length of its mode from there on: the large matmul is called as
# often as the shortest call.
_SAMPLES = {30e9: 1, 3e9: 4, 0: 16}
Input = TypeVar("Input")


@dataclass(frozen=True)
class Mode:
    """The pace of calls."""

    sample: float  # seconds of calls without a gap
    pause: float  # seconds of sleep between samples, of any contestant


MODES = {"back to back": Mode(5e-3, 0.0), "with pauses": Mode(1e-3, 0.02)}
"""Under a constant load the power limit sets the GPU's clock; after a pause it starts at its highest."""


class Work(Protocol):
    """A shape: the least operations and bytes that its outputs need."""

    @property
    def flop(self) -> int:
        """Operations."""
        ...

    def least_bytes(self, dtype: torch.dtype) -> int:
        """Each input and output once."""
        ...


@dataclass(kw_only=True)
class Point:
    """The measurements of one shape in one type; seconds by mode and contestant."""

    shape: Any  # Work
    dtype: str
    path: str  # that recfuse uses
    copy_speed: float
    matmul_flop: int
    errors: dict[str, float]  # norm of the error of all outputs against float64, relative to their norm
    names: frozenset[str]  # requested contestants
    eager: bool = False  # calls were timed, in addition to graph replays
    results: dict[str, timing.Comparison] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def seconds(self, mode: str, name: str) -> float | None:
        """Returns the median, or None if it was not measured."""
        timings = self.results[mode].timings
        return timings[name].median if name in timings else None

    def rate(self, mode: str, name: str) -> float | None:
        """FLOP/s, of the least operations."""
        taken = self.seconds(mode, name)
        return None if taken is None else self.shape.flop / taken

    def matmul_rate(self, mode: str) -> float:
        """FLOP/s of the large matmul."""
        return self.matmul_flop / self.results[mode][MATMUL].median

    def bound(self, mode: str) -> float:
        """Seconds that the least work needs: its operations at the matmul's rate, its bytes at copy speed."""
        least_bytes = self.shape.least_bytes(DTYPES[self.dtype])
        return max(self.shape.flop / self.matmul_rate(mode), least_bytes / self.copy_speed)

    def over(self, mode: str, name: str | None) -> float | None:
        """Returns how many times faster recfuse is."""
        theirs, ours = self.seconds(mode, name or ""), self.seconds(mode, RECFUSE)
        return None if theirs is None or ours is None else theirs / ours

    def take_turns(
        self, mode: str, calls: Mapping[str, Callable[[Input], object]], inputs: Sequence[Input],
        device: torch.device, *, matmul: Callable[[], object], rounds: int, eager: bool,
        slow: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Times contestants and the matmul in a mode, and keeps the result and notes on missing graphs."""
        least, pause = MODES[mode].sample, MODES[mode].pause
        least /= next(part for flop, part in _SAMPLES.items() if self.shape.flop >= flop)
        result, failures = time_calls(
            {MATMUL: lambda each: matmul(), **calls}, inputs, device, rounds=rounds, eager=eager, slow=slow,
            after=(lambda: time.sleep(pause)) if pause else None,
            least_sample=least if device.type == "cuda" else 0.0,
        )  # fmt: skip
        self.results[mode] = result
        self.notes += [f"{name} has no graph: {why}" for name, why in failures.items()]
        for name in failures:
            result.timings.setdefault(name, result.timings[name + EAGER])

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        us = {
            mode: {name: taken.median * 1e6 for name, taken in result.timings.items()}
            for mode, result in self.results.items()
        }
        return {
            "shape": asdict(self.shape), "dtype": self.dtype, "path": self.path,
            "flop": self.shape.flop, "least_bytes": self.shape.least_bytes(DTYPES[self.dtype]),
            "relative_error": self.errors, "us": us, "notes": self.notes,
            "matmul_flop_per_s": {mode: self.matmul_rate(mode) for mode in self.results},
            "bound_us": {mode: self.bound(mode) * 1e6 for mode in self.results},
            "measured": {mode: result.to_json(environment=False) for mode, result in self.results.items()},
        }  # fmt: skip


class PointSetting(Setting):
    """Keeps the points that were measured."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self.points: dict[tuple[Any, str], Any] = {}

    def measure(self, shape: Any, dtype: str, names: Sequence[str], rounds: int, eager: bool) -> Any:
        """Measures the contestants `names` at a shape; `eager`: calls in addition to graph replays."""
        raise NotImplementedError

    def point(self, shape: Any, dtype: str, names: Sequence[str], rounds: int, eager: bool = False) -> Any:
        """As `measure`, but returns an earlier measurement of the shape if it covers the request."""
        before = self.points.get((shape, dtype))
        if before is None or not set(names) <= before.names or (eager and not before.eager):
            try:
                self.points[shape, dtype] = self.measure(shape, dtype, names, rounds, eager)
            finally:
                self.release()
        return self.points[shape, dtype]


class Problem(Protocol):
    """Inputs of a shape, and some of its outputs in float64."""

    inputs: list[Any]
    dtype: torch.dtype
    right: Tensor

    def whole(self, output: Any) -> Tensor:
        """Returns all values of an output in one row."""
        ...

    def sampled(self, output: Any) -> Tensor:
        """Those that `right` has."""
        ...


ROUNDINGS = 3
"""Each part of a sum is rounded to the output's type, and the sum is."""


@dataclass
class Checked:
    """The result of the check of the first outputs."""

    norms: dict[str, float] = field(default_factory=dict)  # errors of those that are right
    failed: dict[str, Exception] = field(default_factory=dict)
    wrong: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # from float64, and from other contestants as a whole


def check_outputs(
    problem: Problem, runs: Mapping[str, Callable[[Any], Any]], first: Sequence[str]
) -> Checked:
    """Compares samples of outputs with float64, and whole outputs with the first right output, preferably
    that of `first`. A row that is missing or misplaced shows so."""
    checked, whole, right = Checked(), None, problem.right
    allowed = ROUNDINGS * TOLERANCES[problem.dtype]
    for name in sorted(runs, key=lambda name: name not in first):
        try:
            output = runs[name](problem.inputs[0])
            sample, values = problem.sampled(output).double(), problem.whole(output)
            error = relative_error(sample, right)
            whole = values if whole is None and error <= allowed else whole
            apart = 0.0 if whole is None else ((values - whole).abs_().max() / whole.abs().max()).item()
            del output, values
        except Exception as failure:
            checked.failed[name] = failure
            continue
        if error <= allowed and apart <= 2 * allowed:
            checked.norms[name] = ((sample - right).norm() / right.norm()).item()
        else:
            checked.wrong[name] = error, apart
    checked.norms = {name: checked.norms[name] for name in runs if name in checked.norms}
    return checked


def large_matmul(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Creates a product of two matrices [size, size] of random values."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.matmul(left, right)


def made_at_first_call(make: Callable[[], Callable[[Input], Any]]) -> Callable[[Input], Any]:
    """Defers `make` to the first call, so that a contestant whose creation fails is left out like one that
    fails to run."""
    kept: list[Callable[[Input], Any]] = []

    def run(inputs: Input) -> Any:
        if not kept:
            kept.append(make())
        return kept[0](inputs)

    return run


def tera(rate: float | None) -> str:
    """FLOP/s in TFLOP/s, in three digits."""
    return "-" if rate is None else f"{rate / 1e12:.3g}"


def micro(seconds: float | None) -> str:
    """Seconds in µs."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def matmul_rates(points: Iterable[Point]) -> Table:
    """The large matmul at each point: the reference of the shares."""
    table = Table(
        "The large matmul in turns with the contestants: TFLOP/s", ["type", "mode", "median", "least", "most"]
    )
    rates: dict[tuple[str, str], list[float]] = {}
    for point in points:
        for mode in point.results:
            rates.setdefault((point.dtype, mode), []).append(point.matmul_rate(mode))
    for (dtype, mode), rate in rates.items():
        cells = statistics.median(rate), min(rate), max(rate)
        table.rows.append([dtype, mode, *map(tera, cells)])
    return table
