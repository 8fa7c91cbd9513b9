"""Tensors of any size on the CPU, whose memory is never touched: only their sizes and alignment are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: memory counts where it is written alone


def reserve(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU that takes no memory until it is written, of any size.

    Raises:
        MemoryError: the address space has no room for it.
    """
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    except OSError as error:
        raise MemoryError(f"no address space for a table of {list(shape)}") from error
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(tuple(shape))


def with_reserved_memory(module: nn.Module) -> nn.Module:
    """Give a module of meta tensors memory of `reserve` on the CPU."""
    return module._apply(lambda tensor: reserve(tensor.shape, tensor.dtype))
