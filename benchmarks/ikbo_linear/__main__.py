"""A linear layer over user and candidate features: recfuse.ikbo_linear against what people use.

The linear compression of IKBO: out[b] = W_cand . X_cand[b] + W_user . X_user[cand_to_user[b]]. Contestants
take turns on the same inputs:

  torch    a matmul of the concatenated input, with and without the broadcast and the concatenation; two
           matmuls, with K as it is and padded, added or by baddbmm
  compiled these under torch.compile(mode="max-autotune-no-cudagraphs"), with --compile
  Triton   a kernel of this benchmark that adds the user part before it stores
  recfuse  by each of its paths, the stages of the paper, and by the one that it chooses

A large matmul takes turns with them: what share of its rate is reached. All outputs are compared with float64
first. The user part and the padding of weights are part of every call of recfuse and Triton. Modes: back to
back, where the power limit sets a GPU's clock, and with pauses between samples.

The defaults with --device cuda are the paper's shape and sweeps, in float16 and bfloat16; on the CPU smaller
ones, in float32.
"""

from __future__ import annotations

import argparse
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
    integers,
    make_parser,
    positive,
    start,
)
from ikbo_linear.figures import BEST, batches, figure_main, figure_sweep, host, ratios, shapes
from ikbo_linear.forms import COMPILABLE, COMPILED, DECOMPOSITIONS, IN_SWEEPS, NAMES, RECFUSE, TRITON
from ikbo_linear.measure import IkboSetting
from ikbo_linear.problem import MAPPINGS

