"""The parts of a `CollectionPlan`: what its tables, calls and lookups are like, and lists as short text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from recfuse._codes import DTYPE_NAMES, INTEGER_NAMES, MODES, DType, Integer, Mode
from recfuse.ops.schedules import FusedSchedule
from recfuse.plan.file import MOST_ITEMS, PlanError, shown
from recfuse.plan.parts import row_bytes

if TYPE_CHECKING:
    from recfuse.nn.packed.module import PackedModule
    from recfuse.plan.collection import CollectionPlan

_BASE = 1 << 20  # an address that buffers may have; nothing is read there
_WORD = re.compile(r"\S+")
_RUN = re.compile(r"(-?\d{1,10})(?:\*(\d{1,8}))?", re.ASCII)

Item = TypeVar("Item")


@dataclass(frozen=True)
class FeatureTable:
    """The table of a feature."""

    rows: int
    dim: int
    dtype: DType
    mode: Mode
    padded: bool

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return row_bytes(self.dim, self.dtype)


@dataclass(frozen=True)
class CallForm:
    """Types of the tensors of a call."""

    indices: Integer
    offsets: Integer
    weighted: bool


@dataclass(frozen=True)
class Occupancy:
    """Microseconds a batch with so many warps an SM."""

    warps: int
    default_us: float | None
    """By the default schedules; None: not timed."""
    tuned_us: float | None
    """By those chosen for this occupancy; None: not timed."""


def schedule_text(row: Sequence[int]) -> str:
    """A row of schedules as text; what has its default, and the expected lookups, are not in it."""
    return str(FusedSchedule.of_row(row))


def distinct(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Items without repetition, in order of appearance, and the place among them of each."""
    places: dict[Item, int] = {}
    found = [places.setdefault(item, len(places)) for item in items]
    return list(places), found


def runs(values: Iterable[int]) -> str:
    """Integers as text, `value*count` for those that repeat."""
    counted = ((value, sum(1 for _ in run)) for value, run in groupby(values))
    return " ".join(f"{value}*{count}" if count > 1 else str(value) for value, count in counted)


def of_runs(text: Any, where: str) -> list[int]:
    """The integers that a text of `runs` gives; PlanError when it gives none, or more than `MOST_ITEMS`."""
    if not isinstance(text, str):
        raise PlanError(f"recfuse.Plan: {where} is {shown(text)}, must be str")
    values: list[int] = []
    for word in _WORD.finditer(text):  # one by one: a long text is not split as a whole
        match = _RUN.fullmatch(word[0])
        count = int(match[2] or 1) if match else 0
        if match is None or count < 1 or len(values) + count > MOST_ITEMS:
            raise PlanError(
                f"recfuse.Plan: {where} has {shown(word[0])}, must have integers or value*count, for "
                f"{MOST_ITEMS:,} features at most"
            )
        values.extend([int(match[1])] * count)
    return values


def tables_of(packed: PackedModule) -> list[FeatureTable]:
    """The table of each feature of a collection."""
    own = [
        FeatureTable(
            rows=table.weight.shape[0],
            dim=table.weight.shape[1],
            dtype=str(table.weight.dtype).removeprefix("torch."),
            mode=table.mode,
            padded=table.padding_idx is not None,
        )
        for table in packed.tables.values()
    ]
    return [own[number] for number in packed.layout.table_of_feature]


def kernel_of(plan: CollectionPlan) -> tuple[Any, ...]:
    """What `_C.fused_embedding_bag_compile` wants to know of a plan's tables and calls: from the call to
    whether there are weights. PlanError where there is no kernel for them.
    """
    from recfuse.nn.packed.layout import Wanted, group_weights

    tables = [plan.tables[place] for place in plan.table_of]
    form = plan.form
    for name, value, known in (
        *((f"a table of {table.dtype}", table.dtype, DTYPE_NAMES) for table in plan.tables),
        *((f"mode {table.mode}", table.mode, MODES) for table in plan.tables),
        (f"{form.indices} indices", form.indices, INTEGER_NAMES),
        (f"{form.offsets} offsets", form.offsets, INTEGER_NAMES),
    ):
        if value not in known:
            raise PlanError(f"recfuse.Plan: there is no kernel for {name}, there is for {', '.join(known)}")
    cpu = torch.device("cpu")
    groups = group_weights([Wanted(one.rows, one.dim, getattr(torch, one.dtype), cpu) for one in tables])
    places = {number: (at, row) for at, group in enumerate(groups) for number, row in group.members}
    features, column = np.empty((len(tables), 7), np.int64), 0
    for at, table in enumerate(tables):
        group, first_row = places[at]
        place = group, first_row * table.dim, table.rows, table.dim
        features[at] = (*place, MODES.index(table.mode), 0 if table.padded else -1, column)
        column += table.dim
    codes = [DTYPE_NAMES.index(str(group.like.dtype).removeprefix("torch.")) for group in groups]
    buffers = [(_BASE, one.rows * one.like.dim, code) for one, code in zip(groups, codes, strict=True)]
    call = (buffers, features, codes[0] if len(set(codes)) == 1 else 0, column)
    return call, INTEGER_NAMES.index(form.indices), INTEGER_NAMES.index(form.offsets), form.weighted
