"""Checks and times all contestants at one shape, with a large matmul beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from common.ceilings import copy_speed
from common.checks import TOLERANCES, checked, relative_error
from common.points import DTYPES, Point, large_matmul
from common.settings import Setting
from ikbo_linear.forms import CONCATENATED, DECOMPOSITIONS, is_separate, make_runs, path_taken
from ikbo_linear.problem import Problem, Shape
from recfuse import timing

_ROUNDINGS = 3
"""The decomposed forms round each part and the sum to the output's type."""


@dataclass(kw_only=True)
class LinearPoint(Point):
    """A point of this benchmark."""

    eager: bool  # whether calls were timed as well as graph replays

    def best_torch(self, mode: str, suffix: str = "") -> str:
        """The fastest of torch's forms, compiled or not, that take users and candidates apart."""
        names = [name for name in self.results[mode].timings if name.endswith(suffix)]
        return self.results[mode].fastest(name for name in names if is_separate(name.removesuffix(suffix)))

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        return {**super().to_json(), "best_torch": {mode: self.best_torch(mode) for mode in self.results}}


class IkboSetting(Setting):
    """The command line, the device, its copy speed, and the points measured so far."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self.points: dict[tuple[Shape, str], LinearPoint] = {}

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

    def point(self, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool) -> LinearPoint:
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
) -> LinearPoint:
    """Ends the program where an output is wrong; a peer that does not run is left out, and a note says so."""
    arguments, label = setting.arguments, f"{dtype}, {shape}"
    problem = Problem(shape, DTYPES[dtype], setting.device, arguments.seed, arguments.mapping)
    runs = make_runs(problem, names)
    errors, notes = _check(setting, problem, runs, label)
    runs = {name: run for name, run in runs.items() if name in errors}
    size = arguments.matmul
    matmul = large_matmul(size, problem.dtype, setting.device)
    point = LinearPoint(
        shape=shape, dtype=dtype, path=path_taken(problem), copy_speed=setting.copy_speed,
        matmul_flop=2 * size**3, errors=errors, names=frozenset(names), eager=eager, notes=notes,
    )  # fmt: skip
    for mode in arguments.modes:
        point.take_turns(
            mode, runs, problem.inputs, setting.device, matmul=matmul, rounds=rounds,
            eager=eager and mode == arguments.modes[0] and setting.has_graphs,
        )  # fmt: skip
    # Without the shape, so that points of a sweep say the same thing once.
    notes = [note.removeprefix(f"{label}: ") for note in [*point.notes, *problem.notes]]
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


def error_ratio(point: LinearPoint, name: str) -> float | None:
    """An error over that of torch's matmul of the concatenated input."""
    if CONCATENATED not in point.errors:
        return None
    return point.errors[name] / point.errors[CONCATENATED]
