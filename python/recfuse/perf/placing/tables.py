"""``Table``: a table to place, and its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recfuse._arguments import integer, real
from recfuse.errors import ArgumentTypeError, ArgumentValueError

LEAST_COLUMNS = 4
"""A part of a table has at least this many columns."""


@dataclass(frozen=True)
class Table:
    """A table to place.

    Attributes:
        name: its name.
        rows, dim: its size.
        pooling: lookups of a bag.
        itemsize: bytes of an element.
        unique: distinct rows among the lookups of a step; None: the largest possible number.
        features: features that look up the table, each with a bag a sample.
        shares: shares of the lookups in ranges of rows of equal size, in the order of rows. Default: all
            rows have as many lookups.

    Example:
        >>> table = recfuse.perf.placement.Table("item", rows=1000, dim=64, pooling=20.0)
        >>> table.bytes
        256000
    """

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    itemsize: int = 4
    unique: float | None = None
    features: int = 1
    shares: tuple[float, ...] = ()

    @property
    def bytes(self) -> int:
        """Memory of its weights."""
        return self.rows * self.dim * self.itemsize


def points_of(size: int, pieces: int) -> list[int]:
    """Returns the bounds of equal pieces, as ``torch.distributed.tensor.Shard`` cuts; the last may be
    smaller or empty.
    """
    chunk = -(-size // pieces)
    return [min(piece * chunk, size) for piece in range(pieces + 1)]


def columns_from(table: Table, begin: int, end: int) -> Table:
    """Returns columns of a table as a table."""
    return replace(table, dim=end - begin)


def rows_from(table: Table, begin: int, end: int) -> Table:
    """Returns rows of a table as a table, with their share of the lookups."""
    part = (end - begin) / table.rows
    share = part
    if table.shares:
        share = _share_before(table.shares, end / table.rows) - _share_before(
            table.shares, begin / table.rows
        )
    unique = None if table.unique is None else table.unique * part
    return replace(table, rows=end - begin, pooling=table.pooling * share, unique=unique, shares=())


def _share_before(shares: Sequence[float], fraction: float) -> float:
    """Returns the share of lookups in the first rows; a range has as many lookups on each of its rows."""
    position = fraction * len(shares)
    whole = int(position)
    rest = shares[whole] * (position - whole) if whole < len(shares) else 0.0
    return sum(shares[:whole]) + rest


def table_of(record: Mapping[str, Any], where: str) -> Table:
    """Returns the table of a record of its fields; ``where`` begins errors.

    Raises:
        TypeError, ValueError: fields of another name, type or range.
    """
    try:
        table = Table(**record)
    except TypeError as error:
        raise ArgumentValueError(
            f"{where}: a table is {dict(record)!r}; expected name, rows and dim, and optionally "
            "pooling, itemsize, unique, features and shares"
        ) from error
    if not isinstance(table.name, str):
        raise ArgumentTypeError(f"{where}: the name of a table is {table.name!r}; expected a str")
    prefix = f"{where}: {{}} of {table.name!r}"
    integer(prefix.format("rows"), table.rows, 1, 1 << 48)
    integer(prefix.format("dim"), table.dim, 1, 1 << 20)
    integer(prefix.format("itemsize"), table.itemsize, 1, 8)
    integer(prefix.format("features"), table.features, 0, 1 << 20)
    shares = tuple(real(prefix.format("shares"), share) for share in table.shares)
    real(prefix.format("pooling"), table.pooling)
    if table.unique is not None:
        real(prefix.format("unique"), table.unique)
    return replace(table, shares=shares)


def check_names(tables: Iterable[Table], where: str) -> None:
    """Raises ValueError for no table, or for two tables of the same name."""
    names = [table.name for table in tables]
    if not names:
        raise ArgumentValueError(f"{where}: no table is given. Pass at least one table.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentValueError(f"{where}: two tables are named {twice!r}; expected different names")
