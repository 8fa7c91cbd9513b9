"""The command line of the benchmark, and its setting."""

from __future__ import annotations

import argparse

from common.points import DTYPES, MODES
from common.settings import comma_list, integers, positive
from ikbo_linear import bench
from ikbo_linear.forms import COMPILABLE, COMPILED, DECOMPOSITIONS, IN_SWEEPS, NAMES, RECFUSE
from ikbo_linear.problem import MAPPINGS

USUAL = [name for name in NAMES if not name.startswith(COMPILED)]
SHAPES = [
    *((m, n, 1178, 866) for m in (64, 128, 384) for n in (64, 128, 192)),
    *((433, 256, k, k) for k in (256, 512, 1024, 2048)),
    (64, 64, 256, 256),
]
CPU_SHAPES = [(64, 64, 1178, 866), (433, 16, 256, 256)]


def shapes(text: str) -> list[tuple[int, ...]]:
    """An argparse type: shapes M x N x K of users x K of candidates."""
    sizes = [tuple(positive(part) for part in shape.split("x")) for shape in comma_list(text)]
    if any(len(shape) != 4 for shape in sizes):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected shapes of four integers joined by x")
    return sizes


flag = bench.flag
# fmt: off
flag("--contestants", comma_list, USUAL, "of the figure main", allowed=NAMES, metavar="NAMES")
flag("--in-sweeps", comma_list, list(IN_SWEEPS), "of other figures", allowed=NAMES, metavar="NAMES")
flag("--sweep-rounds", positive, 5, "samples of each contestant in other figures", quick=3)
flag("--dtypes", comma_list, ["float16", "bfloat16"], "types", cpu=["float32"], allowed=DTYPES, quick=1)
flag("--modes", comma_list, list(MODES), "how calls follow", cpu=["back to back"], allowed=MODES)
flag("--compile", comma_list, None, f"figure main, first type: of {', '.join(COMPILABLE)}, or all, under "
     "torch.compile; 20 s each", allowed=[*COMPILABLE, "all"], metavar="FORMS")
flag("--candidates", positive, 1024, "candidates", cpu=140)
flag("--ratio", positive, 70, "candidates a user")
flag("--m", positive, 433, "rows of the weights and of an output")
flag("--n", positive, 256, "columns of an input and of an output", cpu=16)
flag("--k-user", positive, 1178, "rows of a user's input")
flag("--k-cand", positive, 866, "rows of a candidate's input")
flag("--mapping", str, "sorted", "order of the candidates", allowed=MAPPINGS)
flag("--batches", integers, [512, 1024, 1536, 2048, 2560, 3072], "candidates of the figure batches",
     cpu=[70, 140, 280], quick=2)
flag("--small", integers, [1, 8, 64, 256], "candidates of the figure small", cpu=[1, 8], quick=2)
flag("--ratios", integers, [1, 2, 5, 10, 50, 70, 100, 1000], "candidates a user of the figure ratios",
     cpu=[1, 2, 10, 70, 140], quick=2)
flag("--shapes", shapes, SHAPES, "of the figure shapes", cpu=CPU_SHAPES, quick=2, metavar="MxNxKUxKC,...")
flag("--matmul", positive, 8192, "rows and columns of the large matmul", cpu=1024)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Adds the contestants that every figure needs, in the order of tables."""
    arguments.compile = arguments.compile or []
    if "all" in arguments.compile:
        arguments.compile = list(COMPILABLE)
    for name in ("contestants", "in_sweeps"):
        value = getattr(arguments, name)
        if RECFUSE not in value or not set(DECOMPOSITIONS) & set(value):
            needs = f"{RECFUSE} is missing, or a peer of {', '.join(DECOMPOSITIONS)}"
            parser.error(f"--{name.replace('_', '-')}: {needs}")
        setattr(arguments, name, [each for each in NAMES if each in value])
