"""What optimizers consist of: those that they wrap, their param groups and other containers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from recfuse.errors import ArgumentTypeError

_DEPTH = 3  # containers inside one another that an optimizer's attributes are searched through


def given(optimizers: Iterable[Optimizer], what: str) -> tuple[Optimizer, ...]:
    """The argument ``optimizers``, which is read several times.

    Raises:
        TypeError: it is no sequence of optimizers.
    """
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


def all_of(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, and those that they wrap."""
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
