"""Checks and times all contestants at one shape, in turns with a large matmul."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.points import DTYPES, RECFUSE, Point, PointSetting, check_outputs, large_matmul, tera
from ikbo_attention import bench
from ikbo_attention.forms import (
    COPIES,
    FA3_VARLEN,
    LOOP,
    OURS,
    PATHS,
    PEERS,
    VARLEN,
    Run,
    make_runs,
    path_taken,
    takes,
)
from ikbo_attention.problem import Problem, Shape

FLASH = (FA3_VARLEN, VARLEN, "FA3 batch", "packed flash", "repeated flash")
"""FlashAttention's forms: the first that runs is the reference of errors."""


@dataclass(kw_only=True)
class AttentionPoint(Point):
    """A point of this benchmark."""

    def best_peer(self, mode: str) -> str | None:
        """Returns the fastest contestant other than recfuse."""
        names = [name for name in PEERS if name in self.results[mode].timings]
        return self.results[mode].fastest(names) if names else None

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        return {**super().to_json(), "best_peer": {mode: self.best_peer(mode) for mode in self.results}}

    def error_ratio(self, name: str) -> float | None:
        """Returns an error divided by FlashAttention's."""
        flash = next((each for each in FLASH if each in self.errors), None)
        return self.errors[name] / self.errors[flash] if flash and self.errors[flash] else None


@bench.setting
class AttentionSetting(PointSetting):
    """The points of this benchmark. Contestants that fail or are wrong are left out, and the run
    continues."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self.troubles: list[str] = []  # wrong outputs, and calls of recfuse that failed: status 1 at the end

    @property
    def shape(self) -> Shape:
        """The shape from which sweeps start."""
        arguments = self.arguments
        sizes = arguments.q, arguments.sweep_kv[0], arguments.heads, arguments.kv_heads, arguments.dim
        return Shape(arguments.candidates, arguments.groups[-1], *sizes)

    def say(self, text: str, is_trouble: bool = False) -> str:
        """Prints a line of progress, or of an error."""
        print(text, file=sys.stderr, flush=True)
        self.troubles += [text] if is_trouble else []
        return text

    def point(
        self, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool = False
    ) -> AttentionPoint | None:
        """Returns None if it failed."""
        names = [name for name in names if name in self.arguments.contestants]
        started, before = time.perf_counter(), self.points.get((shape, dtype))
        try:
            result = super().point(shape, dtype, names, rounds, eager)
        except RuntimeError as error:
            self.say(f"{dtype}, {shape}: not measured: {_line(error)}", is_trouble=True)
            return None
        if result is not before:
            self.say(f"{dtype}, {shape}: {_summary(result)} ({time.perf_counter() - started:.1f} s)")
        return result

    @torch.inference_mode()
    def measure(
        self, shape: Shape, dtype: str, names: Sequence[str], rounds: int, eager: bool
    ) -> AttentionPoint:
        """Measures; notes name the contestants that are left out."""
        arguments = self.arguments
        problem = Problem(shape, DTYPES[dtype], self.device, arguments.seed, arguments.mapping)
        selected, notes = self._wanted(problem, names)
        runs = make_runs(problem, selected)
        errors, more = self._check(problem, runs, f"{dtype}, {shape}")
        runs = {name: runs[name] for name in errors}
        try:
            path = path_taken(problem)
        except Exception as error:
            path, more = "-", [*more, f"The path is not known: {_line(error)}"]
        size = arguments.matmul
        point = AttentionPoint(
            shape=shape, dtype=dtype, path=path, copy_speed=self.copy_speed, matmul_flop=2 * size**3,
            errors=errors, names=frozenset(names), notes=[*notes, *more, *problem.notes],
        )  # fmt: skip
        matmul = large_matmul(size, problem.dtype, self.device)
        for mode in arguments.modes:
            # Forms that are slow for any clock are timed in the first mode only.
            slow = [name for name in (*COPIES, LOOP) if name in runs and mode == arguments.modes[0]]
            timed = {name: run for name, run in runs.items() if name in slow or name not in (*COPIES, LOOP)}
            point.take_turns(
                mode, timed, problem.inputs, self.device, matmul=matmul, rounds=rounds, eager=eager, slow=slow
            )
        point.notes = list(dict.fromkeys(point.notes))
        return point

    def _wanted(self, problem: Problem, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the contestants that accept the shape, and notes."""
        shape = problem.shape
        selected = [name for name in names if takes(name, shape, self.on_gpu)]
        copied = 2 * sum(shape.counts) * shape.kv * shape.kv_heads * shape.dim * problem.dtype.itemsize
        if copied <= self.arguments.most_copied * 1e9 or not set(COPIES) & set(selected):
            return selected, []
        note = f"Repeated keys and values of {copied / 1e9:.0f} GB or more are left out."
        return [name for name in selected if name not in COPIES], [note]

    def _check(
        self, problem: Problem, runs: dict[str, Run], label: str
    ) -> tuple[dict[str, float], list[str]]:
        """Returns the error of each contestant that runs here and is right, and notes on the others."""
        checked = check_outputs(problem, runs, (VARLEN, LOOP))
        notes = []
        for name, why in checked.failed.items():
            notes.append(f"{name} is left out: {_line(why)}")
            # A path may refuse shapes; the operator itself must run.
            self.say(f"{label}: {notes[-1]}", is_trouble=name in OURS and name not in PATHS)
        for name, (error, apart) in checked.wrong.items():
            notes.append(f"{name} is wrong: {error:.1e} from float64, {apart:.1e} from others as a whole")
            self.say(f"{label}: {notes[-1]}", is_trouble=True)
        return checked.norms, notes


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160] or type(error).__name__


def _summary(point: AttentionPoint) -> str:
    mode = next(iter(point.results))
    best = point.best_peer(mode)
    ours, theirs = (tera(point.rate(mode, name or "")) for name in (RECFUSE, best))
    return f"recfuse {ours}, {best} {theirs}, matmul {tera(point.matmul_rate(mode))} TFLOP/s"
