"""The command line of the benchmark."""

from __future__ import annotations

import argparse

from common.points import DTYPES, MODES
from common.settings import comma_list, integers, positive
from ikbo_attention import bench
from ikbo_attention.forms import NAMES
from ikbo_attention.problem import MAPPINGS, group_bounds

RATIOS = ["1", "10", "10+1", "63", "64", "64+1", "1..127", "100", "1000", "10000"]


def groups(text: str) -> list[str]:
    """An argparse type: candidates per user, N, N+M or N..M."""
    sizes = comma_list(text)
    for group in sizes:
        try:
            group_bounds(group)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return sizes


flag = bench.flag
# fmt: off
flag("--contestants", comma_list, list(NAMES), "no others than these", allowed=NAMES, metavar="NAMES")
flag("--sweep-rounds", positive, 5, "samples in all figures but main", quick=3)
flag("--dtypes", comma_list, ["float16", "bfloat16"], "types", cpu=["float32"], allowed=DTYPES, quick=1)
flag("--modes", comma_list, list(MODES), "how calls follow", cpu=["back to back"], allowed=MODES)
flag("--candidates", positive, 2048, "about as many", cpu=64)
flag("--groups", groups, ["64", "64+1"], "candidates a user: N, N+1 (half of the users have one more) or "
     "N..M; the last is that of other figures", cpu=["16", "16+1"])
flag("--ratios", groups, RATIOS, "of the figure ratios", cpu=["1", "4", "16", "16+1", "64"], quick=3)
flag("--q", positive, 64, "queries of a candidate", cpu=16)
flag("--queries", integers, [1, 16, 32, 64], "of the figure queries", cpu=[1, 16], quick=2)
flag("--kv", integers, [512, 1024, 2048, 4096, 8192, 16384], "of the figures main and ragged",
     cpu=[64, 256, 1024], quick=2)
flag("--sweep-kv", integers, [1024, 4096], "of queries, the first also of ratios", cpu=[256], quick=1)
flag("--self-kv", integers, [512, 1024, 2048], "of the figure self", cpu=[64, 256], quick=1)
flag("--ragged-most", positive, 8192, "greatest kv of the figure ragged")
flag("--heads", positive, 2, "heads")
flag("--kv-heads", positive, None, "heads of keys and values; else as many")
flag("--dim", positive, 128, "of a head", cpu=64)
flag("--mapping", str, "sorted", "order of the candidates", allowed=MAPPINGS)
flag("--most-copied", float, 3.0, "GB of repeated keys and values above which forms that repeat them are "
     "left out", metavar="GB")
flag("--matmul", positive, 8192, "rows and columns of the large matmul", cpu=1024)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Heads of keys and values."""
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    if arguments.heads % arguments.kv_heads:
        parser.error(f"--kv-heads: found {arguments.kv_heads}, needs a divisor of --heads {arguments.heads}")
