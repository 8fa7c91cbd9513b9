"""Checks and times all contestants at one shape, with a large matmul beside them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from common.ceilings import copy_speed
from common.checks import TOLERANCES, relative_error
from common.points import DTYPES, RECFUSE, Point, large_matmul, tera
from common.settings import Setting
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
from ikbo_attention.problem import Output, Problem, Shape
from recfuse import timing

_ROUNDINGS = 3
"""Weights are rounded to the type of the values before their product, and the output is."""
FLASH = (FA3_VARLEN, VARLEN, "FA3 batch", "packed flash", "repeated flash")
"""FlashAttention's forms: the first that runs is what errors are compared with."""


@dataclass(kw_only=True)
class AttentionPoint(Point):
    """A point of this benchmark."""

    def best_peer(self, mode: str) -> str | None:
        """The fastest contestant that is not recfuse."""
        names = [name for name in PEERS if name in self.results[mode].timings]
        return self.results[mode].fastest(names) if names else None

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        return {**super().to_json(), "best_peer": {mode: self.best_peer(mode) for mode in self.results}}

    def error_ratio(self, name: str) -> float | None:
        """An error over FlashAttention's."""
        flash = next((each for each in FLASH if each in self.errors), None)
        return self.errors[name] / self.errors[flash] if flash and self.errors[flash] else None


class AttentionSetting(Setting):
    """The command line, the device, its copy speed, and the points measured so far."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        super().__init__(parser, arguments)
        self.points: dict[tuple[Shape, str], AttentionPoint] = {}
        self.troubles: list[str] = []  # wrong outputs, and calls of recfuse that failed: status 1 at the end

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second; on the CPU, of reading alone."""
        return copy_speed(self.device) if self.device.type == "cuda" else timing.read_bandwidth()

    @property
    def shape(self) -> Shape:
        """The one that sweeps start from."""
        given = self.arguments
        return Shape(
            given.candidates,
            given.groups[-1],
            given.q,
            given.sweep_kv[0],
            given.heads,
            given.kv_heads,
            given.dim,
        )

    def trouble(self, text: str) -> str:
        """Says at once what is wrong, and keeps it for the end of the run."""
        self.troubles.append(text)
        return self.say(text)

    def say(self, text: str) -> str:
        """A line of progress."""
        print(text, file=sys.stderr, flush=True)
        return text

    def point(self, shape: Shape, dtype: str, names: Iterable[str], rounds: int) -> AttentionPoint | None:
        """Measured, where it was not with all of these contestants; None where that failed."""
        names = [name for name in names if name in self.arguments.contestants]
        before = self.points.get((shape, dtype))
        if before is None or not set(names) <= before.names:
            started = time.perf_counter()
            try:
                found = measure(self, shape, dtype, names, rounds)
            except RuntimeError as error:
                self.trouble(f"{dtype}, {shape}: not measured: {_line(error)}")
                return None
            finally:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
            self.points[shape, dtype] = found
            self.say(f"{dtype}, {shape}: {_summary(found)} ({time.perf_counter() - started:.1f} s)")
        return self.points[shape, dtype]


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160] or type(error).__name__


def _summary(point: AttentionPoint) -> str:
    mode = next(iter(point.results))
    best = point.best_peer(mode)
    ours, theirs = (tera(point.rate(mode, name or "")) for name in (RECFUSE, best))
    return f"recfuse {ours}, {best} {theirs}, matmul {tera(point.matmul_rate(mode))} TFLOP/s"


@torch.inference_mode()
def measure(
    setting: AttentionSetting, shape: Shape, dtype: str, names: Sequence[str], rounds: int
) -> AttentionPoint:
    """A contestant that does not run or whose output is wrong is left out, and a note says so."""
    arguments = setting.arguments
    problem = Problem(shape, DTYPES[dtype], setting.device, arguments.seed, arguments.mapping)
    copied = 2 * sum(shape.counts) * shape.kv * shape.kv_heads * shape.dim * problem.dtype.itemsize
    notes = []
    asked = frozenset(names)
    names = [name for name in names if takes(name, shape, setting.device.type == "cuda")]
    if copied > arguments.most_copied * 1e9 and set(COPIES) & set(names):
        notes.append(f"Repeated keys and values of {copied / 1e9:.0f} GB or more are left out.")
        names = [name for name in names if name not in COPIES]
    runs = make_runs(problem, names)
    errors, more = _check(setting, problem, runs, f"{dtype}, {shape}")
    runs = {name: run for name, run in runs.items() if name in errors}
    try:
        path = path_taken(problem)
    except Exception as error:
        path, more = "-", [*more, f"The path is not known: {_line(error)}"]
    size = arguments.matmul
    point = AttentionPoint(
        shape=shape, dtype=dtype, path=path, copy_speed=setting.copy_speed, matmul_flop=2 * size**3,
        errors=errors, names=asked,
        notes=[*notes, *more, *problem.notes],
    )  # fmt: skip
    matmul = large_matmul(size, problem.dtype, setting.device)
    for mode in arguments.modes:
        # What is slow for a reason that no clock changes is timed in the first mode alone.
        slow = [name for name in (*COPIES, LOOP) if name in runs and mode == arguments.modes[0]]
        timed = {name: run for name, run in runs.items() if name in slow or name not in (*COPIES, LOOP)}
        point.take_turns(
            mode, timed, problem.inputs, setting.device, matmul=matmul, rounds=rounds, eager=False,
            slow=slow,
        )  # fmt: skip
    point.notes = list(dict.fromkeys(point.notes))
    return point


def _check(
    setting: AttentionSetting, problem: Problem, runs: Mapping[str, Run], label: str
) -> tuple[dict[str, float], list[str]]:
    """The error of each contestant that runs here and is right, by name, and notes on the others."""
    inputs, right = problem.inputs[0], problem.right
    allowed = _ROUNDINGS * TOLERANCES[problem.dtype]
    norms: dict[str, float] = {}
    notes, whole = [], None
    # Of the whole output as well, so that rows that are not written or go elsewhere show.
    for name in sorted(runs, key=lambda name: name not in (VARLEN, LOOP)):
        try:
            output = runs[name](inputs)
            if problem.shape.own and isinstance(output, Tensor):
                output = inputs.apart(output)
            found = problem.sampled(output).double()
            error = relative_error(found, right)
            flat = _flat(output)
            whole = flat if whole is None and error <= allowed else whole
            apart = 0.0 if whole is None else ((flat - whole).abs_().max() / whole.abs().max()).item()
            del output, flat
        except Exception as failure:
            note = f"{name} is left out: {_line(failure)}"
            notes.append(note)
            # A path may refuse what it does not take; the operator as called has to run.
            lost = name in OURS and name not in PATHS
            (setting.trouble if lost else setting.say)(f"{label}: {note}")
            continue
        if not (error <= allowed and apart <= 2 * allowed):
            note = f"{name} is wrong: {error:.1e} from float64, {apart:.1e} from others as a whole"
            notes.append(setting.trouble(f"{label}: {note}").removeprefix(f"{label}: "))
            continue
        norms[name] = ((found - right).norm() / right.norm()).item()
    return {name: norms[name] for name in runs if name in norms}, notes


def _flat(output: Output) -> Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return torch.cat([part.flatten() for part in parts])
