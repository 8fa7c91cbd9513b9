"""Plans for a reader: decisions, and the text of a report."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Line: TypeAlias = tuple[str, str]
"""A name and its text, in a report."""

_WIDTH = 140  # columns of the report
_MOST_DECISIONS = 2000  # largest number of decisions in a report
_CONFIRM = "confirm"  # the step that compares the winner with the defaults again
# Control characters, which a terminal would execute, and halves of surrogate pairs, which have no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Decision:
    """A step of the tuner: a candidate, its time, its result and the reason."""

    step: str
    candidate: str
    us: float | None
    """Microseconds per batch; None: not timed."""
    kept: bool
    why: str


def render(summary: Iterable[Line], decisions: Sequence[Decision], last: Line) -> str:
    """Return a report as text: the summary, a table of decisions, and `last` repeated below the table."""
    from rich.console import Console
    from rich.table import Table

    head = Table(show_header=False, box=None, pad_edge=False)
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for name, line in summary:
        head.add_row(name, _printable(line))
    steps = Table("step", "candidate", "µs", "result", "reason", title="decisions")
    steps.columns[2].justify = "right"
    for decision in decisions[:_MOST_DECISIONS]:
        steps.add_row(
            _printable(decision.step),
            _printable(decision.candidate) or "default",
            "" if decision.us is None else f"{decision.us:.2f}",
            _result(decision),
            _printable(decision.why),
        )
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False)
    console.print(head)
    if decisions:
        console.print(steps)
    if len(decisions) > _MOST_DECISIONS:
        console.print(f"and {len(decisions) - _MOST_DECISIONS:,} more, in decisions of the plan")
    if decisions:  # repeated below a long table, because a terminal shows the end
        console.print(f"{last[0]}: {_printable(last[1])}")
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


def _result(decision: Decision) -> str:
    """Return the result of a candidate: the last step chooses the winner, other steps keep candidates."""
    return ("won" if decision.step == _CONFIRM else "kept") if decision.kept else ""


def _printable(text: str) -> str:
    """Return a text with escapes for unprintable characters."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
