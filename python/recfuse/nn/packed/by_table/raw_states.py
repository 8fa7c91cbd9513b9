"""The refusal of ``optimizer.state_dict()`` where an optimizer steps this rank's part of sharded tables.

Such a dictionary has numbers instead of names. ``torch.distributed.checkpoint`` takes packed values that two
ranks have under a number for the same, and saves those of one rank without an error.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recfuse.errors import ArgumentValueError

PART = "_recfuse_is_part"
"""The attribute of a Parameter that has a rank's part of sharded tables."""
_is_by_table: contextvars.ContextVar[bool] = contextvars.ContextVar("is_by_table", default=False)
_refusing: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_is_watching: list[bool] = []


@contextlib.contextmanager
def by_table() -> Iterator[None]:
    """Allow ``state_dict()`` of optimizers, whose packed states the caller converts to those of tables."""
    token = _is_by_table.set(True)
    try:
        yield
    finally:
        _is_by_table.reset(token)


def refuse_raw_states(optimizers: Iterable[Optimizer]) -> None:
    """Make ``state_dict()`` of the optimizers that hold a part of sharded tables raise."""
    for optimizer in optimizers:
        if optimizer not in _refusing and _has_part(optimizer):
            optimizer.register_state_dict_pre_hook(_refuse)
            _refusing.add(optimizer)


def watch_steps() -> None:
    """Make ``state_dict()`` raise from an optimizer's first step on; before it, there is no state."""
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        _is_watching.append(True)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_raw_states((optimizer,))


def _has_part(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(getattr(parameter, PART, False) for group in groups for parameter in group["params"])


def _refuse(optimizer: Optimizer) -> None:
    if not _is_by_table.get() and _has_part(optimizer):
        raise ArgumentValueError(
            f"recfuse.distributed: state_dict() of {type(optimizer).__name__} has packed states of one rank; "
            "expected states by table. Call "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)."
        )
