"""A schedule: how a kernel of `embedding_bag` works, as text `field=value` with spaces between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

STATIONS = ("none", "register", "shared", "local", "l1")
"""Where rows in flight wait until they are summed."""

AnySchedule = TypeVar("AnySchedule", bound="ScheduleText")


@dataclass(frozen=True)
class ScheduleText:
    """The text of every kind of schedule; fields that are None are not in it."""

    _WORDS: ClassVar[Mapping[str, Sequence[str]]] = {"station": STATIONS}  # of fields that are no numbers
    _NUMBERS: ClassVar[tuple[float, float]] = 0, float("inf")  # the least, and what all are less than

    @classmethod
    def parse(cls: type[AnySchedule], text: str) -> AnySchedule:
        """The schedule that a text gives; ValueError when it gives none."""
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        least, end = cls._NUMBERS
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in names or name in given:
                raise ValueError(
                    f"schedule {text!r}: {word!r} is none of, or the second of: {', '.join(names)}"
                )
            allowed = cls._WORDS.get(name)
            if allowed and value not in allowed:
                raise ValueError(f"schedule {text!r}: {name} is {value!r}, allowed are {', '.join(allowed)}")
            if not allowed and not (value.isdecimal() and least <= int(value) < end):
                must = f"must be a whole number{f' >= {least}' if least else ''}"
                raise ValueError(f"schedule {text!r}: {name} is {value!r}, {must}")
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
