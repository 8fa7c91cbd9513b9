"""Descriptions of the features of a `CollectionPlan`: tables, types of calls, and lists as short text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast

import torch

from recfuse._codes import DType, Integer, Mode, row_bytes
from recfuse.errors import ArgumentValueError
from recfuse.nn.collection_view import CollectionView, FeatureForm
from recfuse.plan.file import MOST_ITEMS, shown

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
        """The bytes of a row."""
        return row_bytes(self.dim, getattr(torch, self.dtype))

    @property
    def form(self) -> FeatureForm:
        """The table in the form of collections."""
        return FeatureForm(self.rows, self.dim, getattr(torch, self.dtype), self.mode, self.padded)


@dataclass(frozen=True)
class CallForm:
    """Types of the tensors of a call."""

    indices: Integer
    offsets: Integer
    weighted: bool


@dataclass(frozen=True)
class Occupancy:
    """Microseconds per batch at a number of warps per SM."""

    warps: int
    default_us: float | None
    """With the default schedules; None: not timed."""
    tuned_us: float | None
    """With the schedules chosen for this occupancy; None: not timed."""


def tables_of(view: CollectionView) -> list[FeatureTable]:
    """Return the table of each feature of a collection."""
    return [
        FeatureTable(
            form.rows, form.dim, cast(DType, dtype_name(form.dtype)), cast(Mode, form.mode), form.padded
        )
        for form in view.tables
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in plans."""
    return str(dtype).removeprefix("torch.")


def distinct(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Return the distinct items in order of appearance, and for each item its position in that list."""
    positions: dict[Item, int] = {}
    numbers = [positions.setdefault(item, len(positions)) for item in items]
    return list(positions), numbers


def runs(values: Iterable[int]) -> str:
    """Return integers as text, with `value*count` for a run of equal values."""
    counted = ((value, sum(1 for _ in run)) for value, run in groupby(values))
    return " ".join(f"{value}*{count}" if count > 1 else str(value) for value, count in counted)


def of_runs(text: Any, prefix: str) -> list[int]:
    """Return the integers of a text of `runs`; raises ValueError for other texts, or above `MOST_ITEMS`."""
    if not isinstance(text, str):
        raise ArgumentValueError(f"{prefix} is {shown(text)}; expected a str")
    values: list[int] = []
    for word in _WORD.finditer(text):  # lazily: a long text is never split as a whole
        match = _RUN.fullmatch(word[0])
        count = int(match[2] or 1) if match else 0
        if match is None or count < 1 or len(values) + count > MOST_ITEMS:
            raise ArgumentValueError(
                f"{prefix} has {shown(word[0])}; expected integers or value*count, for {MOST_ITEMS:,} "
                "features at most"
            )
        values.extend([int(match[1])] * count)
    return values
