"""What else holds Parameters that are about to be replaced, and would go on with the old ones."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.optimizer_parts import all_of, given, groups_of


def check_holders(weights: Sequence[Tensor], optimizers: Sequence[Optimizer], what: str) -> None:
    """Looks through the process for optimizers and parallel wrappers that would go on with old Parameters.

    Args:
        weights: the Parameters that will be replaced.
        optimizers: those that are handed over, and so may hold them.
        what: who replaces them, for the errors.

    Raises:
        ValueError: names what holds one of the weights, and what to do.
    """
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    own = all_of(given(optimizers, what))
    known = {id(group["params"]) for optimizer in own for group in groups_of(optimizer)}
    if _first_holder(numbers, known) is None:
        return
    gc.collect()  # what nobody refers to any more is no holder
    if (found := _first_holder(numbers, known)) is None:
        return
    holder, number = found
    shape = tuple(weights[number].shape)
    kind = type(holder).__name__
    if not isinstance(holder, Optimizer):
        raise ArgumentValueError(
            f"{what}: a {kind} wraps a module with the weight of table {number}, of shape {shape}, which is "
            f"about to be replaced; call {what} first, then wrap the model"
        )
    if any(own is holder for own in getattr(weights[number], "_in_backward_optimizers", ())):
        raise ArgumentValueError(
            f"{what}: {kind} was applied in the backward to the weight of table {number}, of shape {shape}, "
            f"which is about to be replaced; call {what} first, then apply it"
        )
    raise ArgumentValueError(
        f"{what}: an optimizer, {kind}, holds the weight of table {number}, of shape {shape}, which is about "
        "to be replaced, and would go on with the old one; hand it over (optimizers=[optimizer]), or make it "
        f"after {what}"
    )


def gradient_hooks(weight: Tensor) -> str | None:
    """What acts on a Parameter's gradient and would be lost with it, in words; None: nothing."""
    if getattr(weight, "_in_backward_optimizers", None):
        return "an optimizer is applied to its weight in the backward"
    if getattr(weight, "_backward_hooks", None) or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "its weight has gradient hooks"
    return None


def _first_holder(numbers: Mapping[int, int], known: set[int]) -> tuple[Any, int] | None:
    """An optimizer or wrapper with one of the weights, and which; None: there is none."""
    wrappers = _wrappers()
    for candidate in gc.get_objects():
        kind = type(candidate)  # not isinstance, which asks proxies for their __class__
        if issubclass(kind, Optimizer):
            for group in groups_of(candidate):
                if id(group["params"]) in known:
                    continue
                for entry in group["params"]:
                    if id(entry) in numbers:
                        return candidate, numbers[id(entry)]
        elif issubclass(kind, wrappers):
            for entry in candidate.parameters():
                if id(entry) in numbers:
                    return candidate, numbers[id(entry)]
    return None


def _wrappers() -> tuple[type, ...]:
    """Classes that note the Parameters of the module they wrap."""
    found = [torch.nn.parallel.DistributedDataParallel]
    module = sys.modules.get("torch.distributed.fsdp")
    if (sharded := getattr(module, "FullyShardedDataParallel", None)) is not None:
        found.append(sharded)
    return tuple(found)
