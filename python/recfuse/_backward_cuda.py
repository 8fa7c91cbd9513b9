"""Gradients of one table's embedding bag on the GPU, by calling ATen's backward functions.

The forward kernel survives bad indices and offsets, and reports them later; ATen's kernels assert on them,
which ends the process's CUDA context. So nothing bad may reach them: lookups that do not count (out of the
table, in no bag, of the padding row; csrc/bag_lookups.h) are led to a row or a bag of their own, whose
gradient is dropped.
Only the sparse gradient, whose size depends on them, waits for the GPU.

Runs on any device: the tests compare it with `_backward` on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._backward import MAX, MEAN, SUM, aten, no_integers, sparse_grad, sum_dtype

bag_lookups = torch.ops.recfuse._bag_lookups.default

_CHUNK = 1 << 16  # lookups whose rows are gathered at once


class Lookups(NamedTuple):
    """Which lookups count, and where."""

    row: Tensor  # [lookups] int64; the table's number of rows where a lookup does not count
    bag_of: Tensor  # [lookups] int64; 0 where it does not
    sizes: Tensor  # [bags] int64: lookups that count, at least 1


def lookups_of(
    indices: Tensor, offsets: Tensor, rows: int, include_last_offset: bool, padding_idx: int
) -> Lookups:
    """For at least one bag, and any contents of indices and offsets."""
    count = indices.numel()
    found = bag_lookups(indices, offsets, rows, include_last_offset, padding_idx)[0]
    return Lookups(found[:count], found[count : 2 * count], found[2 * count :])


def max_grad(grad: Tensor, weight: Tensor, found: Lookups) -> Tensor:
    """``[rows, dim]``: each element of grad goes to the row that won it, in an order that is always the same
    (ATen's own adds in any order).

    ATen finds the winners again, with lookups that do not count behind the others, in a bag of their own.
    """
    rows, dim = weight.shape
    bags = grad.shape[0]
    used = found.row < rows
    in_order = torch.where(used, found.bag_of, bags).sort(stable=True)
    begins = torch.searchsorted(in_order.values, torch.arange(bags + 1, device=grad.device))
    winners = aten._embedding_bag(
        weight, torch.where(used, found.row, 0)[in_order.indices], begins, False, MAX, False, None, False, -1
    )[3][:-1]
    places = torch.where(begins.diff()[:, None] == 0, rows, winners) * dim
    places += torch.arange(dim, device=grad.device)
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
        return max_grad(grad, weight, found)
    total = aten._embedding_bag_dense_backward(
        grad.contiguous(),
        found.row,
        found.bag_of,
        found.sizes if pooling == MEAN else no_integers(found.sizes),
        no_integers(found.sizes),
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
    kept = (found.row < rows).nonzero()[:, 0]
    return aten._embedding_bag_sparse_backward(
        grad,
        found.row[kept],
        no_integers(found.row),
        found.bag_of[kept],
        found.sizes if pooling == MEAN else no_integers(found.sizes),
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
    used = found.row < weight.shape[0]
    row = torch.where(used, found.row, 0)
    if grad.dtype == torch.float32:
        products = aten._embedding_bag_per_sample_weights_backward(
            grad.contiguous(), weight, row, no_integers(row), found.bag_of, SUM, -1
        )
    else:  # ATen multiplies in float16, and not at all in bfloat16
        products = row_products(grad, found.bag_of, weight, row)
    return torch.where(used, products, 0).to(grad.dtype)


def row_products(grads: Tensor, grad_row: Tensor, weight: Tensor, row: Tensor) -> Tensor:
    """[n] float32: products of rows of two matrices."""
    parts = zip(grad_row.split(_CHUNK), row.split(_CHUNK), strict=True)
    return torch.cat([(grads[one].float() * weight[other].float()).sum(1) for one, other in parts])
