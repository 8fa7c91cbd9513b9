"""The gradients of attention on the CPU: torch's flash attention over many users at once.

Users with similar numbers of rows and keys form a batch. Rows and keys of a batch are views if they are
equally spaced, else copies. Rows and keys that pad a batch are zeros, and padding keys have no weight. Keys
that no query reads are never copied to a batch: keys of users without rows, and keys after a user's last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse.ops.ikbo.reads import good_parents, key_ranges


class BackwardCall(NamedTuple):
    """Arguments of ``_ikbo_attention_backward``, whose queries are rows ``[rows, heads, dim]``."""

    grad: Tensor | None
    grad_lse: Tensor | None
    """``[rows, heads]``, as is ``lse``."""
    q: Tensor
    k: Tensor
    v: Tensor
    row_to_user: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    kv_lengths: Tensor | None
    kv_offsets: Tensor | None

    def check(self) -> None:
        """Raise a ValueError unless shapes fit the queries': torch's kernels read past the end of others."""
        rows = self.q.shape
        shapes = {"grad": rows, "out": rows, "grad_lse": rows[:2], "lse": rows[:2], "row_to_user": rows[:1]}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"recfuse._ikbo_attention_backward: {name} has shape {list(tensor.shape)}; "
                    f"expected {list(shape)}"
                )

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the start and the end of each user's keys, in k flattened to positions."""
        return key_ranges(self.k, self.kv_lengths, self.kv_offsets)


