"""The decisions of a search, and its progress bars."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from recfuse._progress import hidden
from recfuse.plan.report import Decision

WORTH = 1.01
"""Least ratio of the time of the defaults to the time of a plan."""


class Log:
    """The decisions of a search."""

    def __init__(self) -> None:
        """Create an empty log."""
        self.decisions: list[Decision] = []

    def note(self, step: str, candidate: str, us: float | None, kept: bool, why: str) -> None:
        """Record a decision."""
        self.decisions.append(Decision(step, candidate, us, kept, why))

    def confirm(self, candidate: str, us: float, default_us: float) -> bool:
        """Record and return whether the winner is fast enough, by its last run in turns with
        the defaults.
        """
        won = us * WORTH < default_us
        self.note("confirm", candidate, us, won, f"{default_us / us:.3f}x as fast as the defaults")
        why = "the defaults" if won else "the defaults: the gain is too small"
        self.note("confirm", "", default_us, not won, why)
        return won


def counted(rounds: int) -> str:
    """Format a number of rounds."""
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def now() -> str:
    """Return the time of creation of a plan, for its file."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def missing(result: Any) -> str | None:
    """Return why a compiler's result has no kernel; None: it has a kernel."""
    if result is None:
        return "not compiled: the budget is spent"
    return f"does not compile: {first_line(result)}" if isinstance(result, Exception) else None


def spilled(result: Any) -> str:
    """Describe the spills of a kernel; "" if it does not spill."""
    registers = f"{result['spill_bytes']} bytes with {result['registers']} registers"
    return registers if result["spill_bytes"] > 0 else ""


def bar(
    progress: bool | None, label: str, items: Iterable[Any] | None = None, total: int | None = None
) -> Any:
    """Return a progress bar; `progress` None: on a terminal."""
    shown = not hidden() if progress is None else progress
    return tqdm(items, desc=label, total=total, disable=not shown, leave=False)
