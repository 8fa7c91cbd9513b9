"""One large table: recfuse.nn.EmbeddingBag against torch's and FBGEMM's, on five kinds of access.

The setting of Jain et al. (MICRO'24): 500,000 rows of fp32, batch 2048 x 150 lookups, sum pooling, int64
indices; hotness from one row for all lookups to random rows. Candidates run in turns on the same batches
with the same number of threads. FBGEMM's CPU modules run on one thread by their nature; each is also run
with the bags dealt out by us to as many threads, and the fastest of these is the peer "FBGEMM".

With --device cuda: the paper's figures, and a table of torch (eager and compiled), FBGEMM and recfuse on many
tables in turn, beside the ceilings of the GPU at hand.

All outputs are compared first. Inference mode throughout. Each candidate has a table of its own, on the
pages that it asks the system for: recfuse on huge ones, torch and FBGEMM on what malloc gives (all on huge
ones with GLIBC_TUNABLES=glibc.malloc.hugetlb=1).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.settings import (
    add_comparison_arguments,
    check_choices,
    comma_list,
    make_parser,
    positive,
    start,
)
from common.traces import check_rows, read_traces
from embedding_bag import cpu, gpu
from recfuse.data import traces


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=21)
    add_comparison_arguments(parser)
    names = ", ".join(traces.HOTNESS)
    parser.add_argument("--hotness", type=comma_list, default=list(traces.HOTNESS), help=f"default: {names}")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="used (its first table) instead of the generated medium trace",
    )
    parser.add_argument("--dims", type=comma_list, help="default: 32,64,128; on a GPU 128")
    parser.add_argument("--rows", type=positive, default=500_000, help="default: 500000")
    parser.add_argument("--batch-size", type=positive, default=2048, help="bags (default: 2048)")
    parser.add_argument("--num-indices-per-lookup", type=positive, default=150, help="pooling (default: 150)")
    gpu.add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    if arguments.dims is None:
        arguments.dims = ["128"] if arguments.device == "cuda" else ["32", "64", "128"]
    try:
        arguments.dims = [positive(dim) for dim in arguments.dims]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--dims: {error}")
    if not arguments.dims:
        parser.error("--dims: needs one at least")
    check_choices(parser, {"--hotness": (arguments.hotness, traces.HOTNESS)})
    if arguments.device == "cuda":
        gpu.check_arguments(parser, arguments)
    return parser, arguments


def read_medium(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NDArray[np.int64] | None:
    """The rows of --trace, where it is given."""
    if arguments.trace is None:
        return None
    trace = read_traces(parser, arguments.trace)[0]
    check_rows(parser, arguments.trace, trace, arguments.rows)
    return trace


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    room = gpu if arguments.device == "cuda" else cpu
    room.run(parser, arguments, read_medium(parser, arguments))


if __name__ == "__main__":
    main()
