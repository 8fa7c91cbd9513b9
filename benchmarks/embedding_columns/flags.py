"""The command line of the benchmark."""

from __future__ import annotations

import argparse

import torch

from common.settings import comma_list, integers, positive
from embedding_columns import bench
from embedding_columns.forms import COMPILED, NAMES, NEED_COMPILER, PEERS, RECFUSE

PARTS = ("columns", "whole model")
"""Of models: only the columns, and with the layers that follow."""
ON_THE_CPU = [name for name in NAMES if name not in NEED_COMPILER or name == COMPILED]
BATCHES = [32, 64, 128, 256, 512, 1024, 2048]


def names(text: str) -> list[str]:
    """An argparse type: names joined by semicolons, because names contain commas."""
    return [part.strip() for part in text.split(";") if part.strip()]


flag = bench.flag
# fmt: off
flag("--num-batches", positive, 4, "batches to rotate through", quick=2)
flag("--contestants", names, list(NAMES), "joined by ;", cpu=ON_THE_CPU, allowed=NAMES, metavar="NAMES")
flag("--columns", integers, [10, 50, 100, 500, 1000], "of micro", quick=1)
flag("--mixed", positive, 300, "columns of the figure mixed", quick=15)
flag("--models", comma_list, ["E", "F"], "models", allowed=("E", "F"))
flag("--parts", comma_list, list(PARTS), "of models", allowed=PARTS)
flag("--batch", positive, 256, "of all figures but models")
flag("--batches", integers, BATCHES, "of models", cpu=[32, 256, 2048], quick=2)
flag("--compiled-at", integers, [32, 256, 2048], "batches that compiled forms are measured at", cpu=[256])
flag("--large-rows", positive, 2**23, "of the large tables", cpu=2**18)
flag("--part", positive, 1, "every n-th column of the models", quick=25)
flag("--strings", positive, 1_000_000, "of the figure strings", quick=2000)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Adds the contestants that every figure needs, in the order of tables."""
    if RECFUSE not in arguments.contestants or not set(PEERS) & set(arguments.contestants):
        parser.error(f"--contestants: {RECFUSE} is missing, or a peer of {', '.join(PEERS)}")
    arguments.contestants = [name for name in NAMES if name in arguments.contestants]
    # Each size and subject recompiles once, as intended.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
