"""Preservation of the optimizer's state of tables that are frozen alone.

The state of such a table stays in the Parameter that the table has left, which an optimizer with momentum or
decay steps as a whole. So the rows of the state are copied before a step and written back after it. They keep
the values that they had when the table was frozen, as torch's. The number of steps belongs to the whole
Parameter. If a step depends on it, the first step of a table that is trained again raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.known_optimizers import is_counted
from recfuse.nn.packed.optimizer_state import kinds_of
from recfuse.nn.packed.store import PackedStore

left: list[weakref.ref[PackedStore]] = []
"""Stores in which a table was frozen alone."""

_Records = weakref.WeakKeyDictionary[PackedStore, dict[int, dict[str, Any]]]
_records: weakref.WeakKeyDictionary[Optimizer, _Records] = weakref.WeakKeyDictionary()
"""By optimizer, store and table: the numbers in the state at the time of freezing."""
_kept: weakref.WeakKeyDictionary[Optimizer, list[tuple[Tensor, str | None, int, Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""By optimizer: Parameter, entry of its state (None: itself), first row, and the rows to be written back."""


def note_frozen(store: PackedStore) -> None:
    """Record a store with a table that is frozen alone."""
    if all(other() is not store for other in left):
        left[:] = [other for other in left if other() is not None]
        left.append(weakref.ref(store))


@torch._disable_dynamo
def keep_states(optimizer: Optimizer, moves: Callable[[Mapping[str, Any]], bool]) -> None:
    """Copy the rows of states that the next step must not change.

    ``moves`` returns whether a step with a param group changes rows without a gradient, or their state.

    Raises:
        ValueError: a table is trained again, and the number of steps has changed since it was frozen.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    kept: list[tuple[Tensor, str | None, int, Tensor]] = []
    for reference in left:
        if (store := reference()) is None:
            continue
        check_counts(optimizer, store)
        for number, (name, first_row) in store.origins.items():
            parameter = store.parameters[name]
            group = groups.get(id(parameter))
            if group is None or not moves(group):
                continue
            state = getattr(optimizer, "state", {}).get(parameter, {})
            numbers = numbers_of(state) if is_counted(optimizer, group) else {}
            _records.setdefault(optimizer, _Records()).setdefault(store, {}).setdefault(number, numbers)
            rows = store.layout.tables[number].num_embeddings
            if not state and group.get("weight_decay"):  # decay would reach the state that the step creates
                weight = parameter.detach().narrow(0, first_row, rows)
                kept.append((parameter, None, first_row, weight.clone()))
                weight.zero_()
            for key, value in state.items():
                is_strided = isinstance(value, Tensor) and value.layout is torch.strided
                if is_strided and kinds_of(value, parameter)[:1] in (["element"], ["row"]):
                    kept.append((parameter, key, first_row, value.narrow(0, first_row, rows).clone()))
    if kept and optimizer not in _kept:
        optimizer.register_step_post_hook(_write_back)
    if kept or optimizer in _kept:
        _kept[optimizer] = kept


@torch._disable_dynamo
@torch.no_grad()
def _write_back(optimizer: Optimizer, *_: Any) -> None:
    for parameter, key, first_row, rows in _kept.get(optimizer, ()):
        written = parameter if key is None else optimizer.state[parameter][key]
        written.narrow(0, first_row, len(rows)).copy_(rows)
    if optimizer in _kept:
        _kept[optimizer] = []


def check_counts(optimizer: Optimizer, store: PackedStore, all_tables: bool = False) -> None:
    """Raise ValueError if a table that was frozen alone is trained again after steps of the whole Parameter.

    With ``all_tables`` it raises for tables that are still frozen, too.
    """
    records = _records.get(optimizer, _Records()).get(store, {})
    for number, before in list(records.items()):
        if number in store.origins and not all_tables:
            continue
        spec = store.layout.tables[number]
        name = (
            store.origins[number][0] if number in store.origins else store.layout.parameter_names[spec.matrix]
        )
        parameter: Any = store.parameters.get(name)
        group = group_of(optimizer, parameter)
        if (
            group is None
            or not is_counted(optimizer, group)
            or numbers_of(optimizer.state[parameter]) == before
        ):
            if number not in store.origins:
                del records[number]
            continue
        raise ArgumentValueError(
            f"recfuse: packed table {spec.name!r} was frozen alone, and {type(optimizer).__name__} has made "
            "steps since, which it counts by Parameter, so the table's next step would differ from "
            "torch's. Make a new optimizer when the table is trained again, or call "
            "recfuse.optim.embedding_parameters(table) before the optimizer is made."
        )


def note_numbers(
    optimizer: Optimizer, store: PackedStore, table: int, numbers: dict[str, Any] | None
) -> None:
    """Record the numbers in the state of a table that is frozen alone; None removes the record."""
    records = _records.setdefault(optimizer, _Records()).setdefault(store, {})
    records.pop(table, None)
    if numbers is not None:
        records[table] = numbers


def noted_numbers(optimizer: Optimizer, store: PackedStore, table: int) -> dict[str, Any] | None:
    """Return the numbers in the state of a table at the time when it was frozen alone.

    Returns None if no step was made since, or if no step depends on them.
    """
    numbers = _records.get(optimizer, _Records()).get(store, {}).get(table)
    group = group_of(optimizer, store.origin(table)) or {}
    return numbers if is_counted(optimizer, group) else None


def group_of(optimizer: Optimizer, parameter: Any) -> dict[str, Any] | None:
    """Return the param group with a Parameter, or None."""
    return next(
        (group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None
    )


def numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a state's entries, with their values if these are numbers, else None."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else _number(value)
        for key, value in state.items()
    }


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None
