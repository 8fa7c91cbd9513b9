"""``_ikbo_attention_backward``: the gradients of attention whose queries share their users' keys and values.

Queries are rows here, of candidates and of users alike: sorted by user, a user's rows are one long query.
On the CPU each user is a few matmuls of torch. On a GPU all users are one call of torch's variable-length
backward, with the rows sorted and counted on the device: nothing waits for it. So a user's gradients of keys
and values are sums over all of its rows in float32, and no key or value is copied for a row. The query heads
that share a head of keys are rows as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from recfuse.ops.autograd import register
from recfuse.ops.library import library

_Gradients = tuple[Tensor, Tensor, Tensor]
_MOST_SCORES = 2**24
"""Of one matmul on the CPU."""
_MOST_LSE = 2**26
"""Log-sum-exps that torch's memory-efficient backward has in a call: [sequences, heads, rows]."""
_MOST_SEQUENCES = 2**16 - 1
"""Of a call: blocks in the second dimension of a grid."""
_MOST_FLASH = 256
"""Dims of a head of torch's FlashAttention."""
_UNIT = 8
"""Elements that torch's kernels have the dims of a head in multiples of."""

library.define(
    "_ikbo_attention_backward(Tensor? grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    "Tensor row_to_user, Tensor out, Tensor lse, float scale, Tensor? kv_lengths, Tensor? kv_offsets) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("recfuse::_ikbo_attention_backward", lib=library)
