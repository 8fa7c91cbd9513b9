"""Assigns tables to several GPUs: longest first, then exchanges.

Each rank pools its tables for the samples of all ranks, then sends pooled rows to the ranks of their samples.
A step waits for the slowest rank, so that the largest sum of pooling and exchange determines its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from recfuse._arguments import integer
from recfuse.errors import ArgumentValueError
from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import choose
from recfuse.perf.placing.balance import balanced
from recfuse.perf.placing.costs import Costs, RankTimes
from recfuse.perf.placing.tables import LEAST_COLUMNS, Table, check_names, table_of

WHERE = "recfuse place"
_MOST_SPLITS = 6
_WORTH = 0.97  # largest ratio of the slowest rank's times with and without a further cut


@dataclass(frozen=True)
class Shard:
    """Columns of a table on a rank.

    Attributes:
        table: the name of the table.
        rank: the rank.
        first_column: the first column of the table on this rank.
        columns: the number of columns.

    Example:
        >>> recfuse.perf.placement.Shard("item", rank=0, first_column=32, columns=32).columns
        32
    """

    table: str
    rank: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Placement(RankTimes):
    """The ranks of tables, and the predicted costs.

    Attributes:
        shards: columns of tables and their rank; a table that was cut has several shards.
        pooling_us: microseconds that each rank pools.
        exchange_us: microseconds in which each rank's pooled rows reach the other ranks.
        bytes: memory of each rank's tables.
        training: True if gradients and their updates count.

    Example:
        >>> tables = [{"name": f"t{n}", "rows": 1000, "dim": 64, "pooling": 20.0} for n in range(4)]
        >>> placement = recfuse.perf.placement.place(tables, gpus=2, gpu="H100")
        >>> len(placement.rank_us)
        2
    """

    shards: tuple[Shard, ...]
    pooling_us: tuple[float, ...]
    exchange_us: tuple[float, ...]
    bytes: tuple[int, ...]
    training: bool = False

    def ranks_of(self, table: str) -> list[int]:
        """Return the ranks of a table's shards, in the order of their columns.

        Args:
            table: the name of the table.
        """
        shards = [shard for shard in self.shards if shard.table == table]
        shards.sort(key=lambda shard: shard.first_column)
        return [shard.rank for shard in shards]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "shards": [asdict(shard) for shard in self.shards], "rank_us": list(self.rank_us),
            "pooling_us": list(self.pooling_us), "exchange_us": list(self.exchange_us),
            "bytes": list(self.bytes), "training": self.training,
        }  # fmt: skip

    def torchrec_constraints(self) -> dict[str, Any]:
        """Return TorchRec's ``ParameterConstraints`` for each table.

        A table is whole or cut into columns; the constraints have the width of the columns.

        Returns:
            dict: the constraints by table.
        """
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ShardingType

        constraints = {}
        for table in dict.fromkeys(shard.table for shard in self.shards):
            shards = [shard for shard in self.shards if shard.table == table]
            kind = ShardingType.COLUMN_WISE if len(shards) > 1 else ShardingType.TABLE_WISE
            least = min(shard.columns for shard in shards) if len(shards) > 1 else None
            constraints[table] = ParameterConstraints(sharding_types=[kind.value], min_partition=least)
        return constraints

    def torchrec_sharding(self) -> dict[str, Any]:
        """Return generators for TorchRec's ``construct_module_sharding_plan``, with the ranks.

        TorchRec cuts columns into equal parts, so a shard that is wider than others becomes several on its
        rank.

        Returns:
            dict: the generators by table.
        """
        from torchrec.distributed.sharding_plan import column_wise, table_wise

        generators: dict[str, Any] = {}
        for table in dict.fromkeys(shard.table for shard in self.shards):
            shards = sorted(
                (shard for shard in self.shards if shard.table == table), key=lambda shard: shard.first_column
            )
            width = math.gcd(*(shard.columns for shard in shards))
            ranks = [shard.rank for shard in shards for _ in range(shard.columns // width)]
            generators[table] = table_wise(rank=ranks[0]) if len(shards) == 1 else column_wise(ranks=ranks)
        return generators

    def __str__(self) -> str:
        """Format a line per rank."""
        lines = [f"{'rank':>4} {'tables':>7} {'memory':>10} {'pooling':>10} {'exchange':>10} {'sum':>10}"]
        for rank, us in enumerate(self.rank_us):
            count = sum(shard.rank == rank for shard in self.shards)
            lines.append(
                f"{rank:>4} {count:>7} {self.bytes[rank] / 1e9:>7.2f} GB {self.pooling_us[rank]:>7.1f} us "
                f"{self.exchange_us[rank]:>7.1f} us {us:>7.1f} us"
            )
        cut = sorted({shard.table for shard in self.shards if shard.first_column})
        if cut:
            lines.append(f"cut into columns: {', '.join(cut)}")
        return "\n".join([*lines, f"slowest rank: {self.us:.1f} us"])


def place(
    tables: Iterable[Table | Mapping[str, Any]],
    gpus: int,
    memory: float | None = None,
    *,
    batch: int = 2048,
    gpu: str | None = None,
    training: bool = False,
    calibration: Calibration | str | None = None,
) -> Placement:
    """Assign tables to several GPUs of one host.

    Args:
        tables: the tables, or dicts of the fields of :class:`Table`.
        gpus: the number of GPUs.
        memory: bytes for tables on each GPU. Default: 85 % of the memory of the calibration's GPU.
        batch: samples of a step on each GPU. Default: 2048.
        gpu, calibration: as for :func:`recfuse.predict`.
        training: count gradients and their updates as well.

    Returns:
        Placement: the ranks of the tables, with predicted costs.

    Raises:
        ValueError: no table, two tables of the same name, or tables that do not fit.

    Example:
        >>> tables = [{"name": f"t{n}", "rows": 1000, "dim": 64, "pooling": 20.0} for n in range(4)]
        >>> placement = recfuse.perf.placement.place(tables, gpus=2, gpu="H100")
        >>> sorted(shard.rank for shard in placement.shards)
        [0, 0, 1, 1]
    """
    count = integer("recfuse place: gpus", gpus, 1, 4096)
    samples = integer("recfuse place: batch", batch, 1, 1 << 24) * count
    converted = [table if isinstance(table, Table) else table_of(table, WHERE) for table in tables]
    check_names(converted, WHERE)
    chosen = choose(gpu, calibration)
    room = memory or 0.85 * float(chosen.calibration.facts.get("memory_bytes", 80e9))
    costs = Costs(chosen.calibration.bags, samples, count, training)
    parts = [part for table in converted for part in _fitting(table, room)]
    if sum(table.bytes for table, _ in parts) > room * count:
        raise ArgumentValueError(
            f"recfuse place: the tables have {sum(table.bytes for table in converted) / 1e9:.1f} GB, {count} "
            f"GPUs have room for {room * count / 1e9:.1f} GB. Use more GPUs, or narrower types."
        )
    best = _arranged(parts, costs, count, room)
    for _ in range(_MOST_SPLITS):
        cut = _cut_slowest(parts, best, costs)
        if cut is None:
            break
        other = _arranged(cut, costs, count, room)
        if other.us >= best.us * _WORTH:
            break
        parts, best = cut, other
    return best


_Part = tuple[Table, int]  # a table with some columns of another, and the first of these columns


def _fitting(table: Table, room: float) -> list[_Part]:
    """Return the table, or parts of its columns, halved until each part fits."""
    pieces = 1
    while table.bytes / pieces > room:
        pieces *= 2
        if table.dim % pieces or table.dim // pieces < LEAST_COLUMNS:
            raise ArgumentValueError(
                f"recfuse place: table {table.name!r} has {table.bytes / 1e9:.1f} GB, and even parts of its "
                f"{table.dim} columns do not fit in {room / 1e9:.1f} GB. Give more memory."
            )
    return _pieces(table, 0, pieces)


def _pieces(table: Table, first: int, pieces: int) -> list[_Part]:
    width = table.dim // pieces
    return [(replace(table, dim=width), first + number * width) for number in range(pieces)]


def _cut_slowest(parts: Sequence[_Part], best: Placement, costs: Costs) -> list[_Part] | None:
    """Halve the most expensive part of the slowest rank; return None if it cannot be halved."""
    slowest = best.rank_us.index(best.us)
    columns = {(shard.table, shard.first_column) for shard in best.shards if shard.rank == slowest}
    candidates = [number for number, (table, first) in enumerate(parts) if (table.name, first) in columns]
    number = max(candidates, key=lambda at: costs.pooling(parts[at][0]))
    table, first = parts[number]
    if table.dim % 2 or table.dim // 2 < LEAST_COLUMNS:
        return None
    return [*parts[:number], *_pieces(table, first, 2), *parts[number + 1 :]]


def _arranged(parts: Sequence[_Part], costs: Costs, gpus: int, room: float) -> Placement:
    """Assign parts, longest first, to the least loaded rank, then exchange parts with the slowest rank."""
    pooling = np.array([costs.pooling(table) for table, _ in parts])
    load = np.array([costs.load(table) for table, _ in parts])
    size = np.array([float(table.bytes) for table, _ in parts])
    rank_of = balanced(load, size, gpus, room)
    if rank_of is None:
        raise ArgumentValueError(
            f"recfuse place: parts of {size.max() / 1e9:.1f} GB and less do not fit on {gpus} GPUs of "
            f"{room / 1e9:.1f} GB each. Give more memory."
        )
    exchange = [float((load - pooling)[rank_of == rank].sum()) + costs.exchange(0) for rank in range(gpus)]
    return Placement(
        tuple(Shard(table.name, int(rank), first, table.dim)
              for (table, first), rank in zip(parts, rank_of, strict=True)),
        tuple(float(pooling[rank_of == rank].sum()) + costs.launches for rank in range(gpus)),
        tuple(exchange),
        tuple(int(size[rank_of == rank].sum()) for rank in range(gpus)),
        costs.training,
    )  # fmt: skip
