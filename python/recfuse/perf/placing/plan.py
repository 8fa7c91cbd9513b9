"""``ShardPlan``: the placement of each table on ranks with its predicted cost, as a readable JSON file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recfuse._arguments import integer, path_of, real, wrong_type
from recfuse._files import parsing, read_json, write_json
from recfuse.errors import ArgumentValueError, FileFormatError
from recfuse.ops.training.optimizers import KINDS, kind_of
from recfuse.perf.choosing import Chosen
from recfuse.perf.models.bags import States
from recfuse.perf.placing.costs import Costs, RankTimes
from recfuse.perf.placing.search import Arranged, Found, Search
from recfuse.perf.placing.tables import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT, VERSION = "recfuse sharding plan", 1
MOST_RANKS, MOST_BATCH = 4096, 1 << 24
_MOST_BYTES, _MOST_VALUES = 32 << 20, 2_000_000
_SHARE_OF_MEMORY = 0.85  # of a GPU's memory for tables
_SHOWN = 40


@dataclass(frozen=True)
class ShardPlan(RankTimes):
    """A placement of tables on ranks. :func:`recfuse.distributed.shard` takes it, or the path of its file.

    Attributes:
        ranks: the number of ranks.
        batch: samples of a step on each rank.
        gpu: the GPU of the predicted costs.
        optimizer: the optimizer of `recfuse.optim` that counts, or None for inference.
        memory: bytes on each rank that the plan may use.
        tables: the tables, each with its kind of placement and its rank or its bounds.
        pooling_us: microseconds that each rank pools, and updates in training.
        exchange_us: microseconds of each rank's exchanges.
        bytes: memory of each rank: tables, states of the optimizer, buffers of exchanges.

    Example:
        >>> tables = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)], device="meta")
        >>> batch = torch.randint(50, (8,)), torch.arange(9)
        >>> plan = recfuse.distributed.plan(tables, 2, [batch], gpu="H100")  # doctest: +SKIP
        >>> print(plan.report())  # doctest: +SKIP
    """

    ranks: int
    batch: int
    gpu: str
    optimizer: str | None
    memory: float
    tables: tuple[Found, ...]
    pooling_us: tuple[float, ...]
    exchange_us: tuple[float, ...]
    bytes: tuple[int, ...]

    @property
    def slowest_over_mean(self) -> float:
        """The time of the slowest rank over the mean of all ranks."""
        return self.us * self.ranks / sum(self.rank_us)

    def report(self) -> str:
        """Return the placement of each table, then bytes and predicted microseconds by rank."""
        width = max([len(each.table.name) for each in self.tables[:_SHOWN]] + [5])
        lines = [f"{'table'.ljust(width)}  placement"]
        lines += [f"{each.table.name.ljust(width)}  {_text(each)}" for each in self.tables[:_SHOWN]]
        if len(self.tables) > _SHOWN:
            lines.append(f"... {len(self.tables) - _SHOWN} more tables")
        lines.append(f"{'rank':>4} {'tables':>7} {'memory':>11} {'pooling':>11} {'exchange':>11} {'sum':>11}")
        for rank, us in enumerate(self.rank_us):
            count = sum(each.is_on(rank) for each in self.tables)
            lines.append(
                f"{rank:>4} {count:>7} {self.bytes[rank] / 1e9:>8.3f} GB {self.pooling_us[rank]:>8.1f} us "
                f"{self.exchange_us[rank]:>8.1f} us {us:>8.1f} us"
            )
        step = "inference" if self.optimizer is None else f"a step of {self.optimizer}"
        lines.append(f"predicted for {step} on {self.gpu}, {self.batch} samples a rank")
        lines.append(f"slowest rank: {self.us:.1f} us, {self.slowest_over_mean:.3f} of the mean")
        return "\n".join(lines)

    __str__ = report

    def plot(self) -> Figure:
        """Draw microseconds and bytes by rank. Needs matplotlib (the extra ``bench``).

        Returns:
            Figure: matplotlib's figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        names = [str(rank) for rank in range(self.ranks)]
        left.bar(names, self.pooling_us, label="pooling", color="#4477aa")
        left.bar(names, self.exchange_us, bottom=self.pooling_us, label="exchange", color="#66ccee")
        left.axhline(sum(self.rank_us) / self.ranks, color="#bb5566", label="mean")
        left.set(xlabel="rank", ylabel="µs a step", title=f"slowest over mean: {self.slowest_over_mean:.3f}")
        left.legend(fontsize="small")
        right.bar(names, [size / 1e9 for size in self.bytes], color="#ccbb44")
        right.set(xlabel="rank", ylabel="GB", title="tables, states and exchanges")
        return figure

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as in the file."""
        return {
            "format": FORMAT, "version": VERSION, "ranks": self.ranks, "batch": self.batch, "gpu": self.gpu,
            "optimizer": self.optimizer, "memory": self.memory, "rank_us": list(self.rank_us),
            "pooling_us": list(self.pooling_us), "exchange_us": list(self.exchange_us),
            "bytes": list(self.bytes), "tables": [_to_record(each) for each in self.tables],
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Args:
            path: the file.
        """
        write_json(path_of(path, "ShardPlan.save"), self.to_json(), "ShardPlan.save")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ShardPlan:
        """Read a plan that ``save`` or ``recfuse place --plan`` has written.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be read. ValueError: it is no plan.
        """
        where = "ShardPlan.load"
        name = path_of(path, where)
        record = read_json(name, where, _MOST_BYTES, _MOST_VALUES)
        with parsing(f"{where}: {name}"):
            return from_json(record, f"{where}: {name}")


