"""Attention of candidates over their user's history: recfuse.ikbo_attention and its peers.

out[b] = softmax(scale * q[b] . k[user(b)]^T) . v[user(b)], per head. Contestants take turns on the same
inputs:

  torch    SDPA by each backend over keys and values repeated for each candidate, with and without the
           repetition; a user's candidates packed as one long query, in a batch and with different lengths
  FA3      FlashAttention-3 on the packed form, in a batch and with different lengths (package fa3-fwd)
  Triton   a kernel of this benchmark that packs and broadcasts inside
  recfuse  by each of its paths, and by the path that it chooses

A large matmul takes turns with them, as the reference of the rate. Outputs are compared with float64, and as
a whole with each other; contestants that fail or are wrong are left out, and the run continues. Packed forms
get offsets and packed keys for free; recfuse groups by the map in every call.

The defaults with --device cuda are the paper's shape and sweeps, in float16 and bfloat16; on the CPU smaller
shapes, in float32.
"""

from common.registry import Benchmark

bench = Benchmark("ikbo_attention", __doc__, ["flags", "figures", "parts"], rounds=5, plots="attention")
