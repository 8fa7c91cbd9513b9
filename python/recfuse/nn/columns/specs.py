"""Base classes of the specifications of columns: small frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch

from recfuse._arguments import integer, real, wrong_type
from recfuse._codes import CODES, DTYPES
from recfuse.errors import ArgumentTypeError, ArgumentValueError, FileFormatError, a_type
from recfuse.nn.columns.steps import Step

Pooling = Literal["sum", "mean", "max", "sqrtn"]
POOLINGS = cast(tuple[Pooling, ...], CODES["column_pooling"])
"""All poolings, in the order of the operator's numbers."""
PLACEMENTS = ("auto", "device", "host")
_MOST_ROWS = 2**48
MOST_DIM = 2**24
_MOST_FLOAT = float(np.finfo(np.float32).max)


class FeatureRef(NamedTuple):
    """The data that a column reads from a batch: an entry, and the weights of its values."""

    feature: str
    weights: str | None = None  # the entry with the weights
    weighted: bool = False  # the entry itself contains the weights


if not TYPE_CHECKING:  # hidden from type checkers, for which every name would have type Any

    def __getattr__(name: str) -> Any:
        """Raise the error of a name that only pickles of earlier versions have."""
        if name == "Use":  # FeatureRef, before other fields of a packed batch changed too
            raise FileFormatError(
                "recfuse.nn.EmbeddingColumns: the packed batch was saved by an earlier version. Pack the "
                "batch again by EmbeddingColumns.pack."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Source(NamedTuple):
    """An entry of a batch and the steps that its values go through."""

    use: FeatureRef
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Key:
    """A feature of a :class:`Cross`, with steps; its values after ``preprocess`` must be integers.

    Args:
        feature: the entry of the batch.
        preprocess: steps, in order.

    Example:
        >>> columns = recfuse.nn.columns
        >>> age = columns.Key("age", preprocess=[columns.Cast(), columns.Modulo(10)])
        >>> columns.Cross("age_city", keys=[age, "city"], num_embeddings=100, embedding_dim=8).output_dim
        8
    """

    feature: str
    preprocess: Sequence[Step] = ()

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for an invalid name or invalid steps."""
        check_name("feature", self.feature)
        object.__setattr__(self, "preprocess", checked_steps(self.preprocess))


@dataclass(frozen=True)
class Column:
    """Base of all columns.

    Args:
        name: the name of the column, and of its feature unless that is given.

    Raises:
        TypeError: a bad field; names the column.
        ValueError: a bad field; names the column.

    Example:
        >>> isinstance(recfuse.nn.columns.Numeric("price"), recfuse.nn.columns.Column)
        True
    """

    name: str
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the fields; errors name the column."""
        try:
            check_name("name", self.name)
            self._check()
        except (TypeError, ValueError) as error:
            kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
            raise kind(f"recfuse.nn.columns.{type(self).__name__} {self.name!r}: {error}") from None

    def _check(self) -> None:
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def sources(self) -> tuple[Source, ...]:
        """Return the entries that the column reads, with their steps: 2 for a cross, else 1.

        Raises:
            NotImplementedError: the class of the column does not define its entries.
        """
        raise NotImplementedError

    @property
    def output_dim(self) -> int:
        """The number of columns in the output."""
        raise NotImplementedError


@dataclass(frozen=True)
class TableColumn(Column):
    """Base of columns with a table.

    Args:
        embedding_dim: columns of the table.
        num_embeddings: rows of the table.
        pooling: "sum", "mean", "sqrtn" (the sum divided by the square root of the number of rows) or "max" of
            a sample's rows. With weights, mean divides by the sum of the weights, and sqrtn by the square
            root of the sum of their squares.
        invalid: the treatment of an index outside the table: "error" raises, "drop" leaves it out, a number
            is the row to read instead.
        empty: the result of a sample without valid indices: "fill" writes ``fill_value``, a number is the row
            to read.
        fill_value: the value of "fill"; not scaled.
        slice: ``(start, stop)``, the columns of the table that are written. Default: all.
        scale: a factor of the pooled row.
        table: the name of the table, also in the state_dict; columns with the same name share it. Default:
            the name of the column.
        dtype: float32, float16 or bfloat16. Default: the module's.
        trainable: False gives the table no gradient.
        placement: "device": the table moves with the module; "host": it stays in host memory; "auto": its
            size decides.

    Example:
        >>> home = recfuse.nn.columns.Identity("home", 1000, 8, table="city")
        >>> work = recfuse.nn.columns.Identity("work", 1000, 8, table="city", slice=(0, 4))
        >>> recfuse.nn.EmbeddingColumns([home, work]).output_dim
        12
    """

    _: KW_ONLY
    pooling: Pooling = "mean"
    invalid: Literal["error", "drop"] | int = "error"
    empty: Literal["fill"] | int = "fill"
    fill_value: float = 0.0
    slice: tuple[int, int] | None = None
    scale: float = 1.0
    table: str | None = None
    dtype: torch.dtype | None = None
    trainable: bool = True
    placement: Literal["auto", "device", "host"] = "auto"

    if TYPE_CHECKING:  # fields of each class, in its own order
        embedding_dim: ClassVar[int]
        num_embeddings: ClassVar[Any]

    @property
    def table_name(self) -> str:
        """The name of the table."""
        return self.name if self.table is None else self.table

    @property
    def rows(self) -> int:
        """The rows of the table."""
        return int(self.num_embeddings)

    @property
    def dims(self) -> tuple[int, int]:
        """The columns of the table that are written: the first, and the end."""
        return (0, self.embedding_dim) if self.slice is None else self.slice

    @property
    def output_dim(self) -> int:
        """The number of columns in the output."""
        first, end = self.dims
        return end - first

    def _check(self) -> None:
        self._set("embedding_dim", integer("embedding_dim", self.embedding_dim, 0, MOST_DIM))
        self._set("num_embeddings", integer("num_embeddings", self.num_embeddings, 0, _MOST_ROWS))
        if self.table is not None:
            check_name("table", self.table)
        if "." in self.table_name:
            raise ValueError(
                f"the table's name is {self.table_name!r}; expected no dot, since it is a part of a name in "
                "the state_dict. Pass table."
            )
        _one_of("pooling", self.pooling, POOLINGS)
        _one_of("placement", self.placement, PLACEMENTS)
        for name, word in (("invalid", ("error", "drop")), ("empty", ("fill",))):
            value = getattr(self, name)
            if isinstance(value, str):
                _one_of(name, value, word, " or the number of a row")
            else:
                self._set(name, integer(name, value, 0, self.rows - 1))
        for name in ("fill_value", "scale"):
            self._set(name, real(name, getattr(self, name)))
            if not -_MOST_FLOAT <= getattr(self, name) <= _MOST_FLOAT:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite float32")
        if self.empty != "fill" and self.fill_value != 0:
            raise ValueError(
                f'fill_value is {self.fill_value} with empty={self.empty}; expected 0, or empty="fill"'
            )
        if self.slice is not None:
            self._set("slice", self._checked_slice(self.slice))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TypeError(
                f"dtype is {self.dtype!r}; expected torch.float32, torch.float16 or torch.bfloat16"
            )
        if not isinstance(self.trainable, bool):
            raise TypeError(f"trainable is {a_type(self.trainable)}; expected a bool")

    def _checked_slice(self, bounds: Any) -> tuple[int, int]:
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError("slice has another form; expected (start, stop)")
        first = integer("slice's start", bounds[0], 0, self.embedding_dim)
        return first, integer("slice's stop", bounds[1], first, self.embedding_dim)


@dataclass(frozen=True)
class FeatureColumn(TableColumn):
    """Base of columns with a table and a single feature.

    Args:
        feature: the entry of the batch. Default: the entry with the name of the column.
        preprocess: steps before the column, in order.
        weights: the entry of the batch with a weight for each value; not with pooling "max".
        weighted: the entry contains the weights of its values itself.
    """

    _: KW_ONLY
    feature: str | None = None
    preprocess: Sequence[Step] = ()
    weights: str | None = None
    weighted: bool = False

    def sources(self) -> tuple[Source, ...]:
        """Return the single source."""
        step = self._step()
        steps = tuple(self.preprocess) if step is None else (*self.preprocess, step)
        return (Source(FeatureRef(self.feature or self.name, self.weights, self.weighted), steps),)

    def _step(self) -> Step | None:
        """Return the column's own step, which follows ``preprocess``, or None."""
        raise NotImplementedError

    def _check(self) -> None:
        super()._check()
        self._set("preprocess", checked_steps(self.preprocess))
        for name in ("feature", "weights"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        if not isinstance(self.weighted, bool):
            raise TypeError(f"weighted is {a_type(self.weighted)}; expected a bool")
        if self.weighted and self.weights is not None:
            raise ValueError(
                f"weighted is True and weights is {self.weights!r}; expected weighted=False or weights=None"
            )
        if self.pooling == "max" and (self.weighted or self.weights is not None):
            raise ValueError('pooling is "max", which takes no weights')


def check_name(prefix: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the value is a str that is not empty."""
    if not isinstance(value, str):
        raise wrong_type(prefix, value, "a str")
    if not value:
        raise ArgumentValueError(f"{prefix} is empty")


def _one_of(prefix: str, value: Any, allowed: Sequence[str], more: str = "") -> None:
    if value not in allowed:
        words = ", ".join(f'"{value}"' for value in allowed)
        raise ArgumentValueError(f"{prefix} is {value!r}; expected {words}{more}")


def checked_steps(steps: Any) -> tuple[Step, ...]:
    """Return the steps as a tuple; raise TypeError for an element that is no step."""
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise wrong_type("preprocess", steps, "a sequence of steps (recfuse.nn.columns.Affine, ...)")
    for step in steps:
        if not isinstance(step, Step):
            raise wrong_type("a step of preprocess", step, "recfuse.nn.columns.Affine, Log1p, Clip, ...")
    return tuple(steps)
