"""``_ikbo_attention_backward``: the gradients of attention whose queries share their users' keys and values.

Queries of candidates and of users are rows here. Sorted by user, a user's rows form one long query. On the
CPU a call of torch takes all users of similar size. On a GPU a call of torch's variable-length backward takes
all users; rows are sorted and counted on the device, without a wait. So a user's gradients of keys and values
are sums over all of its rows in float32, and no key or value is copied for a row. The query heads that share
a head of keys are rows, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from recfuse.ops.autograd import register
from recfuse.ops.ikbo.attention_backward_cpu import BackwardCall, gradients
from recfuse.ops.ikbo.reads import covered, good_parents
from recfuse.ops.library import implement, library, register_fake

_Gradients = tuple[Tensor, Tensor, Tensor]
_MOST_LSE = 2**26
"""The most log-sum-exps in a call of torch's memory-efficient backward: [sequences, heads, rows]."""
_MOST_SEQUENCES = 2**16 - 1
"""The most sequences of a call: blocks in the second dimension of a grid."""
_MOST_FLASH = 256
"""The most dims of a head in torch's FlashAttention."""
_UNIT = 8
"""The dims of a head in torch's kernels must be a multiple of this number of elements."""

library.define(
    "_ikbo_attention_backward(Tensor? grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    "Tensor row_to_user, Tensor out, Tensor lse, float scale, Tensor? kv_lengths, Tensor? kv_offsets) "
    "-> (Tensor, Tensor, Tensor)"
)


@register_fake("_ikbo_attention_backward")
def _(*arguments: Any) -> _Gradients:
    q, k, v = arguments[2:5]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _kernel(run: Callable[[BackwardCall], _Gradients]) -> Callable[..., _Gradients]:
    """Return the operator's kernel, which calls `run` unless an input is empty."""

    def kernel(*arguments: Any) -> _Gradients:
        call = BackwardCall(*arguments)
        call.check()
        if call.q.numel() == 0 or call.k.numel() == 0:
            return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
        return run(call)

    return kernel


_on_cpu = _kernel(gradients)


