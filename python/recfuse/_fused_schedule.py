"""A schedule of one feature of a fused embedding bag, as text `field=value` with spaces between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from recfuse._schedule import STATIONS

KINDS = ("pool", "columns", "staged")
"""Groups of threads a bag; lanes over columns of the output, for short bags; tables staged on chip."""
_NAMES = {"kind": ("", *KINDS), "station": ("", *STATIONS)}  # by their numbers; "": the default


@dataclass(frozen=True)
class FusedSchedule:
    """The fields of a schedule; those that are None have the kernel's defaults."""

    kind: str | None = None
    threads: int | None = None
    """Threads of a bag."""
    distance: int | None = None
    """Rows in flight, for each that a warp reads at once."""
    station: str | None = None
    """Where they wait."""
    split: int | None = None
    """Blocks that share a bag."""

    @classmethod
    def parse(cls, text: str) -> FusedSchedule:
        """The schedule that a text gives; ValueError when it gives none."""
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in names or name in given:
                raise ValueError(
                    f"schedule {text!r}: {word!r} is none of, or the second of: {', '.join(names)}"
                )
            allowed = _NAMES.get(name, ("",))[1:]
            if allowed and value not in allowed:
                raise ValueError(f"schedule {text!r}: {name} is {value!r}, allowed are {', '.join(allowed)}")
            if not allowed and not (value.isdecimal() and 1 <= int(value) < 2**31):
                raise ValueError(f"schedule {text!r}: {name} is {value!r}, must be a whole number >= 1")
            given[name] = value if allowed else int(value)
        return cls(**given)

    @classmethod
    def of_row(cls, row: Sequence[int]) -> FusedSchedule:
        """The schedule of a row of schedules, without the lookups that it expects."""
        values = {field.name: int(value) for field, value in zip(fields(cls), row, strict=False)}
        named = {name: texts[values[name]] for name, texts in _NAMES.items()}
        return cls(**{name: value or None for name, value in (values | named).items()})

    def row(self, expected: int = 0) -> tuple[int, int, int, int, int, int]:
        """As the operator takes it: kind, threads, distance, station, split, expected lookups of a bag in
        sixteenths (0: unknown, -1: none).
        """
        kind, station = (_NAMES[name].index(getattr(self, name) or "") for name in _NAMES)
        return kind, self.threads or 0, self.distance or 0, station, self.split or 0, expected

    def __str__(self) -> str:
        """The text."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value is not None)
