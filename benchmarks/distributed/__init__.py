"""Sharded tables on several GPUs: TorchRec with FBGEMM's and with recfuse's kernels, in turns.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --device cuda --json FILE

"steps": a training step of both kernels with the same tables, plan (table-wise, longest first) and batches,
which are on the GPU: the forward pass of the collection, a loss over its output, and the backward pass with
the update. "lookup" and "update" are the calls of the compute kernels alone.
"losses": 50 steps of both kernels from the same rows, with every way to shard.
"plans": a step of random collections with TorchRec's default plan and with the plan of
`recfuse.torchrec.planner`, both with recfuse's kernels; its estimate beside the measured time of the kernels.

Each time is that of the slowest rank, and a figure is the median of rounds in turns.
"""

from common.registry import Benchmark
from common.settings import comma_list, positive

OPTIMIZERS = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
PARTS = ("steps", "losses", "plans")
SUBJECTS = "mlperf-2048,mlperf-16384,A-2048,A-16384"

bench = Benchmark("distributed", __doc__, [], rounds=11)
flag = bench.flag
# fmt: off
flag("--parts", comma_list, list(PARTS), "what to measure", allowed=PARTS)
flag("--subjects", comma_list, comma_list(SUBJECTS), "of steps: NAME-SIZE, size of a rank's batch")
flag("--optimizers", comma_list, list(OPTIMIZERS), "of steps and losses", allowed=OPTIMIZERS)
flag("--rows-cap", positive, 4_000_000, "most rows of a table")
flag("--collections", positive, 20, "random collections of plans")
flag("--plan-sizes", comma_list, ["2048", "16384"], "sizes of a rank's batch, of plans")
flag("--seconds", positive, 24 * 3600, "after which no measurement begins; of steps two thirds of it")
# fmt: on
