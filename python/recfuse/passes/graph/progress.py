"""``Progress``: a bar for what may last, shown after two seconds."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm

_SECONDS = 2.0


class Progress:
    """A tqdm bar that appears only where the work lasts longer than two seconds."""

    def __init__(self, what: str, total: int) -> None:
        """``total`` steps at most."""
        self._bar = tqdm(desc=what, total=total, delay=_SECONDS, leave=False, unit=" matches")

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
