"""Checks and times all contestants at one shape, in turns with a large matmul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.checks import TOLERANCES, check_error, left_out
from common.points import DTYPES, ROUNDINGS, Point, PointSetting, check_outputs, large_matmul
from ikbo_linear import bench
from ikbo_linear.forms import CONCATENATED, DECOMPOSITIONS, Run, is_separate, make_runs, path_taken
from ikbo_linear.problem import Problem, Shape


@dataclass(kw_only=True)
class LinearPoint(Point):
    """A point of this benchmark."""

    def best_torch(self, mode: str, suffix: str = "") -> str:
        """Returns the fastest of torch's forms, compiled or not, that take users and candidates
        separately."""
        names = [name for name in self.results[mode].timings if name.endswith(suffix)]
        return self.results[mode].fastest(name for name in names if is_separate(name.removesuffix(suffix)))

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        return {**super().to_json(), "best_torch": {mode: self.best_torch(mode) for mode in self.results}}

    def error_ratio(self, name: str) -> float | None:
        """Returns an error divided by that of torch's matmul of the concatenated input."""
        return self.errors[name] / self.errors[CONCATENATED] if CONCATENATED in self.errors else None


@bench.setting
class IkboSetting(PointSetting):
    """The points of this benchmark."""

    @property
    def shape(self) -> Shape:
        """The shape from which sweeps start."""
        arguments = self.arguments
        return Shape(
            arguments.candidates,
            arguments.ratio,
            arguments.m,
            arguments.n,
            arguments.k_user,
            arguments.k_cand,
        )

    @torch.inference_mode()
    def measure(
        self, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool
    ) -> LinearPoint:
        """Measures; ends the program if an output is wrong. Notes name the peers that do not run."""
        arguments = self.arguments
        problem = Problem(shape, DTYPES[dtype], self.device, arguments.seed, arguments.mapping)
        runs = make_runs(problem, names)
        errors, notes = self._check(problem, runs, f"{dtype}, {shape}")
        runs = {name: runs[name] for name in errors}
        size = arguments.matmul
        point = LinearPoint(
            shape=shape, dtype=dtype, path=path_taken(problem), copy_speed=self.copy_speed,
            matmul_flop=2 * size**3, errors=errors, names=frozenset(names), eager=eager, notes=notes,
        )  # fmt: skip
        matmul = large_matmul(size, problem.dtype, self.device)
        for mode in arguments.modes:
            called = eager and mode == arguments.modes[0] and self.on_gpu
            point.take_turns(
                mode, runs, problem.inputs, self.device, matmul=matmul, rounds=rounds, eager=called
            )
        point.notes = list(dict.fromkeys([*point.notes, *problem.notes]))
        return point

    def _check(
        self, problem: Problem, runs: dict[str, Run], label: str
    ) -> tuple[dict[str, float], list[str]]:
        """Returns the error of each contestant that runs here, and notes on the others."""
        checked = check_outputs(problem, runs, DECOMPOSITIONS)
        for name, (error, apart) in checked.wrong.items():
            worst = torch.tensor([error, apart / 2]).max().item()  # NaN if either is NaN
            check_error(self.parser, f"{label}, {name}", worst, ROUNDINGS * TOLERANCES[problem.dtype])
        # Without the shape, so that points of a sweep have one note.
        return checked.norms, [
            left_out("", name, why).removeprefix(": ") for name, why in checked.failed.items()
        ]