@_kernel
def _on_cuda(call: BackwardCall) -> _Gradients:
    """Compute the gradients in one call of a kernel, or in several calls for very many users."""
    grad, grad_lse, q, k, v, row_to_user, out, lse, scale, _, kv_offsets = call
    heads, dim = k.shape[-2:]
    keys, values = k.reshape(-1, heads, dim), v.reshape(-1, heads, dim)
    share, positions = q.shape[1] // heads, keys.shape[0]
    if q.dtype == torch.float64:
        _refuse("q is float64 on a GPU, for which there are no gradients. Use float32, or the CPU.")
    if max(q.shape[0] * share, positions) >= 2**31:
        _refuse(
            "the call has 2^31 or more queries or keys, for which there are no gradients. Split the batch."
        )
    begins, ends = call.key_ranges()
    users = begins.numel()
    row_users, order = good_parents(row_to_user, users).sort(stable=True)
    row_ends = torch.searchsorted(row_users, torch.arange(users + 1, device=q.device)) * share

    def by_head(rows: Tensor) -> Tensor:
        """Reshape [rows, query heads, dim] to [rows * share, heads, dim], in the order of users."""
        return rows[order].unflatten(1, (heads, share)).transpose(1, 2).flatten(0, 1)

    grad = torch.zeros_like(out) if grad is None else grad
    # The gradient of the log-sum-exp adds to each weight's: a further dim of `grad`, for which values are 1.
    width = _rounded_up(dim + (grad_lse is not None))
    packed = _Packed(
        *(_padded(by_head(tensor), width) for tensor in (grad, q)),
        *(_padded(tensor, width) for tensor in (keys, values)),
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
    run, most_users = (_flash, _MOST_SEQUENCES // 2) if flash else (_efficient, packed.most_users())
    totals = [torch.zeros_like(tensor) for tensor in (packed.q, packed.k, packed.v)]
    for first in range(0, users, most_users):
        chosen = slice(first, min(first + most_users, users))
        part = begins[chosen], ends[chosen], row_ends[chosen.start : chosen.stop + 1]
        for total, new, valid in zip(
            totals, run(packed, *_sequences(*part)), _written(packed, *part), strict=True
        ):
            torch.where(valid[:, None, None], new, total, out=total)
    of_rows = totals[0].unflatten(0, (-1, share)).transpose(1, 2).flatten(1, 2)[..., :dim]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device).index_copy_(0, order, of_rows)
    dk, dv = (total[..., :dim].reshape(k.shape) for total in totals[1:])
    return dq, dk, dv


class _Packed(NamedTuple):
    """The inputs of kernels.

    Rows are [rows, heads, width], in the order of users; keys and values are [positions, heads, width]. All
    tensors are contiguous, aligned to 16 bytes, and not shared with other code."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    """float32 [rows, heads]."""
    longest: int
    """The maximum number of keys of a user."""
    scale: float

    def most_users(self) -> int:
        """Return the most users of a call of the memory-efficient kernel.

        It stores log-sum-exps of all rows for each user.
        """
        return max(min(_MOST_LSE // (self.lse.numel() + 32), _MOST_SEQUENCES) // 2, 1)


def _padded(rows: Tensor, width: int) -> Tensor:
    """Return a copy with zeros after the dims of each head."""
    copy = rows.new_zeros((*rows.shape[:-1], width))
    copy[..., : rows.shape[-1]] = rows
    return copy


def _rounded_up(dim: int) -> int:
    return (dim + _UNIT - 1) // _UNIT * _UNIT


def _sequences(begins: Tensor, ends: Tensor, row_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of rows and of positions, int32 [2 * users + 1].

    Each user has two sequences: its rows and keys, then no rows and the positions up to the next user's keys.
    """
    of_rows = row_ends.repeat_interleave(2)[1:]
    of_keys = torch.cat((torch.stack((begins, ends), 1).flatten(), ends[-1:]))
    return of_rows.int(), of_keys.int()


def _written(packed: _Packed, begins: Tensor, ends: Tensor, row_ends: Tensor) -> Iterator[Tensor]:
    """Iterate over masks of the written rows, keys and values: those of users with both rows and keys."""
    has_both = (ends > begins) & (row_ends[1:] > row_ends[:-1])
    for count, first, last in (
        (packed.q.shape[0], row_ends[:-1], row_ends[1:]),
        (packed.k.shape[0], begins, ends),
    ):
        is_written = covered(first, last, has_both, count)
        yield is_written
    yield is_written


def _flash(packed: _Packed, of_rows: Tensor, of_keys: Tensor) -> _Gradients:
    grad, q, k, v, out, lse, longest, scale = packed
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of random numbers, unused without dropout
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.t().contiguous(), of_rows, of_keys, q.shape[0], longest, 0.0, False, state,
        torch.empty(0, device=q.device), scale=scale,
    )  # fmt: skip


def _efficient(packed: _Packed, of_rows: Tensor, of_keys: Tensor) -> _Gradients:
    grad, q, k, v, out, lse, longest, scale = packed
    rows = q.shape[0]
    positions = of_rows[:-1, None].long() + torch.arange((rows + 31) // 32 * 32, device=q.device)
    padded_lse = torch.where(
        (positions < of_rows[1:, None])[..., None], lse[positions.clamp(max=rows - 1)], torch.inf
    )  # [sequences, rows, heads]
    none = torch.zeros((), dtype=torch.int64)
    gradients = torch.ops.aten._efficient_attention_backward(
        grad[None], q[None], k[None], v[None], None, out[None], of_rows, of_keys, rows, longest,
        padded_lse.transpose(1, 2).contiguous(), 0.0, none, none, 0, False, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (gradient[0] for gradient in gradients[:3])
    return dq, dk, dv


def _refuse(reason: str) -> NoReturn:
    raise NotImplementedError(f"recfuse.ikbo_attention: {reason}")


implement("_ikbo_attention_backward", _on_cpu, "CPU")
implement("_ikbo_attention_backward", _on_cuda, "CUDA")
register("_ikbo_attention_backward")
