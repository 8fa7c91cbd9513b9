"""Gradients of the fused embedding bags on the CPU: of the packed tables, and of the per-sample weights.

As in ``_backward``: plain CPU tensors, float32 sums, ATen's backward functions. The cost grows with lookups
plus rows, not with features times rows. ``_fused_backward_cuda`` has those on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
class Group:
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


# A group's dense gradient is one allocation, and one much larger than this is new memory from the system at
# each step, whose page faults cost more than the sums. Tables above it are groups of their own.
_GROUP_ELEMENTS = 1 << 20


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
        self.by_max = [number for number, one in enumerate(self.features) if one.pooling == MAX]

    def grouped(self, most_elements: int) -> list[Group]:
        """Groups of features of one dim; a group with several tables has no more elements than that."""
        groups: list[Group] = []
        group_of_slot: dict[int, Group] = {}
        open_groups: dict[int, Group] = {}
        for number, feature in enumerate(self.features):
            if feature.pooling == MAX:
                continue
            slot = self.slots[feature.slot]
            group = group_of_slot.get(feature.slot) or open_groups.get(slot.dim)
            full = group is not None and (group.rows + slot.rows) * slot.dim > most_elements
            if group is None or (full and feature.slot not in group_of_slot):
                group = open_groups[slot.dim] = Group(slot.dim)
                groups.append(group)
            group_of_slot[feature.slot] = group
            group.add(number, feature, slot)
        return groups

    def check_sparse(self) -> None:
        """Raises ArgumentValueError where there is no sparse gradient."""
        if self.by_max:
            raise ArgumentValueError(
                "recfuse.fused_embedding_bag: sparse is True and a feature pools by max, which has no sparse "
                "gradient"
            )

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
        grad, bags = grad.to(dtype), bags_of(indices, offsets, True)
        bounds = self._bounds(bags)
        return self.by_slot(
            self.grouped(_GROUP_ELEMENTS),
            lambda group: self._group_grad(
                group, self._lookups(group, grad, bags, bounds, sample_weights), dtype
            ),
            lambda number: self._max_feature_grad(number, grad, weights, bags, bounds),
        )

    def by_slot(
        self,
        groups: Sequence[Group],
        group_grad: Callable[[Group], Tensor],
        max_feature_grad: Callable[[int], Tensor],
    ) -> list[Tensor]:
        """Gradient of each slot, from those of groups (which may have more rows) and of features that pool by
        max.
        """
        out: list[Tensor | None] = [None] * len(self.slots)
        for group in groups:
            total = group_grad(group)
            for slot, first in group.first_row.items():
                out[slot] = total[first : first + self.slots[slot].rows]
        for number in self.by_max:
            slot = self.features[number].slot
            part, known = max_feature_grad(number), out[slot]
            out[slot] = part if known is None else known + part
        return [slot_grad for slot_grad in out if slot_grad is not None]

    def sparse_grads(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Gradient of each slot as (rows [n], values [n, dim]), one entry a lookup, in the order of the
        lookups.
        """
        self.check_sparse()
        bags = bags_of(indices, offsets, True)
        bounds = self._bounds(bags)
        out: list[tuple[Tensor, Tensor] | None] = [None] * len(self.slots)
        for group in self.grouped(sys.maxsize):
            found = self._lookups(group, grad, bags, bounds, sample_weights)
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

    def _lookups(
        self, group: Group, grad: Tensor, bags: Bags, bounds: Sequence[int], sample_weights: Tensor | None
    ) -> _Lookups:
        features = [self.features[number] for number in group.features]
        count = self._bags_per_feature(bags)
        sizes = bags.sizes.view(len(self.features), count)[_integers(group.features)]
        bag_of = torch.repeat_interleave(sizes.reshape(-1))
        feature_of = torch.div(bag_of, max(count, 1), rounding_mode="floor")
        indices = _of_features(bags.indices, group.features, bounds)
        if sample_weights is not None:
            sample_weights = _of_features(sample_weights, group.features, bounds)
        if any(feature.padding_idx >= 0 for feature in features):
            keep = indices != _integers([feature.padding_idx for feature in features])[feature_of]
            indices, bag_of, feature_of = indices[keep], bag_of[keep], feature_of[keep]
            sample_weights = sample_weights[keep] if sample_weights is not None else None
            sizes = torch.bincount(bag_of, minlength=sizes.numel()).view(sizes.shape)
        return _Lookups(
            self._group_bag_grads(group, features, grad, sizes),
            indices + _integers([group.first_row[feature.slot] for feature in features])[feature_of],
            bag_of,
            sample_weights,
            _integers([feature.slot for feature in features])[feature_of],
        )

    def _group_bag_grads(
        self, group: Group, features: Sequence[Feature], grad: Tensor, sizes: Tensor
    ) -> Tensor:
        """[group's features * B, dim]: the group's columns of grad, feature-major, those of means divided."""
        divisors = None
        if any(feature.pooling == MEAN for feature in features):
            means = _integers([feature.pooling == MEAN for feature in features]).bool()
            divisors = torch.where(means[:, None], sizes.clamp(min=1), 1)
        columns = _integers([feature.column for feature in features])
        return group_bag_grads(grad, columns, group.dim, divisors)

    def _group_grad(self, group: Group, found: _Lookups, dtype: torch.dtype) -> Tensor:
        """[group's rows, dim]"""
        if found.rows.numel() == 0 or group.dim == 0:
            return torch.zeros(group.rows, group.dim, dtype=dtype, device="cpu")
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
        self,
        number: int,
        grad: Tensor,
        weights: Sequence[Tensor],
        bags: Bags,
        bounds: Sequence[int],
    ) -> Tensor:
        feature = self.features[number]
        slot, count = self.slots[feature.slot], self._bags_per_feature(bags)
        start, end = bounds[number], bounds[number + 1]
        if start == end or slot.dim == 0:
            return grad.new_zeros(slot.rows, slot.dim)
        return max_grad(
            grad[:, feature.column : feature.column + slot.dim].contiguous(),
            weights[feature.slot],
            Bags(
                bags.indices[start:end],
                bags.offsets[number * count : (number + 1) * count + 1] - start,
                bags.bag_of[start:end],
                bags.sizes,
            ),
            feature.padding_idx,
        )


