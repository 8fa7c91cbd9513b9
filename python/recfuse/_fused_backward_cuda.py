"""Gradients of the fused embedding bags on the GPU, by calling ATen's backward functions.

As in ``_backward_cuda``, nothing bad may reach those: lookups that do not count (out of their table, in no
bag, of a padding row) are sorted behind the others, or led to a row of their own, whose gradient is dropped.

Tables of one dim, put under each other, are one table to ATen. Where there is one dim alone, and while a
graph is captured, each such table gets all lookups, and nothing waits for the GPU. Else the lookups are
sorted by feature, and their counts are read once. Sparse gradients, whose size depends on them, do that
always.

Runs on any device: the tests compare it with ``_fused_backward`` on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._backward import MEAN, SUM, aten, no_integers
from recfuse._backward_cuda import Lookups, bag_lookups, max_grad, row_products
from recfuse._fused_backward import FusedLayout, Group, group_bag_grads
from recfuse._upload import integers_on

_MOST_ROWS = sys.maxsize


class _Places(NamedTuple):
    """What the GPU needs to know of each feature; each [features] int64."""

    rows: Tensor  # of its table
    padding_idx: Tensor
    column: Tensor
    is_mean: Tensor
    group: Tensor  # -1: pools by max
    in_group: Tensor  # its number in the group
    first_row: Tensor  # of its table in the group
    rank: Tensor  # its number in `order`
    order: Tensor  # numbers of features: group after group, table after table, those that pool by max last


class _Layout:
    """A fused call's features, on the host and on the GPU."""

    def __init__(self, features: Tensor, device: torch.device) -> None:
        self.host = FusedLayout(features)
        self.groups = self.host.grouped(sys.maxsize)
        count = len(self.host.features)
        group_of, in_group, first_row = [-1] * count, [0] * count, [0] * count
        self.order: list[int] = []
        for number, group in enumerate(self.groups):
            group.features.sort(key=lambda one: self.host.features[one].slot)  # stable
            for place, feature in enumerate(group.features):
                group_of[feature], in_group[feature] = number, place
                first_row[feature] = group.first_row[self.host.features[feature].slot]
            self.order += group.features
        self.order += self.host.by_max
        self.rank = [0] * count
        self.of_slot: list[list[int]] = [[] for _ in self.host.slots]  # features, but those that pool by max
        for place, feature in enumerate(self.order):
            self.rank[feature] = place
            if group_of[feature] >= 0:
                self.of_slot[self.host.features[feature].slot].append(feature)
        own = self.host.features
        columns = (
            [self.host.slots[one.slot].rows for one in own],
            [one.padding_idx for one in own],
            [one.column for one in own],
            [int(one.pooling == MEAN) for one in own],
            group_of,
            in_group,
            first_row,
            self.rank,
            self.order,
        )
        self.flat = integers_on([value for column in columns for value in column], device)
        self.places = _Places(*self.flat.view(len(columns), count).unbind(0))


_MOST_LAYOUTS = 16
_layouts: dict[tuple[bytes, torch.device], _Layout] = {}  # of calls before, by what is in `features`
_captured: list[_Layout] = []  # those that graphs read at each replay


