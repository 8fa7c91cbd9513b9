"""``ShardReport``: the placement of each table, the way of the exchange, and the modules that were left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_SHOWN = 40


class ShardEntry(NamedTuple):
    """A table of the report."""

    name: str
    placement: str
    nbytes: int  # of the whole table
    ranks: tuple[int, ...]  # the ranks that hold a part
    rank_bytes: tuple[int, ...]  # by these ranks


@dataclass
class ShardReport:
    """Report of :func:`recfuse.distributed.shard`; ``print`` shows a table.

    Attributes:
        entries: the tables, in the order of the model.
        left: names of modules with embedding tables that were not sharded, each with the reason.
        ranks: the number of ranks.
        path: the way in which ranks exchange lookups and rows: "collectives".
        reason: the reason for this way.

    Example:
        >>> print(recfuse.distributed.shard(model))  # doctest: +SKIP
    """

    ranks: int
    path: str
    reason: str
    entries: list[ShardEntry] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def bytes_of_rank(self, rank: int) -> int:
        """Return the bytes of the tables that a rank holds."""
        return sum(
            size
            for entry in self.entries
            for holder, size in zip(entry.ranks, entry.rank_bytes, strict=True)
            if holder == rank
        )

    def __str__(self) -> str:
        """The tables, the bytes of each rank, and the way of the exchange."""
        width = max([len(entry.name) for entry in self.entries[:_SHOWN]] + [5])
        lines = [f"{'table'.ljust(width)}  placement"]
        lines += [f"{entry.name.ljust(width)}  {entry.placement}" for entry in self.entries[:_SHOWN]]
        if len(self.entries) > _SHOWN:
            lines.append(f"... {len(self.entries) - _SHOWN} more tables")
        lines += [f"{name}: left, {reason}" for name, reason in self.left]
        sizes = ", ".join(f"{self.bytes_of_rank(rank):,}" for rank in range(self.ranks))
        lines.append(f"bytes by rank: {sizes}")
        lines.append(f"exchange: {self.path}, {self.reason}")
        return "\n".join(lines)