def group_bag_grads(grad: Tensor, columns: Tensor, dim: int, divisors: Tensor | None) -> Tensor:
    """[k * B, dim]: of each of k features its columns of grad, over its divisors [k, B] where there are any.
    ``columns``: the first one of each.
    """
    every = columns[:, None] + torch.arange(dim, device=columns.device)
    rows = grad.index_select(1, every.reshape(-1)).view(grad.shape[0], columns.numel(), dim).transpose(0, 1)
    if divisors is not None:
        rows = (rows.to(sum_dtype(grad.dtype)) / divisors[:, :, None]).to(grad.dtype)
    return rows.reshape(columns.numel() * grad.shape[0], dim)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _of_features(values: Tensor, features: Sequence[int], bounds: Sequence[int]) -> Tensor:
    """The parts of a tensor of lookups that belong to some features, in order."""
    runs: list[list[int]] = []
    for number in features:
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    parts = [values[bounds[first] : bounds[end]] for first, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def slot_weights(layout: FusedLayout, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Each slot's table, ``[rows, dim]``, as a view into its buffer."""
    return [
        buffers[slot.buffer].narrow(0, slot.offset, slot.rows * slot.dim).view(slot.rows, slot.dim)
        for slot in layout.slots
    ]


def flat_elements(
    parts: Sequence[tuple[Slot, Tensor, Tensor]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Elements of a packed buffer and their gradients, both 1-D, from its slots' (rows, values)."""
    elements = [torch.empty(0, dtype=torch.int64, device=device)]
    values = [torch.empty(0, dtype=dtype, device=device)]
    for slot, rows, slot_values in parts:
        start = slot.offset + rows * slot.dim
        elements.append((start[:, None] + torch.arange(slot.dim, device=rows.device)).reshape(-1))
        values.append(slot_values.reshape(-1).to(dtype))
    return torch.cat(elements), torch.cat(values)
