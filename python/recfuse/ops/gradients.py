"""Gradients of embedding bags on the GPU, by calling ATen's backward functions.

The operators whose CPU kernels are C: gradients of one group (a matrix whose rows are those of tables), of
the per-sample weights, and the rows that won a maximum.

The forward kernel survives bad indices and offsets, and reports them later; ATen's kernels assert on them,
which ends the process's CUDA context. So nothing bad may reach them: lookups that do not count (out of their
table, in no bag, of a padding row, of another group) are led to a row of their own, whose gradient is
dropped. Only the sparse gradient, whose size depends on them, waits for the GPU.

Runs on any device: the tests compare it with the C kernels on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._codes import DTYPES, MAX, MEAN, SUM
from recfuse._upload import integers_on

aten = torch.ops.aten
bag_lookups = torch.ops.recfuse._bag_lookups.default

_MOST_ROWS = sys.maxsize
_CHUNK = 1 << 16  # lookups whose rows are gathered at once


class _Columns(NamedTuple):
    """What the GPU needs to know of each feature; each [features] int64."""

    weight: Tensor  # its group
    offset: Tensor  # first element of its table in the group
    rows: Tensor  # of its table
    dim: Tensor
    pooling: Tensor
    padding_idx: Tensor
    column: Tensor  # its first one in the output
    rank: Tensor  # its number in `order`
    order: Tensor  # numbers of features: group after group, in a group those that pool by max last


class _Features:
    """A call's features, on the host and on the GPU."""

    def __init__(self, features: Tensor, device: torch.device) -> None:
        self.host: list[list[int]] = features.tolist()
        self.order = sorted(range(len(self.host)), key=lambda one: (self.host[one][0], self._by_max(one)))
        rank = [0] * len(self.order)
        for place, number in enumerate(self.order):
            rank[number] = place
        rows = [*zip(*self.host, strict=True), rank, self.order]
        self.flat = integers_on([value for row in rows for value in row], device)
        self.on_device = _Columns(*self.flat.view(len(_Columns._fields), len(rank)).unbind(0))
        offset, dim = self.on_device.offset, self.on_device.dim
        self.first_row = torch.div(offset, dim.clamp(min=1), rounding_mode="floor")

    def of_group(self, group: int, by_max: bool) -> tuple[int, int]:
        """Where in `order` the features of a group begin and end: those that pool by max, or the others."""
        own = [
            place
            for place, number in enumerate(self.order)
            if self.host[number][0] == group and self._by_max(number) == by_max
        ]
        return (own[0], own[-1] + 1) if own else (0, 0)

    def by_max(self) -> list[int]:
        """Numbers of the features that pool by max."""
        return [number for number in range(len(self.host)) if self._by_max(number)]

    def columns(self, numbers: Tensor, dim: int) -> Tensor:
        """[features * dim]: columns of some features in the output."""
        first = self.on_device.column[numbers]
        return (first[:, None] + torch.arange(dim, device=first.device)).reshape(-1)

    def _by_max(self, number: int) -> bool:
        return self.host[number][4] == MAX


_MOST_FEATURES = 16
_known: dict[tuple[bytes, torch.device], _Features] = {}  # of calls before, by what is in `features`
_captured: list[_Features] = []  # those that graphs read at each replay


