"""The command line of the benchmark, with the names of facebookresearch/dlrm."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from common.settings import dashed, positive
from dlrm import bench, gpu
from recfuse import info
from recfuse.data import traces

OTHER = {"cpu": "torch finds no GPU.", "cuda": "--device cpu runs on the CPU."}
"""The note printed if the device was chosen by default."""
LEVELS = ",".join(gpu.LEVELS)


def trains(arguments: argparse.Namespace) -> bool:
    """Returns true if training steps are measured."""
    return arguments.train or "train" in arguments.figures


def by_use(usual: Any, training: Any) -> Callable[[argparse.Namespace], Any]:
    """A default that is `training` for training steps, because torch keeps their gradients lookup by
    lookup."""
    return lambda arguments: training if trains(arguments) else usual


# On the CPU as many tables as Criteo's data set has, of a size that fits a laptop (1.3 GB, twice). With 80
# lookups per bag, embeddings take two thirds of a call. On a GPU, training has MLPerf's layers.
flag = bench.flag
# fmt: off
flag("--train", bool, False, "the figure train")
flag("--arch-embedding-size", dashed, by_use([500_000], [1_000_000] * 26), "rows of each table; see --tables",
     cpu=[200_000] * 26, metavar="N-N-...")
flag("--arch-sparse-feature-size", positive, 128, "embedding dimension", cpu=64)
flag("--arch-mlp-bot", dashed, by_use([1024, 512, 128, 128], [13, 512, 256, 128]), "bottom MLP, from the "
     "dense features to the embedding dimension", cpu=[13, 512, 256, 64], metavar="N-N-...")
flag("--arch-mlp-top", dashed, by_use([128, 64, 1], [1024, 1024, 512, 256, 1]), "top MLP after its input",
     cpu=[256, 64, 1], metavar="N-N-...")
flag("--mini-batch-size", positive, 2048, "samples", cpu=1024)
flag("--num-indices-per-lookup", positive, by_use(150, 20), "pooling", cpu=by_use(80, 20))
flag("--num-batches", positive, 21, "mini-batches to time", cpu=by_use(50, 21), quick=3)
flag("--trace", str, by_use(LEVELS, "medium"), f"rows: a trace file, or one of {', '.join(traces.HOTNESS)}; "
     f"on a GPU a list of hotness levels and mixes, of {LEVELS}", cpu="medium", metavar="FILE|HOTNESS")
flag("--tables", positive, None, f"on a GPU: how many tables; else {gpu.MOST_TABLES}, or as many as its "
     "memory holds")
flag("--no-compile", bool, False, "on a GPU: leave torch.compile out")
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Prints the device, and completes the arguments that depend on the GPU's memory."""
    if arguments.train:
        arguments.figures = ["train"]
    on_gpu = arguments.device == "cuda"
    name = (
        torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads of {info.cpu_model()}"
    )
    print(f"Running on {name}" + (f"; {OTHER[arguments.device]}" if arguments.device_found else ""))
    if on_gpu:
        if len(arguments.arch_embedding_size) == 1:
            if arguments.tables is None:
                arguments.tables = gpu.default_tables(arguments, torch.cuda.mem_get_info()[0])
                if arguments.tables < gpu.MOST_TABLES:
                    print(f"{arguments.tables} tables of {gpu.MOST_TABLES}: what this GPU's memory holds.")
            arguments.arch_embedding_size *= arguments.tables
        gpu.check_levels(parser, arguments)
    if len(arguments.arch_mlp_bot) < 2 or arguments.arch_mlp_bot[-1] != arguments.arch_sparse_feature_size:
        parser.error(
            f"--arch-mlp-bot: found {'-'.join(map(str, arguments.arch_mlp_bot))}; expected at least two "
            f"widths, the last equal to --arch-sparse-feature-size {arguments.arch_sparse_feature_size}"
        )
