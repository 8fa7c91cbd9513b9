"""What optimizers consist of: those that they wrap, their param groups and other containers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from recfuse.errors import ArgumentTypeError

_DEPTH = 3  # containers inside one another that an optimizer's attributes are searched through


def all_of(optimizers: Sequence[Optimizer], what: str) -> list[Optimizer]:
    """The optimizers, and those that they wrap."""
    if isinstance(optimizers, Optimizer):
        raise ArgumentTypeError(
            f"{what}: optimizers is a {type(optimizers).__name__}, must be a sequence of optimizers"
        )
    found: dict[int, Optimizer] = {}

    def add(optimizer: Optimizer) -> None:
        if id(optimizer) in found:
            return
        found[id(optimizer)] = optimizer
        for attribute, value in vars(optimizer).items():
            if attribute in ("param_groups", "state"):
                continue
            if isinstance(value, Optimizer):
                add(value)
            for container in containers(value):
                for item in container.values() if isinstance(container, Mapping) else container:
                    if isinstance(item, Optimizer):
                        add(item)

    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"{what}: optimizers has a {type(optimizer).__name__}, must be torch.optim.Optimizer"
            )
        add(optimizer)
    return list(found.values())


def containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Lists, tuples, sets and dictionaries in a value, itself first."""
    if depth == 0 or not isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return
    yield value
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from containers(item, depth - 1)


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The param groups that an optimizer keeps itself; one that combines others has none."""
    groups = getattr(optimizer, "__dict__", {}).get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return []
    return [group for group in groups if isinstance(group, dict) and "params" in group]
