"""Gradients of one table's embedding bag on the GPU, by calling ATen's backward functions.

The forward kernel survives bad indices and offsets, and reports them later; ATen's kernels assert on them,
which ends the process's CUDA context. So nothing bad may reach them: lookups that do not count (out of the
table, in no bag, of the padding row) are led to a row or a bag of their own, whose gradient is dropped.
Only the sparse gradient, whose size depends on them, waits for the GPU.

Runs on any device: the tests compare it with `_backward` on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recfuse._backward import MAX, MEAN, SUM, aten, no_integers, sparse_grad, sum_dtype

_CHUNK = 1 << 16  # lookups whose rows are gathered at once


class Lookups(NamedTuple):
    """Which lookups count, and where; every index is within its bounds."""

    rows: Tensor  # [lookups] int64; 0 where a lookup does not count
    bag_of: Tensor  # [lookups] int64
    used: Tensor  # [lookups] bool: it counts
    ends: Tensor  # [bags + 1] int64, rising, at most lookups: where bags begin, and the last one ends


def lookups_of(
    indices: Tensor, offsets: Tensor, rows: int, include_last_offset: bool, padding_idx: int
) -> Lookups:
    """For at least one bag and one row, and any contents of indices and offsets."""
    count = indices.numel()
    ends = offsets.to(torch.int64)
    if not include_last_offset:
        ends = pad(ends, (0, 1), value=count)
    ends = ends.clamp(0, count).cummax(0).values
    bags = ends.numel() - 1
    bag_of = torch.searchsorted(ends, torch.arange(count, device=ends.device), right=True) - 1
    used = (bag_of >= 0) & (bag_of < bags) & (indices >= 0) & (indices < rows)
    if padding_idx >= 0:
        used &= indices != padding_idx
    return Lookups(torch.where(used, indices.to(torch.int64), 0), bag_of.clamp(0, bags - 1), used, ends)


def _used_before(found: Lookups) -> Tensor:
    """``[bags + 1]`` int64: how many lookups count before each bag."""
    return pad(found.used.cumsum(0), (1, 0))[found.ends]


def _divisors(found: Lookups, pooling: int) -> Tensor:
    """What the gradient of each bag is divided by, in ATen's form: sizes for mean, nothing for the others."""
    return _used_before(found).diff().clamp(min=1) if pooling == MEAN else no_integers(found.ends)


def _winners(weight: Tensor, found: Lookups) -> Tensor:
    """``[bags, dim]`` int64: the row that each element of the maximum came from; of no use where a bag is
    empty.

    Lookups that do not count go behind the others, into a bag of their own.
    """
    order = torch.sort(found.used.logical_not().to(torch.uint8), stable=True).indices
    winners = aten._embedding_bag(
        weight, found.rows[order], _used_before(found), False, MAX, False, None, False, -1
    )[3]
    return winners[:-1]


def _max_grad(grad: Tensor, weight: Tensor, found: Lookups) -> Tensor:
    """``[rows, dim]``: each element of grad goes to the row that won it, in an order that is always the same
    (ATen's own adds in any order).
    """
    rows, dim = weight.shape
    empty = _used_before(found).diff() == 0
    winners = torch.where(empty[:, None], rows, _winners(weight, found))
    places = winners * dim + torch.arange(dim, device=grad.device)
    total = grad.new_zeros((rows + 1) * dim, dtype=sum_dtype(grad.dtype))
    # "unsafe" only means that it does not look at the places, for which it would wait.
    aten._index_put_impl_(
        total, [places.reshape(-1)], grad.to(total.dtype).reshape(-1), accumulate=True, unsafe=True
    )
    return total.view(rows + 1, dim)[:rows].to(grad.dtype)


def dense_weight_grad(
    grad: Tensor,
    weight: Tensor | None,
    rows: int,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Gradient of one table: ``[rows, dim]`` of grad's dtype. ``weight`` only matters to max."""
    if indices.numel() == 0 or rows * grad.numel() == 0:
        return grad.new_zeros(rows, grad.shape[1])
    found = lookups_of(indices, offsets, rows, include_last_offset, padding_idx)
    if pooling == MAX:
        assert weight is not None
        return _max_grad(grad, weight, found)
    total = aten._embedding_bag_dense_backward(
        grad.contiguous(),
        torch.where(found.used, found.rows, rows),
        found.bag_of,
        _divisors(found, pooling),
        no_integers(found.ends),
        rows + 1,
        scale_grad_by_freq,
        pooling,
        None if sample_weights is None else sample_weights.to(grad.dtype).contiguous(),
        -1,
    )
    return total[:rows]


def sparse_weight_grad(
    grad: Tensor,
    rows: int,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Gradient of one table: sparse COO ``[rows, dim]`` of grad's dtype, one entry a lookup that counts."""
    if indices.numel() == 0 or rows * grad.shape[0] == 0:
        none = grad.new_empty((1, 0), dtype=torch.int64)
        return sparse_grad(none[0], grad.new_empty((0, grad.shape[1])), (rows, grad.shape[1]))
    found = lookups_of(indices, offsets, rows, include_last_offset, padding_idx)
    kept = found.used.nonzero()[:, 0]
    return aten._embedding_bag_sparse_backward(
        grad,
        found.rows[kept],
        found.ends,
        found.bag_of[kept],
        _divisors(found, pooling),
        rows,
        scale_grad_by_freq,
        pooling,
        None if sample_weights is None else sample_weights[kept].to(grad.dtype),
        -1,
    )


def sample_weights_grad(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    padding_idx: int,
) -> Tensor:
    """Gradient of the per-sample weights of one table: ``[lookups]`` of grad's dtype, zero where a lookup
    does not count.
    """
    if indices.numel() == 0 or weight.numel() * grad.shape[0] == 0:
        return grad.new_zeros(indices.numel())
    found = lookups_of(indices, offsets, weight.shape[0], include_last_offset, padding_idx)
    if grad.dtype == torch.float32:
        products = aten._embedding_bag_per_sample_weights_backward(
            grad.contiguous(), weight, found.rows, found.ends, found.bag_of, SUM, -1
        )
    else:  # ATen multiplies in float16, and not at all in bfloat16
        parts = zip(found.bag_of.split(_CHUNK), found.rows.split(_CHUNK), strict=True)
        products = torch.cat([(grad[bags].float() * weight[rows].float()).sum(1) for bags, rows in parts])
    return torch.where(found.used, products, 0).to(grad.dtype)
