"""The search for the placement of each table: whole, copied, or cut by rows or columns.

1. A table that does not fit on a rank is cut.
2. A costly table of the slowest rank is cut, while that makes the slowest rank faster.
3. The same is tried with copies of the tables that take less time so; the faster arrangement is returned.

Copies are on all ranks; parts of a cut go to the least loaded ranks, the longest first; whole tables fill the
rest, longest first, and are exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recfuse.errors import ArgumentValueError
from recfuse.perf.placing.balance import balanced
from recfuse.perf.placing.costs import Costs
from recfuse.perf.placing.tables import LEAST_COLUMNS, Table, columns_from, points_of, rows_from

_COPIED = 0.1  # largest share of a rank's memory for copies
_TRIED = 3  # tables of the slowest rank that are cut in turn
_PATIENCE = 4  # cuts without a gain
_EVEN = 1.05  # a slowest rank below this multiple of the mean is cut only for a gain of 3 %
_WORTH, _LITTLE = 0.97, 0.999
_POWER = 64  # of the mean in a score


@dataclass(frozen=True)
class Choice:
    """A table with its kind of placement, "whole", "copies", "rows" or "columns", and its number of parts."""

    table: Table
    kind: str = "whole"
    pieces: int = 1


@dataclass(frozen=True)
class Found:
    """The placement of a table. ``points`` are the bounds of the parts on each rank; empty if not cut."""

    table: Table
    kind: str
    rank: int = 0  # of a whole table
    points: tuple[int, ...] = ()

    def is_on(self, rank: int) -> bool:
        """Returns whether a rank has the table or a part of it."""
        if self.kind == "whole":
            return self.rank == rank
        return self.kind == "copies" or self.points[rank] < self.points[rank + 1]


@dataclass(frozen=True)
class Arranged:
    """All tables on ranks, with microseconds and bytes by rank."""

    found: tuple[Found, ...]
    pooling_us: NDArray[np.float64]
    exchange_us: NDArray[np.float64]
    bytes: NDArray[np.float64]

    @property
    def rank_us(self) -> NDArray[np.float64]:
        """Microseconds of each rank."""
        return self.pooling_us + self.exchange_us

    @property
    def us(self) -> float:
        """Microseconds of the slowest rank."""
        return float(self.rank_us.max())

    @property
    def score(self) -> float:
        """Microseconds of the slowest ranks: below ``us``, and lower if fewer ranks are that slow."""
        return self.us * float(np.mean((self.rank_us / self.us) ** _POWER)) ** (1 / _POWER)


class _Part(NamedTuple):
    """The costs of a part of a table: microseconds of pooling, and with exchanges, and bytes."""

    pooling: float
    load: float
    memory: float


class Search:
    """Searches placements of tables on ranks with ``room`` bytes each."""

    def __init__(
        self, costs: Costs, room: float, where: str, cuts: Sequence[str] = ("columns", "rows")
    ) -> None:
        """Takes costs and limits; ``where`` begins errors, ``cuts`` are the kinds of cuts."""
        self._costs, self._room, self._where, self._cuts = costs, room, where, tuple(cuts)
        self._ranks = costs.gpus
        self._known: dict[tuple[str, str, int], list[_Part]] = {}

    def run(self, tables: Sequence[Table]) -> Arranged:
        """Returns the best arrangement.

        Raises:
            ValueError: too little memory.
        """
        own = self._costs.own_memory(tables)
        self._free = self._room - own
        needed = sum(map(self._costs.memory, tables))
        if needed > self._free * self._ranks:
            raise ArgumentValueError(
                f"{self._where}: memory is {self._room / 1e9:.3g} GB on each of {self._ranks} ranks; "
                f"expected at least {(needed / self._ranks + own) / 1e9:.3g} GB for tables, states and "
                "exchanges. Use more ranks, or narrower types."
            )
        choices = [self._fitting(table) for table in tables]
        best = self._arranged(choices)
        while best is None:
            choices = self._cut_largest(choices)
            best = self._arranged(choices)
        if self._ranks == 1:
            return best
        best = self._cut_slowest(choices, best)
        copied = self._with_copies(choices)
        if (other := self._arranged(copied)) is not None:
            other = self._cut_slowest(copied, other)
            best = other if other.us < best.us else best
        return best

    def _numbers(self, choice: Choice) -> list[int]:
        """Returns the numbers of parts into which a table may be cut further."""
        powers = {2**power for power in range(self._ranks.bit_length())}
        numbers = powers | {3 * power for power in powers} | {self._ranks}
        return sorted(number for number in numbers if choice.pieces < number <= self._ranks)

    def _cut_more(self, choice: Choice) -> list[Choice]:
        """Returns the cuts of a table into more parts."""
        table, found = choice.table, []
        if choice.kind == "copies":
            return []
        for kind in self._cuts:
            for number in self._numbers(choice):
                if table.dim // number >= LEAST_COLUMNS if kind == "columns" else table.rows >= number:
                    found.append(Choice(table, kind, number))
        return found

    def _fitting(self, table: Table) -> Choice:
        """Returns the table whole, or in the parts that fit on a rank and cost least."""
        choice = Choice(table)
        if self._costs.memory(table) <= self._free:
            return choice
        fitting = [
            cut
            for cut in self._cut_more(choice)
            if max(part.memory for part in self._parts(cut)) <= self._free
        ]
        if not fitting:
            raise ArgumentValueError(
                f"{self._where}: memory is {self._room / 1e9:.3g} GB on a rank, and no part of table "
                f"{table.name!r} fits there; expected room for a part of its "
                f"{self._costs.memory(table) / 1e9:.3g} GB. Use more ranks, or narrower types."
            )
        return min(fitting, key=self._load)

    def _load(self, choice: Choice) -> float:
        """Returns the microseconds of all parts."""
        return sum(part.load for part in self._parts(choice))

    def _parts(self, choice: Choice) -> list[_Part]:
        """Returns the costs of the parts, which are computed once."""
        key = choice.table.name, choice.kind, choice.pieces
        if key not in self._known:
            costs, is_rows = self._costs, choice.kind == "rows"
            if choice.kind == "copies":
                us = costs.copy(choice.table)
                self._known[key] = [_Part(us, us, costs.weights(choice.table))]
            else:
                self._known[key] = [
                    _Part(costs.pooling(part), costs.load(part, is_rows), costs.memory(part))
                    for part in parts_of(choice)
                ]
        return self._known[key]

    def _cut_largest(self, choices: list[Choice]) -> list[Choice]:
        """Cuts the table with the largest part into more parts."""
        order = sorted(range(len(choices)), key=lambda at: -self._parts(choices[at])[0].memory)
        for at in order:
            if cuts := self._cut_more(choices[at]):
                return [*choices[:at], max(cuts, key=lambda cut: cut.pieces), *choices[at + 1 :]]
        raise ArgumentValueError(
            f"{self._where}: memory is {self._room / 1e9:.3g} GB on each of {self._ranks} ranks, and the "
            "tables cannot be cut so that all parts fit; expected more memory. Use more ranks."
        )

    def _with_copies(self, choices: Sequence[Choice]) -> list[Choice]:
        """Copies the tables that take less time so, the smallest first."""
        found, left = list(choices), _COPIED * self._free
        for at in sorted(range(len(found)), key=lambda number: choices[number].table.bytes):
            table = choices[at].table
            size = self._costs.weights(table)
            if size <= left and self._costs.copy(table) < self._costs.load(table) / self._ranks:
                found[at] = Choice(table, "copies")
                left -= size
        return found

    def _cut_slowest(self, choices: Sequence[Choice], best: Arranged) -> Arranged:
        """Cuts costly tables of the slowest rank while that makes the slowest rank faster.

        A cut may gain only with a second cut, so that a few cuts may pass without a gain.
        """
        last, without_gain = best, 0
        while without_gain < _PATIENCE:
            found = [
                (other.score, number, tried, other)
                for number, tried in enumerate(self._cuts_of_slowest(choices, last))
                if (other := self._arranged(tried)) is not None
            ]
            if not found:
                break
            _, _, choices, last = min(found, key=lambda each: each[:2])
            is_even = best.us < _EVEN * best.rank_us.mean()
            without_gain += 1
            if last.score < best.score * (_WORTH if is_even else _LITTLE):
                best, without_gain = last, 0
        return best

    def _cuts_of_slowest(self, choices: Sequence[Choice], arranged: Arranged) -> Iterator[list[Choice]]:
        """Yields the choices with a further cut of a costly table of the slowest rank."""
        slowest = int(arranged.rank_us.argmax())
        on_it = [
            at for at, each in enumerate(arranged.found) if each.kind != "copies" and each.is_on(slowest)
        ]
        on_it.sort(key=lambda at: -self._parts(choices[at])[0].load)
        for at in on_it[:_TRIED]:
            for cut in self._cut_more(choices[at]):
                yield [*choices[:at], cut, *choices[at + 1 :]]

    def _arranged(self, choices: Sequence[Choice]) -> Arranged | None:
        """Returns the choices on ranks, or None if they do not fit."""
        costs, ranks = self._costs, self._ranks
        pooling, load, size = (np.zeros(ranks) for _ in range(3))
        found: dict[str, Found] = {}

        def add(part: _Part, rank: int) -> None:
            pooling[rank] += part.pooling
            load[rank] += part.load
            size[rank] += part.memory

        for choice in choices:
            if choice.kind == "copies":
                found[choice.table.name] = Found(choice.table, "copies")
                (part,) = self._parts(choice)
                pooling += part.pooling
                load += part.load
                size += part.memory
        cut = [choice for choice in choices if choice.pieces > 1]
        for choice in sorted(cut, key=lambda each: -self._load(each)):
            parts = self._parts(choice)
            most = max(part.memory for part in parts)
            roomy = [rank for rank in range(ranks) if size[rank] + most <= self._free]
            if len(roomy) < len(parts):
                return None
            chosen = sorted(sorted(roomy, key=lambda rank: (load[rank], rank))[: len(parts)])
            for part, rank in zip(parts, chosen, strict=True):
                add(part, rank)
            found[choice.table.name] = Found(choice.table, choice.kind, points=_points(choice, chosen, ranks))
        whole = [choice for choice in choices if choice.kind == "whole"]
        if size.max() > self._free:
            return None
        if whole:
            parts = [self._parts(choice)[0] for choice in whole]
            loads, sizes = np.array([part.load for part in parts]), np.array([part.memory for part in parts])
            rank_of = balanced(loads, sizes, ranks, self._free, load, size)
            if rank_of is None:
                return None
            for choice, part, rank in zip(whole, parts, rank_of, strict=True):
                found[choice.table.name] = Found(choice.table, "whole", int(rank))
                add(part, int(rank))
        exchange = load - pooling + costs.exchange(0)
        own = self._room - self._free
        return Arranged(
            tuple(found[choice.table.name] for choice in choices),
            pooling + costs.launches,
            exchange,
            size + own,
        )


def parts_of(choice: Choice) -> list[Table]:
    """Returns the parts of a table, each as a table, without empty parts."""
    if choice.pieces == 1:
        return [choice.table]
    part: Callable[[Table, int, int], Table] = columns_from if choice.kind == "columns" else rows_from
    points = _bounds(choice)
    return [part(choice.table, *bounds) for bounds in itertools.pairwise(points) if bounds[0] < bounds[1]]


def _bounds(choice: Choice) -> list[int]:
    size = choice.table.dim if choice.kind == "columns" else choice.table.rows
    return points_of(size, choice.pieces)


def _points(choice: Choice, chosen: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Returns the bounds of the parts by rank, one more than ranks; ``chosen`` are the ranks with a part."""
    ends = iter(point for before, point in itertools.pairwise(_bounds(choice)) if before < point)
    points = [0]
    for rank in range(ranks):
        points.append(next(ends) if rank in chosen else points[-1])
    return tuple(points)
