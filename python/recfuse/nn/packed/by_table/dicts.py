"""``state_dict()`` and ``load_state_dict()`` of optimizers, by table.

A packed Parameter has the entries of its tables, as if each table were a Parameter. So torch's modules and
packed modules load each other's files. Tools of ``torch.distributed`` relate the numbers in a ``state_dict``
to the Parameters themselves, so they get it by Parameter.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from recfuse.nn.packed.by_table.slots import Slot, slots_of_groups
from recfuse.nn.packed.by_table.states import joined, split

_ATTRIBUTE = "_recfuse_by_table"
_INNER = ("torch.optim.", "torch._", "recfuse.", "contextlib")  # between a tool and an optimizer's method


def speak_of_tables() -> None:
    """Patch the dictionaries of all optimizers to have entries by table, from now on."""
    save, load = Optimizer.state_dict, Optimizer.load_state_dict
    if hasattr(save, _ATTRIBUTE):
        return

    @torch._disable_dynamo
    @functools.wraps(save)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        saved = save(self)
        return saved if _is_by_parameter() else to_tables(self, saved)

    @torch._disable_dynamo
    @functools.wraps(load)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        load(self, state_dict if _is_by_parameter() else to_parameters(self, state_dict))

    setattr(state_dict, _ATTRIBUTE, True)
    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _is_by_parameter() -> bool:
    """Return whether the caller is a tool of torch.distributed."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(_INNER):
            return name.startswith("torch.distributed.")
        frame = frame.f_back  # type: ignore[assignment]
    return False


def to_tables(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a ``state_dict`` by Parameter to a ``state_dict`` by table, over the same memory."""
    slots = slots_of_groups(optimizer)
    if slots is None:
        return state_dict
    numbers: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        numbers.update(zip(map(id, group["params"]), saved["params"], strict=True))
    states = state_dict["state"]
    known = set(numbers.values())
    result: dict[Any, Any] = {}
    groups, count = [], itertools.count()
    for group_slots, group, saved in zip(
        slots, optimizer.param_groups, state_dict["param_groups"], strict=True
    ):
        entries = []
        for slot in group_slots:
            entries.append(number := next(count))
            state = states.get(numbers[id(slot.parameter)])
            if slot.store is not None and isinstance(state, Mapping):
                state = split(optimizer, slot, state)
            if state is not None:
                result[number] = state
        groups.append({**saved, "params": entries})
        if "param_names" in saved:
            groups[-1]["param_names"] = _names(group_slots, group, saved["param_names"])
    result.update({key: value for key, value in states.items() if key not in known})
    return {**state_dict, "state": result, "param_groups": groups}


def _names(slots: list[Slot], group: Mapping[str, Any], names: list[str]) -> list[str]:
    name_of = dict(zip(map(id, group["params"]), names, strict=True))
    table_names = []
    for slot in slots:
        name = name_of[id(slot.parameter)]
        if slot.store is not None:
            parameter_name = next(
                parameter_name for parameter_name, p in slot.store.parameters.items() if p is slot.parameter
            )
            name = f"{name.removesuffix(parameter_name)}{slot.store.layout.tables[slot.table].name}.weight"
        table_names.append(name)
    return table_names


def to_parameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a ``state_dict`` by table to a ``state_dict`` by Parameter.

    Returns a ``state_dict`` by Parameter, or with other groups, unchanged: torch loads or refuses it.
    """
    slots = slots_of_groups(optimizer)
    saved_groups = state_dict.get("param_groups", ())
    if slots is None or [len(group_slots) for group_slots in slots] != [
        len(saved["params"]) for saved in saved_groups
    ]:
        return state_dict
    states = state_dict.get("state")
    if not isinstance(states, Mapping):
        return state_dict
    known = {number for saved in saved_groups for number in saved["params"]}
    result: dict[Any, Any] = {}
    groups, count = [], itertools.count()
    for group_slots, group, saved in zip(slots, optimizer.param_groups, saved_groups, strict=True):
        entries = []
        for parameter in group["params"]:
            entries.append(number := next(count))
            pairs = [
                (slot, states.get(key))
                for slot, key in zip(group_slots, saved["params"], strict=True)
                if slot.parameter is parameter
            ]
            if pairs and pairs[0][0].store is not None:
                state = joined(optimizer, group, [slot for slot, _ in pairs], [state for _, state in pairs])
            else:
                state = pairs[0][1] if pairs else None
            if state is not None:
                result[number] = state
        groups.append({**saved, "params": entries})
        if "param_names" in saved and "param_names" in group:
            groups[-1]["param_names"] = list(group["param_names"])
        else:
            groups[-1].pop("param_names", None)
    result.update({key: value for key, value in states.items() if key not in known})
    return {**state_dict, "state": result, "param_groups": groups}