def _features_on(features: Tensor, device: torch.device) -> _Features:
    key = features.contiguous().numpy().tobytes(), device
    found = _known.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        found = found or _Features(features, device)  # a new one is filled only when the graph is replayed
        _captured.append(found)
        return found
    if found is None:
        found = _Features(features, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the next call may be on another stream
        while len(_known) >= _MOST_FEATURES:
            _known.pop(next(iter(_known)), None)
        _known[key] = found
    elif device.type == "cuda":
        for tensor in (found.flat, found.first_row):
            tensor.record_stream(torch.cuda.current_stream(device))
    return found


class _Lookups:
    """The lookups of a call, of any contents; for at least one bag and one lookup."""

    def __init__(self, features: _Features, indices: Tensor, offsets: Tensor) -> None:
        self.features, known = features, features.on_device
        count, n_features = indices.numel(), len(features.host)
        self.bags = (offsets.numel() - 1) // n_features
        found = bag_lookups(indices, offsets, _MOST_ROWS, True, -1)[0]
        self.row, bag_of = found[:count], found[count : 2 * count]
        self.feature = torch.div(bag_of, self.bags, rounding_mode="floor")
        self.bag = bag_of - self.feature * self.bags
        self.used = self.row < known.rows[self.feature]
        self.used &= self.row != known.padding_idx[self.feature]
        sizes = self.row.new_zeros(n_features * self.bags)
        sizes.scatter_add_(0, bag_of, self.used.to(torch.int64))
        self.sizes = sizes.clamp_(min=1).view(n_features, self.bags)  # lookups that count
        self.group_row = features.first_row[self.feature] + self.row

    def pooled(self, group: int, grad: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What a group's features that do not pool by max have: which lookups are theirs and count [lookups],
        the gradients of their bags [features * bags, dim] (those of means divided), and which row of these a
        lookup has [lookups], 0 where it does not count. None: no such feature.
        """
        known = self.features.on_device
        begin, end = self.features.of_group(group, by_max=False)
        if begin == end:
            return None
        used, rank = self.used, known.rank[self.feature]
        if end - begin < len(self.features.host):
            used = used & (rank >= begin) & (rank < end)
        numbers = known.order[begin:end]
        grads = grad.index_select(1, self.features.columns(numbers, dim))
        grads = grads.view(grad.shape[0], end - begin, dim).transpose(0, 1)
        if any(self.features.host[number][4] == MEAN for number in self.features.order[begin:end]):
            is_mean = (known.pooling[numbers] == MEAN)[:, None]
            grads = grads.float() / torch.where(is_mean, self.sizes[numbers], 1)[:, :, None]
        grads = grads.to(grad.dtype).reshape((end - begin) * self.bags, dim)
        return used, grads, torch.where(used, (rank - begin) * self.bags + self.bag, 0)


def weight_grad(
    grad: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    group: int,
    rows: int,
    dim: int,
    dtype: int,
    per_sample_weights: Tensor | None,
    winners: Tensor | None,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Gradient of a group, ``[rows, dim]``."""
    kind = DTYPES[dtype]
    if grad.numel() == 0 or indices.numel() == 0 or rows * dim == 0:
        return grad.new_zeros((rows, dim), dtype=kind)
    known = _features_on(features, grad.device)
    lookups = _Lookups(known, indices, offsets)
    total = _max_grad(known, grad, group, rows, dim, winners)
    if (pooled := lookups.pooled(group, grad, dim)) is not None:
        used, grads, grad_row = pooled
        row = torch.where(used, lookups.group_row, rows)
        part = aten._embedding_bag_dense_backward(
            grads,
            row,
            grad_row,
            _none(row),
            _none(row),
            rows + 1,
            scale_grad_by_freq,
            SUM,
            None if per_sample_weights is None else per_sample_weights.to(grad.dtype).contiguous(),
            -1,
        )
        total = part if total is None else total.add_(part)
    return grad.new_zeros((rows, dim), dtype=kind) if total is None else total[:rows].to(kind)


def _max_grad(
    known: _Features, grad: Tensor, group: int, rows: int, dim: int, winners: Tensor | None
) -> Tensor | None:
    """``[rows + 1, dim]`` float32: each element of grad goes to the row that won it, in an order that is
    always the same (ATen's own adds in any order). None: no feature of the group pools by max.
    """
    begin, end = known.of_group(group, by_max=True)
    if begin == end:
        return None
    assert winners is not None, "winners is None, must be the rows that won where a feature pools by max"
    numbers = known.on_device.order[begin:end]
    columns = known.columns(numbers, dim)
    won = winners.index_select(1, columns).view(-1, end - begin, dim)
    places = torch.where(won < 0, rows, won + known.first_row[numbers][:, None]) * dim
    places += torch.arange(dim, device=grad.device)
    total = grad.new_zeros((rows + 1) * dim, dtype=torch.float32)
    # "unsafe" only means that it does not look at the places, for which it would wait.
    aten._index_put_impl_(
        total,
        [places.reshape(-1)],
        grad.index_select(1, columns).float().reshape(-1),
        accumulate=True,
        unsafe=True,
    )
    return total.view(rows + 1, dim)


def sparse_weight_grad(
    grad: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    group: int,
    rows: int,
    dim: int,
    dtype: int,
    per_sample_weights: Tensor | None,
    winners: Tensor | None,
    scale_grad_by_freq: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradient of a group as the rows that it has, rising, and their values ``[rows found, dim]``."""
    found = values = None
    if grad.numel() and indices.numel() and rows * dim:
        known = _features_on(features, grad.device)
        lookups = _Lookups(known, indices, offsets)
        if (pooled := lookups.pooled(group, grad, dim)) is not None:
            used, grads, grad_row = pooled
            kept = used.nonzero()[:, 0]
            found, row = torch.unique(lookups.group_row[kept], sorted=True, return_inverse=True)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.to(grad.dtype)[kept]
            values = aten._embedding_bag_dense_backward(
                grads,
                row,
                grad_row[kept],
                _none(row),
                _none(row),
                found.numel(),
                scale_grad_by_freq,
                SUM,
                per_sample_weights,
                -1,
            ) if kept.numel() else None  # fmt: skip
    if found is None or values is None:
        return indices.new_empty(0, dtype=torch.int64), grad.new_empty((0, dim), dtype=DTYPES[dtype])
    return found, values.to(DTYPES[dtype])


def winners(
    weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, output_dim: int
) -> Tensor:
    """int64 ``[bags, output_dim]``: which row of its table won each maximum; -1: an empty bag, or another
    pooling.
    """
    known = _features_on(features, indices.device)
    bags = (offsets.numel() - 1) // max(len(known.host), 1)
    out = indices.new_full((bags, output_dim), -1, dtype=torch.int64)
    if out.numel() == 0 or indices.numel() == 0:
        return out
    lookups = _Lookups(known, indices, offsets)
    for number in known.by_max():
        weight, offset, rows, dim, _, _, column = known.host[number]
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
    lookups = _Lookups(_features_on(features, grad.device), indices, offsets)
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
            grads, weight, row, _none(row), grad_row, SUM, -1
        )
    # ATen multiplies in float16, and not at all in bfloat16.
    parts = zip(grad_row.split(_CHUNK), row.split(_CHUNK), strict=True)
    return torch.cat([(grads[one].float() * weight[other].float()).sum(1) for one, other in parts])


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0)
