"""Graph passes: plain models eager, compiled, compiled with recfuse.backend(), and written by hand.

"bags": many tables of torch.nn.EmbeddingBag before one cat. "ranking": a user tower, candidates of each user,
linear compression and target attention, in plain PyTorch. "E" and "F": RECom's models, column by column,
against recfuse.nn.EmbeddingColumns. All candidates hold the same weights and run in turns on the same batches
in inference mode, and their outputs are compared; on a GPU as CUDA graphs and as called.

"pass": seconds of recfuse.backend(), without torch.compile's own time, for a graph of many columns of several
kinds and any batch.
"""

from common.registry import Benchmark
from common.settings import positive

bench = Benchmark("passes", __doc__, ["figures", "columns", "compile_time"], rounds=21)
flag = bench.flag
# fmt: off
flag("--tables", positive, 1000, "of bags", cpu=100, quick=5)
flag("--rows", positive, 500_000, "of each table", cpu=100_000, quick=100)
flag("--dim", positive, 16, "of each table")
flag("--batch", positive, 512, "samples of bags", cpu=256)
flag("--lookups", positive, 8, "of each bag")
flag("--users", positive, 32, "of ranking", cpu=4)
flag("--ratio", positive, 70, "candidates of each", quick=5)
flag("--columns", positive, 1000, "of the graph whose pass is timed", quick=10)
flag("--samples", positive, 256, "of E and F", quick=8)
flag("--part", positive, 1, "every n-th column of E and F", quick=100)
flag("--large-rows", positive, 2**23, "of their large tables", cpu=2**18, quick=100)
flag("--num-batches", positive, 4, "batches to rotate through", quick=2)
# fmt: on
