"""Histories of many features without pooling: recfuse.nn.FusedEmbeddingCollection and its peers.

"group": features with the same histories, padded, joined side by side, or one after the other. "lookups":
many features with long histories, of which some rows repeat. "training", on a GPU: steps of the same with SGD
and Adam. "host": the host's time of a call of many features of tiny batches. "models": a DIN and an HSTU in
TorchRec's form, before and after recfuse.swap.

  torch    nn.Embedding for each feature, then a copy into place and cat
  TorchRec its unsharded EmbeddingCollection, then to_padded_dense and cat
  FBGEMM   SplitTableBatchedEmbeddingBagsCodegen with PoolingMode.NONE, then jagged_to_padded_dense and cat
  recfuse  one call

All contestants have the same values, outputs are compared first, and they take turns on the same batches; on
a GPU as CUDA graphs and as called. A peer that is not installed, or has no such graph, is left out with a
note. FBGEMM has PoolingMode.NONE only on GPUs.
"""

from common.registry import Benchmark
from common.settings import integers, positive

bench = Benchmark("sequences", __doc__, ["group", "lookups", "host", "end_to_end"], rounds=15)
flag = bench.flag
# fmt: off
flag("--features", positive, 8, "of a group", cpu=26, quick=2)
flag("--dim", positive, 32, "columns of each table of a group")
flag("--batch", positive, 512, "histories of a feature", quick=4)
flag("--longest", positive, 100, "lookups of the longest history; the shortest has 1", cpu=79, quick=7)
flag("--rows", positive, 100_000, "of each table of a group", quick=100)
flag("--tables", positive, 10, "of lookups", cpu=4, quick=2)
flag("--table-rows", positive, 400_000, "of each table of lookups", cpu=50_000, quick=100)
flag("--table-dim", positive, 128, "columns of each table of lookups", quick=8)
flag("--table-lookups", positive, 104_857, "of each table", cpu=10_000, quick=50)
flag("--unique", positive, 35_028, "rows of each table that are looked up", cpu=3_340, quick=20)
flag("--host-features", integers, [26, 100], "of the host's time", quick=1)
flag("--num-batches", positive, 4, "batches to rotate through", quick=2)
# fmt: on
