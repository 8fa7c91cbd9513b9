"""``plan``: the placement of a model's tables by predicted cost, made in one process without the GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recfuse._arguments import integer, wrong_type
from recfuse.data.forms import each_batch, moved
from recfuse.distributed.exchanges.batches import check_arguments, check_contents
from recfuse.distributed.exchanges.header import BAD_INDEX, GOOD
from recfuse.distributed.plans import TableFacts
from recfuse.distributed.preparing import facts_of, shardable
from recfuse.errors import ArgumentValueError, IndexRangeError, OffsetError
from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import choose
from recfuse.perf.placing.plan import MOST_RANKS, ShardPlan, make_plan
from recfuse.perf.placing.tables import Table

WHERE = "recfuse.distributed.plan"
_RANGES = 64  # of rows, in each of which lookups are counted


def plan(
    module: torch.nn.Module,
    ranks: int,
    batches: Iterable[Any] | Mapping[str, Iterable[Any]],
    memory: float | None = None,
    *,
    optimizer: str | None = None,
    gpu: str | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> ShardPlan:
    """Plan the placement of a model's tables on ranks by predicted cost, without the GPUs.

    Small tables are copied and large tables are cut by rows or columns where that makes the slowest rank
    faster. The others go to the least loaded rank, the most expensive first, and are then exchanged between
    ranks. Costs are those of ``recfuse place``: bytes and operations of the batches at measured rates.

    Args:
        module: a model as for :func:`shard`, on any device, also ``meta``.
        ranks: the number of ranks.
        batches: batches of one rank, as calls of the collection take them, on the CPU. For a model with
            several collections, a dict from their names to batches. Each batch has the samples of a step.
        memory: bytes on each rank for tables, states of the optimizer and buffers of exchanges. Default:
            85 % of the memory of the calibration's GPU.
        optimizer: the class of `recfuse.optim` that trains the tables, as "Adagrad". Default: inference.
        gpu, calibration: as for :func:`recfuse.predict`.

    Returns:
        ShardPlan: for ``shard(model, plan=plan)``, on the given number of ranks; ``print`` it,
        ``plan.save(path)``, ``plan.plot()``.

    Raises:
        TypeError: an argument or a batch of another form. ValueError: too little memory, an unknown optimizer
            or GPU, no batch. IndexError: an index outside of its table.

    Example:
        >>> tables = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16), (50, 8)], device="meta")
        >>> batch = torch.randint(50, (8,)), torch.arange(9)
        >>> plan = recfuse.distributed.plan(tables, 2, [batch], gpu="H100")  # doctest: +SKIP
        >>> plan.save("plan.json")  # doctest: +SKIP
    """
    if not isinstance(module, torch.nn.Module):
        raise wrong_type(f"{WHERE}: module", module, "a torch.nn.Module")
    ranks = integer(f"{WHERE}: ranks", ranks, 1, MOST_RANKS)
    modules = shardable(module, WHERE)
    tables: list[Table] = []
    most = 1
    for name, own in _by_module(batches, [name for name, _ in modules]).items():
        samples, found = _tables_of(name, module.get_submodule(name), own, ranks)
        tables += found
        most = max(most, samples)
    return make_plan(tables, ranks, memory, most, optimizer, choose(gpu, calibration), WHERE)


def _by_module(batches: Any, names: list[str]) -> dict[str, Any]:
    if not isinstance(batches, Mapping):
        if len(names) > 1:
            raise ArgumentValueError(
                f"{WHERE}: batches are of one collection, and the model has {len(names)}; expected a dict "
                f"from their names, as {names[0]!r}, to batches"
            )
        return {names[0]: batches}
    if set(batches) != set(names):
        raise ArgumentValueError(
            f"{WHERE}: batches are of {', '.join(map(repr, batches))}; expected those of "
            f"{', '.join(map(repr, names))}"
        )
    return {name: batches[name] for name in names}


def _tables_of(name: str, module: Any, batches: Iterable[Any], ranks: int) -> tuple[int, list[Table]]:
    """Return the samples of a step, the most of all batches, and the tables with their lookups."""
    facts, layout = facts_of(name, module), module.layout
    rows = torch.tensor([facts[table].rows for table in layout.table_of_feature], dtype=torch.int64)
    counts = [_Counts(table) for table in facts]
    samples = number = 0
    for prefix, batch in each_batch(batches, WHERE):
        cpu = torch.device("cpu")
        indices, offsets, _ = moved(module._lookups_of(batch, prefix), cpu, prefix)
        bags = check_arguments(indices, offsets, None, len(rows), cpu)
        state, bad, bounds = check_contents(indices, offsets, rows, bags)
        if state != GOOD:
            raise _bad(prefix, state, bad, rows)
        samples, number = max(samples, bags), number + 1
        for feature, table in enumerate(layout.table_of_feature):
            own = indices[bounds[feature] : bounds[feature + 1]].numpy()
            counts[table].add(own, bags, is_in_step=number <= ranks)
    if not samples:
        raise ArgumentValueError(f"{WHERE}: batches are empty; expected the samples of a step")
    return samples, [each.table(number, ranks) for each in counts]


def _bad(prefix: str, state: int, bad: Any, rows: torch.Tensor) -> Exception:
    if state == BAD_INDEX:
        return IndexRangeError(
            f"{prefix}: feature {bad.feature}: bag {bad.bag}: place {bad.position}: index is {bad.value}; "
            f"expected [0, {int(rows[bad.feature])})"
        )
    return OffsetError(
        f"{prefix}: offset {bad.position} is {bad.value}; expected offsets that ascend from 0 to the "
        "number of indices"
    )


class _Counts:
    """The lookups of a table: those of all batches, and the distinct rows of a step's batches."""

    def __init__(self, facts: TableFacts) -> None:
        self._facts, self._bags = facts, 0
        self._lookups = np.zeros(_RANGES, np.int64)  # by range of rows
        self._rows: list[NDArray[np.integer]] = []

    def add(self, indices: NDArray[np.integer], bags: int, is_in_step: bool) -> None:
        """Count a feature of a batch; ``is_in_step`` says that its distinct rows count."""
        self._bags += bags
        if not len(indices):
            return
        rows, counts = np.unique(indices, return_counts=True)
        ranges = rows.astype(np.int64) * _RANGES // self._facts.rows
        self._lookups += np.bincount(ranges, counts, _RANGES).astype(np.int64)
        if is_in_step:
            self._rows.append(rows)

    def table(self, batches: int, ranks: int) -> Table:
        """Return the table with its lookups in a step of all ranks, which has a batch a rank.

        With fewer batches than ranks, their distinct rows are multiplied, an upper bound.
        """
        facts, total = self._facts, int(self._lookups.sum())
        distinct = len(np.unique(np.concatenate(self._rows))) if self._rows else 0
        unique = distinct * max(ranks / batches, 1.0)
        return Table(
            facts.name,
            facts.rows,
            facts.dim,
            total / max(self._bags, 1),
            facts.dtype.itemsize,
            min(unique, facts.rows, total * ranks / batches),
            facts.features,
            tuple(map(float, self._lookups / total)) if total else (),
        )
