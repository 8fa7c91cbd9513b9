"""Objects that hold Parameters before their replacement: optimizers, their attributes, and wrappers."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type

_DEPTH = 3  # levels of nested containers to search in an optimizer's attributes


def check_optimizers(optimizers: Iterable[Optimizer], prefix: str) -> tuple[Optimizer, ...]:
    """Return the argument ``optimizers`` as a tuple; raise TypeError if it is no sequence of optimizers."""
    if isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable):
        raise wrong_type(f"{prefix}: optimizers", optimizers, "a sequence of optimizers")
    optimizer_list = tuple(optimizers)
    for optimizer in optimizer_list:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"{prefix}: optimizers has {a_type(optimizer)}; expected torch.optim.Optimizer"
            )
    return optimizer_list


def with_wrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers and all optimizers that they wrap."""
    optimizers_by_id: dict[int, Optimizer] = {}
    pending: list[Any] = list(optimizers)[::-1]
    while pending:
        value = pending.pop()
        if not isinstance(value, Optimizer) or id(value) in optimizers_by_id:
            continue
        optimizers_by_id[id(value)] = value
        inner: list[Any] = []
        for attribute in attributes(value).values():
            inner.append(attribute)
            for container in containers(attribute):
                inner.extend(items(container))
        pending.extend(inner[::-1])
    return list(optimizers_by_id.values())


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer without param groups and state."""
    return {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}


def containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Iterate over lists, tuples, sets and dictionaries in a value, the value itself first."""
    if depth == 0 or not isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return
    yield value
    for item in items(value):
        yield from containers(item, depth - 1)


def items(container: Any) -> Iterable[Any]:
    """Return the elements of a container, or the values of a dictionary."""
    return container.values() if isinstance(container, Mapping) else container


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the param groups that an optimizer stores itself; a combination of optimizers has no groups."""
    groups = getattr(optimizer, "__dict__", {}).get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return []
    return [group for group in groups if isinstance(group, dict) and "params" in group]


class _Search(threading.local):
    is_shared = False
    candidates: list[Any] | None = None  # optimizers and wrappers


_search = _Search()


@contextlib.contextmanager
def shared_search() -> Iterator[None]:
    """Walk over the heap once for all checks inside, which create no optimizer and no wrapper."""
    outer, _search.is_shared = _search.is_shared, True
    try:
        yield
    finally:
        _search.is_shared = outer
        if not outer:
            _search.candidates = None


def check_holders(weights: Sequence[Tensor], optimizers: Iterable[Optimizer], prefix: str) -> None:
    """Raise ValueError if a parallel wrapper, or an optimizer not in ``optimizers``, holds a weight."""
    if (found := holder_of(weights, optimizers)) is None:
        return
    holder, number = found
    shape = tuple(weights[number].shape)
    kind = type(holder).__name__
    if not isinstance(holder, Optimizer):
        does, advice = f"a {kind} wraps a module with", f"; call {prefix} first, then wrap the model"
    elif any(applied is holder for applied in getattr(weights[number], "_in_backward_optimizers", ())):
        does, advice = f"{kind} was applied in the backward to", f"; call {prefix} first, then apply it"
    else:
        does = f"an optimizer, {kind}, holds"
        advice = ", and would go on with the old one; hand it over (optimizers=[optimizer]), or make it after"
        advice += f" {prefix}"
    which = f"the weight of table {number}, of shape {shape}, which is about to be replaced"
    raise ArgumentValueError(f"{prefix}: {does} {which}{advice}")


def holder_of(weights: Sequence[Tensor], optimizers: Iterable[Optimizer] = ()) -> tuple[Any, int] | None:
    """Return a wrapper, or an optimizer not in ``optimizers``, and the number of a weight that it holds."""
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    handed_over = {id(group["params"]) for optimizer in optimizers for group in groups_of(optimizer)}
    if _first_holder(numbers, handed_over) is None:
        return None
    _search.candidates = None
    gc.collect()  # unreachable objects are no holders
    return _first_holder(numbers, handed_over)


def _first_holder(numbers: Mapping[int, int], handed_over: set[int]) -> tuple[Any, int] | None:
    """Return the first optimizer or wrapper that holds a weight, with the weight's number, or None."""
    for candidate in _candidates() if numbers else ():
        if issubclass(type(candidate), Optimizer):
            groups = (group["params"] for group in groups_of(candidate))
            entries = [entry for group in groups if id(group) not in handed_over for entry in group]
        else:
            entries = list(candidate.parameters())
        for entry in entries:
            if id(entry) in numbers:
                return candidate, numbers[id(entry)]
    return None


def _candidates() -> list[Any]:
    """Return all optimizers and parallel wrappers of the process."""
    if _search.candidates is not None:
        return _search.candidates
    parallel = torch.nn.parallel.DistributedDataParallel
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", parallel)
    kinds = (Optimizer, parallel, sharded)
    is_candidate: dict[type, bool] = {}
    candidates = []
    for value in gc.get_objects():
        kind = type(value)  # not isinstance, which reads __class__ of proxies
        if kind not in is_candidate:
            is_candidate[kind] = issubclass(kind, kinds)
        if is_candidate[kind]:
            candidates.append(value)
    if _search.is_shared:
        _search.candidates = candidates
    return candidates
