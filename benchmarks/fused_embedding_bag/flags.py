"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from common.settings import check_folder, comma_list, integers, positive
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import DEFAULT, NAMES, TUNED
from recfuse.data import traces, workloads

SKEWED = ["E-zipf1.0", "D-zipf1.0", "E-zipf1.0-rows10", "D-zipf1.0-rows10"]
NEED_PLAN = {"11", "12", "13", "occupancy"}


def models(text: str) -> list[str]:
    """An argparse type: models of RecFlex and their variants."""
    names = comma_list(text)
    for name in names:
        try:
            workloads.model(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


flag = bench.flag
# fmt: off
flag("--models", models, list("ABCDE"), "models", quick=["A", "D"], cpu=list("ABCDE"))
flag("--num-batches", positive, 4, "batches to rotate through", quick=2)
flag("--cache", str, "warm", "state of the caches", allowed=("warm", "cold"), on="cpu")
flag("--batch-size", positive, 187, "the median request", on="cpu")
gpu = {"on": "cuda"}
flag("--candidates", comma_list, list(NAMES), "contestants", allowed=NAMES, **gpu)
flag("--batch-sizes", integers, [512, 187], "of one size; the first for end_to_end, host, features", **gpu)
flag("--test-batches", positive, 128, "of the published sizes", quick=12, **gpu)
flag("--tuning-batches", positive, 128, "of the published sizes, other batches", quick=12, **gpu)
flag("--repeats", positive, 5, "times that each batch of the published sizes is timed", quick=2, **gpu)
flag("--tune-budget", float, 120.0, "seconds of tuning a model", quick=5.0, metavar="S", **gpu)
flag("--compile", int, 0, "most features with which the loop is run under torch.compile", metavar="N", **gpu)
flag("--skewed", models, SKEWED, "variants of the figure skewed", quick=["D-zipf1.0"], **gpu)
flag("--hotness", comma_list, list(traces.HOTNESS), "of the equal tables", allowed=traces.HOTNESS,
     quick=["medium", "random"], **gpu)
flag("--equal-tables", positive, 32, "equal tables in one launch", quick=8, **gpu)
flag("--equal-rows", positive, 500_000, "rows of each of them", **gpu)
flag("--equal-dim", positive, 128, "their dimension", **gpu)
flag("--equal-bags", positive, 2048, "their batch", **gpu)
flag("--equal-pooling", positive, 150, "lookups of each of their bags", **gpu)
flag("--one-hot-rows", positive, 4_000_000, "most rows of one of MLPerf's tables", **gpu)
flag("--one-hot-dims", integers, [16, 128], "their dimensions", **gpu)
flag("--one-hot-batches", integers, [512, 2048, 8192, 65536], "their batches", **gpu)
flag("--tail-size", positive, 2560, "samples of the long request of figure 13", **gpu)
flag("--mutations", positive, 10, "features of figure 12, chosen at random", quick=2, **gpu)
flag("--occupancies", positive, 8, "occupancies that tuning goes through, for per_feature", **gpu)
flag("--plans", Path, None, "plans are read from there, or written", metavar="FOLDER", **gpu)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Checks and completes the arguments of figures on a GPU."""
    if arguments.device == "cpu":
        return
    if DEFAULT not in arguments.candidates:
        parser.error(f"--candidates: {DEFAULT} is missing")
    if TUNED not in arguments.candidates and NEED_PLAN & set(arguments.figures):
        parser.error(f"--candidates: {TUNED} is missing, which {', '.join(sorted(NEED_PLAN))} need")
    if arguments.cache != "warm":
        parser.error("--cache: cold is for --device cpu; expected warm")
    if arguments.plans is not None:
        with contextlib.suppress(OSError):  # reported below
            arguments.plans.mkdir(exist_ok=True)
        check_folder(parser, "--plans", arguments.plans / "file")
