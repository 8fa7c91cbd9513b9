"""Gradients of the fused embedding bags: of the packed tables, and of the per-sample weights.

As in ``_backward``: plain CPU tensors, float32 sums, ATen's backward functions. The cost grows with lookups
plus rows, not with features times rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._backward import MAX, MEAN, SUM, Bags, aten, bags_of, max_grad, no_integers, sum_dtype
from recfuse._backward import sample_weights_grad as one_table_sample_weights_grad
from recfuse.errors import ArgumentValueError


class Slot(NamedTuple):
    """A table's place in the packed buffers."""

    buffer: int
    offset: int
    rows: int
    dim: int


class Feature(NamedTuple):
    """One feature of a fused call."""

    slot: int
    pooling: int
    padding_idx: int
    column: int


@dataclass
class _Group:
    """Features of one dim, pooled by sum or mean: one call of ATen serves them all, because rows of their
    tables, put under each other, are the rows of one table."""

    dim: int
    features: list[int] = field(default_factory=list)
    first_row: dict[int, int] = field(default_factory=dict)  # slot -> its first row in the group
    rows: int = 0

    def add(self, number: int, feature: Feature, slot: Slot) -> None:
        self.features.append(number)
        if feature.slot not in self.first_row:
            self.first_row[feature.slot] = self.rows
            self.rows += slot.rows


class _Lookups(NamedTuple):
    """The lookups of a group, as ATen wants them."""

    grad: Tensor  # [group's features * B, dim], mean already divided
    rows: Tensor  # [n] row in the group
    bag_of: Tensor  # [n] row of grad
    sample_weights: Tensor | None  # [n]
    slot_of: Tensor  # [n] slot


