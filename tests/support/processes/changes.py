"""Changes of a model while another thread calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def at_each_line(
    call: Callable[[], Tensor], answers: Sequence[Tensor], change: Callable[[], Any], least: int = 30
) -> None:
    """Runs ``change`` while another thread calls before each line of recfuse that changes the model."""
    lines: set[str] = set()
    with ThreadPoolExecutor(1) as pool:

        def before_line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                where = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
                if where not in lines:
                    lines.add(where)
                    out = pool.submit(call).result(60)
                    assert any(torch.equal(out, answer) for answer in answers), where
            return before_line

        def of_frame(frame: Any, *_: Any) -> Any:
            name = frame.f_globals.get("__name__", "")
            follows = name.startswith(("recfuse.nn", "recfuse.passes")) and not name.endswith(".holders")
            return before_line if follows else None

        call()
        sys.settrace(of_frame)
        try:
            change()
        finally:
            sys.settrace(None)
    assert len(lines) > least
