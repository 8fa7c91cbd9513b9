"""``PackedColumns``: a batch in one buffer, which one copy takes to a GPU."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse._arguments import integers_on
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.inputs import Inputs, Jagged, widened
from recfuse.nn.columns.lowering import Place
from recfuse.nn.columns.specs import Use

_ALIGNMENT = 64  # bytes of each part of the buffer


class _Part(NamedTuple):
    """A tensor of the buffer."""

    field: int  # of Inputs: which list it is in
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte


class PackedColumns:
    """A batch in one buffer, made by ``EmbeddingColumns.pack``: one copy takes it to a GPU.

    Attributes:
        batch_size: samples.
        device: where it is.
        nbytes: size of the buffer.
    """

    def __init__(
        self, uses: tuple[Use, ...], inputs: Inputs, buffer: Tensor | None, parts: Sequence[_Part]
    ) -> None:
        """``uses``: what it was packed for; ``inputs`` are views of the buffer, where there is one."""
        self._uses, self._inputs, self._buffer, self._parts = uses, inputs, buffer, tuple(parts)
        self._form = _encoded(inputs.places)  # the compiler would take numbers of an object for variables
        self.on_host: Inputs | None = None  # the batch that it was copied from

    def inputs(self, uses: tuple[Use, ...]) -> Inputs:
        """For columns with these uses; ValueError where it was packed for others."""
        if self._uses is not uses and self._uses != uses:
            raise ArgumentValueError(
                "recfuse.nn.EmbeddingColumns: the batch was packed for other columns; pack it by this module"
            )
        if not torch.compiler.is_dynamo_compiling():
            return self._inputs
        lists = self._inputs[2:]
        return Inputs(_decoded(self._form), _batch_of(self._inputs.places, *lists[:3]), *lists)

    @property
    def batch_size(self) -> int:
        """Samples."""
        return self._inputs.batch

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._inputs.device

    @property
    def nbytes(self) -> int:
        """What a copy moves."""
        tensors = [one for each in self._inputs[2:] for one in each]
        return sum(one.nbytes for one in tensors) if self._buffer is None else self._buffer.nbytes

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedColumns:
        """On a device, by one copy; without waiting for it, from page-locked memory, if ``non_blocking``."""
        target, given = torch.empty(0, device=device).device, self._inputs  # with its number
        if target == given.device:
            return self
        if self._buffer is None:
            lists = [[one.to(target, non_blocking=non_blocking) for one in each] for each in given[2:]]
            found = PackedColumns(self._uses, Inputs(given.places, given.batch, *lists), None, ())
        else:
            buffer = self._buffer.to(target, non_blocking=non_blocking)
            found = _of_buffer(self._uses, given.places, given.batch, buffer, self._parts)
        found.on_host = given if given.device.type == "cpu" else self.on_host
        return found

    def __repr__(self) -> str:
        """Sizes."""
        return f"PackedColumns(batch_size={self.batch_size}, nbytes={self.nbytes}, device='{self.device}')"


def _of_buffer(
    uses: tuple[Use, ...], places: tuple[Place, ...], batch: int, buffer: Tensor, parts: Sequence[_Part]
) -> PackedColumns:
    lists: tuple[list[Tensor], ...] = [], [], [], []
    for part in parts:
        view = _view(buffer, part)
        lists[part.field].append(view.t() if part.field == 0 else view)
    return PackedColumns(uses, Inputs(places, batch, *lists), buffer, parts)


def _view(buffer: Tensor, part: _Part) -> Tensor:
    size = math.prod(part.shape) * part.dtype.itemsize
    return buffer[part.first : part.first + size].view(part.dtype).view(part.shape)


class _Group:
    """Inputs that become one."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first: list[int] = []  # their first slots in it
        self.slots = 0

    def add(self, number: int, slots: int) -> None:
        self.numbers.append(number)
        self.first.append(self.slots)
        self.slots += slots


class _Piece(NamedTuple):
    """Tensors that become one, one after the other."""

    field: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: list[Tensor]


