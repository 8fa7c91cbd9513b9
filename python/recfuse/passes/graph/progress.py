"""What may last: ``Progress``, a bar that is shown after two seconds, and ``uncollected``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import TracebackType

from tqdm import tqdm

from recfuse._progress import hidden

_SECONDS = 2.0


class Progress:
    """A tqdm bar that appears on a terminal where the work lasts longer than two seconds."""

    def __init__(self, what: str, total: int | None = None, unit: str = "matches") -> None:
        """``total`` steps at most; None: nobody knows."""
        self._bar = tqdm(
            desc=what, total=total, delay=_SECONDS, leave=False, unit=f" {unit}", disable=hidden()
        )

    def __enter__(self) -> Progress:
        """Itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Takes the bar away."""
        self._bar.close()

    def describe(self, what: str) -> None:
        """Names what is looked for."""
        self._bar.set_description(f"recfuse: graph passes: {what}", refresh=False)

    def update(self, steps: int) -> None:
        """Some steps are done."""
        self._bar.update(steps)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector of cycles waits: to look at the nodes of a graph takes a fifth of a pass."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
