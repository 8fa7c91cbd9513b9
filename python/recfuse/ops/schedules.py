"""Schedules: parameters of kernels, as text `field=value` with spaces between, and as rows of integers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from recfuse._codes import CODES, FUSED_SCHEDULE

STATIONS = CODES["station"][1:]  # the first is the default
"""Stations of prefetched rows until they are summed."""
KINDS = CODES["fused_kind"][1:]  # the first is the default
"""A group of threads per bag; lanes over columns of the output, for short bags; tables staged on chip."""
FIELDS = len(FUSED_SCHEDULE)
"""Columns of a row of fused schedules."""
KIND, EXPECTED = FUSED_SCHEDULE.at("kind"), FUSED_SCHEDULE.at("expected")
"""Columns of the kind, and of expected lookups of a bag."""
CHOSEN = slice(EXPECTED)
"""Columns of a schedule itself: all before the expected lookups, which are last."""
SIXTEENTHS = 16
"""The unit of expected lookups of a bag: a sixteenth of a lookup."""
ALWAYS_EMPTY = -1
"""Expected lookups of a feature whose bags are always empty."""

_NUMBER = re.compile(r"[0-9]{1,10}")
_MOST_SHOWN = 100  # of the characters of a text in an error

AnySchedule = TypeVar("AnySchedule", bound="ScheduleText")


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


@dataclass(frozen=True)
class ScheduleText:
    """The text form of every kind of schedule, without fields that are None."""

    _WORDS: ClassVar[Mapping[str, Sequence[str]]] = {"station": STATIONS}  # of fields that are no numbers
    _NUMBERS: ClassVar[tuple[int, int]] = 0, 2**31  # the range of numbers: begin, end

    @classmethod
    def parse(cls: type[AnySchedule], text: str) -> AnySchedule:
        """Return the schedule of a text; raise ValueError for an invalid text."""
        values: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        least, end = cls._NUMBERS
        prefix = f"schedule {_short(text)}"
        for word in filter(None, text.split(" ")):  # as the C library splits it
            name, _, value = word.partition("=")
            if name not in names or name in values:
                raise ValueError(
                    f"{prefix}: {_short(word)} is unknown or given twice; expected {', '.join(names)}"
                )
            allowed = cls._WORDS.get(name)
            if allowed and value not in allowed:
                raise ValueError(f"{prefix}: {name} is {_short(value)}; expected {', '.join(allowed)}")
            if not allowed and not (_NUMBER.fullmatch(value) and least <= int(value) < end):
                must = f"expected a whole number from {least} to {end - 1}"
                raise ValueError(f"{prefix}: {name} is {_short(value)}; {must}")
            values[name] = value if allowed else int(value)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value in values if value is not None)


@dataclass(frozen=True)
class Schedule(ScheduleText):
    """A schedule of `embedding_bag`; fields that are None have the kernel's defaults."""

    station: str | None = None
    distance: int | None = None
    """Prefetched rows for each row that a warp reads at a time."""
    threads: int | None = None
    """Threads of a bag."""
    block: int | None = None
    """Threads of a block."""
    warps: int | None = None
    """The maximum of warps that an SM runs at once."""
    parts: int | None = None
    """Parts of the table that all bags sweep through together."""
    segment: int | None = None
    """Lookups of a bag that are listed at a time."""
    bags: int | None = None
    """Short bags of a warp; only with block and warps."""

    def but(self, **changes: Any) -> Schedule:
        """Return a copy with other values of some fields."""
        return replace(self, **changes)


@dataclass(frozen=True)
class FusedSchedule(ScheduleText):
    """A schedule of a feature of `fused_embedding_bag`; fields that are None have the kernel's defaults."""

    _WORDS: ClassVar = {"kind": KINDS}  # numbered from 1; 0 is the default
    _NUMBERS: ClassVar = 1, 2**31

    kind: str | None = None
    threads: int | None = None
    """Threads of a bag; if 32 share long bags, 64 do in batches of at most 256 bags."""
    distance: int | None = None
    """Prefetched rows for each row that a warp reads at a time."""
    split: int | None = None
    """Blocks that share a bag."""

    @classmethod
    def parse(cls, text: str) -> FusedSchedule:
        """Return the schedule of a text. Plans of version 0.1 also have a station."""
        return super().parse(" ".join(word for word in text.split(" ") if word != "station=register"))

    @classmethod
    def of_row(cls, row: Sequence[int]) -> FusedSchedule:
        """Return the schedule of a row of schedules, without its expected lookups."""
        values = (int(value) or None for value in row[CHOSEN])
        values_by_name: dict[str, Any] = dict(zip(FUSED_SCHEDULE.fields[CHOSEN], values, strict=True))
        kind = values_by_name.pop("kind")
        return cls(None if kind is None else KINDS[kind - 1], **values_by_name)

    def row(self, expected_sixteenths: int = 0) -> tuple[int, ...]:
        """Return the row of the operator.

        Expected lookups of a bag are in sixteenths (0: unknown, -1: always empty).
        """
        values = {field.name: getattr(self, field.name) or 0 for field in fields(self)}
        values["kind"] = (None, *KINDS).index(self.kind)
        return FUSED_SCHEDULE.row(**values, expected=expected_sixteenths)


def expectations(lengths: NDArray[np.float64]) -> NDArray[np.int32]:
    """Convert mean lookups of a bag to the unit of schedules: sixteenths, at least 1; -1 without lookups."""
    sixteenths = np.clip(np.rint(lengths * SIXTEENTHS), 1, np.iinfo(np.int32).max)
    return np.where(lengths > 0, sixteenths, ALWAYS_EMPTY).astype(np.int32)
