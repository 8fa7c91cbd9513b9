"""``LastResult``: what a function returned last, for calls that mostly repeat their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class LastResult(Generic[Result]):
    """A function that remembers its last result: batches of one form follow each other.

    Arguments are compared by ``==``, in which an object equals itself at once. Threads may call it at once.
    Nothing is remembered while a program is compiled.
    """

    def __init__(self, function: Callable[..., Result]) -> None:
        """``function``: its result must depend on its arguments alone."""
        self._function = function
        self._last: tuple[tuple[Any, ...], Result] | None = None

    def __call__(self, *arguments: Any) -> Result:
        """The function's result."""
        if torch.compiler.is_compiling():
            return self._function(*arguments)
        last = self._last
        if last is None or last[0] != arguments:
            last = self._last = arguments, self._function(*arguments)
        return last[1]
