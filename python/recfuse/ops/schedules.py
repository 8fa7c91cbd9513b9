"""Schedules: how kernels work, as text `field=value` with spaces between, and as rows of integers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

STATIONS = ("none", "register", "shared", "local", "l1")
"""Where rows in flight wait until they are summed."""
KINDS = ("pool", "columns", "staged")
"""Groups of threads a bag; lanes over columns of the output, for short bags; tables staged on chip."""
FIELDS = 5
"""Columns of a row of fused schedules: kind, threads, distance, split, expected lookups of a bag."""
SIXTEENTHS = 16
"""Of one lookup: in these the expected lookups of a bag are counted."""
ALWAYS_EMPTY = -1
"""Expected lookups of a feature whose bags are surely empty."""

_NUMBER = re.compile(r"[0-9]{1,10}")
_MOST_SHOWN = 100  # characters of a text in an error

AnySchedule = TypeVar("AnySchedule", bound="ScheduleText")


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


@dataclass(frozen=True)
class ScheduleText:
    """The text of every kind of schedule; fields that are None are not in it."""

    _WORDS: ClassVar[Mapping[str, Sequence[str]]] = {"station": STATIONS}  # of fields that are no numbers
    _NUMBERS: ClassVar[tuple[int, int]] = 0, 2**31  # the least, and what all are less than

    @classmethod
    def parse(cls: type[AnySchedule], text: str) -> AnySchedule:
        """The schedule that a text gives; ValueError when it gives none."""
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        least, end = cls._NUMBERS
        whole = f"schedule {_short(text)}"
        for word in filter(None, text.split(" ")):  # as the C library splits it
            name, _, value = word.partition("=")
            if name not in names or name in given:
                raise ValueError(f"{whole}: {_short(word)} is none of, or the second of: {', '.join(names)}")
            allowed = cls._WORDS.get(name)
            if allowed and value not in allowed:
                raise ValueError(f"{whole}: {name} is {_short(value)}, allowed are {', '.join(allowed)}")
            if not allowed and not (_NUMBER.fullmatch(value) and least <= int(value) < end):
                must = f"must be a whole number from {least} to {end - 1}"
                raise ValueError(f"{whole}: {name} is {_short(value)}, {must}")
            given[name] = value if allowed else int(value)
        return cls(**given)

    def __str__(self) -> str:
        """The text."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value is not None)


@dataclass(frozen=True)
class Schedule(ScheduleText):
    """How `embedding_bag` works; fields that are None have the kernel's defaults."""

    station: str | None = None
    distance: int | None = None
    """Rows in flight, for each that a warp reads at once."""
    threads: int | None = None
    """Threads of a bag."""
    block: int | None = None
    """Threads of a block."""
    warps: int | None = None
    """The most warps that an SM runs at once."""
    parts: int | None = None
    """Parts of the table that all bags sweep through together."""
    segment: int | None = None
    """Lookups of a bag that are listed at a time."""
    bags: int | None = None
    """Short bags of a warp; then there are no fields but this, block and warps."""

    def but(self, **changes: Any) -> Schedule:
        """The same with other values of some fields."""
        return replace(self, **changes)


@dataclass(frozen=True)
class FusedSchedule(ScheduleText):
    """How `fused_embedding_bag` works on one feature; fields that are None have the kernel's defaults."""

    _WORDS: ClassVar = {"kind": KINDS}  # by their numbers, from 1; 0: the default
    _NUMBERS: ClassVar = 1, 2**31

    kind: str | None = None
    threads: int | None = None
    """Threads of a bag; where 32 share long ones, 64 do in batches of 256 bags and fewer."""
    distance: int | None = None
    """Rows in flight, for each that a warp reads at once."""
    split: int | None = None
    """Blocks that share a bag."""

    @classmethod
    def parse(cls, text: str) -> FusedSchedule:
        """The schedule that a text gives. Plans of version 0.1 also have a station."""
        return super().parse(" ".join(word for word in text.split(" ") if word != "station=register"))

    @classmethod
    def of_row(cls, row: Sequence[int]) -> FusedSchedule:
        """The schedule of a row of schedules, without the lookups that it expects."""
        kind, threads, distance, split, *_ = (int(value) or None for value in row)
        return cls(None if kind is None else KINDS[kind - 1], threads, distance, split)

    def row(self, expected_sixteenths: int = 0) -> tuple[int, int, int, int, int]:
        """As the operator takes it: kind, threads, distance, split, expected lookups of a bag in
        sixteenths (0: unknown, -1: none).
        """
        kind = (None, *KINDS).index(self.kind)
        return kind, self.threads or 0, self.distance or 0, self.split or 0, expected_sixteenths


def expectations(lengths: NDArray[np.float64]) -> NDArray[np.int32]:
    """Mean lookups of a bag as schedules have them: in sixteenths, at least 1, -1 where there are none."""
    sixteenths = np.clip(np.rint(lengths * SIXTEENTHS), 1, np.iinfo(np.int32).max)
    return np.where(lengths > 0, sixteenths, ALWAYS_EMPTY).astype(np.int32)
