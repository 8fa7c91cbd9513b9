"""What embedding_bag.py does with --device cuda: ceilings, the main table and the figures, in this order.

After each part the JSON file is written anew, so that a run that is cut short leaves what it has measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from common.ceilings import copy_speed
from common.report import Figure, Report, plot_ratios
from common.settings import apply_quick, check_choices, check_plot, comma_list, positive
from embedding_bag.candidates import NAMES
from embedding_bag.main_table import measure, over_torch, tabulate
from embedding_bag.random_rows import gather_ceilings
from embedding_bag.schemes import figure_12, figure_15, figure_16, figure_17
from embedding_bag.setting import BagSetting, Trace
from embedding_bag.short_bags import measure_short, summary
from embedding_bag.sweeps import Figures, figure_6, figure_9, figure_11

FIGURES: dict[str, Callable[[Figures], Figure]] = {
    "6": figure_6,
    "9": figure_9,
    "11": figure_11,
    "12": figure_12,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
}
PARTS = ("ceilings", "main", *FIGURES, "short")
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK = {
    "tables": 4, "mix_tables": 8, "rounds": 5, "num_batches": 1, "tune_budget": 3.0,
    "hotness": ["medium", "random"],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only --device cuda has."""
    group = parser.add_argument_group("only with --device cuda")
    group.add_argument(
        "--figures", type=comma_list, default=["main"], metavar="LIST",
        help=f"what to measure, of {', '.join(PARTS)}, or all: what the GPU can do at best, the main table, "
        "figures of the paper (12 with table IX), short bags of one table (default: main)",
    )  # fmt: skip
    group.add_argument("--tables", type=positive, default=16, help="looked up in turn (default: 16)")
    group.add_argument("--mix-tables", type=positive, default=40, help="of figure 17 (default: 40, of 250)")
    names = ", ".join(NAMES)
    group.add_argument(
        "--candidates", type=comma_list, default=list(NAMES), help=f"of the main table (default: {names})"
    )
    group.add_argument(
        "--tune-budget",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds of tuning a hotness (default: 15)",
    )
    group.add_argument(
        "--pin-mb", type=float, default=30.0, help="MB of hot rows to pin (default: 30, the paper's)"
    )
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="write each figure as a PNG")
    group.add_argument("--quick", action="store_true", help="fewer tables, rounds and levels: a trial run")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the flags of a run on a GPU, and apply --quick to what was left at its default."""
    if "all" in arguments.figures:
        arguments.figures = list(PARTS)
    check_choices(
        parser, {"--figures": (arguments.figures, PARTS), "--candidates": (arguments.candidates, NAMES)}
    )
    if NAMES[0] not in arguments.candidates or "recfuse" not in arguments.candidates:
        parser.error(f"--candidates: needs {NAMES[0]} and recfuse among them")
    if len(arguments.dims) > 1 or arguments.dims[0] < 8 or arguments.dims[0].bit_count() > 1:
        # The gather reads rows of fp16, too, in whole loads of 16 bytes.
        found = ",".join(map(str, arguments.dims))
        parser.error(f"--dims: found {found}, --device cuda takes one power of two from 8 on")
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    apply_quick(parser, arguments, QUICK)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, trace: Trace | None) -> None:
    """Measure the parts that were asked for. `trace`: rows to use as the medium ones."""
    report, device = Report(arguments), torch.device(arguments.device)
    speed = copy_speed(device)
    report.add("copy_bytes_per_s", [], speed)
    if "ceilings" in arguments.figures:
        lookups = arguments.batch_size * arguments.num_indices_per_lookup
        table, records = gather_ceilings(device, lookups, arguments.seed, arguments.quick)
        table.notes.append(f"Copy speed: {speed / 1e12:.2f} TB/s, read and written together.")
        report.add("ceilings", [table], records)
    setting = BagSetting(parser, arguments, arguments.tables, trace)
    if "main" in arguments.figures:
        rows, notes = [], []
        for row, more in measure(setting, speed):
            rows.append(row)
            notes += more
            report.add(f"main {row.label}", [], row.record)
        report.add("main", tabulate(rows, notes, setting, speed), [row.label for row in rows])
        if arguments.plots is not None:
            title = "One table: times faster than torch"
            plot_ratios(arguments.plots / "main.png", over_torch(rows), title=title, device=arguments.device)
    figures = Figures(setting, lambda: BagSetting(parser, arguments, arguments.mix_tables, trace))
    for name in arguments.figures:
        if name in FIGURES:
            report.add_figure(f"figure {name}", FIGURES[name](figures), f"figure_{name}")
    if "short" in arguments.figures:
        short = []
        for cells, table in measure_short(parser, arguments):
            short += cells
            report.add(f"short {cells[0].point.table}", [table], [cell.record for cell in cells])
        report.add("short", [summary(short)], [])
