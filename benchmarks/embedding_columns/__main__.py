"""Embedding columns: recfuse.nn.EmbeddingColumns against what people use.

Hundreds of columns, each from a raw value to a pooled row: models E and F of RECom (Pan et al., ASPLOS'23)
and 10 to 1,000 equal bucketize columns. Contestants take turns on the same batches; outputs are compared with
float64 first:

  torch       column by column: bucketize or remainder, then F.embedding, or F.embedding_bag where a sample
              has several values; "bags": always the latter; "alike ones by hand": all of a kind at once
  compiled    torch under torch.compile, by default and with max-autotune and combo kernels
  collection  rows by torch, then recfuse.nn.FusedEmbeddingBagCollection
  recfuse     EmbeddingColumns, of a packed batch, of a dict of tensors, and with XXH64 for remainders

On a GPU each is replayed as a CUDA graph, and called. The limit is the least bytes at the copy speed of the
same run.

The figures: micro, mixed (columns of many kinds), models (the columns alone, and with the layers that follow
them), ablations, ready (what it takes to construct and compile), strings (the hash of strings on the host);
on a GPU also transfers (from pageable host memory) and host_tables (large tables that stay on the host).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from common.report import Figure, Report
from common.settings import (
    add_num_batches,
    any_of,
    apply_defaults,
    apply_quick,
    check_choices,
    check_plot,
    comma_list,
    integers,
    make_parser,
    positive,
    start,
)
from embedding_columns.figures import PARTS, figure_ablations, figure_micro, figure_mixed, figure_models
from embedding_columns.forms import COMPILED, NAMES, NEED_COMPILER, PEERS, RECFUSE
from embedding_columns.measure import ColumnsSetting
from embedding_columns.ready import figure_ready
from embedding_columns.strings import figure_strings
from embedding_columns.transfers import figure_host_tables, figure_transfers

FIGURES: dict[str, Callable[[ColumnsSetting], Figure | Iterator[Figure]]] = {
    "micro": figure_micro,
    "mixed": figure_mixed,
    "models": figure_models,
    "ablations": figure_ablations,
    "ready": figure_ready,
    "strings": figure_strings,
    "transfers": figure_transfers,
    "host_tables": figure_host_tables,
}
ON_GPUS = ("transfers", "host_tables")
LINES = {"micro": "columns", "models": "batch"}
# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "figures": list(FIGURES), "contestants": list(NAMES), "batches": [32, 64, 128, 256, 512, 1024, 2048],
        "compiled_at": [32, 256, 2048], "large_rows": 2**23,
    },
    "cpu": {
        "figures": [name for name in FIGURES if name not in ON_GPUS],
        "contestants": [name for name in NAMES if name not in NEED_COMPILER or name == COMPILED],
        "batches": [32, 256, 2048], "compiled_at": [256], "large_rows": 2**18,
    },
}  # fmt: skip
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK: dict[str, Any] = {"mixed": 15, "rounds": 3, "num_batches": 2, "part": 25, "strings": 2000}
QUICK_LISTS = {"batches": 2}


def names(text: str) -> list[str]:
    """An argparse type: names, which have commas, joined by semicolons."""
    return [part.strip() for part in text.split(";") if part.strip()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add_num_batches(parser)
    add(
        "--figures",
        type=comma_list,
        help=f"of {', '.join(FIGURES)} (default: all; CPU: none of the last two)",
    )
    add("--contestants", type=names, metavar="NAMES", help=f"joined by ;, of {'; '.join(NAMES)}")
    add("--columns", type=integers, default=[10, 50, 100, 500, 1000], help="of micro (default: 10 to 1000)")
    add("--mixed", type=positive, default=300, help="columns of the figure mixed (default: 300)")
    add("--models", type=comma_list, default=["E", "F"], help="default: E,F")
    add("--parts", type=comma_list, default=list(PARTS), help="of models (default: columns,whole model)")
    add("--batch", type=positive, default=256, help="of all figures but models (default: 256)")
    add("--batches", type=integers, help="of models (default: 32 to 2048)")
    add("--compiled-at", type=integers, help="batches that compiled ones are measured at (default: 32, "
        "256, 2048; CPU: 256)")  # fmt: skip
    add("--large-rows", type=positive, help="of the large tables (default: 2^23; CPU: 2^18)")
    add("--part", type=positive, default=1, help="every n-th column of the models (default: 1, all)")
    add("--strings", type=positive, default=1_000_000, help="of the figure strings (default: 1,000,000)")
    add("--plots", type=Path, metavar="FOLDER", help="write micro and models as PNGs")
    add("--quick", action="store_true", help="fewer columns, batches and rounds: a trial run")


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=9)
    add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    if arguments.quick and arguments.columns == parser.get_default("columns"):
        arguments.columns = [10, 40]
    apply_defaults(arguments, DEFAULTS[arguments.device], QUICK_LISTS)
    apply_quick(parser, arguments, QUICK)
    figures = [name for name in FIGURES if arguments.device == "cuda" or name not in ON_GPUS]
    check_choices(
        parser,
        {
            "--figures": (arguments.figures, figures),
            "--contestants": (arguments.contestants, NAMES),
            "--models": (arguments.models, ("E", "F")),
            "--parts": (arguments.parts, PARTS),
            **{f"--{name}": any_of(getattr(arguments, name)) for name in ("columns", "batches")},
        },
    )
    if RECFUSE not in arguments.contestants or not set(PEERS) & set(arguments.contestants):
        parser.error(f"--contestants: needs {RECFUSE} and one of {'; '.join(PEERS)}")
    arguments.contestants = [name for name in NAMES if name in arguments.contestants]
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    return parser, arguments


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for; after each of them the JSON file is written anew."""
    # A recompilation a size and subject, none of which is an accident.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    report, setting = Report(arguments), ColumnsSetting(parser, arguments)
    for name in arguments.figures:
        made = FIGURES[name](setting)
        for figure in [made] if isinstance(made, Figure) else made:
            figure.lines = LINES.get(name, "")
            report.add_figure(name, figure, f"columns_{name}")
    report.add("copy_speed", [], {"bytes_per_s": setting.copy_speed})


def main() -> None:
    """Run the benchmark."""
    run(*parse_arguments())


if __name__ == "__main__":
    main()