def pack(given: Inputs, uses: tuple[Use, ...], pin: bool = False) -> PackedColumns:
    """The same inputs as a few: dense ones of a type side by side, jagged ones one after the other.

    Raises:
        ValueError: samples are not as many everywhere.
    """
    batch, dense = given.batch, [widened(one) for one in given.dense]
    jagged = [_trimmed(given.jagged(number)) for number in range(len(given.values))]
    features = _features(given.places, len(dense), jagged, batch)
    groups: dict[Hashable, _Group] = {}
    for number, one in enumerate(dense):
        if one.shape[0] != batch:
            raise ArgumentValueError(
                f"recfuse.nn.EmbeddingColumns: {_readers(given.places, number, uses)} has {one.shape[0]} "
                f"samples, {_readers(given.places, 0, uses)} has {batch}"
            )
        groups.setdefault(one.dtype, _Group()).add(number, 1 if one.dim() == 1 else one.shape[1])
    bags: dict[Hashable, _Group] = {}
    for number, entry in enumerate(jagged):
        bags.setdefault((entry.values.dtype, entry.weights is not None), _Group()).add(
            number, features[number]
        )
    pieces = [
        _dense_piece([dense[number] for number in own.numbers], own.slots, batch) for own in groups.values()
    ]
    pieces += _jagged_pieces([[jagged[number] for number in own.numbers] for own in bags.values()], batch)
    places = _moved(given.places, len(dense), list(groups.values()), list(bags.values()))
    if torch.compiler.is_compiling():
        lists: tuple[list[Tensor], ...] = [], [], [], []
        for piece in pieces:
            whole = torch.cat(piece.tensors).view(piece.shape) if piece.tensors else None
            whole = (
                torch.empty(piece.shape, dtype=piece.dtype, device=given.device) if whole is None else whole
            )
            lists[piece.field].append(whole.t() if piece.field == 0 else whole)
        return PackedColumns(uses, Inputs(places, batch, *lists), None, ())
    parts, first = [], 0
    for piece in pieces:
        parts.append(_Part(piece.field, piece.dtype, piece.shape, first))
        size = math.prod(piece.shape) * piece.dtype.itemsize
        first += -(-size // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(first, dtype=torch.uint8, device=given.device, pin_memory=pin)
    for piece, part in zip(pieces, parts, strict=True):
        if piece.tensors:
            view = _view(buffer, part)
            torch.cat(piece.tensors, out=view.view(-1) if piece.tensors[0].dim() == 1 else view)
    return _of_buffer(uses, places, batch, buffer, parts)


def _trimmed(entry: Jagged) -> Jagged:
    """Without values behind the last offset. A GPU is not asked for it: then there must be none."""
    if torch.compiler.is_compiling() or not entry.offsets.is_cpu or not entry.offsets.numel():
        return entry
    end = int(entry.offsets[-1])
    if not 0 <= end < entry.values.shape[0]:
        return entry
    return Jagged(entry.values[:end], entry.offsets, None if entry.weights is None else entry.weights[:end])


def _readers(places: Sequence[Place], number: int, uses: Sequence[Use]) -> str:
    """The feature that an input is of."""
    return next(
        (f"feature {use.feature!r}" for use, at in zip(uses, places, strict=True) if at.input == number), "?"
    )


def _features(places: Sequence[Place], n_dense: int, jagged: Sequence[Jagged], batch: int) -> list[int]:
    """Of each jagged input; ValueError for offsets of another size."""
    counts = [1 if batch == 0 else max((one.offsets.shape[0] - 1) // batch, 1) for one in jagged]
    for place in places:
        if place.width == 0:
            number = place.input - n_dense
            counts[number] = max(counts[number], place.slot + 1)
    for entry, count in zip(jagged, counts, strict=True):
        if entry.offsets.dim() != 1 or entry.offsets.shape[0] != count * batch + 1:
            raise ArgumentValueError(
                f"recfuse.nn.EmbeddingColumns: offsets of a jagged entry are {list(entry.offsets.shape)}, "
                f"must be [{count * batch + 1}] for {batch} samples"
            )
        weights = entry.weights
        if weights is not None and weights.shape != entry.values.shape:
            raise ArgumentValueError(
                f"recfuse.nn.EmbeddingColumns: weights of a jagged entry are {list(weights.shape)}, must be "
                f"{list(entry.values.shape)} as its values"
            )
    return counts


def _dense_piece(tensors: list[Tensor], values: int, batch: int) -> _Piece:
    """[values, batch]."""
    if any(one.dim() == 2 for one in tensors):
        tensors = [one[None] if one.dim() == 1 else one.t() for one in tensors]
    return _Piece(0, tensors[0].dtype, (values, batch), tensors)


def _jagged_pieces(groups: list[list[Jagged]], batch: int) -> list[_Piece]:
    values, offsets, weights = [], [], []
    for group in groups:
        own = [entry.values for entry in group]
        count = sum(one.shape[0] for one in own)
        values.append(_Piece(1, own[0].dtype, (count,), own))
        joined = _joined(group)
        offsets.append(_Piece(2, joined.dtype, tuple(joined.shape), [joined]))
        factors = [entry.weights.to(torch.float32) for entry in group if entry.weights is not None]
        weights.append(_Piece(3, torch.float32, (count if factors else 0,), factors))
    return [*values, *offsets, *(weights if any(piece.tensors for piece in weights) else [])]


def _joined(group: Sequence[Jagged]) -> Tensor:
    """The offsets of jagged inputs one after the other. Ones that do not begin with 0, or do not end with
    the number of values, become negative, which the operator reports: asking would wait for a GPU.
    """
    first = group[0].offsets
    narrow = all(entry.offsets.dtype == torch.int32 for entry in group)
    lengths = [entry.values.shape[0] for entry in group]
    bases = [0]
    for length in lengths:
        bases.append(bases[-1] + length)
    if len(group) == 1:
        return first
    ends = integers_on(bases, first.device)
    each = [entry.offsets.to(torch.int64) for entry in group]
    outer = torch.stack([torch.stack((one[0], one[-1])) for one in each])
    right = (outer[:, 0] == 0) & (outer[:, 1] == ends.diff())
    starts = torch.where(right, ends[:-1], -ends[-1] - 1)
    found = torch.cat(
        [ends[:1], *(one[1:] + start for one, start in zip(each, starts.unbind(), strict=True))]
    )
    return found.to(torch.int32) if narrow and bases[-1] < 2**31 else found


def _moved(
    places: Sequence[Place], n_dense: int, groups: Sequence[_Group], bags: Sequence[_Group]
) -> tuple[Place, ...]:
    """Where uses are when inputs have become groups."""
    at: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        at.update({own: (number, first) for own, first in zip(group.numbers, group.first, strict=True)})
    for number, group in enumerate(bags, len(groups)):
        at.update(
            {n_dense + own: (number, first) for own, first in zip(group.numbers, group.first, strict=True)}
        )
    found = []
    for place in places:
        number, first = at[place.input]
        found.append(Place(number, first + place.slot, place.width))
    return tuple(found)


def _flatten(packed: PackedColumns) -> tuple[list[Any], Any]:
    given = packed._inputs
    return [list(each) for each in given[2:]], (packed._uses, given.places)


def _unflatten(lists: Any, context: Any) -> PackedColumns:
    uses, places = context
    return PackedColumns(uses, Inputs(places, _batch_of(places, *lists[:3]), *lists), None, ())


def _batch_of(
    places: Sequence[Place], dense: Sequence[Tensor], values: Sequence[Tensor], offsets: Sequence[Tensor]
) -> int:
    """Samples."""
    if dense:
        return dense[0].shape[0]
    return (offsets[0].shape[0] - 1) // (max(place.slot for place in places if place.input == 0) + 1)


def _encoded(places: Sequence[Place]) -> str:
    return " ".join(str(number) for place in places for number in place)


def _decoded(text: str) -> tuple[Place, ...]:
    numbers = [int(number) for number in text.split()]
    return tuple(Place(*numbers[at : at + 3]) for at in range(0, len(numbers), 3))


torch.utils._pytree.register_pytree_node(
    PackedColumns, _flatten, _unflatten, serialized_type_name="recfuse.nn.columns.PackedColumns"
)
