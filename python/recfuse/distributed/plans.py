"""The placement of each table: the default plan, and the check of a plan that is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from recfuse._arguments import wrong_type
from recfuse._codes import row_bytes
from recfuse.distributed.placements import Cuts, Placed, Placement, placed
from recfuse.errors import ArgumentValueError
from recfuse.perf.placing.plan import ShardPlan
from recfuse.perf.placing.tables import points_of

WHERE = "recfuse.distributed.shard"
SMALL_BYTES = 64 << 10
"""A table of at most this size is copied to every rank: its lookups need no exchange in inference."""
CUT_BYTES = 256 << 20
"""A table is cut only if it has more bytes than this, and more than an equal share of all tables."""
COLUMN_BYTES = 128
"""Columns are cut if each rank then has at least this many bytes of a row, else rows."""


class TableFacts(NamedTuple):
    """The facts of a table that its placement depends on."""

    name: str  # the key in the model's state_dict, without ".weight"
    rows: int
    dim: int
    dtype: torch.dtype
    features: int

    @property
    def nbytes(self) -> int:
        """The bytes of the table."""
        return self.rows * row_bytes(self.dim, self.dtype)

    @property
    def cost(self) -> int:
        """The relative time of a sample: bytes of a row that is read, and of a pooled row that is sent."""
        return self.features * 2 * row_bytes(self.dim, self.dtype)


def default_plan(tables: Sequence[TableFacts], ranks: int) -> dict[str, Placement]:
    """Return a placement for each table.

    Copies small tables, cuts tables that exceed the share of a rank, and places the others, the most
    expensive first, on the rank with the least load. The load of a rank is its part of the costs plus its
    part of the bytes of all tables. A larger table is cut by columns if its dim allows, because a cut by
    columns sends each pooled value once, and a cut by rows a partial sum from each rank.
    """
    if ranks == 1:
        return {table.name: 0 for table in tables}
    all_bytes = max(sum(table.nbytes for table in tables), 1)
    all_costs = max(sum(table.cost for table in tables), 1)
    plan: dict[str, Placement] = {}
    rest = []
    for table in tables:
        if table.nbytes <= SMALL_BYTES:
            plan[table.name] = Replicate()
        elif table.nbytes > max(CUT_BYTES, all_bytes // ranks):
            by_columns = table.dim % ranks == 0 and row_bytes(table.dim // ranks, table.dtype) >= COLUMN_BYTES
            plan[table.name] = Shard(1 if by_columns else 0)
        else:
            rest.append(table)
    load = [0.0] * ranks
    share = {table.name: table.cost / all_costs + table.nbytes / all_bytes for table in rest}
    for table in sorted(rest, key=lambda table: -share[table.name]):
        rank = min(range(ranks), key=load.__getitem__)
        plan[table.name] = rank
        load[rank] += share[table.name]
    return {table.name: plan[table.name] for table in tables}


def placements_of(plan: Any, tables: Sequence[TableFacts], ranks: int) -> dict[str, Placed]:
    """Return the parts of each table by its full name.

    ``plan`` is a dict from names to placements, a :class:`ShardPlan`, the path of its file, or None for the
    default. A name is the full name, or the table's own name if no other table of the model has it.

    Raises:
        TypeError: no plan, no placement. ValueError: a table without placement, or with two; an unknown name.
    """
    if plan is None:
        plan = default_plan(tables, ranks)
    if isinstance(plan, (str, os.PathLike)):
        plan = ShardPlan.load(plan)
    if isinstance(plan, ShardPlan):
        plan = _of_plan(plan, tables, ranks)
    if not isinstance(plan, Mapping):
        needed = "a dict from names of tables to placements, a ShardPlan, the path of its file, or None"
        raise wrong_type(f"{WHERE}: plan", plan, needed)
    short: dict[str, list[str]] = {}
    for table in tables:
        short.setdefault(table.name.rpartition(".")[2], []).append(table.name)
    full = {table.name: table for table in tables}
    found: dict[str, Placed] = {}
    for key, placement in plan.items():
        names = [key] if key in full else short.get(key, [])
        if len(names) != 1:
            known = ", ".join(list(full)[:4]) + (", ..." if len(full) > 4 else "")
            fact = f"is the name of {len(names)} tables" if names else "is no table of the module"
            raise ArgumentValueError(f"{WHERE}: plan: {key!r} {fact}; expected names like {known}")
        (name,) = names
        if name in found:
            raise ArgumentValueError(f"{WHERE}: plan: table {name!r} is named twice; expected one placement")
        table = full[name]
        found[name] = placed(f"{WHERE}: plan: table {name!r}", placement, (table.rows, table.dim), ranks)
    missing = [name for name in full if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArgumentValueError(
            f"{WHERE}: plan has no placement of table {missing[0]!r}{more}; expected a placement for "
            "each table"
        )
    return {name: found[name] for name in full}


def _of_plan(plan: ShardPlan, tables: Sequence[TableFacts], ranks: int) -> dict[str, Placement]:
    """Return the placements of a plan.

    Raises:
        ValueError: a plan of another number of ranks, or of tables of other sizes.
    """
    if plan.ranks != ranks:
        raise ArgumentValueError(
            f"{WHERE}: plan is of {plan.ranks} ranks, and the mesh has {ranks}; expected the same number. "
            "Call recfuse.distributed.plan again."
        )
    sizes = {table.name: (table.rows, table.dim) for table in tables}
    found: dict[str, Placement] = {}
    for each in plan.tables:
        table = each.table
        if sizes.get(table.name, (table.rows, table.dim)) != (table.rows, table.dim):
            rows, dim = sizes[table.name]
            raise ArgumentValueError(
                f"{WHERE}: plan: table {table.name!r} has {table.rows} x {table.dim} elements in the plan "
                f"and {rows} x {dim} in the module; expected the same. Call recfuse.distributed.plan again."
            )
        placement: Placement = each.rank
        if each.kind == "copies":
            placement = Replicate()
        elif each.kind != "whole":
            dim = int(each.kind == "columns")
            is_even = list(each.points) == points_of((table.rows, table.dim)[dim], ranks)
            placement = Shard(dim) if is_even else Cuts(dim, each.points)
        found[table.name] = placement
    return found