class FusedLayout:
    """What a fused call's backward needs to know about its features.

    Made from a ``features`` tensor ([F, 7] int64, the array of ``rf_feature``).
    """

    def __init__(self, features: Tensor) -> None:
        numbers: dict[Slot, int] = {}
        self.features: list[Feature] = []
        for buffer, offset, rows, dim, pooling, padding_idx, column in features.tolist():
            slot = numbers.setdefault(Slot(buffer, offset, rows, dim), len(numbers))
            self.features.append(Feature(slot, pooling, padding_idx, column))
        self.slots = list(numbers)
        groups: dict[int, _Group] = {}
        for number, feature in enumerate(self.features):
            if feature.pooling != MAX:
                slot = self.slots[feature.slot]
                groups.setdefault(slot.dim, _Group(slot.dim)).add(number, feature, slot)
        self.groups = list(groups.values())
        self.any_mean = any(feature.pooling == MEAN for feature in self.features)
        self.any_max = any(feature.pooling == MAX for feature in self.features)
        self.any_padding = any(feature.padding_idx >= 0 for feature in self.features)

    def dense_grads(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradient of each slot: ``[rows, dim]`` in float32. ``weights`` (a tensor a slot) only matter to
        max.
        """
        dtype = sum_dtype(grad.dtype)
        bags = bags_of(indices, offsets, True)
        out: list[Tensor | None] = [None] * len(self.slots)
        for group in self.groups:
            found = self._lookups(group, grad.to(dtype), bags, sample_weights)
            total = self._group_grad(group, found, dtype)
            for slot, first in group.first_row.items():
                out[slot] = total[first : first + self.slots[slot].rows]
        if self.any_max:
            for number, feature in enumerate(self.features):
                if feature.pooling == MAX:
                    part = self._max_feature_grad(
                        number, feature, grad.to(dtype), weights[feature.slot], bags
                    )
                    known = out[feature.slot]
                    out[feature.slot] = part if known is None else known + part
        return [slot_grad for slot_grad in out if slot_grad is not None]

    def sparse_grads(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradient of each slot as (rows [n], values [n, dim]), one entry a lookup, in the order of the
        lookups.
        """
        if self.any_max:
            raise ArgumentValueError(
                "recfuse.fused_embedding_bag: sparse is True and a feature pools by max, which has no "
                "sparse gradient"
            )
        bags = bags_of(indices, offsets, True)
        out: list[tuple[Tensor, Tensor] | None] = [None] * len(self.slots)
        for group in self.groups:
            found = self._lookups(group, grad, bags, sample_weights)
            values = found.grad.index_select(0, found.bag_of)
            if found.sample_weights is not None:
                values = values * found.sample_weights.to(values.dtype)[:, None]
            slot_of, rows = found.slot_of, found.rows
            if not bool((slot_of.diff() >= 0).all()):
                # A table used by features that are not neighbours: bring its lookups together.
                order = torch.argsort(slot_of, stable=True)
                slot_of, rows, values = slot_of[order], rows[order], values[order]
            counts = torch.bincount(slot_of, minlength=len(self.slots)).tolist()
            at = 0
            for slot in sorted(group.first_row):
                part = slice(at, at + counts[slot])
                out[slot] = (rows[part] - group.first_row[slot], values[part])
                at += counts[slot]
        return [slot_grad for slot_grad in out if slot_grad is not None]

    def sample_weights_grad(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Gradient of the per-sample weights: ``[lookups]`` of grad's dtype."""
        bags = bags_of(indices, offsets, True)
        count = self._bags_per_feature(bags)
        out = grad.new_zeros(indices.numel())
        bounds = self._bounds(bags)
        for number, feature in enumerate(self.features):
            start, end = bounds[number], bounds[number + 1]
            if start < end:
                dim = self.slots[feature.slot].dim
                out[start:end] = one_table_sample_weights_grad(
                    grad[:, feature.column : feature.column + dim],
                    weights[feature.slot],
                    bags.indices[start:end],
                    bags.offsets[number * count : (number + 1) * count + 1] - start,
                    True,
                    feature.padding_idx,
                )
        return out

    def _bags_per_feature(self, bags: Bags) -> int:
        return bags.sizes.numel() // max(len(self.features), 1)

    def _bounds(self, bags: Bags) -> list[int]:
        """Where each feature's lookups begin, and where the last one's end."""
        count = self._bags_per_feature(bags)
        return bags.offsets[::count].tolist() if count else [0] * (len(self.features) + 1)

    def _per_feature(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def _lookups(self, group: _Group, grad: Tensor, bags: Bags, sample_weights: Tensor | None) -> _Lookups:
        count = self._bags_per_feature(bags)
        slot_of_feature = self._per_feature([feature.slot for feature in self.features])
        place = {number: at for at, number in enumerate(group.features)}
        first_row = [group.first_row.get(feature.slot, 0) for feature in self.features]
        shift = [(place.get(number, number) - number) * count for number in range(len(self.features))]

        indices, bag_of = bags.indices, bags.bag_of
        feature_of = torch.div(bag_of, max(count, 1), rounding_mode="floor")
        keep: Tensor | None = None
        if len(group.features) < len(self.features):
            inside = self._per_feature([int(number in place) for number in range(len(self.features))]).bool()
            keep = inside[feature_of]
        sizes = bags.sizes
        if self.any_padding:
            padding = self._per_feature([feature.padding_idx for feature in self.features])
            counted = indices != padding[feature_of]
            sizes = torch.bincount(bag_of[counted], minlength=sizes.numel())
            keep = counted if keep is None else keep & counted
        if sample_weights is not None:
            sample_weights = sample_weights[: indices.numel()]
        if keep is not None:
            indices, bag_of, feature_of = indices[keep], bag_of[keep], feature_of[keep]
            sample_weights = sample_weights[keep] if sample_weights is not None else None
        return _Lookups(
            self._group_bag_grads(group, grad, sizes, count),
            indices + self._per_feature(first_row)[feature_of],
            bag_of + self._per_feature(shift)[feature_of],
            sample_weights,
            slot_of_feature[feature_of],
        )

    def _group_bag_grads(self, group: _Group, grad: Tensor, sizes: Tensor, count: int) -> Tensor:
        """[group's features * B, dim]: the group's columns of grad, feature-major, those of means divided."""
        first = self._per_feature([self.features[number].column for number in group.features])
        columns = (first[:, None] + torch.arange(group.dim)).reshape(-1)
        rows = (
            grad.index_select(1, columns).view(grad.shape[0], len(group.features), group.dim).transpose(0, 1)
        )
        if self.any_mean:
            means = self._per_feature([int(self.features[n].pooling == MEAN) for n in group.features]).bool()
            divisors = sizes.view(-1, count)[self._per_feature(group.features)].clamp(min=1)
            divisors = torch.where(means[:, None], divisors, 1)
            rows = rows / divisors[:, :, None].to(rows.dtype)
        return rows.reshape(-1, group.dim)

    def _group_grad(self, group: _Group, found: _Lookups, dtype: torch.dtype) -> Tensor:
        """[group's rows, dim]"""
        if found.rows.numel() == 0 or group.dim == 0:
            return torch.zeros(group.rows, group.dim, dtype=dtype)
        weights = found.sample_weights
        return aten._embedding_bag_dense_backward(
            found.grad,
            found.rows,
            found.bag_of,
            no_integers(found.rows),
            no_integers(found.rows),
            group.rows,
            False,
            SUM,
            None if weights is None else weights.to(dtype).contiguous(),
            -1,
        )

    def _max_feature_grad(
        self, number: int, feature: Feature, grad: Tensor, weight: Tensor, bags: Bags
    ) -> Tensor:
        slot, count, bounds = self.slots[feature.slot], self._bags_per_feature(bags), self._bounds(bags)
        start, end = bounds[number], bounds[number + 1]
        if start == end or slot.dim == 0:
            return grad.new_zeros(slot.rows, slot.dim)
        return max_grad(
            grad[:, feature.column : feature.column + slot.dim].contiguous(),
            weight,
            Bags(
                bags.indices[start:end],
                bags.offsets[number * count : (number + 1) * count + 1] - start,
                bags.bag_of[start:end],
                bags.sizes,
            ),
            feature.padding_idx,
        )


def slot_weights(layout: FusedLayout, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Each slot's table, ``[rows, dim]``, as a view into its buffer."""
    return [
        buffers[slot.buffer].narrow(0, slot.offset, slot.rows * slot.dim).view(slot.rows, slot.dim)
        for slot in layout.slots
    ]


def flat_elements(parts: Sequence[tuple[Slot, Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements of a packed buffer and their gradients, both 1-D, from its slots' (rows, values)."""
    elements, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=dtype)]
    for slot, rows, slot_values in parts:
        start = slot.offset + rows * slot.dim
        elements.append((start[:, None] + torch.arange(slot.dim)).reshape(-1))
        values.append(slot_values.reshape(-1).to(dtype))
    return torch.cat(elements), torch.cat(values)
