"""What fused_embedding_bag.py does with --device cuda: one figure after another.

After each figure the JSON file is written anew, so that a run that is cut short leaves what it has measured.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from common.ceilings import copy_speed
from common.report import Figure, Report
from common.settings import apply_quick, check_choices, check_folder, check_plot, comma_list, positive
from fused_embedding_bag.ablations import figure_11, figure_12, figure_occupancy
from fused_embedding_bag.candidates import DEFAULT, NAMES, TUNED
from fused_embedding_bag.end_to_end import figure_end_to_end, figure_host
from fused_embedding_bag.equal import figure_equal, figure_features, figure_one_hot
from fused_embedding_bag.limits import Ceilings
from fused_embedding_bag.mapping import figure_13
from fused_embedding_bag.models import figure_models
from fused_embedding_bag.setting import FusedSetting
from fused_embedding_bag.sizes import figure_sizes
from fused_embedding_bag.tuning import figure_per_feature, figure_tuning
from recfuse.data import traces, workloads

FIGURES: dict[str, Callable[[FusedSetting, Ceilings], list[Figure]]] = {
    "models": lambda setting, ceilings: [figure_models(setting, ceilings)],
    "sizes": lambda setting, ceilings: [figure_sizes(setting)],
    "half": lambda setting, ceilings: [
        figure_models(setting, ceilings, dtype=torch.float16),
        figure_sizes(setting, torch.float16),
    ],
    "skewed": lambda setting, ceilings: [
        figure_models(setting, ceilings, setting.arguments.skewed, release=True)
    ],
    "equal": lambda setting, ceilings: [figure_equal(setting, ceilings)],
    "features": lambda setting, ceilings: [figure_features(setting, ceilings)],
    "one_hot": lambda setting, ceilings: [figure_one_hot(setting)],
    "end_to_end": lambda setting, ceilings: [figure_end_to_end(setting)],
    "host": lambda setting, ceilings: [figure_host(setting)],
    "tuning": lambda setting, ceilings: [figure_tuning(setting)],
    "11": lambda setting, ceilings: [figure_11(setting)],
    "12": lambda setting, ceilings: [figure_12(setting)],
    "13": lambda setting, ceilings: [figure_13(setting)],
    "occupancy": lambda setting, ceilings: [figure_occupancy(setting)],
    "per_feature": lambda setting, ceilings: [figure_per_feature(setting)],
}
ABLATIONS = ("11", "12", "13", "occupancy", "per_feature")
_WITHOUT_LIMITS = {"sizes", "one_hot", "end_to_end", "host", "tuning", *ABLATIONS}
_NEEDS_PLAN = {"11", "12", "13", "occupancy"}
SKEWED = ["E-zipf1.0", "D-zipf1.0", "E-zipf1.0-rows10", "D-zipf1.0-rows10"]
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK = {
    "models": ["A", "D"], "rounds": 3, "repeats": 2, "num_batches": 2, "test_batches": 12,
    "tuning_batches": 12, "tune_budget": 5.0, "equal_tables": 8, "hotness": ["medium", "random"],
    "skewed": ["D-zipf1.0"], "mutations": 2,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only --device cuda has."""
    group = parser.add_argument_group("only with --device cuda")

    def add(flag: str, kind: Callable[[str], object], default: object, text: str, **options: str) -> None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        group.add_argument(flag, type=kind, default=default, help=f"{text} (default: {shown})", **options)

    add(
        "--figures",
        comma_list,
        ["all"],
        f"what to measure, of {', '.join(FIGURES)}; ablations: {', '.join(ABLATIONS)}",
    )
    add("--candidates", comma_list, list(NAMES), "what to compare")
    add(
        "--batch-sizes",
        comma_list,
        ["512", "187"],
        "batches of one size; the first for end_to_end, host and features",
    )
    add("--test-batches", positive, 128, "of the published sizes")
    add("--tuning-batches", positive, 128, "of the published sizes, other ones")
    add("--repeats", positive, 5, "times that each batch of the published sizes is timed")
    add("--tune-budget", float, 120.0, "seconds of tuning a model", metavar="S")
    add("--compile", int, 0, "most features with which the loop is run under torch.compile", metavar="N")
    add("--skewed", comma_list, SKEWED, "variants of the figure skewed")
    add("--hotness", comma_list, list(traces.HOTNESS), "of the equal tables")
    add("--equal-tables", positive, 32, "equal tables in one launch")
    add("--equal-rows", positive, 500_000, "rows of each of them")
    add("--equal-dim", positive, 128, "their dimension")
    add("--equal-bags", positive, 2048, "their batch")
    add("--equal-pooling", positive, 150, "lookups of each of their bags")
    add("--one-hot-rows", positive, 4_000_000, "most rows of one of MLPerf's tables")
    add("--one-hot-dims", comma_list, ["16", "128"], "their dimensions")
    add("--one-hot-batches", comma_list, ["512", "2048", "8192", "65536"], "their batches")
    add("--tail-size", positive, 2560, "samples of the long request of figure 13")
    add("--mutations", positive, 10, "features of figure 12, chosen at random")
    add("--occupancies", positive, 8, "occupancies that tuning goes through, for per_feature")
    group.add_argument(
        "--plans",
        type=Path,
        metavar="FOLDER",
        help="read plans from there, and write those that are missing; it is made where there is none",
    )
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="write each figure as a PNG")
    group.add_argument("--quick", action="store_true", help="fewer models, batches and rounds: a trial run")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the flags of a run on a GPU, and apply --quick to what was left at its default."""
    groups = {"all": list(FIGURES), "ablations": list(ABLATIONS)}
    arguments.figures = list(
        dict.fromkeys(figure for name in arguments.figures for figure in groups.get(name, [name]))
    )
    check_choices(
        parser,
        {
            "--figures": (arguments.figures, FIGURES),
            "--candidates": (arguments.candidates, NAMES),
            "--hotness": (arguments.hotness, traces.HOTNESS),
        },
    )
    if DEFAULT not in arguments.candidates:
        parser.error(f"--candidates: needs {DEFAULT} among them")
    if TUNED not in arguments.candidates and _NEEDS_PLAN & set(arguments.figures):
        parser.error(f"--candidates: figures {', '.join(sorted(_NEEDS_PLAN))} need {TUNED} among them")
    try:
        for name in ("batch_sizes", "one_hot_dims", "one_hot_batches"):
            setattr(arguments, name, [positive(size) for size in getattr(arguments, name)])
        for name in arguments.skewed:
            workloads.model(name)
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(f"--batch-sizes, --one-hot-dims, --one-hot-batches, --skewed: {error}")
    for name in ("batch_sizes", "models", "skewed", "one_hot_dims", "one_hot_batches"):
        if not getattr(arguments, name):
            parser.error(f"--{name.replace('_', '-')}: needs one at least")
    if arguments.cache != "warm" or arguments.plot is not None:
        parser.error("--cache cold, --plot: not with --device cuda, which has warm caches and --plots FOLDER")
    if arguments.plans is not None:
        with contextlib.suppress(OSError):  # said below
            arguments.plans.mkdir(exist_ok=True)
        check_folder(parser, "--plans", arguments.plans / "file")
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    apply_quick(parser, arguments, QUICK)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for."""
    report, setting = Report(arguments), FusedSetting(parser, arguments)
    speed = 0.0
    if set(arguments.figures) - _WITHOUT_LIMITS:
        speed = copy_speed(setting.device)
        report.add("copy_bytes_per_s", [], speed)
    ceilings = Ceilings(speed)
    for name in arguments.figures:
        for number, figure in enumerate(FIGURES[name](setting, ceilings)):
            label = f"{name} sizes" if number else name
            report.add_figure(label, figure, f"fused_{label.replace(' ', '_')}")