def make_plan(
    tables: Sequence[Table],
    ranks: int,
    memory: float | None,
    batch: int,
    optimizer: str | None,
    chosen: Chosen,
    where: str,
) -> ShardPlan:
    """Return a plan of tables with different names.

    Raises:
        ValueError: too little memory, an unknown optimizer.
    """
    integer(f"{where}: ranks", ranks, 1, MOST_RANKS)
    integer(f"{where}: batch", batch, 1, MOST_BATCH)
    if optimizer is not None and optimizer not in [kind.name for kind in KINDS]:
        names = ", ".join(kind.name for kind in KINDS)
        raise ArgumentValueError(f"{where}: optimizer is {optimizer!r}; expected {names} or None")
    if memory is None:
        memory = _SHARE_OF_MEMORY * float(chosen.calibration.facts.get("memory_bytes", 80e9))
    if (room := real(f"{where}: memory", memory)) <= 0:
        raise ArgumentValueError(f"{where}: memory is {room}; expected bytes above 0")
    states, cuts = States(), ("columns", "rows")
    if optimizer is not None:
        kind = kind_of(optimizer)
        states = States(*((0, len(kind.states)) if kind.by_row else (len(kind.states), 0)))
        cuts = ("rows",) if kind.by_row else cuts  # a state of a row needs the whole row
    costs = Costs(chosen.calibration.bags, batch * ranks, ranks, optimizer is not None, states)
    found: Arranged = Search(costs, room, where, cuts).run(tables)
    return ShardPlan(
        ranks,
        batch,
        chosen.calibration.gpu,
        optimizer,
        room,
        found.found,
        tuple(map(float, found.pooling_us)),
        tuple(map(float, found.exchange_us)),
        tuple(map(int, found.bytes)),
    )


def _text(found: Found) -> str:
    if found.kind == "whole":
        return f"rank {found.rank}"
    if found.kind == "copies":
        return "every rank"
    sizes = [
        f"{end - begin} on {rank}"
        for rank, (begin, end) in enumerate(zip(found.points, found.points[1:], strict=False))
        if begin < end
    ]
    return f"{found.kind}: {', '.join(sizes)}"


def _to_record(found: Found) -> dict[str, Any]:
    """Return a table as JSON: its fields, and as its placement a rank, "every rank", or bounds."""
    record = {key: value for key, value in asdict(found.table).items() if value not in (None, ())}
    placement: Any = {found.kind: list(found.points)}
    if found.kind in ("whole", "copies"):
        placement = found.rank if found.kind == "whole" else "every rank"
    return {**record, "placement": placement}


def from_json(record: Any, where: str) -> ShardPlan:
    """Return the plan of a record, with all checks that need no module."""
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise FileFormatError(
            f'{where} has no format "{FORMAT}"; expected a file of recfuse.distributed.plan'
        )
    if record.get("version") != VERSION:
        raise FileFormatError(f"{where} has version {record.get('version')!r}; expected {VERSION}")
    ranks = integer(f"{where}: ranks", record["ranks"], 1, MOST_RANKS)
    tables = tuple(_from_record(each, ranks, where) for each in record["tables"])
    names = [each.table.name for each in tables]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileFormatError(f"{where}: table {twice!r} is named twice; expected one placement")
    optimizer = record["optimizer"]
    if optimizer is not None and not isinstance(optimizer, str):
        raise wrong_type(f"{where}: optimizer", optimizer, "a str or null")
    numbers = {key: tuple(real(f"{where}: {key}", each) for each in record[key])
               for key in ("pooling_us", "exchange_us", "bytes")}  # fmt: skip
    for key, values in numbers.items():
        if len(values) != ranks:
            raise FileFormatError(f"{where}: {key} has {len(values)} elements; expected {ranks}, the ranks")
    batch = integer(f"{where}: batch", record["batch"], 1, MOST_BATCH)
    memory = real(f"{where}: memory", record["memory"])
    return ShardPlan(
        ranks, batch, str(record["gpu"]), optimizer, memory, tables, numbers["pooling_us"],
        numbers["exchange_us"], tuple(map(int, numbers["bytes"])),
    )  # fmt: skip


def _from_record(record: Mapping[str, Any], ranks: int, where: str) -> Found:
    fields = dict(record)
    placement = fields.pop("placement", None)
    table = table_of(fields, where)
    prefix = f"{where}: the placement of {table.name!r}"
    if placement == "every rank":
        return Found(table, "copies")
    if isinstance(placement, Mapping) and len(placement) == 1:
        ((kind, points),) = placement.items()
        if kind in ("rows", "columns") and isinstance(points, list) and len(points) == ranks + 1:
            return Found(table, kind, points=tuple(integer(prefix, point, 0, 1 << 48) for point in points))
    elif isinstance(placement, int):
        return Found(table, "whole", integer(prefix, placement, 0, ranks - 1))
    raise FileFormatError(
        f'{prefix} is {placement!r}; expected a rank, "every rank", or "rows" or "columns" with '
        f"{ranks + 1} bounds"
    )
