"""Converts tensors to arguments of `_C`'s functions: addresses, sizes, codes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from recfuse._codes import INTEGERS
from recfuse._storage import check_storages
from recfuse.data.collection import Jagged
from recfuse.data.forms import BagLookups

_ALIGNMENT = 16  # bytes of the widest load of a lane


def alignment(*sizes: int) -> int:
    """Return the largest power of two up to 16 that divides all given addresses and sizes."""
    bits = functools.reduce(operator.or_, sizes, _ALIGNMENT)
    return bits & -bits


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()


def integer_codes(batch: BagLookups | Jagged) -> tuple[int, int]:
    """Return the codes of the types of indices and offsets."""
    return INTEGERS.index(batch.indices.dtype), INTEGERS.index(batch.offsets.dtype)


def lookups(batch: BagLookups | Jagged) -> tuple[int, int, int, int, int, int]:
    """Return the arguments with which a batch of any kind begins."""
    index_type, offset_type = integer_codes(batch)
    indices = address("indices", batch.indices), batch.indices.numel(), index_type
    return *indices, address("offsets", batch.offsets), batch.bags, offset_type


def float_weights(batches: Iterable[BagLookups | Jagged]) -> list[Tensor | None]:
    """Return per-sample weights in float32, the type that kernels take."""
    tensors = [batch.weights for batch in batches]
    check_storages("recfuse.tune", "per_sample_weights", tensors)
    return [None if weights is None else weights.float() for weights in tensors]


def address(name: str, tensor: Tensor | None) -> int:
    """Return the address of a tensor, 0 for None. Raises ValueError if its storage has become too small."""
    if tensor is None:
        return 0
    check_storages("recfuse.tune", name, (tensor,))
    return tensor.data_ptr()


def stream_of(device: torch.device) -> tuple[int, int]:
    """Return the number of a device, and the address of its current stream."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return number, torch.cuda.current_stream(device).cuda_stream
