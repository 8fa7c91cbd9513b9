"""Random lookups, and values laid out so that a wrong access shows."""

from __future__ import annotations

import torch
from torch import Tensor

from support.cuda_program import cuda_build, cuda_program  # noqa: F401  (fixtures)


def ragged(rows: int, bags: int, longest: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Random lookups and the offsets of `bags` bags of 0 to `longest` of them, with the last offset."""
    lengths = torch.randint(0, longest + 1, (bags,)) if rows else torch.zeros(bags, dtype=torch.int64)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, max(rows, 1), (int(offsets[-1]),)).to(dtype), offsets.to(dtype)


def poisoned(values: Tensor, row_gap: int = 3, lead: int = 5) -> Tensor:
    """Returns the same [rows, dim] values as a strided view, with NaN before, after and between the rows."""
    rows, dim = values.shape
    storage = torch.full((lead + rows * (dim + row_gap) + lead,), torch.nan, dtype=values.dtype)
    view = storage[lead : lead + rows * (dim + row_gap)].view(rows, dim + row_gap)[:, :dim]
    view.copy_(values)
    return view


def odd(values: Tensor) -> Tensor:
    """Returns the same values at an address that is aligned to one element only."""
    storage = values.new_zeros(values.numel() + 1)
    storage[1:] = values.reshape(-1)
    return storage[1:].view(values.shape)
