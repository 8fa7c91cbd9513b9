"""A linear layer over user and candidate features: recfuse.ikbo_linear and its peers.

The linear compression of IKBO: out[b] = W_cand . X_cand[b] + W_user . X_user[cand_to_user[b]]. Contestants
take turns on the same inputs:

  torch    a matmul of the concatenated input, with and without the broadcast and the concatenation; two
           matmuls, with K unchanged and padded, added or by baddbmm
  compiled these under torch.compile(mode="max-autotune-no-cudagraphs"), with --compile
  Triton   a kernel of this benchmark that adds the user part before it stores
  recfuse  by each of its paths, the stages of the paper, and by the path that it chooses

A large matmul takes turns with them, as the reference of the rate. All outputs are compared with float64
first. The user part and the padding of weights are part of every call of recfuse and Triton. Modes: back to
back, where the power limit sets a GPU's clock, and with pauses between samples.

The defaults with --device cuda are the paper's shape and sweeps, in float16 and bfloat16; on the CPU smaller
shapes, in float32.
"""

from common.registry import Benchmark

bench = Benchmark("ikbo_linear", __doc__, ["flags", "figures", "parts"], rounds=9, plots="ikbo")
