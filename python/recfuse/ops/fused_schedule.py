"""A schedule of one feature of a fused embedding bag, as text `field=value` with spaces between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from recfuse.ops.schedule import STATIONS, ScheduleText

KINDS = ("pool", "columns", "staged")
"""Groups of threads a bag; lanes over columns of the output, for short bags; tables staged on chip."""


@dataclass(frozen=True)
class FusedSchedule(ScheduleText):
    """The fields of a schedule; those that are None have the kernel's defaults."""

    _WORDS: ClassVar = {"kind": KINDS, "station": STATIONS}  # by their numbers, from 1; 0: the default
    _NUMBERS: ClassVar = 1, 2**31

    kind: str | None = None
    threads: int | None = None
    """Threads of a bag; where 32 share long ones, 64 do in batches of 256 bags and fewer."""
    distance: int | None = None
    """Rows in flight, for each that a warp reads at once."""
    station: str | None = None
    """Where they wait."""
    split: int | None = None
    """Blocks that share a bag."""

    @classmethod
    def of_row(cls, row: Sequence[int]) -> FusedSchedule:
        """The schedule of a row of schedules, without the lookups that it expects."""
        values = {field.name: int(value) for field, value in zip(fields(cls), row, strict=False)}
        named = {name: ("", *words)[values[name]] for name, words in cls._WORDS.items()}
        return cls(**{name: value or None for name, value in (values | named).items()})

    def row(self, expected: int = 0) -> tuple[int, int, int, int, int, int]:
        """As the operator takes it: kind, threads, distance, station, split, expected lookups of a bag in
        sixteenths (0: unknown, -1: none).
        """
        kind, station = (("", *words).index(getattr(self, name) or "") for name, words in self._WORDS.items())
        return kind, self.threads or 0, self.distance or 0, station, self.split or 0, expected
