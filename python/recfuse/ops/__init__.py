"""The operators as Python functions, a file each. Importing this registers their Python side with torch."""

from recfuse.ops import device_threads  # registers a function that runs at exit
from recfuse.ops.embedding_bag import embedding_bag
from recfuse.ops.fused_embedding import fused_embedding, history_mask
from recfuse.ops.fused_embedding_bag import fused_dtype, fused_embedding_bag
from recfuse.ops.ikbo_attention import ikbo_attention, ikbo_attention_path
from recfuse.ops.ikbo_linear import (
    ikbo_linear,
    ikbo_linear_chain,
    ikbo_linear_chain_path,
    ikbo_linear_path,
)
from recfuse.ops.library import HAS_CUDA_KERNELS, check
from recfuse.ops.pin_rows import pin_rows, unpin
from recfuse.ops.quantized.embedding_bag_quantized import embedding_bag_quantized
from recfuse.ops.quantized.fused_embedding_bag_quantized import (
    dequantize_rows,
    fused_embedding_bag_quantized,
    quantize_rows,
)

__all__ = [
    "HAS_CUDA_KERNELS",
    "check",
    "dequantize_rows",
    "device_threads",
    "embedding_bag",
    "embedding_bag_quantized",
    "fused_dtype",
    "fused_embedding",
    "fused_embedding_bag",
    "fused_embedding_bag_quantized",
    "history_mask",
    "ikbo_attention",
    "ikbo_attention_path",
    "ikbo_linear",
    "ikbo_linear_chain",
    "ikbo_linear_chain_path",
    "ikbo_linear_path",
    "pin_rows",
    "quantize_rows",
    "unpin",
]
