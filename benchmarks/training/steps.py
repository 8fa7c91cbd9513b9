"""Whole training steps of the sides, beside one another: measured, and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from common import checks
from common.calls import EAGER, time_calls
from common.report import Row, load_notes
from common.settings import Setting
from common.table import Table, times
from recfuse import timing
from training import stages
from training.lookups import Batch, Subject
from training.sides import FBGEMM, LOOP, OPTIMIZERS, PLAIN, RECFUSE, SLOW, Side, make_sides

FORWARD = ", forward"
TOLERANCE = 1e-4
"""Of the changes of the first step, in their norm: sums of float32 in another order, added to values near
1."""
PROFILED_STEPS = 8


@dataclass
class StepRow(Row):
    """One subject and optimizer."""

    least: stages.Least
    stages: dict[str, dict[str, float]]

    def best(self, name: str) -> str:
        """A graph's replays where there is a graph, else calls."""
        return name if name in self.result.timings else name + EAGER


def measure(
    subject: Subject, kind: str, batches: Sequence[Batch], setting: Setting
) -> tuple[StepRow, list[str]]:
    """One subject with one optimizer, with notes."""
    arguments, device, optimizer = setting.arguments, setting.device, OPTIMIZERS[kind]
    label = f"{subject.name}, {kind}"
    sides, notes = make_sides(subject, kind, arguments.sides, device, batches[0].indices.dtype)
    right = stages.right_changes(subject, batches[0], optimizer)
    errors, more = checks.checked(
        setting.parser, label,
        {name: partial(stages.first_step_error, side, batches[0], right) for name, side in sides.items()},
        lambda name, error: error, lambda name: TOLERANCE,
    )  # fmt: skip
    del right
    sides = {name: sides[name] for name in errors}
    result, failures = time_sides(sides, batches, device, arguments.rounds)
    kernels = {
        name: stages.profile(side.step, batches, PROFILED_STEPS)
        for name, side in sides.items()
        if name != LOOP  # of a thousand tables it has too many kernels for the profiler
    }
    row = StepRow(
        label, result, {}, stages.least(subject, batches, optimizer),
        {name: stages.by_stage(found) for name, found in kernels.items()},
    )  # fmt: skip
    row.record = {
        "subject": subject.name,
        "optimizer": kind,
        "features": len(subject.rows),
        "rows": sum(subject.rows),
        "least": row.least.to_json(),
        "us": {name: timing_.median * 1e6 for name, timing_ in result.timings.items()},
        "relative_error": errors,
        "without_graph": failures,
        "stages_us": {
            name: {stage: seconds * 1e6 for stage, seconds in found.items()}
            for name, found in row.stages.items()
        },
        "kernels_us": {
            name: {kernel: seconds * 1e6 for kernel, seconds in found.items()}
            for name, found in kernels.items()
        },
        "measured": result.to_json(environment=False),
    }
    return row, [*notes, *more, *(f"{label}, {name}: no graph: {why}" for name, why in failures.items())]


def time_sides(
    sides: dict[str, Side], batches: Sequence[Batch], device: torch.device, rounds: int
) -> tuple[timing.Comparison, dict[str, str]]:
    """Steps as graphs and as called, forward passes as graphs; and why there is no graph of something.

    Sides that wait for the device are only called, and take their turns among themselves, in a third of the
    rounds: a step of theirs may take a tenth of a second.
    """
    results, failures = [], {}
    slow = {name: side.step for name, side in sides.items() if name in SLOW}
    fast = {name: side.step for name, side in sides.items() if name not in SLOW}
    forward = {name + FORWARD: sides[name].forward for name in fast}
    if fast:
        found, failures = time_calls({**fast, **forward}, batches, device, rounds=rounds)
        results.append(found)
    if slow:
        results.append(
            timing.compare(
                {name + EAGER: step for name, step in slow.items()}, inputs=[(batch,) for batch in batches],
                rounds=max(rounds // 3, 1), device=device, progress=False,
            )
        )  # fmt: skip
    for other in results[1:]:
        results[0].timings.update(other.timings)
    return results[0], failures


def tabulate(rows: Sequence[StepRow], notes: Sequence[str], rounds: int, speed: float) -> list[Table]:
    """Steps, ratios, stages and limits."""
    spread = f"(median ± IQR of {rounds})"
    columns = {
        f"{LOOP}, as called": LOOP + EAGER,
        f"{PLAIN}, as called": PLAIN + EAGER,
        f"{FBGEMM}, as called": FBGEMM + EAGER,
        f"{RECFUSE}, as called": RECFUSE + EAGER,
        FBGEMM: FBGEMM,
        RECFUSE: RECFUSE,
    }
    steps = Table(f"us a step as a CUDA graph, and as called {spread}", ["subject, optimizer", *columns])
    pairs = {
        f"{RECFUSE} over {FBGEMM}": (RECFUSE, FBGEMM),
        f"{RECFUSE} over {FBGEMM}, as called": (RECFUSE + EAGER, FBGEMM + EAGER),
        f"{PLAIN} over {LOOP}": (PLAIN + EAGER, LOOP + EAGER),
        f"{RECFUSE} over {LOOP}": (RECFUSE + EAGER, LOOP + EAGER),
    }
    faster = Table("How many times faster is a step", ["subject, optimizer", *pairs])
    parts = Table(
        f"us of kernels by stage, in {PROFILED_STEPS} steps",
        ["subject, optimizer", "side", *stages.STAGES, "sum"],
    )
    limits = Table(
        f"The limit: least bytes at copy speed, {speed / 1e12:.2f} TB/s",
        ["subject, optimizer", "side", "lookups", "rows in use", "MB forward", "MB backward",
         "us, least, backward", "us backward", "share, backward", "share, step"],
    )  # fmt: skip
    for row in rows:
        steps.rows.append([row.label, *(row.cell(name) for name in columns.values())])
        faster.rows.append([row.label, *(times(row.ratio(*pair)) for pair in pairs.values())])
        for name, found in row.stages.items():
            if found:
                cells = [*found.values(), sum(found.values())]
                parts.rows.append([row.label, name, *(f"{cell * 1e6:.1f}" for cell in cells)])
        limits.rows += [
            limit_cells(row, name, speed)
            for name in (RECFUSE, FBGEMM)
            if row.best(name) in row.result.timings
        ]
    steps.notes = [
        f"{PLAIN}: recfuse's collection with sparse gradients and torch's own optimizer. It and {LOOP} wait "
        "for the device in each step, have no graph, and are timed in a third of the rounds.",
        *dict.fromkeys(notes),
        *load_notes(row.result for row in rows),
    ]
    limits.notes = ["us backward: of a step less those of its forward pass, both as graphs where there are."]
    return [steps, faster, *([parts] if parts.rows else []), limits]


def limit_cells(row: StepRow, name: str, speed: float) -> list[str]:
    """A row of the table of limits."""
    pair = name, name + FORWARD  # in one mode: the difference is the backward pass
    mode = "" if set(pair) <= set(row.result.timings) else EAGER
    step, forward = (row.us(each + mode) for each in pair)
    least, backward = row.least, step - forward
    bound = least.backward_bytes / speed * 1e6
    whole = (least.forward_bytes + least.backward_bytes) / speed * 1e6
    return [
        row.label, name, f"{least.lookups:,.0f}", f"{least.unique_rows:,.0f}",
        *(f"{size / 1e6:.1f}" for size in (least.forward_bytes, least.backward_bytes)),
        f"{bound:.1f}", f"{backward:.1f}", f"{bound / backward:.0%}", f"{whole / step:.0%}",
    ]  # fmt: skip
