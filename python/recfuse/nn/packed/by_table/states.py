"""Conversion between the state of a packed Parameter and the states of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from recfuse._arguments import wrong_type
from recfuse.errors import ArgumentValueError
from recfuse.nn.memory import own_storage
from recfuse.nn.packed.by_table.known_optimizers import is_counted
from recfuse.nn.packed.by_table.slots import Slot
from recfuse.nn.packed.frozen_alone import note_numbers, noted_numbers, numbers_of
from recfuse.nn.packed.optimizer_state import Entry, Piece, Target, described, gathered, kinds_of

State = Mapping[str, Any]
_INSTEAD = (
    "Load it into the optimizer of a model that was not swapped, and pass that optimizer to "
    "recfuse.swap(model, optimizers=[optimizer])."
)


def split(optimizer: Optimizer, slot: Slot, state: State) -> dict[str, Any] | None:
    """Return the state of a table, over the same memory, or None if it has no state. Numbers are copies.

    Raises:
        ValueError: an entry has neither the Parameter's shape nor its rows, and is no number.
    """
    store = slot.store
    numbers = noted_numbers(optimizer, store, slot.table) if store and slot.is_frozen_alone else None
    if numbers == {}:
        return None
    result = {}
    for key, value in state.items():
        result[key] = _part(optimizer, slot, key, value)
        if numbers and numbers.get(key) is not None:
            number = numbers[key]
            result[key] = torch.full_like(value, number) if isinstance(value, Tensor) else number
    return result


def _part(optimizer: Optimizer, slot: Slot, key: str, value: Any) -> Any:
    kinds = kinds_of(value, slot.parameter)
    if "scalar" in kinds[:1]:
        return value.clone() if isinstance(value, Tensor) else value
    if _is_whole(slot):
        return value
    if not kinds:
        raise ArgumentValueError(
            f"recfuse: state_dict() of {type(optimizer).__name__}: state entry {key!r} is {described(value)} "
            f"for a packed Parameter of shape {tuple(slot.parameter.shape)}, and cannot be saved for "
            f"{slot.said}; expected its shape, a first dimension of its rows, or one number. Call "
            "recfuse.unswap(model, optimizers=[optimizer]) first."
        )
    if value.layout is torch.strided:
        return own_storage(value.narrow(0, slot.first_row, slot.rows))
    piece = Piece(0, slot.first_row, slot.rows, 0)
    target = Target(Parameter(slot.parameter.detach()[: slot.rows]), "", [piece])
    return gathered(target, {0: Entry(value, "element")})


def _is_whole(slot: Slot) -> bool:
    return slot.first_row == 0 and slot.rows == slot.parameter.shape[0]


def joined(
    optimizer: Optimizer, group: Mapping[str, Any], slots: Sequence[Slot], states: Sequence[State | None]
) -> State | None:
    """Return the state of a packed Parameter from the states of its tables ``slots``, or None without states.

    Raises:
        ValueError: tables differ in having a state, or in its entries; an entry has another shape; numbers of
            steps differ, and a step depends on them.
    """
    prefix = f"recfuse: load_state_dict() of {type(optimizer).__name__}"
    counted = is_counted(optimizer, group)
    for state in states:
        if state is not None and not isinstance(state, Mapping):
            raise wrong_type(f"{prefix}: the state of a Parameter", state, "a dict")
    slot_states = [(slot, state) for slot, state in zip(slots, states, strict=True) if state]
    result: State | None = None
    if len(slots) == 1 and _is_whole(slots[0]):
        result = slot_states[0][1] if slot_states else None
    elif slot_states:
        result = _gathered(prefix, counted, slots, states, slot_states)
    for slot, state in zip(slots, states, strict=True):
        if slot.store is not None:
            numbers = numbers_of(state or {}) if counted else {}
            note_numbers(optimizer, slot.store, slot.table, numbers if slot.is_frozen_alone else None)
    return result


def _gathered(
    prefix: str,
    counted: bool,
    slots: Sequence[Slot],
    states: Sequence[State | None],
    slot_states: Sequence[tuple[Slot, State]],
) -> State:
    slots_and_states = [
        (slot, state) for slot, state in zip(slots, states, strict=True) if not slot.is_frozen_alone
    ]
    first_slot, first = next((pair for pair in slot_states if not pair[0].is_frozen_alone), slot_states[0])
    for slot, state in slots_and_states:
        if not state or set(state) != set(first):
            raise ArgumentValueError(
                f"{prefix}: {slot.said} has the state {sorted(state or {})}, {first_slot.said} has "
                f"{sorted(first)}, and both lie in one packed Parameter, which has one state. {_INSTEAD}"
            )
    pieces = [Piece(at, 0, slot.rows, slot.first_row) for at, (slot, _) in enumerate(slot_states)]
    target = Target(slots[0].parameter, "", pieces)  # type: ignore[arg-type]
    result = {}
    for key in first:
        parts = _entries(prefix, key, slot_states)
        if parts[0].kind == "scalar":
            trained = [parts[at] for at, (slot, _) in enumerate(slot_states) if not slot.is_frozen_alone]
            result[key] = _number(prefix, counted, key, trained or list(parts.values()))
        else:
            result[key] = gathered(target, parts)
    return result


def _entries(prefix: str, key: str, slot_states: Sequence[tuple[Slot, State]]) -> dict[int, Entry]:
    """Return an entry of the states of all tables."""
    kinds: list[str] | None = None
    for slot, state in slot_states:
        rows = slot.parameter.detach().narrow(0, slot.first_row, slot.rows)
        possible = kinds_of(state.get(key), rows)
        if not possible:
            raise ArgumentValueError(
                f"{prefix}: state entry {key!r} of {slot.said} is {described(state.get(key))}; expected a "
                f"value that fits its shape {tuple(rows.shape)}"
            )
        kinds = possible if kinds is None else [kind for kind in kinds if kind in possible]
    kind = kinds[0] if kinds else "scalar"
    entries = {at: Entry(state.get(key), kind) for at, (_, state) in enumerate(slot_states)}
    if not kinds or (kind != "scalar" and len({entry.tag() for entry in entries.values()}) > 1):
        values = ", ".join(f"{slot.said}: {described(state.get(key))}" for slot, state in slot_states)
        raise ArgumentValueError(
            f"{prefix}: state entry {key!r} has {values} for tables that lie in one packed Parameter; "
            "expected one kind, dtype and device"
        )
    return entries


def _number(prefix: str, counted: bool, key: str, parts: Sequence[Entry]) -> Any:
    values = [numbers_of({key: entry.value})[key] for entry in parts]
    if counted and any(value != values[0] for value in values):
        raise ArgumentValueError(
            f"{prefix}: {key!r} is {values} for tables that lie in one packed Parameter, which has one "
            f"state. {_INSTEAD}"
        )
    wrong = [at for at, value in enumerate(values) if value is None or value != value]  # for the optimizer
    value = parts[wrong[0] if wrong else values.index(max(values))].value
    return value.clone() if isinstance(value, Tensor) else value