def _(
    grad: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> _Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _ranges(k: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each user's keys begin and end, int64 [users], in k [positions, heads, dim] or flattened to that.
    What the forward pass reports as bad counts as it does there."""
    if offsets is None:
        users, positions = k.shape[:2]
        begins = torch.arange(users, device=k.device) * positions
        return begins, begins + (positions if lengths is None else lengths.long().clamp(0, positions))
    begins, ends = offsets[:-1].long(), offsets[1:].long()
    good = (begins >= 0) & (begins <= ends) & (ends <= k.shape[0])
    return torch.where(good, begins, 0), torch.where(good, ends, 0)


# ---- CPU


@torch.autocast("cpu", enabled=False)  # in which backward() may be called
def _on_cpu(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_to_user: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    kv_lengths: Tensor | None,
    kv_offsets: Tensor | None,
) -> _Gradients:
    """Softmaxes are computed again: lse is less exact than float64."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, dim = k.shape[-2:]
    keys, values = k.reshape(-1, heads, dim), v.reshape(-1, heads, dim)
    dq = torch.zeros(q.shape, dtype=wide)
    dk, dv = (torch.zeros(keys.shape, dtype=wide) for _ in range(2))

    def by_head(rows: Tensor) -> Tensor:
        """[heads, rows, dim] of [rows, heads, dim], or with query heads: [heads, rows * share, dim]."""
        shared = rows.to(wide).reshape(rows.shape[0], heads, -1, rows.shape[-1])
        return shared.transpose(0, 1).flatten(1, 2)

    for rows, start, end in _groups(row_to_user, *_ranges(k, kv_lengths, kv_offsets), q.shape[1]):
        of_keys, of_values, of_q = by_head(keys[start:end]), by_head(values[start:end]), by_head(q[rows])
        weights = (of_q @ of_keys.mT * scale).softmax(-1)
        slopes = torch.zeros_like(weights)
        if grad is not None:
            of_grad = by_head(grad[rows])
            dv[start:end] += (weights.mT @ of_grad).transpose(0, 1)
            slopes = of_grad @ of_values.mT
            slopes = slopes - (weights * slopes).sum(-1, keepdim=True)
        if grad_lse is not None:
            slopes = slopes + by_head(grad_lse[rows][..., None])
        slopes = slopes * weights * scale
        dk[start:end] += (slopes.mT @ of_q).transpose(0, 1)
        found = (slopes @ of_keys).unflatten(1, (rows.numel(), -1)).transpose(0, 1)
        dq[rows] = found.reshape(rows.numel(), *q.shape[1:])
    return dq.to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def _groups(users: Tensor, begins: Tensor, ends: Tensor, heads: int) -> Iterator[tuple[Tensor, int, int]]:
    """Rows of one user, and where its keys begin and end; of a user with many, some at a time."""
    order = users.long().argsort(stable=True)
    counts = users.long().bincount(minlength=begins.numel()).tolist()
    for rows, start, end in zip(order.split(counts), begins.tolist(), ends.tolist(), strict=True):
        if end > start and rows.numel():
            step = max(_MOST_SCORES // ((end - start) * heads), 1)
            yield from ((some, start, end) for some in rows.split(step))


# ---- CUDA


def _on_cuda(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_to_user: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    kv_lengths: Tensor | None,
    kv_offsets: Tensor | None,
) -> _Gradients:
    """One call of a kernel, or a few where there are very many users."""
    heads, dim = k.shape[-2:]
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys, values = k.reshape(-1, heads, dim), v.reshape(-1, heads, dim)
    share, positions = q.shape[1] // heads, keys.shape[0]
    if q.dtype == torch.float64:
        _refuse("float64 on a GPU; use float32, or the CPU")
    if max(q.shape[0] * share, positions) >= 2**31:
        _refuse("2^31 or more queries or keys in one call; split the batch")
    begins, ends = _ranges(k, kv_lengths, kv_offsets)
    users = begins.numel()
    row_users = torch.where((row_to_user >= 0) & (row_to_user < users), row_to_user.long(), users)
    row_users, order = row_users.sort(stable=True)
    row_ends = torch.searchsorted(row_users, torch.arange(users + 1, device=q.device)) * share

    def by_head(rows: Tensor) -> Tensor:
        """[rows * share, heads, dim] of [rows, query heads, dim], in the order of users."""
        return rows[order].unflatten(1, (heads, share)).transpose(1, 2).flatten(0, 1)

    grad = torch.zeros_like(out) if grad is None else grad
    # The gradient of the log-sum-exp adds to each weight's: as one more dim of `grad`, where values are 1.
    width = _rounded_up(dim + (grad_lse is not None))
    packed = _Packed(
        *(_padded(by_head(one), width) for one in (grad, q)),
        *(_padded(one, width) for one in (keys, values)),
        _padded(by_head(out), width),
        by_head(lse[..., None])[..., 0].float(),
        k.shape[1] if kv_offsets is None else positions,
        scale,
    )
    if grad_lse is not None:
        packed.grad[..., dim] = by_head(grad_lse[..., None])[..., 0]
        packed.v[..., dim] = 1
    flash = q.dtype != torch.float32 and width <= _MOST_FLASH
    flash = flash and torch.cuda.get_device_capability(q.device) >= (8, 0)
    call, most_users = (_flash, _MOST_SEQUENCES // 2) if flash else (_efficient, packed.most_users())
    found = [torch.zeros_like(one) for one in (packed.q, packed.k, packed.v)]
    for first in range(0, users, most_users):
        chosen = slice(first, min(first + most_users, users))
        part = begins[chosen], ends[chosen], row_ends[chosen.start : chosen.stop + 1]
        for total, new, valid in zip(
            found, call(packed, *_sequences(*part)), _written(packed, *part), strict=True
        ):
            torch.where(valid[:, None, None], new, total, out=total)
    of_rows = found[0].unflatten(0, (-1, share)).transpose(1, 2).flatten(1, 2)[..., :dim]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device).index_copy_(0, order, of_rows)
    dk, dv = (one[..., :dim].reshape(k.shape) for one in found[1:])
    return dq, dk, dv


class _Packed(NamedTuple):
    """Rows in the order of their users, [rows, heads, width], and keys and values [positions, heads, width],
    as kernels want them: contiguous, aligned to 16 bytes, and the call's own."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """float32 [rows, heads]."""
    longest: int
    """No user has more keys."""
    scale: float

    def most_users(self) -> int:
        """In a call of the memory-efficient kernel, which has log-sum-exps of all rows for each."""
        return max(min(_MOST_LSE // (self.lse.numel() + 32), _MOST_SEQUENCES) // 2, 1)


def _padded(rows: Tensor, width: int) -> Tensor:
    """A copy with zeros behind the dims of each head."""
    copy = rows.new_zeros((*rows.shape[:-1], width))
    copy[..., : rows.shape[-1]] = rows
    return copy


def _rounded_up(dim: int) -> int:
    return (dim + _UNIT - 1) // _UNIT * _UNIT


def _sequences(begins: Tensor, ends: Tensor, row_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds int32 [2 * users + 1] of rows and of positions: of a user's rows and keys, then of no row and of
    the positions up to the next user's keys."""
    of_rows = row_ends.repeat_interleave(2)[1:]
    of_keys = torch.cat((torch.stack((begins, ends), 1).flatten(), ends[-1:]))
    return of_rows.int(), of_keys.int()


def _written(packed: _Packed, begins: Tensor, ends: Tensor, row_ends: Tensor) -> Iterator[Tensor]:
    """Which rows, keys and values are of users with both rows and keys: no others are written."""
    has_both = (ends > begins) & (row_ends[1:] > row_ends[:-1])
    for count, first, last in (
        (packed.q.shape[0], row_ends[:-1], row_ends[1:]),
        (packed.k.shape[0], begins, ends),
    ):
        step = has_both.int()
        marks = step.new_zeros(count + 1).index_add_(0, first, step).index_add_(0, last, -step)
        covered = marks.cumsum(0)[:-1] > 0
        yield covered
    yield covered


def _flash(packed: _Packed, of_rows: Tensor, of_keys: Tensor) -> _Gradients:
    grad, q, k, v, out, lse, longest, scale = packed
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of random numbers, which no dropout needs
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.t().contiguous(), of_rows, of_keys, q.shape[0], longest, 0.0, False, state,
        torch.empty(0, device=q.device), scale=scale,
    )  # fmt: skip


def _efficient(packed: _Packed, of_rows: Tensor, of_keys: Tensor) -> _Gradients:
    grad, q, k, v, out, lse, longest, scale = packed
    rows = q.shape[0]
    place = of_rows[:-1, None].long() + torch.arange((rows + 31) // 32 * 32, device=q.device)
    own = torch.where(
        (place < of_rows[1:, None])[..., None], lse[place.clamp(max=rows - 1)], torch.inf
    )  # [sequences, rows, heads]
    none = torch.zeros((), dtype=torch.int64)
    found = torch.ops.aten._efficient_attention_backward(
        grad[None], q[None], k[None], v[None], None, out[None], of_rows, of_keys, rows, longest,
        own.transpose(1, 2).contiguous(), 0.0, none, none, 0, False, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (one[0] for one in found[:3])
    return dq, dk, dv


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"recfuse.ikbo_attention: gradients of {what}")


library.impl("_ikbo_attention_backward", _on_cpu, "CPU")
library.impl("_ikbo_attention_backward", _on_cuda, "CUDA")
register("_ikbo_attention_backward")
