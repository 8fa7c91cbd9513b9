"""What training.py does with --device cuda: whole steps beside peers, by stage, and the host's part.

After each subject the JSON file is written anew, so that a run that is cut short leaves what it has measured.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from common import host
from common.ceilings import copy_speed
from common.report import Figure, Report
from common.settings import Setting, apply_quick, check_choices, comma_list, positive
from training.convergence import figure_convergence
from training.lookups import DIM, DYNAMICEMB_TABLES, Batch, make_subject
from training.sides import FBGEMM, LOOP, NAMES, OPTIMIZERS, PLAIN, RECFUSE, Side, make_sides
from training.steps import measure, tabulate

SUBJECTS = ["A-512", "D-512", "mlperf-2048", "mlperf-16384", "dynamicemb-104857"]
HOST_SUBJECT = "A-4"
"""A thousand tables, and so few lookups that no step waits for the GPU's work."""
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK = {"subjects": ["D-512", "mlperf-2048"], "rounds": 3, "num_batches": 2, "steps": 50}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only --device cuda has."""
    group = parser.add_argument_group("only with --device cuda")
    group.add_argument(
        "--subjects",
        type=comma_list,
        default=SUBJECTS,
        help=f"NAME-BATCH SIZE (default: {','.join(SUBJECTS)})",
    )
    optimizers = ["sgd", "rowwise_adagrad", "adam"]
    group.add_argument(
        "--optimizers", type=comma_list, default=optimizers,
        help=f"of {', '.join(OPTIMIZERS)} (default: {','.join(optimizers)})",
    )  # fmt: skip
    group.add_argument("--sides", type=comma_list, default=list(NAMES), help=f"default: {','.join(NAMES)}")
    group.add_argument(
        "--rows-cap", type=positive, default=4_000_000, help="most rows of mlperf's tables (default: 4000000)"
    )
    group.add_argument(
        "--dynamicemb-rows", type=positive, default=8_000_000,
        help="rows of each of dynamicemb's tables (default: 8000000, or as many as fit)",
    )  # fmt: skip
    group.add_argument("--quick", action="store_true", help="fewer subjects, batches and rounds: a trial run")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the flags of a run on a GPU, and apply --quick to what was left at its default."""
    check_choices(
        parser,
        {"--optimizers": (arguments.optimizers, OPTIMIZERS), "--sides": (arguments.sides, NAMES)},
    )
    if RECFUSE not in arguments.sides:
        parser.error(f"--sides: needs {RECFUSE} among them")
    try:
        for name in arguments.subjects:
            make_subject(name, arguments.seed, 1, 1)
    except ValueError as error:
        parser.error(f"--subjects: {error}")
    if not arguments.subjects:
        parser.error("--subjects: needs one at least")
    apply_quick(parser, arguments, QUICK)


def fitting_rows(wanted: int, kind: str, sides: Sequence[str], device: torch.device) -> int:
    """As many rows of dynamicemb's tables as the GPU's memory holds, of all sides, at most `wanted`."""
    if device.type != "cuda":
        return wanted
    optimizer = OPTIMIZERS[kind]
    there = {LOOP: optimizer.torch, PLAIN: optimizer.torch, RECFUSE: True, FBGEMM: optimizer.fbgemm}
    holders = [name for name in sides if there[name]]
    # All train the same tables; FBGEMM allocates its own before it is given these.
    floats = DIM * (2 if FBGEMM in holders else 1) + optimizer.states(DIM) * len(holders)
    free = torch.cuda.mem_get_info(device)[0] - (24 << 30)  # batches, graphs' outputs, gradients
    return max(1, min(wanted, free // (4 * floats * DYNAMICEMB_TABLES)))


def figure_steps(setting: Setting, speed: float, report: Report) -> Figure:
    """Every optimizer on every subject; an interrupted run keeps what it has measured."""
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
            row, more = measure(subject, kind, batches[key], setting)
            rows.append(row)
            notes += more
            report.add(row.label, [], row.record)
            release(setting.device)
    except KeyboardInterrupt:
        notes.append(f"interrupted: {len(rows)} of {len(cases)} cases")
    return Figure(tabulate(rows, notes, arguments.rounds, speed), {}, [row.label for row in rows])


def release(device: torch.device) -> None:
    """Gives back the memory of what is no longer in use: graphs and modules hold each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def step_on_one_thread(side: Side, batch: Batch) -> None:
    """A step whose backward pass is not handed over to autograd's thread of the device."""
    with torch.autograd.set_multithreading_enabled(False):
        side.step(batch)


def figure_host(setting: Setting) -> Figure:
    """What the host spends on a step of a thousand tables with SGD, by autograd's threads and without."""
    arguments, device = setting.arguments, setting.device
    subject = make_subject(HOST_SUBJECT, arguments.seed, arguments.rows_cap, 1)
    batch = subject.batches(1, arguments.seed + 1, device)[0]
    names = [name for name in arguments.sides if name != LOOP]  # of a thousand launches, and more
    sides, notes = make_sides(subject, "sgd", names, device, batch.indices.dtype)
    title = f"a step with SGD, {len(subject.rows):,} tables, batch {subject.size}"
    runs: dict[str, Callable[[], object]] = {}
    for name, side in sides.items():
        runs[name] = partial(side.step, batch)
        runs[f"{name}, one thread"] = partial(step_on_one_thread, side, batch)
    figure = host.figure_host(title, runs, device, min(arguments.rounds, 5))
    figure.tables[0].notes += notes
    return figure


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for."""
    report, setting = Report(arguments), Setting(parser, arguments)
    for name in arguments.figures:
        figure: Any
        if name == "steps":
            speed = copy_speed(setting.device)
            report.add("copy_bytes_per_s", [], speed)
            figure = figure_steps(setting, speed, report)
        else:
            figure = {"host": figure_host, "convergence": figure_convergence}[name](setting)
        release(setting.device)
        report.add_figure(name, figure, f"training_{name}")
