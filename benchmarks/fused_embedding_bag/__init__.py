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
