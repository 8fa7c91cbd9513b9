"""The features and lookups of a call as the gradients on a GPU use them.

The forward kernel survives bad indices and offsets, and reports them later; ATen's kernels assert on them,
which ends the process's CUDA context. So nothing bad may reach them: lookups that do not count (out of their
table, in no bag, of a padding row, of another group) are led to a row of their own, whose gradient is
dropped.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._arguments import integers_on
from recfuse._codes import MAX, MEAN

_bag_lookups = torch.ops.recfuse._bag_lookups.default
_MOST_ROWS = sys.maxsize


class _Columns(NamedTuple):
    """What the GPU needs to know of each feature; each [features] int64."""

    weight: Tensor  # its group
    offset: Tensor  # first element of its table in the group
    rows: Tensor  # of its table
    dim: Tensor
    pooling: Tensor
    padding_idx: Tensor
    column: Tensor  # its first one in the output
    rank: Tensor  # its position in `order`
    order: Tensor  # numbers of features: group after group, in a group those that pool by max last


class Features:
    """A call's features, on the host and on the GPU."""

    def __init__(self, features: Tensor, device: torch.device) -> None:
        """Copies them to the device."""
        self.host: list[list[int]] = features.tolist()
        self.order = sorted(range(len(self.host)), key=self._group_of)
        rank = [0] * len(self.order)
        for position, number in enumerate(self.order):
            rank[number] = position
        rows = [*zip(*self.host, strict=True), rank, self.order]
        self.flat = integers_on([value for row in rows for value in row], device)
        self.on_device = _Columns(*self.flat.view(len(_Columns._fields), len(rank)).unbind(0))
        offset, dim = self.on_device.offset, self.on_device.dim
        self.first_row = torch.div(offset, dim.clamp(min=1), rounding_mode="floor")

    def _group_of(self, number: int) -> tuple[int, bool]:
        return self.host[number][0], self.host[number][4] == MAX

    def of_group(self, group: int, by_max: bool) -> tuple[int, int]:
        """Where in `order` the features of a group begin and end: those that pool by max, or the others."""
        own = [rank for rank, number in enumerate(self.order) if self._group_of(number) == (group, by_max)]
        return (own[0], own[-1] + 1) if own else (0, 0)

    def by_max(self) -> list[int]:
        """Numbers of the features that pool by max."""
        return [number for number in range(len(self.host)) if self._group_of(number)[1]]

    def columns(self, numbers: Tensor, dim: int) -> Tensor:
        """[features * dim]: columns of some features in the output."""
        first = self.on_device.column[numbers]
        return (first[:, None] + torch.arange(dim, device=first.device)).reshape(-1)


_MOST_FEATURES = 16
_recent: dict[tuple[bytes, torch.device], Features] = {}  # of calls before, by what is in `features`
_captured: list[Features] = []  # those that graphs read at each replay


def features_on(features: Tensor, device: torch.device) -> Features:
    """Features on a device, where they may be from a call before."""
    key = features.contiguous().numpy().tobytes(), device
    found = _recent.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        found = found or Features(features, device)  # a new one is filled only when the graph is replayed
        _captured.append(found)
        return found
    if found is None:
        found = Features(features, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the next call may be on another stream
        while len(_recent) >= _MOST_FEATURES:
            _recent.pop(next(iter(_recent)), None)
        _recent[key] = found
    elif device.type == "cuda":
        for tensor in (found.flat, found.first_row):
            tensor.record_stream(torch.cuda.current_stream(device))
    return found


class Lookups:
    """The lookups of a call, of any contents; for at least one bag and one lookup."""

    def __init__(self, features: Features, indices: Tensor, offsets: Tensor) -> None:
        """Finds the bag of each, and which of them count."""
        self.features, columns = features, features.on_device
        count, n_features = indices.numel(), len(features.host)
        self.bags = (offsets.numel() - 1) // n_features
        found = _bag_lookups(indices, offsets, _MOST_ROWS, True, -1)[0]
        self.row, bag_of = found[:count], found[count : 2 * count]
        self.feature = torch.div(bag_of, self.bags, rounding_mode="floor")
        self.bag = bag_of - self.feature * self.bags
        self.used = self.row < columns.rows[self.feature]
        self.used &= self.row != columns.padding_idx[self.feature]
        sizes = self.row.new_zeros(n_features * self.bags)
        sizes.scatter_add_(0, bag_of, self.used.to(torch.int64))
        self.sizes = sizes.clamp_(min=1).view(n_features, self.bags)  # lookups that count
        self.group_row = features.first_row[self.feature] + self.row

    def pooled(self, group: int, grad: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What a group's features that do not pool by max have: which lookups are theirs and count [lookups],
        the gradients of their bags [features * bags, dim] (those of means divided), and which row of these a
        lookup has [lookups], 0 where it does not count. None: no such feature.
        """
        columns = self.features.on_device
        begin, end = self.features.of_group(group, by_max=False)
        if begin == end:
            return None
        used, rank = self.used, columns.rank[self.feature]
        if end - begin < len(self.features.host):
            used = used & (rank >= begin) & (rank < end)
        numbers = columns.order[begin:end]
        grads = grad.index_select(1, self.features.columns(numbers, dim))
        grads = grads.view(grad.shape[0], end - begin, dim).transpose(0, 1)
        if any(self.features.host[number][4] == MEAN for number in self.features.order[begin:end]):
            is_mean = (columns.pooling[numbers] == MEAN)[:, None]
            grads = grads.float() / torch.where(is_mean, self.sizes[numbers], 1)[:, :, None]
        grads = grads.to(grad.dtype).reshape((end - begin) * self.bags, dim)
        return used, grads, torch.where(used, (rank - begin) * self.bags + self.bag, 0)
