"""``Packer``: a batch as few inputs, dense ones of a type side by side, jagged ones one after the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse import _C
from recfuse._arguments import integers_on
from recfuse._storage import check_storages
from recfuse.errors import ArgumentValueError
from recfuse.nn.columns.addresses import Addresses
from recfuse.nn.columns.inputs import TYPES, Inputs, Jagged, widened, width_of
from recfuse.nn.columns.lowering import Place
from recfuse.nn.columns.packed import BufferPart, PackedColumns, encoded, of_buffer, view_of
from recfuse.nn.columns.specs import Use

_ALIGNMENT = 64  # bytes of each part of the buffer
_dtype_of = operator.attrgetter("dtype")


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


class _Form(NamedTuple):
    """All of a batch that decides how it is packed."""

    places: tuple[Place, ...]
    dtypes: list[torch.dtype]  # of dense ones
    widths: list[int]  # of dense ones
    kinds: list[tuple[torch.dtype, bool, int]]  # of jagged ones: type, has weights, features

    def same_as(self, other: _Form) -> bool:
        """Quickly where places are the same object."""
        return (self.places is other.places or self.places == other.places) and self[1:] == other[1:]


class _Plan(NamedTuple):
    """How a form is packed."""

    form: _Form
    dense: list[_Group]
    bags: list[_Group]
    places: tuple[Place, ...]  # of uses in what is packed
    text: str  # of these


class _Piece(NamedTuple):
    """Tensors that become one, one after the other."""

    field: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: list[Tensor]


class Packer:
    """Packs batches for the columns of one module. Remembers the form of the last: batches of one form have
    the same ``places``.

    Raises (when called):
        ValueError: features that differ in their number of samples.
    """

    def __init__(self, uses: tuple[Use, ...]) -> None:
        """``uses``: what the columns read."""
        self.uses = uses
        self._last: _Plan | None = None
        self._least: tuple[tuple[Place, ...], list[int]] = ((), [])
        self._last_at: tuple[tuple[Place, ...], bytes, _Plan | None] = ((), b"", None)

    def __call__(self, given: Inputs, pin: bool = False) -> PackedColumns:
        """The same inputs; ``pin``: in page-locked memory."""
        for name, tensors in zip(("dense", "values", "offsets", "weights"), given[2:], strict=True):
            check_storages("recfuse.nn.EmbeddingColumns", name, tensors)
        batch, dense = given.batch, given.dense
        dtypes = list(map(_dtype_of, dense))
        if not set(dtypes).issubset(TYPES):
            dense = [widened(one) for one in dense]
            dtypes = list(map(_dtype_of, dense))
        is_compiling = torch.compiler.is_compiling()
        shapes = [one.shape for one in dense]
        different = shapes if is_compiling else set(shapes)
        if any(shape[0] != batch for shape in different):
            self._fail_samples(given, shapes)
        narrow = not is_compiling and all(len(shape) == 1 for shape in different)
        widths = [1] * len(dense) if narrow else [width_of(one) for one in dense]
        jagged = [given.jagged(number) for number in range(len(given.values))]
        kinds = [
            (entry.values.dtype, entry.weights is not None, count)
            for entry, count in zip(jagged, self._features(given, jagged), strict=True)
        ]
        plan = self._plan(_Form(given.places, dtypes, widths, kinds))
        pieces = [
            _dense_piece([dense[number] for number in own.numbers], own.slots, batch) for own in plan.dense
        ]
        pieces += _jagged_pieces([[jagged[number] for number in own.numbers] for own in plan.bags])
        if is_compiling:
            return PackedColumns(self.uses, _joined_inputs(plan.places, given, pieces))
        parts, first = [], 0
        for piece in pieces:
            parts.append(BufferPart(piece.field, piece.dtype, piece.shape, first))
            size = math.prod(piece.shape) * piece.dtype.itemsize
            first += -(-size // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(first, dtype=torch.uint8, device=given.device, pin_memory=pin)
        for piece, part in zip(pieces, parts, strict=True):
            if piece.tensors:
                view = view_of(buffer, part)
                torch.cat(piece.tensors, out=view.view(-1) if piece.tensors[0].dim() == 1 else view)
        return of_buffer(self.uses, plan.places, batch, buffer, parts, plan.text)

    def at(self, given: Addresses, pin: bool = False) -> PackedColumns:
        """The same of tensors that are known by their addresses, on the CPU."""
        batch, kinds, widths = given.batch, given.forms[:, 0], given.forms[:, 1]
        size, _ = _C.embedding_columns_pack(given.owner, 0, 0)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        _, found = _C.embedding_columns_pack(given.owner, buffer.data_ptr(), size)
        parts = []
        for field, kind, wide, rows, columns, first in found:
            dtype = TYPES[kind] if kind >= 0 else torch.int64 if wide else torch.int32
            parts.append(BufferPart(field, dtype, (rows,) if columns < 0 else (rows, columns), first))
        types = kinds.tobytes()
        places, last, plan = self._last_at
        if plan is None or places is not given.places or types != last:
            dtypes, n_dense = [TYPES[number] for number in kinds], given.n_dense
            kinds = [(dtype, False, 1) for dtype in dtypes[n_dense:]]
            form = _Form(given.places, dtypes[:n_dense], widths[:n_dense].tolist(), kinds)
            plan = _plan_of(form)
            self._last_at = given.places, types, plan
        return of_buffer(self.uses, plan.places, batch, buffer, parts, plan.text)

    def _features(self, given: Inputs, jagged: Sequence[Jagged]) -> list[int]:
        if not jagged:
            return []
        if torch.compiler.is_compiling():
            least = _least_features(given.places, len(given.dense), len(jagged))
        else:
            places, least = self._least
            if places is not given.places:
                least = _least_features(given.places, len(given.dense), len(jagged))
                self._least = given.places, least
        return _features(least, jagged, given.batch)

    def _plan(self, form: _Form) -> _Plan:
        if torch.compiler.is_compiling():
            return _plan_of(form)
        plan = self._last
        if plan is None or not plan.form.same_as(form):
            self._last = plan = _plan_of(form)
        return plan

    def _fail_samples(self, given: Inputs, shapes: Sequence[torch.Size]) -> None:
        number = next(at for at, shape in enumerate(shapes) if shape[0] != given.batch)
        raise ArgumentValueError(
            f"recfuse.nn.EmbeddingColumns: {_readers(given.places, number, self.uses)} has "
            f"{shapes[number][0]} samples, {_readers(given.places, 0, self.uses)} has {given.batch}"
        )


def _plan_of(form: _Form) -> _Plan:
    groups: dict[Hashable, _Group] = {}
    for number, (dtype, width) in enumerate(zip(form.dtypes, form.widths, strict=True)):
        groups.setdefault(dtype, _Group()).add(number, width)
    bags: dict[Hashable, _Group] = {}
    for number, kind in enumerate(form.kinds):
        bags.setdefault(kind, _Group()).add(number, kind[2])
    own, other = list(groups.values()), list(bags.values())
    places = _moved(form.places, len(form.dtypes), own, other)
    return _Plan(form, own, other, places, "" if torch.compiler.is_compiling() else encoded(places))


def _joined_inputs(places: tuple[Place, ...], given: Inputs, pieces: Sequence[_Piece]) -> Inputs:
    """Pieces as tensors of their own: the compiler has no buffer."""
    lists: tuple[list[Tensor], ...] = [], [], [], []
    for piece in pieces:
        if piece.tensors:
            whole = torch.cat(piece.tensors).view(piece.shape)
        else:
            whole = torch.empty(piece.shape, dtype=piece.dtype, device=given.device)
        lists[piece.field].append(whole.t() if piece.field == 0 else whole)
    return Inputs(places, given.batch, *lists)


def _readers(places: Sequence[Place], number: int, uses: Sequence[Use]) -> str:
    """The feature that an input is of."""
    return next(
        (f"feature {use.feature!r}" for use, at in zip(uses, places, strict=True) if at.input == number), "?"
    )


def _least_features(places: Sequence[Place], n_dense: int, count: int) -> list[int]:
    """What uses read of each jagged input."""
    least = [1] * count
    for place in places:
        if place.width == 0:
            number = place.input - n_dense
            least[number] = max(least[number], place.slot + 1)
    return least


def _features(least: Sequence[int], jagged: Sequence[Jagged], batch: int) -> list[int]:
    """Of each jagged input; ValueError for offsets of another size."""
    counts = [
        count if batch == 0 else max((one.offsets.shape[0] - 1) // batch, count)
        for one, count in zip(jagged, least, strict=True)
    ]
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


def _jagged_pieces(groups: list[list[Jagged]]) -> list[_Piece]:
    values, offsets, weights = [], [], []
    for group in groups:
        narrow = all(entry.offsets.dtype == torch.int32 for entry in group)
        bags = torch.stack([entry.offsets for entry in group])
        own = _trimmed(group, bags)
        lengths = [entry.values.shape[0] for entry in own]
        joined = _joined(bags, lengths, narrow) if len(own) > 1 else bags[0]
        values.append(_Piece(1, own[0].values.dtype, (sum(lengths),), [entry.values for entry in own]))
        offsets.append(_Piece(2, joined.dtype, tuple(joined.shape), [joined]))
        factors = [entry.weights.to(torch.float32) for entry in own if entry.weights is not None]
        weights.append(_Piece(3, torch.float32, (sum(lengths) if factors else 0,), factors))
    return [*values, *offsets, *(weights if any(piece.tensors for piece in weights) else [])]


def _trimmed(group: list[Jagged], bags: Tensor) -> list[Jagged]:
    """Without values behind the last offset; ``bags``: offsets, a row an input. A GPU is not asked for it:
    then there must be none.
    """
    if torch.compiler.is_compiling() or not bags.is_cpu:
        return group
    return [
        entry
        if not 0 <= end < entry.values.shape[0]
        else Jagged(entry.values[:end], entry.offsets, None if entry.weights is None else entry.weights[:end])
        for entry, end in zip(group, bags[:, -1].tolist(), strict=True)
    ]


def _joined(bags: Tensor, lengths: Sequence[int], narrow: bool) -> Tensor:
    """The offsets of jagged inputs one after the other; ``bags``: a row an input. Ones that do not begin with
    0, or do not end with the number of values, become negative, which the operator reports: asking would wait
    for a GPU.
    """
    bases = [0]
    for length in lengths:
        bases.append(bases[-1] + length)
    ends = integers_on(bases, bags.device)
    bags = bags.to(torch.int64)
    right = (bags[:, 0] == 0) & (bags[:, -1] == ends.diff())
    starts = torch.where(right, ends[:-1], -ends[-1] - 1)
    found = torch.cat([ends[:1], (bags[:, 1:] + starts[:, None]).flatten()])
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
