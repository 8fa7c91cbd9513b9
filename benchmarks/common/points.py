"""Points of a sweep: what contestants need at one shape, beside a large matmul that takes turns with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from common.calls import EAGER, time_calls
from common.table import Table
from recfuse import timing

MATMUL, RECFUSE = "matmul", "recfuse"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# FLOP of a call, and by what a sample is shorter from there on than its mode says: the large matmul is called
# as often as the shortest call.
_SAMPLES = {30e9: 1, 3e9: 4, 0: 16}
Input = TypeVar("Input")


@dataclass(frozen=True)
class Mode:
    """How calls follow one another."""

    sample: float  # seconds of calls without a gap
    pause: float  # seconds of sleep between samples, of whatever contestant


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
    """What was measured of one shape in one type; seconds by mode and contestant."""

    shape: Any  # Work
    dtype: str
    path: str  # that recfuse takes
    copy_speed: float
    matmul_flop: int
    errors: dict[str, float]  # of all outputs together, relative to their norm, against float64
    names: frozenset[str]  # contestants that were asked for
    results: dict[str, timing.Comparison] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def seconds(self, mode: str, name: str) -> float | None:
        """The median; None where it was not measured."""
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
        """How many times faster recfuse is."""
        theirs, ours = self.seconds(mode, name or ""), self.seconds(mode, RECFUSE)
        return None if theirs is None or ours is None else theirs / ours

    def take_turns(
        self,
        mode: str,
        calls: Mapping[str, Callable[[Input], object]],
        inputs: Sequence[Input],
        device: torch.device,
        *,
        matmul: Callable[[], object],
        rounds: int,
        eager: bool,
        slow: Sequence[str] = (),
    ) -> None:
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


def large_matmul(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A product of two matrices [size, size] of random values."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.matmul(left, right)


def made_at_first_call(make: Callable[[], Callable[[Input], Any]]) -> Callable[[Input], Any]:
    """A contestant that fails to be made is left out like one that fails to run."""
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
    """The large matmul at each point: what the shares are of."""
    table = Table(
        "The large matmul beside the contestants: TFLOP/s", ["type", "mode", "median", "least", "most"]
    )
    rates: dict[tuple[str, str], list[float]] = {}
    for point in points:
        for mode in point.results:
            rates.setdefault((point.dtype, mode), []).append(point.matmul_rate(mode))
    for (dtype, mode), found in rates.items():
        cells = statistics.median(found), min(found), max(found)
        table.rows.append([dtype, mode, *map(tera, cells)])
    return table