FIGURES: dict[str, Callable[[IkboSetting], Figure]] = {
    "main": figure_main,
    "batches": lambda setting: figure_sweep(
        setting, "Batches", "candidates", batches(setting, setting.arguments.batches)
    ),
    "small": lambda setting: figure_sweep(
        setting, "Small batches", "candidates", batches(setting, setting.arguments.small), eager=True
    ),
    "ratios": lambda setting: figure_sweep(setting, "Ratios", "candidates a user", ratios(setting)),
    "shapes": lambda setting: figure_sweep(setting, "Shapes", "M x N", shapes(setting)),
    "host": host,
}
CPU_FIGURES = ("main", "ratios")
SHAPES = [
    *((m, n, 1178, 866) for m in (64, 128, 384) for n in (64, 128, 192)),
    *((433, 256, k, k) for k in (256, 512, 1024, 2048)),
    (64, 64, 256, 256),
]
# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtypes": ["float16", "bfloat16"], "modes": list(MODES), "matmul": 8192,
        "candidates": 1024, "n": 256, "small": [1, 8, 64, 256],
        "batches": [512, 1024, 1536, 2048, 2560, 3072],
        "ratios": [1, 2, 5, 10, 50, 70, 100, 1000], "shapes": SHAPES,
    },
    "cpu": {
        "dtypes": ["float32"], "modes": ["back to back"], "matmul": 1024,
        "candidates": 140, "n": 16, "batches": [70, 140, 280], "small": [1, 8],
        "ratios": [1, 2, 10, 70, 140], "shapes": [(64, 64, 1178, 866), (433, 16, 256, 256)],
    },
}  # fmt: skip
# What --quick changes: to see whether everything runs, not to be quoted.
QUICK: dict[str, Any] = {"rounds": 3, "sweep_rounds": 3}
QUICK_LISTS = {"dtypes": 1, "batches": 2, "small": 2, "ratios": 2, "shapes": 2}
"""How many of each list it takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add = parser.add_argument
    text = f"of {', '.join(FIGURES)}, or all (default: all; CPU: {','.join(CPU_FIGURES)})"
    add("--figures", type=comma_list, help=text)
    usual = [name for name in NAMES if not name.startswith(COMPILED)]
    add(
        "--contestants", type=comma_list, default=usual, metavar="NAMES",
        help=f"of {', '.join(usual)} (default: all)",
    )  # fmt: skip
    add(
        "--in-sweeps", type=comma_list, default=list(IN_SWEEPS), metavar="NAMES",
        help=f"contestants of all figures but main (default: {','.join(IN_SWEEPS)})",
    )  # fmt: skip
    add("--sweep-rounds", type=positive, default=5, help="samples of each of them (default: 5)")
    add("--dtypes", type=comma_list, help=f"of {', '.join(DTYPES)} (default: float16,bfloat16; CPU: float32)")
    add("--modes", type=comma_list, help=f"of {', '.join(MODES)} (default: all; CPU: the first)")
    text = f"figure main, first type: of {', '.join(COMPILABLE)}, or all, under torch.compile; 20 s each"
    add("--compile", type=comma_list, default=[], metavar="FORMS", help=text)
    add("--candidates", type=positive, help="default: 1024; CPU: 140")
    add("--ratio", type=positive, default=70, help="candidates a user (default: 70)")
    add("--m", type=positive, default=433, help="rows of the weights and of an output (default: 433)")
    add("--n", type=positive, help="columns of an input and of an output (default: 256; CPU: 16)")
    add("--k-user", type=positive, default=1178, help="rows of a user's input (default: 1178)")
    add("--k-cand", type=positive, default=866, help="rows of a candidate's input (default: 866)")
    add("--mapping", choices=MAPPINGS, default="sorted", help="order of the candidates (default: sorted)")
    add(
        "--batches",
        type=integers,
        help="of the figure batches (default: 512 to 3072; CPU: 70 to 280)",
    )
    add("--small", type=integers, help="of the figure small (default: 1 to 256; CPU: 1, 8)")
    add("--ratios", type=integers, help="of the figure ratios (default: 1 to 1000; CPU: 1 to 140)")
    add(
        "--shapes",
        type=_shapes,
        metavar="MxNxKUxKC,...",
        help="of the figure shapes",
    )
    add("--matmul", type=positive, help="rows and columns of the large matmul (default: 8192; CPU: 1024)")
    add("--plots", type=Path, metavar="FOLDER", help="write each figure, and a roofline, as a PNG")
    add("--quick", action="store_true", help="fewer shapes, types and rounds: a trial run")


def _shapes(text: str) -> list[tuple[int, ...]]:
    found = [tuple(positive(part) for part in shape.split("x")) for shape in comma_list(text)]
    if any(len(shape) != 4 for shape in found):
        raise argparse.ArgumentTypeError(f"found {text!r}, needs shapes of four integers joined by x")
    return found


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=9)
    add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    apply_defaults(arguments, DEFAULTS[arguments.device], QUICK_LISTS)
    apply_quick(parser, arguments, QUICK)
    if arguments.figures == ["all"]:
        arguments.figures = list(FIGURES)
    if arguments.compile == ["all"]:
        arguments.compile = list(COMPILABLE)
    arguments.figures = arguments.figures or list(FIGURES if arguments.device == "cuda" else CPU_FIGURES)
    check_choices(
        parser,
        {
            "--figures": (arguments.figures, FIGURES),
            "--contestants": (arguments.contestants, NAMES),
            "--in-sweeps": (arguments.in_sweeps, NAMES),
            "--dtypes": (arguments.dtypes, DTYPES),
            "--modes": (arguments.modes, MODES),
            "--compile": (arguments.compile or COMPILABLE, COMPILABLE),
            **{f"--{name}": any_of(getattr(arguments, name)) for name in QUICK_LISTS if name != "dtypes"},
        },
    )
    for flag in ("contestants", "in_sweeps"):
        given = getattr(arguments, flag)
        if RECFUSE not in given or not set(DECOMPOSITIONS) & set(given):
            needs = f"needs {RECFUSE} and one of {', '.join(DECOMPOSITIONS)}"
            parser.error(f"--{flag.replace('_', '-')}: {needs}")
        setattr(arguments, flag, [name for name in NAMES if name in given])
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    return parser, arguments


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for; after each of them the JSON file is written anew."""
    report, setting = Report(arguments), IkboSetting(parser, arguments)
    for name in arguments.figures:
        report.add_figure(name, FIGURES[name](setting), f"ikbo_{name}")
    points = list(setting.points.values())
    if points:
        plot = arguments.plots and arguments.plots / "ikbo_roofline.png"
        roofline = figure_roofline(
            points, arguments.modes, plot, str(setting.shape),
            lambda point, mode: {BEST: point.best_torch(mode), TRITON: TRITON},
            arguments.device,
        )  # fmt: skip
        report.add_figure("roofline", roofline, "")
        report.add("matmul", [matmul_rates(points)], None)


def main() -> None:
    """Run the benchmark."""
    run(*parse_arguments())


if __name__ == "__main__":
    main()
