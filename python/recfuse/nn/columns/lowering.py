"""Columns as the arrays that ``recfuse._C.embedding_columns_program`` takes: pure data.

Their rows are the structs ``rf_column``, ``rf_column_source`` and ``rf_column_step`` of
recfuse/embedding_columns.h.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recfuse._codes import CODES, COLUMN, COLUMN_EMPTY, COLUMN_INVALID, COLUMN_SOURCE, COLUMN_STEP
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

_SOURCES = [COLUMN.at("left"), COLUMN.at("right")]
_N_DIMS, _OUTPUT_COLUMN = COLUMN.at("n_dims"), COLUMN.at("output_column")


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

    columns: NDArray[np.int64]  # [n, fields of rf_column]
    sources: NDArray[np.int64]  # [n, fields of rf_column_source]
    steps: NDArray[np.int64]  # [n, fields of rf_column_step]
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
        self._columns = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMN))
        self._steps = np.array(self._pools.steps, dtype=np.int64).reshape(-1, len(COLUMN_STEP))
        self._use_of_source = [self._uses[source.use] for source in self._sources]
        self._steps_of_source = [self._chains[source.steps] for source in self._sources]

    def chosen(self, numbers: Sequence[int]) -> Lowered:
        """Return a subset of the columns, in the order of ``numbers``, with the same uses."""
        subset = copy.copy(self)
        subset._columns = self._columns[list(numbers)]
        widths = subset._columns[:, _N_DIMS]
        subset._columns[:, _OUTPUT_COLUMN] = widths.cumsum() - widths
        subset.output_dim = int(widths.sum())
        return subset

    def reader_of(self, use: int) -> int | None:
        """Return the number of the first column that reads a use."""
        sources = np.flatnonzero(np.array(self._use_of_source, np.int64) == use)
        columns = np.flatnonzero(np.isin(self._columns[:, _SOURCES], sources).any(axis=1))
        return int(columns[0]) if columns.size else None

    def arrays(self, places: Sequence[InputRef]) -> Arrays:
        """Return the arrays of the program for batches with these places, a place per use."""
        sources = [
            COLUMN_SOURCE.row(**places[use]._asdict(), first_step=first, n_steps=count)
            for use, (first, count) in zip(self._use_of_source, self._steps_of_source, strict=True)
        ]
        boundaries, vocabulary = self._pools.boundaries, self._pools.vocabulary
        return Arrays(
            self._columns,
            np.array(sources, dtype=np.int64).reshape(-1, len(COLUMN_SOURCE)),
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
        left, right = (*(self._source(source) for source in column.sources()), -1)[:2]
        values = {"left": left, "right": right, "output_column": at}
        if not isinstance(column, TableColumn):
            table = dict.fromkeys(("weight_offset", "rows", "dim", "pooling", "weighted", "first_dim"), 0)
            cross = {"cross_buckets": 0, "cross_seed": 0}
            empty = {"invalid": COLUMN_INVALID["drop"], "empty": COLUMN_EMPTY["fill"], "fill": _bits(0.0)}
            written = {"n_dims": column.output_dim, "scale": _bits(1.0)}
            return COLUMN.row(**values, **cross, buffer=-1, **table, **empty, **written)
        place, (first, end) = place_of[column.table_name], column.dims
        buckets, seed = (column.buckets, _signed(column.seed)) if isinstance(column, Cross) else (0, 0)
        return COLUMN.row(
            **values,
            cross_buckets=buckets,
            cross_seed=seed,
            buffer=place.buffer,
            weight_offset=place.offset,
            rows=place.rows,
            dim=place.dim,
            pooling=POOLINGS.index(column.pooling),
            weighted=isinstance(column, FeatureColumn) and (column.weighted or column.weights is not None),
            invalid=column.invalid if isinstance(column.invalid, int) else COLUMN_INVALID[column.invalid],
            empty=column.empty if isinstance(column.empty, int) else COLUMN_EMPTY[column.empty],
            fill=_bits(column.fill_value),
            first_dim=first,
            n_dims=end - first,
            scale=_bits(column.scale),
        )


class _Pools:
    """Steps, with their boundaries and words; equal lists are stored once."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.boundaries: list[NDArray[np.float32]] = []
        self.vocabulary: list[NDArray[np.int64]] = []
        self._first: dict[bytes, int] = {}
        self._counts = [0, 0]  # boundaries, words

    def step(self, step: Step) -> tuple[int, ...]:
        """Return the row of a step."""
        is_right = isinstance(step, ToBucket) and step.right
        operation = CODES["column_step"].index(f"{step.kind}_right" if is_right else step.kind)
        a, b = self._operands(step)
        return COLUMN_STEP.row(operation=operation, a=a, b=b)

    def _operands(self, step: Step) -> tuple[int, int]:
        if isinstance(step, Affine):
            return _bits(step.scale), _bits(step.offset)
        if isinstance(step, Clip):
            least, most = step.bounds()
            return _bits(least), _bits(most)
        if isinstance(step, ClipInteger):
            return step.bounds()
        if isinstance(step, Modulo):
            return step.divisor, 0
        if isinstance(step, ToHash):
            return step.num_buckets, _signed(step.seed)
        if isinstance(step, ToBucket):
            return self._kept(self.boundaries, 0, step.float32), len(step.float32)
        if isinstance(step, ToWord):
            return self._kept(self.vocabulary, 1, step.int64), len(step.int64)
        return 0, 0

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
