"""A DLRM with nn.EmbeddingBag and the same model after recfuse.swap: times by stage, ratios, a verdict.

Flags have the names of facebookresearch/dlrm. Tables are accessed along a trace: a file of rows, or a trace
generated at a hotness level (one_item, high, medium, low, random). Both models run in turns on the same
mini-batches, in inference mode, and their outputs are compared. It runs on the GPU if available.

On a GPU: the model of Jain et al. (MICRO'24) with 250 tables at every level of hotness and in their mixes,
eager and under torch.compile.

--figures train, or --train: training steps instead, with SGD, before and after recfuse.swap, and with the
optimizer of the tables fused into the backward pass.
"""

from common.registry import Benchmark

bench = Benchmark("dlrm", __doc__, ["flags", "cpu", "gpu", "train"], device=None)
