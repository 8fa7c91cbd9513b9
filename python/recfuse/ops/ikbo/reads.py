"""The users' features and keys that a call reads; all others may be NaN, and must not affect a result.

A gradient of a weight is a sum of products over all rows. Rows that no candidate reads have a gradient of
zero, but zero times NaN or infinity is NaN. Such rows must not take part in the products.
"""

from __future__ import annotations

import torch
from torch import Tensor


def good_parents(parent: Tensor, items: int) -> Tensor:
    """Convert parents to int64; bad parents, which the forward pass reports, become `items`."""
    parent = parent.long()
    return torch.where((parent >= 0) & (parent < items), parent, items)


def has_children(parent: Tensor, items: int, is_read: Tensor | None = None) -> Tensor:
    """Return a mask of parents, bool [items]; with `is_read`, of parents of items that are read."""
    if is_read is not None:
        parent = torch.where(is_read, parent, items)
    return parent.new_zeros(items + 1, dtype=torch.bool).index_fill(0, parent, True)[:items]


def key_ranges(k: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the start and the end of each user's keys, int64 [users], in k [positions, ...] or flattened k.

    Bad lengths and offsets, which the forward pass reports, count as in the forward pass.
    """
    if offsets is None:
        users, positions = k.shape[:2]
        begins = torch.arange(users, device=k.device) * positions
        return begins, begins + (positions if lengths is None else lengths.long().clamp(0, positions))
    begins, ends = offsets[:-1].long(), offsets[1:].long()
    good = (begins >= 0) & (begins <= ends) & (ends <= k.shape[0])
    return torch.where(good, begins, 0), torch.where(good, ends, 0)


def covered(begins: Tensor, ends: Tensor, chosen: Tensor, positions: int) -> Tensor:
    """Return a mask of the positions in chosen ranges, bool [positions]. Ranges must not overlap."""
    step = chosen.int()
    marks = step.new_zeros(positions + 1).index_add(0, begins, step).index_add(0, ends, -step)
    return marks.cumsum(0)[:-1] > 0


def read_histories(
    x: Tensor, cand_to_user: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """Return histories with zeros at positions that no query reads.

    Histories are `[users, positions, ...]`, or `[positions, ...]` with offsets. `cand_to_user` is None if
    every user has its own queries. Returns `x` itself for arguments that the operator refuses.
    """
    if not _fit(x, cand_to_user, lengths, offsets):
        return x
    begins, ends = key_ranges(x, lengths, offsets)
    users = begins.shape[0]
    if cand_to_user is None:
        chosen = begins.new_ones(users, dtype=torch.bool)
    else:
        chosen = has_children(good_parents(cand_to_user, users), users)
    if offsets is not None:
        is_read = covered(begins, ends, chosen, x.shape[0])
    elif lengths is None:
        is_read = chosen[:, None]
    else:
        at = torch.arange(x.shape[1], device=x.device)
        is_read = chosen[:, None] & (at < (ends - begins)[:, None])
    return torch.where(is_read[..., None], x, 0)


def _fit(x: Tensor, cand_to_user: object, lengths: object, offsets: object) -> bool:
    tensors = [tensor for tensor in (cand_to_user, lengths, offsets) if tensor is not None]
    if any(
        not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.device != x.device for tensor in tensors
    ):
        return False
    if isinstance(offsets, Tensor):
        return lengths is None and offsets.shape[0] > 0
    return lengths is None or lengths.shape[0] == x.shape[0]  # type: ignore[attr-defined]
