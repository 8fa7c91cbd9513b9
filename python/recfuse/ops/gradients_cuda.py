"""The gradient operators on a GPU, by ATen's backward functions; on the CPU they are in C.

Only the sparse gradient, whose size depends on the lookups, waits for the GPU. Runs on any device: the tests
compare it with the C kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import DTYPES, MAX, SUM
from recfuse.ops.gradients import WeightGradCall
from recfuse.ops.library import library
from recfuse.ops.lookups_cuda import Features, Lookups, features_on

aten = torch.ops.aten

_CHUNK = 1 << 16  # lookups whose rows are gathered at once


def weight_grad(*arguments: Any) -> Tensor:
    """Gradient of a group, ``[rows, dim]``; arguments of a WeightGradCall."""
    call = WeightGradCall(*arguments)
    grad, rows, dim, dtype = call.grad, call.rows, call.dim, DTYPES[call.dtype]
    total = None
    if grad.numel() and call.indices.numel() and rows * dim:
        features = features_on(call.features, grad.device)
        lookups = Lookups(features, call.indices, call.offsets)
        total = _max_grad(features, call)
        if (pooled := lookups.pooled(call.group, grad, dim)) is not None:
            used, grads, grad_row = pooled
            row = torch.where(used, lookups.group_row, rows)
            added = _row_grads(call, grads, row, grad_row, rows + 1, call.per_sample_weights)
            total = added if total is None else total.add_(added)
    return grad.new_zeros((rows, dim), dtype=dtype) if total is None else total[:rows].to(dtype)


def _row_grads(
    call: WeightGradCall, grads: Tensor, row: Tensor, grad_row: Tensor, rows: int, factors: Tensor | None
) -> Tensor:
    """[rows, dim]: row `grad_row` of `grads`, times its factor, is added to `row`, lookup by lookup."""
    if factors is not None:
        factors = factors.to(call.grad.dtype).contiguous()
    none = row.new_empty(0)
    return aten._embedding_bag_dense_backward(
        grads, row, grad_row, none, none, rows, call.scale_grad_by_freq, SUM, factors, -1
    )


def _max_grad(features: Features, call: WeightGradCall) -> Tensor | None:
    """``[rows + 1, dim]`` float32: each element of grad goes to the row that won it, in an order that is
    always the same (ATen's own adds in any order). None: no feature of the group pools by max.
    """
    grad, rows, dim, winners = call.grad, call.rows, call.dim, call.winners
    begin, end = features.of_group(call.group, by_max=True)
    if begin == end:
        return None
    assert winners is not None, "winners is None, must be the rows that won where a feature pools by max"
    numbers = features.on_device.order[begin:end]
    columns = features.columns(numbers, dim)
    won = winners.index_select(1, columns).view(-1, end - begin, dim)
    elements = torch.where(won < 0, rows, won + features.first_row[numbers][:, None]) * dim
    elements += torch.arange(dim, device=grad.device)
    total = grad.new_zeros((rows + 1) * dim, dtype=torch.float32)
    added = grad.index_select(1, columns).float().reshape(-1)
    # "unsafe" only means that it does not look at the indices, for which it would wait.
    aten._index_put_impl_(total, [elements.reshape(-1)], added, accumulate=True, unsafe=True)
    return total.view(rows + 1, dim)


def sparse_weight_grad(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Gradient of a group as the rows that it has, rising, and their values ``[rows found, dim]``."""
    call = WeightGradCall(*arguments)
    grad, indices, dim, dtype = call.grad, call.indices, call.dim, DTYPES[call.dtype]
    if grad.numel() and indices.numel() and call.rows * dim:
        lookups = Lookups(features_on(call.features, grad.device), indices, call.offsets)
        if (pooled := lookups.pooled(call.group, grad, dim)) is not None:
            used, grads, grad_row = pooled
            kept = used.nonzero()[:, 0]
            rows, row = torch.unique(lookups.group_row[kept], sorted=True, return_inverse=True)
            factors = None if call.per_sample_weights is None else call.per_sample_weights[kept]
            if kept.numel():
                values = _row_grads(call, grads, row, grad_row[kept], rows.numel(), factors)
                return rows, values.to(dtype)
    return indices.new_empty(0, dtype=torch.int64), grad.new_empty((0, dim), dtype=dtype)


def winners(
    weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, output_dim: int
) -> Tensor:
    """int64 ``[bags, output_dim]``: which row of its table won each maximum; -1: an empty bag, or another
    pooling.
    """
    on_gpu = features_on(features, indices.device)
    bags = (offsets.numel() - 1) // max(len(on_gpu.host), 1)
    out = indices.new_full((bags, output_dim), -1, dtype=torch.int64)
    if out.numel() == 0 or indices.numel() == 0:
        return out
    lookups = Lookups(on_gpu, indices, offsets)
    for number in on_gpu.by_max():
        weight, offset, rows, dim, _, _, column = on_gpu.host[number]
        if rows * dim == 0:
            continue
        # ATen finds them, with lookups that do not count behind the others, in a bag of their own.
        used = lookups.used & (lookups.feature == number)
        in_order = torch.where(used, lookups.bag, bags).sort(stable=True)
        begins = torch.searchsorted(in_order.values, torch.arange(bags + 1, device=out.device))
        row = torch.where(used, lookups.row, 0)[in_order.indices]
        table = weights[weight].view(-1).narrow(0, offset, rows * dim).view(rows, dim)
        won = aten._embedding_bag(table, row, begins, False, MAX, False, None, False, -1)[3][:-1]
        out[:, column : column + dim] = torch.where(begins.diff()[:, None] == 0, -1, won)
    return out


def sample_weights_grad(
    grad: Tensor, weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor
) -> Tensor:
    """Gradient of the per-sample weights: float32 ``[lookups]``, zero where a lookup does not count."""
    out = grad.new_zeros(indices.numel(), dtype=torch.float32)
    if grad.numel() == 0 or indices.numel() == 0:
        return out
    lookups = Lookups(features_on(features, grad.device), indices, offsets)
    for group, weight in enumerate(weights):
        pooled = lookups.pooled(group, grad, weight.shape[1]) if weight.numel() else None
        if pooled is not None:
            used, grads, grad_row = pooled
            row = torch.where(used, lookups.group_row, 0)
            out = torch.where(used, _row_products(grads, grad_row, weight, row), out)
    return out


def _row_products(grads: Tensor, grad_row: Tensor, weight: Tensor, row: Tensor) -> Tensor:
    """[n] float32: products of rows of two matrices."""
    if grads.dtype == weight.dtype == torch.float32:
        return aten._embedding_bag_per_sample_weights_backward(
            grads, weight, row, row.new_empty(0), grad_row, SUM, -1
        )
    # ATen multiplies in float16, and not at all in bfloat16.
    chunks = zip(grad_row.split(_CHUNK), row.split(_CHUNK), strict=True)
    return torch.cat([(grads[at].float() * weight[rows].float()).sum(1) for at, rows in chunks])


for _name, _kernel in (
    ("winners", winners),
    ("sample_weights_backward", sample_weights_grad),
):
    library.impl(f"fused_embedding_bag_{_name}", _kernel, "CUDA")
