"""Many heterogeneous tables: recfuse.nn.FusedEmbeddingBagCollection against what people use.

Models A to E of RecFlex (Pan et al., SC'24): 750 to 1,200 features of fp32 tables, sum pooling, int32
indices, one output row a sample. Candidates run in turns on the same batches with the same threads:

  torch    a loop of nn.EmbeddingBag, then torch.cat; its inputs are cut into features beforehand
  fbgemm   FBGEMM's CPU table-batched embeddings, both modules; each runs on one thread by its nature
  fbgemm, a thread each   the same, tables dealt out by us to as many modules and threads

With --device cuda: the same models and others beside what the GPU can do, against torch's loops, FBGEMM's GPU
modules and one warp a bag; over the published sizes of batches; with half tables; skewed; equal tables; whole
models; the host's part; and what the tuner's parts are worth (figures 11, 12 and 13 of the paper).

All outputs are compared first. Of each family the fastest counts. Inference mode throughout.
"""

from __future__ import annotations

import argparse

from common.settings import add_comparison_arguments, comma_list, make_parser, positive, start
from fused_embedding_bag import cpu, gpu
from recfuse.data import workloads


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=15)
    add_comparison_arguments(parser)
    parser.add_argument("--models", type=comma_list, default=list("ABCDE"), help="default: A,B,C,D,E")
    parser.add_argument("--batch-size", type=positive, default=187, help="default: 187, the median request")
    gpu.add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    for name in arguments.models:
        try:
            workloads.model(name)
        except ValueError as error:
            parser.error(f"--models: {error}")
    if arguments.device == "cuda":
        gpu.check_arguments(parser, arguments)
    return parser, arguments


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    room = gpu if arguments.device == "cuda" else cpu
    room.run(parser, arguments)


if __name__ == "__main__":
    main()
