"""Columns as the arrays that ``recfuse._C.embedding_columns_program`` takes: pure data.

Fields are those of ``rf_column``, ``rf_column_source`` and ``rf_column_step`` in recfuse/embedding_columns.h.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recfuse._codes import CODES
from recfuse.nn.columns.kinds import Cross
from recfuse.nn.columns.specs import POOLINGS, Column, FeatureColumn, FeatureRef, Source, TableColumn
from recfuse.nn.columns.steps import (
    Affine,
    Clip,
    ClipInteger,
    Modulo,
    Step,
    ToBucket,
    ToHash,
    ToWord,
)

_INVALID = {"error": -2, "drop": -1}
_FILL = -1
_N_DIMS, _OUTPUT_COLUMN = 14, 16  # fields of rf_column


class InputRef(NamedTuple):
    """The place of the values of a use among the operator's inputs."""

    input: int
    slot: int  # dense: the first value of a sample; jagged: the number of the feature
    width: int  # dense: values per sample; jagged: 0


class TableRef(NamedTuple):
    """The place of a table among the operator's weights."""

    buffer: int
    offset: int  # first element
    rows: int
    dim: int


class Arrays(NamedTuple):
    """The arrays from which a program is compiled."""

    columns: NDArray[np.int64]  # [n, 17]
    sources: NDArray[np.int64]  # [n, 5]
    steps: NDArray[np.int64]  # [n, 3]
    boundaries: NDArray[np.float32]
    vocabulary: NDArray[np.int64]


class Lowered:
    """Columns as arrays, without the facts of a form of batches, which ``arrays(places)`` adds.

    Attributes:
        uses: the features that the columns read; places have this order.
        output_dim: columns of the output.
    """

    def __init__(
        self, columns: Sequence[Column], place_of: Mapping[str, TableRef], uses: Sequence[FeatureRef] = ()
    ) -> None:
        """Lower columns, in the order of the output.

        ``place_of`` has the places of tables by name. ``uses`` come first, even if no column reads them.
        """
        self._sources: dict[Source, int] = {}
        self._uses = {use: number for number, use in enumerate(uses)}
        self._chains: dict[tuple[Step, ...], tuple[int, int]] = {}
        self._pools = _Pools()
        rows, column_at = [], 0
        for column in columns:
            rows.append(self._row(column, place_of, column_at))
            column_at += column.output_dim
        self.uses = list(self._uses)
        self.output_dim = column_at
        self._columns = np.array(rows, dtype=np.int64).reshape(-1, 17)
        self._steps = np.array(self._pools.steps, dtype=np.int64).reshape(-1, 3)
        self._source_rows = np.array(
            [(self._uses[source.use], *self._chains[source.steps]) for source in self._sources],
            dtype=np.int64,
        ).reshape(-1, 3)

    def chosen(self, numbers: Sequence[int]) -> Lowered:
        """Return a subset of the columns, in the order of ``numbers``, with the same uses."""
        found = copy.copy(self)
        found._columns = self._columns[list(numbers)]
        widths = found._columns[:, _N_DIMS]
        found._columns[:, _OUTPUT_COLUMN] = widths.cumsum() - widths
        found.output_dim = int(widths.sum())
        return found

    def reader_of(self, use: int) -> int | None:
        """Return the number of the first column that reads a use."""
        sources = np.flatnonzero(self._source_rows[:, 0] == use)
        columns = np.flatnonzero(np.isin(self._columns[:, :2], sources).any(axis=1))
        return int(columns[0]) if columns.size else None

    def arrays(self, places: Sequence[InputRef]) -> Arrays:
        """Return the arrays of the program for batches with these places, a place per use."""
        own = np.array(places, dtype=np.int64).reshape(-1, 3)
        sources = np.concatenate((own[self._source_rows[:, 0]], self._source_rows[:, 1:]), axis=1)
        boundaries, vocabulary = self._pools.boundaries, self._pools.vocabulary
        return Arrays(
            self._columns,
            np.ascontiguousarray(sources),
            self._steps,
            np.concatenate(boundaries) if boundaries else np.empty(0, np.float32),
            np.concatenate(vocabulary) if vocabulary else np.empty(0, np.int64),
        )

    def _source(self, source: Source) -> int:
        if source not in self._sources:
            self._sources[source] = len(self._sources)
            self._uses.setdefault(source.use, len(self._uses))
            if source.steps not in self._chains:
                first = len(self._pools.steps)
                self._pools.steps.extend(map(self._pools.step, source.steps))
                self._chains[source.steps] = first, len(source.steps)
        return self._sources[source]

    def _row(self, column: Column, place_of: Mapping[str, TableRef], at: int) -> tuple[int, ...]:
        sources = [self._source(source) for source in column.sources()]
        left, right = (*sources, -1)[:2]
        if not isinstance(column, TableColumn):
            numeric = left, -1, 0, 0, -1, 0, 0, 0, 0, 0, _INVALID["drop"], _FILL, _bits(0.0)
            return *numeric, 0, column.output_dim, _bits(1.0), at
        cross = (column.buckets, _signed(column.seed)) if isinstance(column, Cross) else (0, 0)
        weighted = isinstance(column, FeatureColumn) and (column.weighted or column.weights is not None)
        invalid = column.invalid if isinstance(column.invalid, int) else _INVALID[column.invalid]
        empty = column.empty if isinstance(column.empty, int) else _FILL
        first, end = column.dims
        return (
            *(left, right, *cross, *place_of[column.table_name]),
            *(POOLINGS.index(column.pooling), int(weighted), invalid, empty, _bits(column.fill_value)),
            *(first, end - first, _bits(column.scale), at),
        )


class _Pools:
    """Steps, with their boundaries and words; equal lists are stored once."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.boundaries: list[NDArray[np.float32]] = []
        self.vocabulary: list[NDArray[np.int64]] = []
        self._first: dict[bytes, int] = {}
        self._counts = [0, 0]  # boundaries, words

    def step(self, step: Step) -> tuple[int, int, int]:
        """Return operation, a and b of a step."""
        is_right = isinstance(step, ToBucket) and step.right
        operation = CODES["column_step"].index(f"{step.kind}_right" if is_right else step.kind)
        if isinstance(step, Affine):
            return operation, _bits(step.scale), _bits(step.offset)
        if isinstance(step, Clip):
            least, most = step.bounds()
            return operation, _bits(least), _bits(most)
        if isinstance(step, ClipInteger):
            return operation, *step.bounds()
        if isinstance(step, Modulo):
            return operation, step.divisor, 0
        if isinstance(step, ToHash):
            return operation, step.num_buckets, _signed(step.seed)
        if isinstance(step, ToBucket):
            first = self._kept(self.boundaries, 0, step.float32)
            return operation, first, len(step.float32)
        if isinstance(step, ToWord):
            return operation, self._kept(self.vocabulary, 1, step.int64), len(step.int64)
        return operation, 0, 0

    def _kept(self, pool: list[NDArray[np.generic]], which: int, values: NDArray[np.generic]) -> int:
        key = bytes([which]) + values.tobytes()
        if key not in self._first:
            self._first[key] = self._counts[which]
            self._counts[which] += len(values)
            pool.append(values)
        return self._first[key]


def _bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned integer."""
    return value - 2**64 if value >= 2**63 else value
