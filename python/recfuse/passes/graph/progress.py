"""For long passes: ``Progress``, a bar that appears after two seconds, and ``uncollected``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import TracebackType

from tqdm import tqdm

from recfuse._progress import hidden

_SECONDS = 2.0


class Progress:
    """A tqdm bar that appears on a terminal if the work lasts longer than two seconds."""

    def __init__(self, label: str, total: int | None = None, unit: str = "matches") -> None:
        """``total`` is the largest number of steps; None: unknown."""
        self._bar = tqdm(
            desc=label, total=total, delay=_SECONDS, leave=False, unit=f" {unit}", disable=hidden()
        )

    def __enter__(self) -> Progress:
        """Return the bar itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the bar."""
        self._bar.close()

    def describe(self, label: str) -> None:
        """Show the name of the pattern that is searched for."""
        self._bar.set_description(f"recfuse: graph passes: {label}", refresh=False)

    def update(self, steps: int) -> None:
        """Add completed steps."""
        self._bar.update(steps)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's collector of cycles: its visits of the nodes of a graph take a fifth of a pass."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
