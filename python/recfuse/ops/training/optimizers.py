"""The optimizers that update rows of tables, and their numbers in the C library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _step_tensor(steps: int) -> Tensor:
    return torch.tensor(float(steps), dtype=torch.float32)


class Kind(NamedTuple):
    """An optimizer of ``recfuse.optim``."""

    name: str  # of the class
    states: tuple[str, ...] = ()  # names of the tensors of a Parameter's state
    by_row: bool = False  # a state per row instead of a state per element
    counts: bool = False  # the step depends on the number of steps
    step: Callable[[int], Any] | None = None  # creates the entry "step" of a state; None: no such entry


KINDS = (
    Kind("SGD"),
    Kind("Adagrad", ("sum",), step=_step_tensor),
    Kind("RowWiseAdagrad", ("sum",), by_row=True, step=_step_tensor),
    Kind("Adam", ("exp_avg", "exp_avg_sq"), counts=True, step=int),
)
"""The optimizers in the order of their codes, as rf_optimizer."""
STATES = tuple(len(kind.states) for kind in KINDS)
LR, WEIGHT_DECAY, EPS, BETA1, BETA2, STEP, GRAD_SCALE, SKIP = range(8)
"""Positions of the numbers that kernels read, as rf_update_number."""