def _layout(features: Tensor, device: torch.device) -> _Layout:
    key = features.contiguous().numpy().tobytes(), device
    layout = _layouts.get(key)
    if _capturing(device):
        layout = layout or _Layout(features, device)  # a new one is filled only when the graph is replayed
        _captured.append(layout)
        return layout
    if layout is None:
        layout = _Layout(features, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the next call may be on another stream
        while len(_layouts) >= _MOST_LAYOUTS:
            _layouts.pop(next(iter(_layouts)), None)
        _layouts[key] = layout
    elif device.type == "cuda":
        layout.flat.record_stream(torch.cuda.current_stream(device))
    return layout


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Part(NamedTuple):
    """Lookups of some features."""

    at: Tensor | None  # [n] where they are among all; None: these are all
    row: Tensor  # [n] in their own table
    feature: Tensor  # [n]
    bag: Tensor  # [n] of their feature
    used: Tensor | None  # [n] which of them count, and are of these features; None: each

    def of(self, values: Tensor) -> Tensor:
        """[n]: their part of a tensor of lookups."""
        return values if self.at is None else values[self.at]

    def where_used(self, values: Tensor, other: int) -> Tensor:
        """[n]: values, or `other` for lookups that do not count."""
        return values if self.used is None else torch.where(self.used, values, other)


class _Found:
    """The lookups of a call, of any contents; for at least one bag and one lookup."""

    def __init__(self, layout: _Layout, indices: Tensor, offsets: Tensor, wait: bool) -> None:
        self.layout, places = layout, layout.places
        count, features = indices.numel(), len(layout.host.features)
        self.bags = (offsets.numel() - 1) // features
        found = bag_lookups(indices, offsets, _MOST_ROWS, True, -1)[0]
        self.row, bag_of = found[:count], found[count : 2 * count]
        self.feature = torch.div(bag_of, self.bags, rounding_mode="floor")
        self.bag = bag_of - self.feature * self.bags
        self.used = self.row < places.rows[self.feature]
        self.used &= self.row != places.padding_idx[self.feature]
        sizes = self.row.new_zeros(features * self.bags)
        sizes.scatter_add_(0, bag_of, self.used.to(torch.int64))
        self.sizes = sizes.clamp_(min=1).view(features, self.bags)  # lookups that count
        self.bounds: list[int] = []
        if wait:
            key = torch.where(self.used, places.rank[self.feature], features).to(torch.int32)
            self.sorted = torch.sort(key, stable=True).indices
            counts = self.row.new_zeros(features + 1).scatter_add_(0, key.long(), torch.ones_like(self.row))
            self.bounds = [0, *counts.cumsum(0).tolist()]

    def part(self, numbers: Sequence[int]) -> _Part:
        """Lookups of features that are neighbours in the layout's order."""
        first = self.layout.rank[numbers[0]]
        if not self.bounds:
            used = self.used
            if len(numbers) < len(self.layout.order):
                rank = self.layout.places.rank[self.feature]
                used = used & (rank >= first) & (rank < first + len(numbers))
            return _Part(None, self.row, self.feature, self.bag, used)
        at = self.sorted[self.bounds[first] : self.bounds[first + len(numbers)]]
        return _Part(at, self.row[at], self.feature[at], self.bag[at], None)

    def bag_grads(self, group: Group, grad: Tensor) -> Tensor:
        """[group's features * B, dim]: the group's columns of grad, feature-major, those of means divided."""
        places, first = self.layout.places, self.layout.rank[group.features[0]]
        numbers = places.order[first : first + len(group.features)]
        divisors = None
        if any(self.layout.host.features[number].pooling == MEAN for number in group.features):
            divisors = torch.where(places.is_mean[numbers][:, None] == 1, self.sizes[numbers], 1)
        return group_bag_grads(grad, places.column[numbers], group.dim, divisors)

    def row_of_bag_grads(self, part: _Part) -> Tensor:
        """[n]: which row of `bag_grads` a lookup has; 0 where it does not count."""
        places = self.layout.places
        return part.where_used(places.in_group[part.feature] * self.bags + part.bag, 0)


def dense_grads(
    features: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weights: Sequence[Tensor],
) -> tuple[FusedLayout, list[Tensor]]:
    """Gradient of each slot: ``[rows, dim]`` of grad's dtype. ``weights`` (a tensor a slot) only matter to
    max.
    """
    layout = _layout(features, grad.device)
    if grad.numel() == 0 or indices.numel() == 0:
        return layout.host, [grad.new_zeros(slot.rows, slot.dim) for slot in layout.host.slots]
    one_table = len(layout.groups) + len(layout.host.by_max) == 1
    found = _Found(layout, indices, offsets, wait=not (one_table or _capturing(grad.device)))
    return layout.host, layout.host.by_slot(
        layout.groups,
        lambda group: _group_grad(group, found, grad, sample_weights),
        lambda number: _max_feature_grad(number, found, grad, weights),
    )


def _group_grad(group: Group, found: _Found, grad: Tensor, sample_weights: Tensor | None) -> Tensor:
    """[group's rows or one more, dim]"""
    part = found.part(group.features)
    if part.row.numel() == 0 or group.dim == 0:
        return grad.new_zeros(group.rows, group.dim)
    row = part.where_used(found.layout.places.first_row[part.feature] + part.row, group.rows)
    return aten._embedding_bag_dense_backward(
        found.bag_grads(group, grad),
        row,
        found.row_of_bag_grads(part),
        no_integers(row),
        no_integers(row),
        group.rows + 1,
        False,
        SUM,
        None if sample_weights is None else part.of(sample_weights).to(grad.dtype).contiguous(),
        -1,
    )


def _max_feature_grad(number: int, found: _Found, grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    feature = found.layout.host.features[number]
    weight = weights[feature.slot]
    rows, dim = weight.shape
    part = found.part([number])
    if part.row.numel() == 0 or rows * dim == 0:
        return grad.new_zeros(rows, dim)
    lookups = Lookups(part.where_used(part.row, rows), part.where_used(part.bag, 0), found.sizes[number])
    return max_grad(grad[:, feature.column : feature.column + dim].contiguous(), weight, lookups)


def sparse_grads(
    features: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> tuple[FusedLayout, list[tuple[Tensor, Tensor]]]:
    """Gradient of each slot as (rows [n], values [n, dim] of grad's dtype), an entry a lookup that counts, in
    the order of the lookups.
    """
    layout = _layout(features, grad.device)
    slots = layout.host.slots
    layout.host.check_sparse()
    if grad.numel() == 0 or indices.numel() == 0:
        none = torch.empty(0, dtype=torch.int64, device=grad.device)
        return layout.host, [(none, grad.new_empty(0, slot.dim)) for slot in slots]
    found = _Found(layout, indices, offsets, wait=True)
    out: list[tuple[Tensor, Tensor] | None] = [None] * len(slots)
    for group in layout.groups:
        part = found.part(group.features)
        values = found.bag_grads(group, grad).index_select(0, found.row_of_bag_grads(part))
        if sample_weights is not None:
            values = values * part.of(sample_weights).to(values.dtype)[:, None]
        before = found.bounds[layout.rank[group.features[0]]]
        for slot in group.first_row:
            first = layout.rank[layout.of_slot[slot][0]]
            begin, end = found.bounds[first], found.bounds[first + len(layout.of_slot[slot])]
            here = slice(begin - before, end - before)
            out[slot] = part.row[here], values[here]
    return layout.host, [slot_grad for slot_grad in out if slot_grad is not None]


def sample_weights_grad(
    features: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """Gradient of the per-sample weights: ``[lookups]`` of grad's dtype, zero where a lookup does not count.
    ``weights``: a tensor a slot.
    """
    layout = _layout(features, grad.device)
    out = grad.new_zeros(indices.numel())
    if grad.numel() == 0 or indices.numel() == 0:
        return out
    found = _Found(layout, indices, offsets, wait=not _capturing(grad.device))
    for group in layout.groups:
        if group.dim == 0:
            continue
        grads = found.bag_grads(group, grad)
        for slot in group.first_row:
            part, weight = found.part(layout.of_slot[slot]), weights[slot]
            if part.row.numel() == 0 or weight.shape[0] == 0:
                continue
            row = part.where_used(part.row, 0)
            products = row_products(grads, found.row_of_bag_grads(part), weight, row)
            if part.at is None:
                out = torch.where(part.used, products.to(out.dtype), out)
            else:
                out[part.at] = products.to(out.dtype)
    return out
