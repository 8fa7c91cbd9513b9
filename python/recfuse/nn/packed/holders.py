"""What holds Parameters that are about to be replaced: optimizers, what they consist of, and wrappers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentTypeError, ArgumentValueError

_DEPTH = 3  # containers inside one another that an optimizer's attributes are searched through


def check_optimizers(optimizers: Iterable[Optimizer], what: str) -> tuple[Optimizer, ...]:
    """The argument ``optimizers``, which is read several times; TypeError where it is no sequence of some."""
    if isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable):
        raise ArgumentTypeError(
            f"{what}: optimizers is a {type(optimizers).__name__}, must be a sequence of optimizers"
        )
    found = tuple(optimizers)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"{what}: optimizers has a {type(optimizer).__name__}, must be torch.optim.Optimizer"
            )
    return found


def with_wrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, and those that they wrap."""
    found: dict[int, Optimizer] = {}

    def add(value: Any) -> None:
        if not isinstance(value, Optimizer) or id(value) in found:
            return
        found[id(value)] = value
        for _, attribute in attributes(value):
            add(attribute)
            for container in containers(attribute):
                for item in items(container):
                    add(item)

    for optimizer in optimizers:
        add(optimizer)
    return list(found.values())


def attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Names and values of what an optimizer has besides param groups and state."""
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state"):
            yield name, value


def containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Lists, tuples, sets and dictionaries in a value, itself first."""
    if depth == 0 or not isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return
    yield value
    for item in items(value):
        yield from containers(item, depth - 1)


def items(container: Any) -> Iterable[Any]:
    """What is in a container; of a dictionary its values."""
    return container.values() if isinstance(container, Mapping) else container


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The param groups that an optimizer keeps itself; one that combines others has none."""
    groups = getattr(optimizer, "__dict__", {}).get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return []
    return [group for group in groups if isinstance(group, dict) and "params" in group]


def check_holders(weights: Sequence[Tensor], optimizers: Iterable[Optimizer], what: str) -> None:
    """Looks through the process for optimizers and parallel wrappers that would go on with old Parameters.

    ValueError where one holds a weight; ``optimizers``, with all that they wrap, may.
    """
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    handed_over = {id(group["params"]) for optimizer in optimizers for group in groups_of(optimizer)}
    if _first_holder(numbers, handed_over) is None:
        return
    gc.collect()  # what nobody refers to any more is no holder
    if (found := _first_holder(numbers, handed_over)) is None:
        return
    holder, number = found
    shape = tuple(weights[number].shape)
    kind = type(holder).__name__
    if not isinstance(holder, Optimizer):
        raise ArgumentValueError(
            f"{what}: a {kind} wraps a module with the weight of table {number}, of shape {shape}, which is "
            f"about to be replaced; call {what} first, then wrap the model"
        )
    if any(applied is holder for applied in getattr(weights[number], "_in_backward_optimizers", ())):
        raise ArgumentValueError(
            f"{what}: {kind} was applied in the backward to the weight of table {number}, of shape {shape}, "
            f"which is about to be replaced; call {what} first, then apply it"
        )
    raise ArgumentValueError(
        f"{what}: an optimizer, {kind}, holds the weight of table {number}, of shape {shape}, which is about "
        "to be replaced, and would go on with the old one; hand it over (optimizers=[optimizer]), or make it "
        f"after {what}"
    )


def _first_holder(numbers: Mapping[int, int], handed_over: set[int]) -> tuple[Any, int] | None:
    """An optimizer or wrapper with one of the weights, and which; None: there is none."""
    wrappers = _wrappers()
    for candidate in gc.get_objects():
        kind = type(candidate)  # not isinstance, which asks proxies for their __class__
        if issubclass(kind, Optimizer):
            groups = (group["params"] for group in groups_of(candidate))
            entries = [entry for group in groups if id(group) not in handed_over for entry in group]
        elif issubclass(kind, wrappers):
            entries = list(candidate.parameters())
        else:
            continue
        for entry in entries:
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
