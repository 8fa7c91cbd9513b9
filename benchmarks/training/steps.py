"""Whole training steps of the sides: measured in turns, and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

from common import calls, checks
from common.batches import Batch
from common.calls import EAGER, time_calls
from common.report import Figure, Row, load_notes
from common.settings import Setting
from common.table import Table, times
from recfuse import timing
from training import bench, stages
from training.lookups import DIM, DYNAMICEMB_TABLES, Subject, make_subject
from training.sides import FBGEMM, LOOP, OPTIMIZERS, PLAIN, RECFUSE, SLOW, Side, make_sides

HOST_SUBJECT = "A-4"
"""A thousand tables, and so few lookups that no step waits for the GPU."""
FORWARD = ", forward"
TOLERANCE = 1e-4
"""Of the changes of the first step, in their norm: sums of float32 in another order, added to values near
1."""
PROFILED_STEPS = 8


@dataclass(kw_only=True)
class StepRow(Row):
    """One subject and optimizer."""

    least: stages.Least
    stages: dict[str, dict[str, float]]

    def best(self, name: str) -> str:
        """Returns a graph's replays if there is a graph, else calls."""
        return name if name in self.result.timings else name + EAGER


def measure(subject: Subject, kind: str, batches: Sequence[Batch], setting: Setting) -> StepRow:
    """One subject with one optimizer."""
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
        if name != LOOP  # with a thousand tables it has too many kernels for the profiler
    }
    spent = {name: stages.by_stage(records) for name, records in kernels.items()}
    least = stages.least(subject, batches, optimizer)
    record = {
        "subject": subject.name,
        "optimizer": kind,
        "features": len(subject.rows),
        "rows": sum(subject.rows),
        "least": least.to_json(),
        "us": {name: timing_.median * 1e6 for name, timing_ in result.timings.items()},
        "relative_error": errors,
        "without_graph": failures,
        "stages_us": {name: in_us(records) for name, records in spent.items()},
        "kernels_us": {name: in_us(records) for name, records in kernels.items()},
        "measured": result.to_json(environment=False),
    }
    notes += [*more, *(f"{label}, {name}: no graph: {why}" for name, why in failures.items())]
    return StepRow(label, result, record, notes, least=least, stages=spent)


def in_us(seconds: Mapping[str, float]) -> dict[str, float]:
    """Microseconds."""
    return {name: each * 1e6 for name, each in seconds.items()}


def time_sides(
    sides: dict[str, Side], batches: Sequence[Batch], device: torch.device, rounds: int
) -> tuple[timing.Comparison, dict[str, str]]:
    """Times steps as graphs and eager, forward passes as graphs; returns also the reasons for missing graphs.

    Sides that wait for the device are only called, and take turns among themselves in a third of the rounds,
    because a step of theirs may take a tenth of a second.
    """
    results, failures = [], {}
    slow = {name: side.step for name, side in sides.items() if name in SLOW}
    fast = {name: side.step for name, side in sides.items() if name not in SLOW}
    forward = {name + FORWARD: sides[name].forward for name in fast}
    if fast:
        timings, failures = time_calls({**fast, **forward}, batches, device, rounds=rounds)
        results.append(timings)
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
    """Returns a row of the table of limits."""
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


def fitting_rows(rows: int, kind: str, sides: Sequence[str], device: torch.device) -> int:
    """Returns the rows of dynamicemb's tables that fit into the GPU's memory for all sides, at most
    `wanted`."""
    if device.type != "cuda":
        return rows
    optimizer = OPTIMIZERS[kind]
    there = {LOOP: optimizer.torch, PLAIN: optimizer.torch, RECFUSE: True, FBGEMM: optimizer.fbgemm}
    holders = [name for name in sides if there[name]]
    # All train the same tables; FBGEMM allocates its own before it gets these.
    floats = DIM * (2 if FBGEMM in holders else 1) + optimizer.states(DIM) * len(holders)
    free = torch.cuda.mem_get_info(device)[0] - (24 << 30)  # batches, graphs' outputs, gradients
    return max(1, min(rows, free // (4 * floats * DYNAMICEMB_TABLES)))


@bench.figure("steps", on=["cuda"])
def figure_steps(setting: Setting) -> Iterator[Figure]:
    """Every optimizer on every subject; an interrupted run keeps its measurements."""
    arguments, rows, notes = setting.arguments, [], []
    batches: dict[tuple[str, int], list[Batch]] = {}
    cases = [(kind, name) for kind in arguments.optimizers for name in arguments.subjects]
    try:
        for kind, name in tqdm(cases, desc="subjects", leave=False):
            fits = fitting_rows(arguments.dynamicemb_rows, kind, arguments.sides, setting.device)
            subject = make_subject(name, arguments.seed, arguments.rows_cap, fits)
            key = name, max(subject.rows)
            if key not in batches:
                batches[key] = subject.batches(arguments.num_batches, arguments.seed + 1, setting.device)
            rows.append(measure(subject, kind, batches[key], setting))
            notes += rows[-1].notes
            yield Figure([], {}, rows[-1].record, name=rows[-1].label)
            setting.release()
    except KeyboardInterrupt:
        notes.append(f"interrupted: {len(rows)} of {len(cases)} cases")
    if rows:
        tables = tabulate(rows, notes, arguments.rounds, setting.copy_speed)
        yield Figure(tables, {}, [row.label for row in rows])


def step_on_one_thread(side: Side, batch: Batch) -> None:
    """Makes a step whose backward pass runs on this thread instead of autograd's thread of the device."""
    with torch.autograd.set_multithreading_enabled(False):
        side.step(batch)


@bench.figure("host", on=["cuda"])
def figure_host(setting: Setting) -> Figure:
    """The host's time of a step of a thousand tables with SGD, with autograd's threads and without."""
    arguments, device = setting.arguments, setting.device
    subject = make_subject(HOST_SUBJECT, arguments.seed, arguments.rows_cap, 1)
    batch = subject.batches(1, arguments.seed + 1, device)[0]
    names = [name for name in arguments.sides if name != LOOP]  # it has more than a thousand launches
    sides, notes = make_sides(subject, "sgd", names, device, batch.indices.dtype)
    title = f"a step with SGD, {len(subject.rows):,} tables, batch {subject.size}"
    runs: dict[str, Callable[[], object]] = {}
    for name, side in sides.items():
        runs[name] = partial(side.step, batch)
        runs[f"{name}, one thread"] = partial(step_on_one_thread, side, batch)
    figure = calls.figure_host(title, runs, device, min(arguments.rounds, 5))
    figure.tables[0].notes += notes
    setting.release()
    return figure