_MOST_ELEMENTS = 2**22
"""The most elements of the keys, or of the rows, of a batch."""
_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.autocast("cpu", enabled=False)  # backward() may be called under autocast
def gradients(call: BackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. Sums are in float32, or in float64 for float64."""
    grad, grad_lse, q, k, v, row_to_user, out, lse, scale, *_ = call
    begins, ends = call.key_ranges()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, dim = k.shape[-2:]
    keys, values = k.reshape(-1, heads, dim), v.reshape(-1, heads, dim)
    users = good_parents(row_to_user, begins.numel())
    order, counts = users.argsort(stable=True), users.bincount(minlength=begins.numel() + 1)[:-1]
    first_rows, sizes = counts.cumsum(0) - counts, ends - begins
    active = (counts > 0) & (sizes > 0)
    dq = _results(q, counts[active])
    dk, dv = (_results(tensor, sizes[active]) for tensor in (keys, values))
    grad = torch.zeros_like(out) if grad is None else grad

    def by_head(rows: Tensor) -> Tensor:
        """Reshape [users, rows, query heads, dim] to [users, heads, rows * share, dim]."""
        return rows.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)

    for chosen in _batches(active.nonzero()[:, 0], counts, sizes, q.shape[1] * dim, heads * dim):
        at, no_row = _places(first_rows[chosen], counts[chosen])
        rows = order[at]
        positions, no_key = _places(begins[chosen], sizes[chosen])
        of_q, of_grad, of_out, of_lse = (
            by_head(_taken(tensor, rows, no_row, wide)) for tensor in (q, grad, out, lse[..., None])
        )
        of_k, of_v = (_taken(tensor, positions, no_key, wide).transpose(1, 2) for tensor in (keys, values))
        mask = None
        if no_key is not None:
            mask = torch.zeros(no_key.shape, dtype=wide).masked_fill_(no_key, -torch.inf)[:, None, None]
        sums = of_lse[..., 0].contiguous()
        if wide == torch.float64:  # the saved sums are not exact enough for float64
            of_out, sums = _forward(of_q, of_k, of_v, 0.0, False, attn_mask=mask, scale=scale)
        if grad_lse is not None:  # adds to the slope of each weight: a further dim, for which values are 1
            more = by_head(_taken(grad_lse[..., None], rows, no_row, wide))
            of_grad, of_v = torch.cat((of_grad, more), -1), torch.nn.functional.pad(of_v, (0, 1), value=1.0)
            of_q, of_k, of_out = (torch.nn.functional.pad(tensor, (0, 1)) for tensor in (of_q, of_k, of_out))
        new_q, new_k, new_v = _backward(
            of_grad, of_q, of_k, of_v, of_out, sums, 0.0, False, attn_mask=mask, scale=scale
        )
        new_q = new_q[..., :dim].unflatten(2, (at.shape[1], -1)).transpose(1, 2).flatten(2, 3)
        dq = _put(dq, rows, no_row, new_q)
        dk, dv = (
            _put(total, positions, no_key, new[..., :dim].transpose(1, 2))
            for total, new in ((dk, new_k), (dv, new_v))
        )
    return dq, dk.view(k.shape), dv.view(v.shape)


def _results(like: Tensor, sizes: Tensor) -> Tensor:
    """Allocate gradients of rows; with zeros if ``sizes`` does not cover all rows."""
    new = torch.empty if int(sizes.sum()) == like.shape[0] else torch.zeros
    return new(like.shape, dtype=like.dtype)


def _batches(users: Tensor, counts: Tensor, sizes: Tensor, row: int, key: int) -> Iterator[Tensor]:
    """Iterate over batches of users with similar numbers of rows and keys, of `row` and `key` elements."""
    of_rows, of_keys = _rounded(counts[users]), _rounded(sizes[users])
    keys_end = int(of_keys.max()) + 1 if users.numel() else 1
    kinds, kind, lengths = (of_rows * keys_end + of_keys).unique(return_inverse=True, return_counts=True)
    alike = users[kind.argsort(stable=True)].split(lengths.tolist())
    for both, part in zip(kinds.tolist(), alike, strict=True):
        yield from part.split(max(_MOST_ELEMENTS // max(both // keys_end * row, both % keys_end * key), 1))


def _rounded(sizes: Tensor) -> Tensor:
    """Round up to the next of 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    exponent = torch.frexp(sizes.double()).exponent.long()
    step = 1 << (exponent - 2).clamp(min=0)
    return (sizes + step - 1) // step * step


def _places(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return consecutive positions of each user, [users, most], with 0 and a mark after the last."""
    at = torch.arange(int(counts.max()))
    places, marks = first[:, None] + at, at >= counts[:, None]
    return (places.masked_fill_(marks, 0), marks) if marks.any() else (places, None)


def _taken(of: Tensor, places: Tensor, marks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the rows at the positions, [users, most, ...]; marked rows are zeros."""
    if marks is None and (lying := _lying(of, places)) is not None:
        return lying.to(dtype)
    rows = of.index_select(0, places.flatten()).to(dtype).view(*places.shape, *of.shape[1:])
    return rows if marks is None else rows.masked_fill_(marks[..., None, None], 0)


def _put(of: Tensor, places: Tensor, marks: Tensor | None, rows: Tensor) -> Tensor:
    """Write rows [users, most, ...] without a mark to their positions in `of`, and return it."""
    if marks is None and (lying := _lying(of, places)) is not None:
        if lying.numel() == of.numel():
            return rows.reshape(of.shape).to(of.dtype)
        lying.copy_(rows)
    elif marks is None:
        of.index_copy_(0, places.flatten(), rows.flatten(0, 1).to(of.dtype))
    else:
        of.index_copy_(0, places[~marks], rows[~marks].to(of.dtype))
    return of


def _lying(of: Tensor, places: Tensor) -> Tensor | None:
    """Return a view [users, most, ...] of the rows at these positions, or None if spacing varies."""
    users, most = places.shape
    first = int(places[0, 0])
    pitch = int(places[1, 0]) - first if users > 1 else most
    if pitch < most or not of.is_contiguous():
        return None
    if not torch.equal(places, first + pitch * torch.arange(users)[:, None] + torch.arange(most)):
        return None
    row, start = of.stride(0), of.storage_offset()
    return of.as_strided((users, most, *of.shape[1:]), (pitch * row, *of.stride()), start + first * row)
