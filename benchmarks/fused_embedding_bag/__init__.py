"""Many heterogeneous tables: recfuse.nn.FusedEmbeddingBagCollection and its peers.

Models A to E of RecFlex (Pan et al., SC'24): 750 to 1,200 features of fp32 tables, sum pooling, int32
indices, one output row a sample. Candidates run in turns on the same batches with the same threads:

  torch    a loop of nn.EmbeddingBag, then torch.cat; its inputs are cut into features beforehand
  fbgemm   FBGEMM's CPU table-batched embeddings, both modules; each uses a single thread
  fbgemm, a thread each   the same, with the tables distributed over as many modules and threads

With --device cuda: the same models and others, with the limits of the GPU, against torch's loops, FBGEMM's
GPU modules and one warp a bag; over the published batch sizes; with half tables; skewed; equal tables; whole
models; the host's part; and the gain of the tuner's parts (figures 11, 12 and 13 of the paper).

All outputs are compared first. Of each family the fastest counts. Inference mode throughout.
"""

from common.registry import Benchmark

MODULES = [
    "flags",
    "cpu",
    "models",
    "sizes",
    "equal",
    "end_to_end",
    "tuning",
    "ablations",
    "mapping",
    "parts",
]
bench = Benchmark("fused_embedding_bag", __doc__, MODULES, rounds=15, plots="fused")
