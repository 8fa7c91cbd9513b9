"""Quantised tables: recfuse.quantize and its peers.

Models A to E of RecFlex (Pan et al., SC'24), sum pooling, int32 indices, float32 outputs. The same codes and
parameters in all candidates, which run in turns on the same batches:

  recfuse int8, int4   a collection after recfuse.quantize: codes apart from their parameters
  recfuse, FBGEMM's rows   the same operator on FBGEMM's memory, read where it lies
  FBGEMM nbit   IntNBitTableBatchedEmbeddingBagsCodegen; on the CPU a single thread, whatever torch's setting
  torch   a loop of torch's embedding_bag_byte or _4bit, then torch.cat; only on the CPU
  recfuse float16   the project's own tables of halves

All outputs are compared with float64 sums first. FBGEMM forms values in halves, so its error is larger.
"""

from common.registry import Benchmark

bench = Benchmark("quantised", __doc__, ["models"], rounds=15)
