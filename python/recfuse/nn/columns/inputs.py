"""The operator's inputs, as columns read a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recfuse._storage import check_storages
from recfuse.nn.columns.lowering import InputRef

TYPES = (torch.float32, torch.int32, torch.int64)
"""The dtypes of values that the operator takes."""
_WIDENED = {  # without loss
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


class Jagged(NamedTuple):
    """Values of samples with different numbers of values."""

    values: Tensor  # [values]
    offsets: Tensor  # [features * batch + 1], from 0
    weights: Tensor | None = None  # [values]


class Inputs(NamedTuple):
    """The inputs of the operator, from a batch."""

    places: tuple[InputRef, ...]  # a place per use
    batch: int
    dense: Sequence[Tensor]  # [batch] or [batch, values]
    values: Sequence[Tensor] = ()
    offsets: Sequence[Tensor] = ()
    weights: Sequence[Tensor] = ()  # empty, or a tensor per entry of values; without elements: no weights

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return (self.dense or self.values)[0].device

    def to(self, device: str) -> Inputs:
        """Return the inputs on a device."""
        return Inputs(*self[:2], *([tensor.to(device) for tensor in each] for each in self[2:]))

    def jagged(self, number: int) -> Jagged:
        """Return the jagged entry with this number."""
        weights = self.weights[number] if self.weights else None
        if weights is not None and weights.numel() == 0 and self.values[number].numel() > 0:
            weights = None
        return Jagged(self.values[number], self.offsets[number], weights)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the offsets of lengths."""
    return pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


def width_of(dense: Tensor) -> int:
    """Return the number of values of a sample; ``range`` makes it a constant for the compiler."""
    return 1 if dense.dim() == 1 else len(range(dense.shape[1]))


def widened(tensor: Tensor) -> Tensor:
    """Convert to a type that the operator takes, without loss; the operator refuses all other types."""
    wider = _WIDENED.get(tensor.dtype)
    if wider is None:
        return tensor
    check_storages("recfuse.nn.EmbeddingColumns", "dense", (tensor,))
    return tensor.to(wider)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor without gaps; a copy if it has gaps."""
    if tensor.is_contiguous():
        return tensor
    check_storages("recfuse.nn.EmbeddingColumns", "values or offsets", (tensor,))
    return tensor.contiguous()
