"""Checks and times all contestants at one shape, with a large matmul beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from common.calls import EAGER, time_calls
from common.ceilings import copy_speed
from common.checks import TOLERANCES, checked, relative_error
from common.settings import Setting
from ikbo_linear.forms import CONCATENATED, DECOMPOSITIONS, RECFUSE, is_separate, make_runs, path_taken
from ikbo_linear.problem import Problem, Shape
from recfuse import timing

MATMUL = "matmul"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ROUNDINGS = 3
"""The decomposed forms round each part and the sum to the output's type."""
# FLOP of a call, and by what a sample is shorter from there on than its mode says: the large matmul is called
# as often as the shortest call.
_SAMPLES = {30e9: 1, 3e9: 4, 0: 16}


@dataclass(frozen=True)
class Mode:
    """How calls follow one another."""

    sample: float  # seconds of calls without a gap
    pause: float  # seconds of sleep between samples, of whatever contestant


MODES = {"back to back": Mode(5e-3, 0.0), "with pauses": Mode(1e-3, 0.02)}
"""Under a constant load the power limit sets the GPU's clock; after a pause it starts at its highest."""


@dataclass
class Point:
    """What was measured of one shape in one type; seconds by mode and contestant."""

    shape: Shape
    dtype: str
    path: str  # that recfuse takes
    copy_speed: float
    matmul_flop: int
    errors: dict[str, float]  # of all outputs together, relative to their norm, against float64
    names: frozenset[str]  # contestants that were asked for
    eager: bool  # whether calls were timed as well as graph replays
    results: dict[str, timing.Comparison] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def seconds(self, mode: str, name: str) -> float | None:
        """The median; None where it was not measured."""
        timings = self.results[mode].timings
        return timings[name].median if name in timings else None

    def matmul_rate(self, mode: str) -> float:
        """FLOP/s of the large matmul."""
        return self.matmul_flop / self.results[mode][MATMUL].median

    def bound(self, mode: str) -> float:
        """Seconds that the least work needs: its operations at the matmul's rate, its bytes at copy speed."""
        least_bytes = self.shape.least_bytes(DTYPES[self.dtype])
        return max(self.shape.flop / self.matmul_rate(mode), least_bytes / self.copy_speed)

    def best_torch(self, mode: str, suffix: str = "") -> str:
        """The fastest of torch's forms, compiled or not, that take users and candidates apart."""
        names = [name for name in self.results[mode].timings if name.endswith(suffix)]
        return self.results[mode].fastest(name for name in names if is_separate(name.removesuffix(suffix)))

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
            "best_torch": {mode: self.best_torch(mode) for mode in self.results},
            "bound_us": {mode: self.bound(mode) * 1e6 for mode in self.results},
            "measured": {mode: result.to_json(environment=False) for mode, result in self.results.items()},
        }  # fmt: skip


class IkboSetting(Setting):
    """The command line, the device, its copy speed, and the points measured so far."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self.points: dict[tuple[Shape, str], Point] = {}

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second; on the CPU, of reading alone."""
        return copy_speed(self.device) if self.device.type == "cuda" else timing.read_bandwidth()

    @property
    def has_graphs(self) -> bool:
        """Whether a call and its replay are two things."""
        return self.device.type == "cuda"

    @property
    def shape(self) -> Shape:
        """The one that sweeps start from."""
        given = self.arguments
        return Shape(given.candidates, given.ratio, given.m, given.n, given.k_user, given.k_cand)

    def point(self, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool) -> Point:
        """A shape that was measured before with as much as is asked for is not measured again.

        `names`: contestants. `eager`: times calls as well as graph replays.
        """
        before = self.points.get((shape, dtype))
        if before is None or not set(names) <= before.names or (eager and not before.eager):
            self.points[shape, dtype] = measure(self, shape, dtype, names, rounds, eager)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.points[shape, dtype]


@torch.inference_mode()
def measure(
    setting: IkboSetting, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool
) -> Point:
    """Ends the program where an output is wrong; a peer that does not run is left out, and a note says so."""
    arguments, label = setting.arguments, f"{dtype}, {shape}"
    problem = Problem(shape, DTYPES[dtype], setting.device, arguments.seed, arguments.mapping)
    runs = make_runs(problem, names)
    errors, notes = _check(setting, problem, runs, label)
    runs = {name: run for name, run in runs.items() if name in errors}
    size = arguments.matmul
    left, right = (torch.randn(size, size, device=setting.device).to(problem.dtype) for _ in range(2))
    calls = {MATMUL: lambda inputs: torch.matmul(left, right), **runs}
    point = Point(
        shape, dtype, path_taken(problem), setting.copy_speed, 2 * size**3, errors, frozenset(names), eager
    )
    for mode in arguments.modes:
        least, pause = MODES[mode].sample, MODES[mode].pause
        least /= next(part for flop, part in _SAMPLES.items() if shape.flop >= flop)
        result, failures = time_calls(
            calls, problem.inputs, setting.device, rounds=rounds,
            eager=eager and mode == arguments.modes[0] and setting.has_graphs,
            after=(lambda pause=pause: time.sleep(pause)) if pause else None,
            least_sample=least if setting.device.type == "cuda" else 0.0,
        )  # fmt: skip
        point.results[mode] = result
        notes += [f"{name} has no graph: {why}" for name, why in failures.items()]
        for name in failures:
            result.timings.setdefault(name, result.timings[name + EAGER])
    # Without the shape, so that points of a sweep say the same thing once.
    notes = [note.removeprefix(f"{label}: ") for note in [*notes, *problem.notes]]
    point.notes = list(dict.fromkeys(notes))
    return point


def _check(
    setting: IkboSetting, problem: Problem, runs: dict[str, Any], label: str
) -> tuple[dict[str, float], list[str]]:
    """The error of each contestant that runs here, by name, and notes on the others."""
    inputs, right = problem.inputs[0], problem.right
    norms: dict[str, float] = {}
    # Of the whole output, so that a tile that is not written or goes elsewhere shows.
    whole = next(run for name, run in runs.items() if name in DECOMPOSITIONS)(inputs)

    def error_of(name: str, output: Tensor) -> float:
        shape = problem.shape
        if output.shape != (shape.candidates, shape.m, shape.n):
            return float("inf")
        found = output[problem.checked].double()
        norms[name] = ((found - right).norm() / right.norm()).item()
        error = relative_error(found, right)
        apart = (output - whole).abs_().max().double() / whole.abs().max().double()
        return torch.stack((torch.tensor(error), apart.cpu() / 2)).max().item()

    allowed = _ROUNDINGS * TOLERANCES[problem.dtype]
    calls = {name: lambda run=run: run(inputs) for name, run in runs.items()}
    errors, notes = checked(setting.parser, label, calls, error_of, lambda name: allowed)
    return {name: norms[name] for name in errors}, notes


def over(point: Point, mode: str, name: str) -> float | None:
    """How many times faster recfuse is."""
    theirs, ours = point.seconds(mode, name), point.seconds(mode, RECFUSE)
    return None if theirs is None or ours is None else theirs / ours


def error_ratio(point: Point, name: str) -> float | None:
    """An error over that of torch's matmul of the concatenated input."""
    if CONCATENATED not in point.errors:
        return None
    return point.errors[name] / point.errors[CONCATENATED]
