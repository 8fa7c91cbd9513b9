"""The condition for progress bars."""

from __future__ import annotations

import sys


def hidden() -> bool:
    """Return True if standard error is closed or no terminal: a bar would fill a log with lines."""
    return sys.stderr is None or not sys.stderr.isatty()
