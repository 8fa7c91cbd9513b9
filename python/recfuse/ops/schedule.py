"""A schedule: how a kernel of `embedding_bag` works, as text `field=value` with spaces between."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

STATIONS = ("none", "register", "shared", "local", "l1")
"""Where rows in flight wait until they are summed."""

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
    """The fields of a schedule; those that are None have the kernel's defaults."""

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

    def but(self, **changes: Any) -> Schedule:
        """The same with other values of some fields."""
        return replace(self, **changes)
