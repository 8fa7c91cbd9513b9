"""Where the ranks of a test of sharding run, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.processes.ranks import ON_GPUS

DEVICE = "cuda" if ON_GPUS else "cpu"
MANY = max(min(3, torch.cuda.device_count()), 2) if ON_GPUS else 3  # ranks of most cases


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error of a call, which must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
