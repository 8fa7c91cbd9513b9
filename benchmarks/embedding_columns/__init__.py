"""Embedding columns: recfuse.nn.EmbeddingColumns and its peers.

Hundreds of columns, each from a raw value to a pooled row: models E and F of RECom (Pan et al., ASPLOS'23)
and 10 to 1,000 equal bucketize columns. Contestants take turns on the same batches; outputs are compared with
float64 first:

  torch       column by column: bucketize or remainder, then F.embedding, or F.embedding_bag if a sample has
              several values; "bags": always the latter; "similar columns joined": all columns of a kind in
              one call
  compiled    torch under torch.compile, by default and with max-autotune and combo kernels
  collection  rows by torch, then recfuse.nn.FusedEmbeddingBagCollection
  recfuse     EmbeddingColumns, of a packed batch, of a dict of tensors, and with XXH64 for remainders

On a GPU each is replayed as a CUDA graph, and called. The limit is the least bytes at the copy speed of the
same run.

The figures: micro, mixed (columns of many kinds), models (only the columns, and with the layers that follow),
ablations, ready (the time to construct and compile), strings (the hash of strings on the host); on a GPU also
transfers (from pageable host memory) and host_tables (large tables that stay on the host).
"""

from common.registry import Benchmark

MODULES = ["flags", "figures", "ready", "strings", "transfers"]
bench = Benchmark("embedding_columns", __doc__, MODULES, rounds=9, plots="columns")
