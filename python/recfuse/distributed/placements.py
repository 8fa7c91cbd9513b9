"""Placements of a table: the ranks that hold it, and the rows and columns that each of them holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.tensor import Replicate, Shard

from recfuse._arguments import integer, wrong_type
from recfuse.errors import ArgumentValueError

_MOST = 2**62


@dataclass(frozen=True)
class Cuts:
    """An uneven cut of a table: rank r holds the rows, or columns, from ``points[r]`` to ``points[r + 1]``.

    Attributes:
        dim: 0 to cut rows, 1 to cut columns.
        points: a number more than ranks, ascending from 0 to the rows or columns of the table. Equal
            neighbours give a rank no part.

    Example:
        >>> recfuse.distributed.Cuts(0, (0, 600, 600, 1000))  # doctest: +SKIP
    """

    dim: int
    points: tuple[int, ...]


Placement: TypeAlias = int | Shard | Replicate | Cuts


class Part(NamedTuple):
    """The rectangle of a table that a rank holds."""

    rank: int
    row: int
    rows: int
    column: int
    columns: int


class Placed(NamedTuple):
    """A table on ranks.

    ``kind`` is "whole" (a single rank), "rows" (cut by rows), "columns" or "copies" (whole on each rank).
    ``even`` says that the cut is that of ``torch.distributed.tensor.Shard``.
    """

    kind: str
    parts: tuple[Part, ...]  # by rank, without empty parts of a cut
    even: bool = False

    def part_of(self, rank: int) -> Part | None:
        """Return the part of a rank, or None."""
        return next((part for part in self.parts if part.rank == rank), None)

    def __str__(self) -> str:
        """Return the ranks and the cut, for reports."""
        if self.kind == "whole":
            return f"rank {self.parts[0].rank}"
        if self.kind == "copies":
            return "every rank"
        axis = "rows" if self.kind == "rows" else "columns"
        sizes = ", ".join(
            f"{part.rows if axis == 'rows' else part.columns} on {part.rank}" for part in self.parts
        )
        return f"{axis}: {sizes}"


def placed(where: str, placement: Any, shape: tuple[int, int], ranks: int) -> Placed:
    """Return the parts of a table ``shape`` by its placement; ``where`` names the table in errors.

    Raises:
        TypeError: no placement. ValueError: a placement that the table, or this number of ranks, cannot have.
    """
    rows, columns = shape
    if isinstance(placement, Replicate):
        return Placed("copies", tuple(Part(rank, 0, rows, 0, columns) for rank in range(ranks)))
    if isinstance(placement, Cuts):
        return _cut(where, placement.dim, _points(where, placement, shape, ranks), shape, False)
    if isinstance(placement, Shard):
        dim = placement.dim + 2 if placement.dim < 0 else placement.dim
        _check_dim(where, dim)
        size = shape[dim]
        chunk = -(-size // ranks)
        points = [min(rank * chunk, size) for rank in range(ranks + 1)]
        return _cut(where, dim, points, shape, True)
    if isinstance(placement, bool) or not hasattr(placement, "__index__"):
        needed = "a rank, Shard(0), Shard(1), Replicate() or recfuse.distributed.Cuts"
        raise wrong_type(where, placement, needed)
    rank = integer(f"{where}: the rank", placement, 0, ranks - 1)
    return Placed("whole", (Part(rank, 0, rows, 0, columns),))


def _check_dim(where: str, dim: Any) -> None:
    if dim not in (0, 1):
        raise ArgumentValueError(f"{where}: dim of the cut is {dim!r}; expected 0 (rows) or 1 (columns)")


def _points(where: str, cuts: Cuts, shape: tuple[int, int], ranks: int) -> list[int]:
    _check_dim(where, cuts.dim)
    if not isinstance(cuts.points, Sequence):
        raise wrong_type(f"{where}: points of Cuts", cuts.points, "a tuple of whole numbers")
    points = [integer(f"{where}: points[{at}]", point, 0, _MOST) for at, point in enumerate(cuts.points)]
    size = shape[cuts.dim]
    if len(points) != ranks + 1:
        raise ArgumentValueError(
            f"{where}: points of Cuts has {len(points)} elements; expected {ranks + 1} for {ranks} ranks. "
            "Make a plan for this number of ranks."
        )
    if points[0] != 0 or points[-1] != size or points != sorted(points):
        raise ArgumentValueError(f"{where}: points of Cuts are {points}; expected to ascend from 0 to {size}")
    return points


def _cut(where: str, dim: int, points: Sequence[int], shape: tuple[int, int], even: bool) -> Placed:
    rows, columns = shape
    if shape[dim] == 0:
        raise ArgumentValueError(
            f"{where}: the table has no {('rows', 'columns')[dim]}; expected some in a cut. Place it on one "
            "rank."
        )
    parts = []
    for rank, (begin, end) in enumerate(itertools.pairwise(points)):
        if begin < end:
            by_rows, by_columns = (rank, begin, end - begin, 0, columns), (rank, 0, rows, begin, end - begin)
            parts.append(Part(*(by_columns if dim else by_rows)))
    return Placed(("rows", "columns")[dim], tuple(parts), even)
