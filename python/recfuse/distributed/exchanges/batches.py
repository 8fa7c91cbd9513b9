"""A rank's batch: its check, and its lookups in the order in which they go to other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import INTEGERS
from recfuse.distributed.exchanges.header import BAD_INDEX, BAD_OFFSET, WEIGHT_DTYPES, Bad
from recfuse.distributed.exchanges.routes import Route, RowCut
from recfuse.errors import ArgumentTypeError, ArgumentValueError

_WHERE = "recfuse.distributed"


class Batch(NamedTuple):
    """A rank's lookups by segment."""

    bags: int
    values: Tensor  # [lookups, then those of row cuts]: rows of the holder's part
    origins: Tensor | None  # the lookup of each value; None: values are the lookups in order
    lengths: Tensor  # int64 [segments, bags]
    begins: Tensor  # int64 [segments]: first value of each segment
    sizes: Tensor  # int64 [segments]
    host_sizes: list[int]
    counts: dict[int, Tensor]  # by feature of a row cut, lookups without padding: [parts, bags]

    def first_lookup(self, feature: int) -> int:
        """Return the position of a feature's first lookup in the batch."""
        return sum(self.host_sizes[:feature])

    def of_feature(self, feature: int) -> Tensor:
        """Return the indices of a feature's lookups."""
        begin = self.first_lookup(feature)
        return self.values[begin : begin + self.host_sizes[feature]]


def check_arguments(
    indices: Tensor, offsets: Tensor, weights: Tensor | None, features: int, device: torch.device
) -> int:
    """Return the number of bags.

    Raises:
        TypeError, ValueError: arguments of another form.
    """
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if not isinstance(tensor, Tensor):
            raise wrong_type(f"{_WHERE}: {name}", tensor, "a torch.Tensor")
        if tensor.dtype not in INTEGERS:
            raise ArgumentTypeError(f"{_WHERE}: {name} is {tensor.dtype}; expected int32 or int64")
        if tensor.dim() != 1:
            raise ArgumentValueError(
                f"{_WHERE}: {name} has shape {list(tensor.shape)}; expected one dimension"
            )
        if tensor.device != device:
            raise ArgumentValueError(f"{_WHERE}: {name} is on {tensor.device}; expected {device}")
    bags, rest = divmod(offsets.numel() - 1, max(features, 1))
    if rest or offsets.numel() == 0:
        raise ArgumentValueError(
            f"{_WHERE}: offsets has {offsets.numel()} elements; expected features * bags + 1 with {features} "
            "features"
        )
    if weights is not None:
        if not isinstance(weights, Tensor):
            raise wrong_type(f"{_WHERE}: per_sample_weights", weights, "a torch.Tensor or None")
        if weights.dtype not in WEIGHT_DTYPES:
            raise ArgumentTypeError(
                f"{_WHERE}: per_sample_weights is {weights.dtype}; expected float32, float16 or bfloat16"
            )
        if weights.shape != indices.shape or weights.device != device:
            raise ArgumentValueError(
                f"{_WHERE}: per_sample_weights has shape {list(weights.shape)} on {weights.device}; expected "
                f"{list(indices.shape)} on {device}, as indices"
            )
    return bags


def check_contents(indices: Tensor, offsets: Tensor, rows: Tensor, bags: int) -> tuple[int, Bad, list[int]]:
    """Return the state for the header, the first bad offset or index, and the bounds of the features.

    ``rows`` int64 ``[features]`` are the rows of each feature's table. Waits for the device.
    """
    features = rows.numel()
    lengths = offsets.diff()
    begin_end = [offsets[0], offsets[-1]]
    falls = (lengths < 0).any() if lengths.numel() else offsets[0] < 0
    first, last, falling = torch.stack([*begin_end, falls.to(offsets.dtype)]).tolist()
    is_short = last != indices.numel() and (not indices.is_cuda or last > indices.numel())
    if first != 0 or falling or is_short:
        at = 0 if first != 0 else int((lengths < 0).int().argmax()) + 1 if falling else offsets.numel() - 1
        return BAD_OFFSET, Bad(position=at, value=int(offsets[at])), []
    bounds = offsets[::bags].tolist() if bags else [0] * (features + 1)
    own = indices[:last]
    limits = rows.repeat_interleave(torch.tensor(bounds).diff().to(rows.device), output_size=last)
    wrong = (own < 0) | (own >= limits)
    if last and bool(wrong.any()):
        at = int(wrong.int().argmax())
        place = int(torch.searchsorted(offsets.to(torch.int64), at, right=True)) - 1
        feature, bag = divmod(place, bags)
        return BAD_INDEX, Bad(feature, bag, at - int(offsets[place]), int(own[at])), bounds
    return 0, Bad(), bounds


def batch_of(route: Route, indices: Tensor, offsets: Tensor, bags: int, bounds: Sequence[int]) -> Batch:
    """Return the lookups of a checked batch by segment. Waits for the device if a table is cut by rows."""
    features = route.features
    lengths = offsets.to(torch.int64).diff().view(features, bags)
    total = bounds[-1]
    begins = list(bounds[:-1])
    host_sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    if not route.row_cuts:
        return Batch(
            bags, indices[:total], None, lengths, _ints(begins, indices), _ints(host_sizes, indices),
            host_sizes, {},
        )  # fmt: skip
    values, lengths_of, counts = [indices[:total]], [lengths], {}
    origins = [torch.arange(total, device=indices.device)]
    for cut in route.row_cuts:
        begin, end = bounds[cut.feature], bounds[cut.feature + 1]
        own, order, of_part, counts[cut.feature] = _split(cut, indices[begin:end], lengths[cut.feature], bags)
        sizes = of_part.sum(1).tolist()
        for size in sizes:
            begins.append(total)
            host_sizes.append(size)
            total += size
        values.append(own)
        origins.append(order + begin)
        lengths_of.append(of_part)
    return Batch(
        bags, torch.cat(values), torch.cat(origins), torch.cat(lengths_of), _ints(begins, indices),
        _ints(host_sizes, indices), host_sizes, counts,
    )  # fmt: skip


def _split(cut: RowCut, indices: Tensor, lengths: Tensor, bags: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows inside the parts, their order, the lengths and the lookups without padding by part."""
    parts = len(cut.begins)
    begins = torch.tensor(cut.begins, dtype=torch.int64, device=indices.device)
    wide = indices.to(torch.int64)
    part = torch.bucketize(wide, begins[1:], right=True)
    bag = torch.arange(bags, device=indices.device).repeat_interleave(lengths, output_size=len(wide))
    cell = part * bags + bag
    of_part = torch.bincount(cell, minlength=parts * bags).view(parts, bags)
    counts = of_part
    if cut.padding_idx is not None:
        counts = torch.bincount(cell[wide != cut.padding_idx], minlength=parts * bags).view(parts, bags)
    order = part.argsort(stable=True)
    return (wide - begins[part])[order].to(indices.dtype), order, of_part, counts


def positions_of(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Return the positions of the elements of blocks, one block after another."""
    before = sizes.cumsum(0) - sizes
    shifts = (begins - before).repeat_interleave(sizes, output_size=total)
    return torch.arange(total, device=sizes.device) + shifts


def _ints(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
