"""``LastResult``: a cache of the last result of a function, for calls that mostly repeat their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class LastResult(Generic[Result]):
    """A function with a cache of its last result, because batches of one form follow each other.

    Arguments are compared by ``==``, which is fast for identical objects. Threads may call it concurrently.
    Nothing is cached while a program is compiled.
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        """Wrap ``function``, whose result must depend only on its arguments."""
        self._function = function
        self._last: tuple[tuple[Any, ...], Result] | None = None

    def __call__(self, *arguments: Any) -> Result:
        """Return the function's result."""
        if torch.compiler.is_compiling():
            return self._function(*arguments)
        last = self._last
        if last is None or last[0] != arguments:
            last = self._last = arguments, self._function(*arguments)
        return last[1]
