"""Compares the results of a model for the user's batches before and after a change."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type

Call = tuple[tuple[Any, ...], dict[str, Any]]

_EPSILONS = 64
"""The largest difference of results, in units of the last place: sums may have another order."""


def call_of(batch: Any) -> Call:
    """Return a batch of ``check`` as the arguments of a call."""
    if (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], tuple)
        and isinstance(batch[1], dict)
    ):
        return batch
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise ArgumentTypeError(
        f"recfuse.swap: a batch of check is {a_type(batch)}; expected a tuple of the model's arguments, a "
        "dict of them by name, or a pair of both"
    )


def outputs_of(model: torch.nn.Module, calls: Iterable[Call]) -> list[list[Any]]:
    """Return the flat outputs of a model for copies of batches, in order.

    The model must be a copy that may change. Random numbers are the same in each run; the random states of
    the process do not change.
    """
    with _own_random_numbers(), torch.no_grad():
        return [
            [
                item.clone() if isinstance(item, Tensor) else item
                for item in pytree.tree_leaves(model(*args, **kwargs))
            ]
            for args, kwargs in (pytree.tree_map(_copied, call) for call in calls)
        ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Seed random numbers with 0 within the context, and restore all random states after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            # torch.manual_seed would also seed devices that are not in use yet.
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def agrees(model: torch.nn.Module, calls: Sequence[Call], expected: Sequence[list[Any]]) -> bool:
    """Return whether a model, which must be a copy, returns the expected results for batches."""
    try:
        return all(map(alike, outputs_of(model, calls), expected))
    except Exception:  # the original has raised no error
        return False


def stays_the_same(
    model: torch.nn.Module, change: Callable[[torch.nn.Module], Any], calls: Sequence[Call]
) -> bool:
    """Return whether a change keeps the results of a module for batches, in eval mode.

    Only copies run and change, never the module itself. Raises ValueError if it cannot be copied.
    """
    expected = outputs_of(_copy_of(model), calls)
    copied = _copy_of(model)
    change(copied)
    return agrees(copied, calls, expected)


def _copy_of(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(model).eval()
    except Exception as error:
        raise ArgumentValueError(
            f"recfuse.swap: check needs a copy of the model, which {type(error).__name__} prevents "
            f"({error}). Swap it without check, or make copy.deepcopy(model) work."
        ) from error


def alike(actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether results agree up to the order of their sums; NaN equals NaN."""
    return len(actual) == len(expected) and all(map(_alike, actual, expected))


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b.double().nan_to_num(0, 0, 0).abs().amax() if b.numel() else 0
    near = _EPSILONS * torch.finfo(a.dtype).eps * float(scale)
    return torch.allclose(a.double(), b.double(), rtol=0, atol=near, equal_nan=True)
