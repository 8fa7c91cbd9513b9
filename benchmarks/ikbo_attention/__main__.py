"""Attention of candidates over their user's history: recfuse.ikbo_attention against what people use.

out[b] = softmax(scale * q[b] . k[user(b)]^T) . v[user(b)], per head. Contestants take turns on the same
inputs:

  torch    SDPA by each backend over keys and values repeated for each candidate, with and without the
           repetition; a user's candidates packed as one long query, in a batch and with different lengths
  FA3      FlashAttention-3 on the packed form, in a batch and with different lengths (package fa3-fwd)
  Triton   a kernel of this benchmark that packs and broadcasts inside
  recfuse  by each of its paths, and by the one that it chooses

A large matmul takes turns with them: what share of its rate is reached. Outputs are compared with float64,
and as a whole with each other; what does not run or is wrong is left out, and the run goes on. Packed forms
get offsets and packed keys for nothing, recfuse groups by the map in every call.

The defaults with --device cuda are the paper's shape and sweeps, in float16 and bfloat16; on the CPU smaller
ones, in float32.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.points import DTYPES, MODES, matmul_rates
from common.report import Figure, Report
from common.roofline import figure_roofline
from common.settings import (
    any_of,
    apply_defaults,
    apply_quick,
    check_choices,
    check_plot,
    comma_list,
    fail,
    integers,
    make_parser,
    positive,
    start,
)
from ikbo_attention.figures import SWEEPS, figure_sweeps, host
from ikbo_attention.forms import FA3_VARLEN, NAMES, TRITON
from ikbo_attention.measure import AttentionSetting
from ikbo_attention.problem import MAPPINGS, group_bounds

FIGURES: dict[str, Callable[[AttentionSetting], Figure]] = {
    **{name: functools.partial(figure_sweeps, figure=name) for name in SWEEPS},
    "host": host,
}
# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtypes": ["float16", "bfloat16"], "modes": list(MODES), "matmul": 8192,
        "candidates": 2048, "groups": ["64", "64+1"], "q": 64, "dim": 128,
        "kv": [512, 1024, 2048, 4096, 8192, 16384], "sweep_kv": [1024, 4096], "self_kv": [512, 1024, 2048],
        "ratios": ["1", "10", "10+1", "63", "64", "64+1", "1..127", "100", "1000", "10000"],
        "queries": [1, 16, 32, 64],
    },
    "cpu": {
        "dtypes": ["float32"], "modes": ["back to back"], "matmul": 1024,
        "candidates": 64, "groups": ["16", "16+1"], "q": 16, "dim": 64,
        "kv": [64, 256, 1024], "sweep_kv": [256], "self_kv": [64, 256],
        "ratios": ["1", "4", "16", "16+1", "64"], "queries": [1, 16],
    },
}  # fmt: skip
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK: dict[str, Any] = {"rounds": 3, "sweep_rounds": 3}
QUICK_LISTS = {"dtypes": 1, "kv": 2, "sweep_kv": 1, "self_kv": 1, "ratios": 3, "queries": 2}
"""How many of each list it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    add("--figures", type=comma_list, default=["all"], help=f"of {', '.join(FIGURES)}, or all (default)")
    add(
        "--contestants", type=comma_list, default=list(NAMES), metavar="NAMES",
        help=f"no others than these of {', '.join(NAMES)}",
    )  # fmt: skip
    add("--sweep-rounds", type=positive, default=5, help="samples in all figures but main (default: 5)")
    add("--dtypes", type=comma_list, help=f"of {', '.join(DTYPES)} (default: float16,bfloat16; CPU: float32)")
    add("--modes", type=comma_list, help=f"of {', '.join(MODES)} (default: all; CPU: the first)")
    add("--candidates", type=positive, help="about as many (default: 2048; CPU: 64)")
    text = (
        "candidates a user: N, N+1 (half of the users have one more) or N..M (default: 64,64+1; CPU: 16,16+1)"
    )
    add("--groups", type=_groups, help=f"{text}; the last is that of other figures")
    add("--ratios", type=_groups, help="the same for the figure ratios")
    add("--q", type=positive, help="queries of a candidate (default: 64; CPU: 16)")
    add("--queries", type=integers, help="of the figure queries (default: 1,16,32,64; CPU: 1,16)")
    add("--kv", type=integers, help="of the figures main and ragged (default: 512 to 16384; CPU: 64 to 1024)")
    text = "of the figure queries, the first also of ratios (default: 1024,4096; CPU: 256)"
    add("--sweep-kv", type=integers, help=text)
    add("--self-kv", type=integers, help="of the figure self (default: 512,1024,2048; CPU: 64,256)")
    add("--ragged-most", type=positive, default=8192, help="greatest kv of the figure ragged (default: 8192)")
    add("--heads", type=positive, default=2, help="default: 2")
    add("--kv-heads", type=positive, help="default: as many")
    add("--dim", type=positive, help="of a head (default: 128; CPU: 64)")
    add("--mapping", choices=MAPPINGS, default="sorted", help="order of the candidates (default: sorted)")
    text = "GB of repeated keys and values above which forms that repeat them are left out (default: 3)"
    add("--most-copied", type=float, default=3.0, metavar="GB", help=text)
    add("--matmul", type=positive, help="rows and columns of the large matmul (default: 8192; CPU: 1024)")
    add("--plots", type=Path, metavar="FOLDER", help="write each figure, and a roofline, as a PNG")
    add("--quick", action="store_true", help="fewer shapes, types and rounds: a trial run")


def _groups(text: str) -> list[str]:
    groups = comma_list(text)
    for group in groups:
        try:
            group_bounds(group)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return groups


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=5)
    add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    apply_defaults(arguments, DEFAULTS[arguments.device], QUICK_LISTS)
    apply_quick(parser, arguments, QUICK)
    if arguments.figures == ["all"]:
        arguments.figures = list(FIGURES)
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    if arguments.heads % arguments.kv_heads:
        parser.error(f"--kv-heads: found {arguments.kv_heads}, needs a divisor of --heads {arguments.heads}")
    lists = (*QUICK_LISTS, "groups")
    check_choices(
        parser,
        {
            "--figures": (arguments.figures, FIGURES),
            "--contestants": (arguments.contestants, NAMES),
            "--dtypes": (arguments.dtypes, DTYPES),
            "--modes": (arguments.modes, MODES),
            **{
                f"--{name.replace('_', '-')}": any_of(getattr(arguments, name))
                for name in lists
                if name != "dtypes"
            },
        },
    )
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    return parser, arguments


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for; after each of them the JSON file is written anew.

    Ends with status 1 where an output was wrong or recfuse did not run.
    """
    report, setting = Report(arguments), AttentionSetting(parser, arguments)
    for name in arguments.figures:
        report.add_figure(name, FIGURES[name](setting), f"attention_{name}")
    points = list(setting.points.values())
    if points:
        plot = arguments.plots and arguments.plots / "attention_roofline.png"
        roofline = figure_roofline(
            points, arguments.modes, plot, str(setting.shape),
            lambda point, mode: {
                "best peer": point.best_peer(mode), FA3_VARLEN: FA3_VARLEN, TRITON: TRITON,
            },
            arguments.device,
        )  # fmt: skip
        report.add_figure("roofline", roofline, "")
        report.add("matmul", [matmul_rates(points)], None)
    if setting.troubles:
        fail(parser, "\n  ".join(["what did not run or is wrong:", *setting.troubles]))


def main() -> None:
    """Run the benchmark."""
    run(*parse_arguments())


if __name__ == "__main__":
    main()
