"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.settings import comma_list, integers, positive
from embedding_bag import bench
from embedding_bag.candidates import NAMES
from recfuse.data import traces

flag = bench.flag
# fmt: off
flag("--num-batches", positive, 4, "batches to rotate through", quick=1)
flag("--cache", str, "warm", "state of the caches", allowed=("warm", "cold"))
flag("--hotness", comma_list, list(traces.HOTNESS), "levels", allowed=traces.HOTNESS,
     quick=["medium", "random"])
flag("--trace", Path, None, "its first table is used in place of the generated medium trace", metavar="FILE")
flag("--dims", integers, [128], "columns", cpu=[32, 64, 128])
flag("--rows", positive, 500_000, "rows")
flag("--batch-size", positive, 2048, "bags")
flag("--num-indices-per-lookup", positive, 150, "pooling")
gpu = {"on": "cuda"}
flag("--tables", positive, 16, "looked up in turn", quick=4, **gpu)
flag("--mix-tables", positive, 40, "of figure 17, where the paper has 250", quick=8, **gpu)
flag("--candidates", comma_list, list(NAMES), "of the main table", allowed=NAMES, **gpu)
flag("--tune-budget", float, 15.0, "seconds of tuning a hotness", quick=3.0, metavar="S", **gpu)
flag("--pin-mb", float, 30.0, "MB of hot rows to pin, as in the paper", **gpu)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Checks and completes the arguments of figures on a GPU."""
    if arguments.device == "cpu":
        return
    if NAMES[0] not in arguments.candidates or "recfuse" not in arguments.candidates:
        parser.error(f"--candidates: {NAMES[0]} or recfuse is missing")
    if len(arguments.dims) > 1 or arguments.dims[0] < 8 or arguments.dims[0].bit_count() > 1:
        # The gather also reads rows of fp16, in whole loads of 16 bytes.
        dims = ",".join(map(str, arguments.dims))
        parser.error(f"--dims: found {dims}; expected a single power of two from 8 on with --device cuda")
