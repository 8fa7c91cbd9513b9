"""Tables of figures, for a terminal and in Markdown."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from recfuse import timing


def readable(text: str) -> str:
    """Returns text for readers: result files write us for microseconds."""
    return re.sub(r"\bus\b", "µs", text)


@dataclass
class Table:
    """A table of strings with a title and notes. Cells are found by the names of columns."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises ValueError if two columns have the same name."""
        if len(set(self.columns)) != len(self.columns):
            raise ValueError(f"{self.title!r} has columns {list(self.columns)}; expected different names")

    def grid(self, words: bool = False) -> str:
        """Returns columns and rows in Markdown. `words`: cells are words and left-aligned."""
        side = " --- |" if words else " ---: |"
        lines = [
            "| " + " | ".join(map(readable, self.columns)) + " |",
            "| --- |" + side * (len(self.columns) - 1),
        ]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)]) + "\n"

    def markdown(self) -> str:
        """Everything in Markdown."""
        notes = "".join(f"{readable(note)}  \n" for note in self.notes)
        return f"**{readable(self.title)}**\n\n{self.grid()}" + (f"\n{notes}" if notes else "")

    def show(self, markdown: bool = False) -> None:
        """Print for a terminal, or in Markdown."""
        if markdown:
            print(self.markdown())
            return
        table = RichTable(box=box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            table.add_column(readable(column), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        # Output to a file has no width to fit.
        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
        console.print(readable(self.title))
        console.print(table)
        for note in self.notes:
            console.print(readable(note))


def milliseconds(timing_: timing.Timing) -> str:
    """Returns the median and the distance between the quartiles."""
    return f"{timing_.median * 1e3:.2f} ± {timing_.iqr * 1e3:.2f}"


def times(ratio: float | None) -> str:
    """Returns how many times faster; a dash if there is no ratio."""
    return "-" if ratio is None else f"{ratio:.2f}x"
