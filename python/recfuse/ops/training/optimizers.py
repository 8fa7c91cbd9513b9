"""The optimizers that update rows of tables, and their numbers in the C library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse import _C
from recfuse._codes import CODES


def _step_tensor(steps: int) -> Tensor:
    return torch.tensor(float(steps), dtype=torch.float32)


class Kind(NamedTuple):
    """An optimizer of ``recfuse.optim``."""

    name: str  # of the class
    states: tuple[str, ...] = ()  # names of the tensors of a Parameter's state
    by_row: bool = False  # a state per row instead of a state per element
    counts: bool = False  # the step depends on the number of steps
    step: Callable[[int], Any] | None = None  # creates the entry "step" of a state; None: no such entry


_STEPS: dict[str, Callable[[int], Any] | None] = {"": None, "tensor": _step_tensor, "int": int}
KINDS = tuple(
    Kind(name, tuple(states.split()), by_row, counts, _STEPS[step])
    for name, states, by_row, counts, step in _C.optimizers()
)
"""The optimizers in the order of their codes, as rf_optimizer."""


def kind_of(name: str) -> Kind:
    """Return the optimizer of a class of ``recfuse.optim``."""
    return next(kind for kind in KINDS if kind.name == name)


STATES = tuple(len(kind.states) for kind in KINDS)
_NUMBERS = {text: code for code, text in enumerate(CODES["update_number"])}
LR, WEIGHT_DECAY, EPS = _NUMBERS["lr"], _NUMBERS["weight_decay"], _NUMBERS["eps"]
BETA1, BETA2, STEP = _NUMBERS["beta1"], _NUMBERS["beta2"], _NUMBERS["step"]
GRAD_SCALE, SKIP = _NUMBERS["grad_scale"], _NUMBERS["skip"]
"""Positions of the numbers that kernels read."""
BOUNDS = {
    text: (least, end or math.inf) for text, (least, end) in zip(_NUMBERS, _C.update_bounds(), strict=True)
}
"""The least value of each number, by its name, and the end of its range."""
