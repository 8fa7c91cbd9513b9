"""A schedule: how a kernel of `embedding_bag` works, as text `field=value` with spaces between."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

STATIONS = ("none", "register", "shared", "local", "l1")
"""Where rows in flight wait until they are summed."""


@dataclass(frozen=True)
class Schedule:
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

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that a text gives; ValueError when it gives none."""
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in names or name in given:
                raise ValueError(
                    f"schedule {text!r}: {word!r} is none of, or the second of: {', '.join(names)}"
                )
            if name == "station" and value not in STATIONS:
                raise ValueError(
                    f"schedule {text!r}: station is {value!r}, allowed are {', '.join(STATIONS)}"
                )
            if name != "station" and not value.isdecimal():
                raise ValueError(f"schedule {text!r}: {name} is {value!r}, must be a whole number")
            given[name] = value if name == "station" else int(value)
        return cls(**given)

    def but(self, **changes: Any) -> Schedule:
        """The same with other values of some fields."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """The text."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value is not None)
