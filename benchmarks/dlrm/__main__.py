"""A DLRM with nn.EmbeddingBag and the same model after recfuse.swap: times by stage, ratios, a verdict.

Flags are named as in facebookresearch/dlrm. Tables are accessed along a trace: a file of rows, or a
generated one of a hotness level (one_item, high, medium, low, random). Both models run in turns on the
same mini-batches, in inference mode, and their outputs are compared. It runs on the GPU where there is one.

On a GPU: the model of Jain et al. (MICRO'24) with 250 tables at every level of hotness and in their
mixes, eager and under torch.compile.

--train: training steps instead, with SGD, before and after recfuse.swap, and with the optimizer of the tables
fused into the backward pass.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common.settings import dashed, make_parser, positive, start
from dlrm import cpu, gpu, train
from recfuse import info
from recfuse.data import traces

# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        # As many tables as Criteo's data set has, of a size that fits a laptop (1.3 GB, twice). With 80
        # lookups a sample in each, embeddings take two thirds of a call.
        "arch_embedding_size": [200_000] * 26,
        "arch_sparse_feature_size": 64,
        "arch_mlp_bot": [13, 512, 256, 64],
        "arch_mlp_top": [256, 64, 1],
        "mini_batch_size": 1024,
        "num_indices_per_lookup": 80,
        "num_batches": 50,
        "trace": "medium",
    },
    "cuda": {
        "arch_embedding_size": [500_000],  # each of --tables
        "arch_sparse_feature_size": 128,
        "arch_mlp_bot": [1024, 512, 128, 128],
        "arch_mlp_top": [128, 64, 1],
        "mini_batch_size": 2048,
        "num_indices_per_lookup": 150,
        "num_batches": 21,
        "trace": ",".join(gpu.LEVELS),
    },
}


# The same with --train: fewer lookups, whose gradients torch keeps one by one; on a GPU MLPerf's layers.
TRAIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"num_indices_per_lookup": 20, "num_batches": 21},
    "cuda": {
        "arch_embedding_size": [1_000_000] * 26,
        "arch_mlp_bot": [13, 512, 256, 128],
        "arch_mlp_top": [1024, 1024, 512, 256, 1],
        "num_indices_per_lookup": 20,
        "trace": "medium",
    },
}
# What to say where the device was chosen for the user.
OTHER = {"cpu": "torch finds no GPU.", "cuda": "--device cpu runs on the CPU."}


def device_name(device: str) -> str:
    """The processor, in words."""
    if device == "cpu":
        return f"{torch.get_num_threads()} threads of {info.cpu_model()}"
    return torch.cuda.get_device_name()


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__)
    widths = {"type": dashed, "metavar": "N-N-..."}
    parser.add_argument(
        "--arch-embedding-size", help="rows of each table (default: 26 x 200000; see --tables)", **widths
    )
    parser.add_argument(
        "--arch-sparse-feature-size", type=positive, help="embedding dimension (default: 64; on a GPU 128)"
    )
    parser.add_argument(
        "--arch-mlp-bot", **widths,
        help="bottom MLP, from the dense features to the embedding dimension (default: 13-512-256-64; "
        "on a GPU 1024-512-128-128)",
    )  # fmt: skip
    parser.add_argument(
        "--arch-mlp-top", help="top MLP after its input (default: 256-64-1; on a GPU 128-64-1)", **widths
    )
    parser.add_argument("--mini-batch-size", type=positive, help="default: 1024; on a GPU 2048")
    parser.add_argument("--num-indices-per-lookup", type=positive, help="pooling (default: 80; on a GPU 150)")
    parser.add_argument(
        "--num-batches", type=positive, help="mini-batches to time (default: 50; on a GPU 21)"
    )
    parser.add_argument(
        "--trace", metavar="FILE|HOTNESS",
        help=f"rows: a trace file, or one of {', '.join(traces.HOTNESS)} (default: medium). On a GPU "
        f"a list of hotness levels and mixes (default: {','.join(gpu.LEVELS)})",
    )  # fmt: skip
    parser.add_argument(
        "--tables", type=positive,
        help=f"on a GPU: how many tables (default: {gpu.MOST_TABLES}, or as many as its memory holds)",
    )  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="on a GPU: leave torch.compile out")
    parser.add_argument(
        "--train",
        action="store_true",
        help="time training steps (defaults: 20 lookups, on a GPU 26 tables)",
    )
    parser.set_defaults(device=None)
    arguments = parser.parse_args()
    chosen = arguments.device is None
    if chosen:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    start(parser, arguments)
    print(f"Running on {device_name(arguments.device)}" + (f"; {OTHER[arguments.device]}" if chosen else ""))
    defaults = {**DEFAULTS[arguments.device], **(TRAIN_DEFAULTS[arguments.device] if arguments.train else {})}
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.device == "cuda":
        if len(arguments.arch_embedding_size) == 1:
            if arguments.tables is None:
                arguments.tables = gpu.default_tables(arguments, torch.cuda.mem_get_info()[0])
                if arguments.tables < gpu.MOST_TABLES:
                    print(f"{arguments.tables} tables of {gpu.MOST_TABLES}: what this GPU's memory holds.")
            arguments.arch_embedding_size *= arguments.tables
        gpu.check_levels(parser, arguments)
    if len(arguments.arch_mlp_bot) < 2 or arguments.arch_mlp_bot[-1] != arguments.arch_sparse_feature_size:
        parser.error(
            f"--arch-mlp-bot: found {'-'.join(map(str, arguments.arch_mlp_bot))}, needs at least two widths, "
            f"the last equal to --arch-sparse-feature-size {arguments.arch_sparse_feature_size}"
        )
    return parser, arguments


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    room = train if arguments.train else gpu if arguments.device == "cuda" else cpu
    room.run(parser, arguments)


if __name__ == "__main__":
    main()
