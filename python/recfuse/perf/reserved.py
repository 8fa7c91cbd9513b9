"""Tensors of any size on the CPU whose memory is never accessed: only sizes and alignments are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: only written memory counts


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
        raise MemoryError(f"recfuse.predict: no address space for a table of {list(shape)}") from error
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(tuple(shape))


class Reserving(TorchDispatchMode):
    """A context in which modules and optimizers are created on the CPU without memory.

    Large tensors of ``torch.empty`` come from `reserve`; ``fill_`` and ``normal_`` leave them unchanged.
    """

    _LEAST = 1 << 12  # elements
    _FILLS = torch.ops.aten.fill_.Scalar, torch.ops.aten.normal_.default

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, or reserve or skip instead."""
        kwargs = kwargs or {}
        if function is torch.ops.aten.empty.memory_format:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point and math.prod(args[0]) >= self._LEAST:
                return reserve(args[0], dtype)
        if function in self._FILLS and args[0].numel() >= self._LEAST:
            return args[0]
        return function(*args, **kwargs)
