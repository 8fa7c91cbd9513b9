"""The optimizers that update rows of tables, and their numbers, as the C library counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _step_tensor(steps: int) -> Tensor:
    return torch.tensor(float(steps), dtype=torch.float32)


class Kind(NamedTuple):
    """An optimizer of ``recfuse.optim``."""

    name: str  # of its class
    states: tuple[str, ...] = ()  # names of the tensors of a Parameter's state
    by_row: bool = False  # those have one number a row, instead of one an element
    counts: bool = False  # its step depends on the number of steps
    step: Callable[[int], Any] | None = None  # makes the entry "step" of a state; None: there is none


KINDS = (
    Kind("SGD"),
    Kind("Adagrad", ("sum",), step=_step_tensor),
    Kind("RowWiseAdagrad", ("sum",), by_row=True, step=_step_tensor),
    Kind("Adam", ("exp_avg", "exp_avg_sq"), counts=True, step=int),
)
"""By their codes, as rf_optimizer."""
STATES = tuple(len(kind.states) for kind in KINDS)
LR, WEIGHT_DECAY, EPS, BETA1, BETA2, STEP, GRAD_SCALE, SKIP = range(8)
"""The numbers that kernels read, as rf_update_number."""
