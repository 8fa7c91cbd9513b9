"""Gradients of one table's embedding bag, by calling ATen's backward functions.

All functions take plain CPU tensors that no autograd graph follows, whose contents the forward pass has
checked. Dense gradients of half-precision tables are summed in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SUM, MEAN, MAX = 0, 1, 2
POOLING = {"sum": SUM, "mean": MEAN, "max": MAX}

aten = torch.ops.aten


class Bags(NamedTuple):
    """Which bag each lookup belongs to."""

    indices: Tensor  # [used lookups] int64
    offsets: Tensor  # [bags + 1] int64
    bag_of: Tensor  # [used lookups] int64
    sizes: Tensor  # [bags] int64


def bags_of(indices: Tensor, offsets: Tensor, include_last_offset: bool) -> Bags:
    """Lookups behind the last offset belong to no bag and are dropped."""
    ends = offsets.to(torch.int64)
    if not include_last_offset:
        ends = torch.cat((ends, ends.new_tensor([indices.numel()])))
    sizes = ends.diff()
    bag_of = torch.repeat_interleave(sizes)
    return Bags(indices[: bag_of.numel()].to(torch.int64), ends, bag_of, sizes)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_integers(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _without_padding(bags: Bags, padding_idx: int) -> Tensor:
    """Sizes of the bags, lookups of the padding row not counted."""
    if padding_idx < 0:
        return bags.sizes
    padded = bags.bag_of[bags.indices == padding_idx]
    return bags.sizes - torch.bincount(padded, minlength=bags.sizes.numel())


def max_grad(grad: Tensor, weight: Tensor, bags: Bags, padding_idx: int) -> Tensor:
    """``[rows, dim]``: each element of grad goes to the row that won it; ATen finds the winners again."""
    _, bag_of, sizes, winners = aten._embedding_bag(
        weight, bags.indices, bags.offsets, False, MAX, False, None, True, padding_idx
    )
    return aten._embedding_bag_dense_backward(
        grad.to(sum_dtype(grad.dtype)).contiguous(),
        bags.indices,
        bag_of,
        sizes,
        winners,
        weight.shape[0],
        False,
        MAX,
        None,
        padding_idx,
    )


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
    bags = bags_of(indices, offsets, include_last_offset)
    if bags.indices.numel() == 0 or rows * grad.shape[1] == 0:
        return grad.new_zeros(rows, grad.shape[1])
    if pooling == MAX:
        assert weight is not None
        return max_grad(grad, weight, bags, padding_idx).to(grad.dtype)
    dtype = sum_dtype(grad.dtype)
    if sample_weights is not None:
        sample_weights = sample_weights[: bags.indices.numel()].to(dtype).contiguous()
    total = aten._embedding_bag_dense_backward(
        grad.to(dtype).contiguous(),
        bags.indices,
        bags.bag_of,
        _without_padding(bags, padding_idx),
        no_integers(bags.indices),
        rows,
        scale_grad_by_freq,
        pooling,
        sample_weights,
        padding_idx,
    )
    return total.to(grad.dtype)


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
    """Gradient of one table: sparse COO ``[rows, dim]``, one entry a lookup, of grad's dtype."""
    bags = bags_of(indices, offsets, include_last_offset)
    if sample_weights is not None:
        sample_weights = sample_weights[: bags.indices.numel()].to(grad.dtype)
    return aten._embedding_bag_sparse_backward(
        grad,
        bags.indices,
        bags.offsets,
        bags.bag_of,
        _without_padding(bags, padding_idx),
        rows,
        scale_grad_by_freq,
        pooling,
        sample_weights,
        padding_idx,
    )


def sample_weights_grad(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    padding_idx: int,
) -> Tensor:
    """Gradient of the per-sample weights of one table: ``[lookups]`` of grad's dtype, zero where no bag uses
    one.
    """
    bags = bags_of(indices, offsets, include_last_offset)
    out = grad.new_zeros(indices.numel())
    if bags.indices.numel() and weight.shape[1]:
        out[: bags.indices.numel()] = aten._embedding_bag_per_sample_weights_backward(
            grad.contiguous(),
            weight.to(grad.dtype),
            bags.indices,
            bags.offsets,
            bags.bag_of,
            SUM,
            padding_idx,
        )
    return out


def sparse_grad(positions: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sparse COO tensor with ``values[i]`` at ``positions[i]`` of its first dimension."""
    return torch.sparse_coo_tensor(positions[None], values, shape, check_invariants=False)
