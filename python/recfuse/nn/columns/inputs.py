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
"""Of values, as the operator takes them."""
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
    """Values of samples that have any number of them."""

    values: Tensor  # [values]
    offsets: Tensor  # [features * batch + 1], from 0
    weights: Tensor | None = None  # [values]


class Inputs(NamedTuple):
    """What the operator takes of a batch."""

    places: tuple[InputRef, ...]  # one a use
    batch: int
    dense: Sequence[Tensor]  # [batch] or [batch, values]
    values: Sequence[Tensor] = ()
    offsets: Sequence[Tensor] = ()
    weights: Sequence[Tensor] = ()  # none, or one an entry of values; of no elements: there are none

    @property
    def device(self) -> torch.device:
        """Of the first tensor."""
        return (self.dense or self.values)[0].device

    def to(self, device: str) -> Inputs:
        """On a device."""
        return Inputs(*self[:2], *([one.to(device) for one in each] for each in self[2:]))

    def jagged(self, number: int) -> Jagged:
        """An entry of values."""
        weights = self.weights[number] if self.weights else None
        if weights is not None and weights.numel() == 0 and self.values[number].numel() > 0:
            weights = None
        return Jagged(self.values[number], self.offsets[number], weights)


def offsets_of(lengths: Tensor) -> Tensor:
    """From lengths."""
    return pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


def width_of(dense: Tensor) -> int:
    """How many values a sample has; ``range`` makes the compiler take it for a constant."""
    return 1 if dense.dim() == 1 else len(range(dense.shape[1]))


def widened(tensor: Tensor) -> Tensor:
    """Of a type that the operator takes, without loss; one that it does not take is left to it."""
    wider = _WIDENED.get(tensor.dtype)
    if wider is None:
        return tensor
    check_storages("recfuse.nn.EmbeddingColumns", "dense", (tensor,))
    return tensor.to(wider)


def contiguous(tensor: Tensor) -> Tensor:
    """The same without gaps; a copy where it has some."""
    if tensor.is_contiguous():
        return tensor
    check_storages("recfuse.nn.EmbeddingColumns", "values or offsets", (tensor,))
    return tensor.contiguous()
