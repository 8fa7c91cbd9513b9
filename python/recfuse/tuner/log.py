"""What a search writes down, and what it shows meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from recfuse._progress import hidden
from recfuse.plan.report import Decision

WORTH = 1.01
"""How much faster than the defaults a plan must be."""


class Log:
    """The decisions of a search."""

    def __init__(self) -> None:
        """None yet."""
        self.decisions: list[Decision] = []

    def note(self, step: str, candidate: str, us: float | None, kept: bool, why: str) -> None:
        """Writes a decision down."""
        self.decisions.append(Decision(step, candidate, us, kept, why))

    def confirm(self, candidate: str, us: float, default_us: float) -> bool:
        """Whether the winner is worth a change, in its last run beside the defaults."""
        won = us * WORTH < default_us
        self.note("confirm", candidate, us, won, f"{default_us / us:.3f}x as fast as the defaults")
        why = "the defaults" if won else "the defaults: not worth a change"
        self.note("confirm", "", default_us, not won, why)
        return won


def counted(rounds: int) -> str:
    """A number of rounds, as text."""
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def now() -> str:
    """When a plan is made, for its file."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def first_line(error: Exception) -> str:
    """Of what it says."""
    return str(error).partition("\n")[0]


def missing(result: Any) -> str | None:
    """Why there is no kernel, of a compiler's result; None: there is one."""
    if result is None:
        return "not compiled: the budget is spent"
    return f"does not compile: {first_line(result)}" if isinstance(result, Exception) else None


def spilled(result: Any) -> str:
    """What a kernel spills, as text; "" for one that does not."""
    registers = f"{result['spill_bytes']} bytes with {result['registers']} registers"
    return registers if result["spill_bytes"] > 0 else ""


def bar(
    progress: bool | None, label: str, items: Iterable[Any] | None = None, total: int | None = None
) -> Any:
    """A bar; `progress` None: on a terminal."""
    shown = not hidden() if progress is None else progress
    return tqdm(items, desc=label, total=total, disable=not shown, leave=False)
