"""The tables in the Parameters of an optimizer, in the order of an optimizer without packed tables."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from recfuse.nn.packed.layout import is_sharded
from recfuse.nn.packed.store import PackedStore
from recfuse.nn.packed.taking_part import numbered


class Slot(NamedTuple):
    """A table of a packed Parameter, or a Parameter that is not packed (without a store)."""

    parameter: Tensor
    store: PackedStore | None = None
    table: int = -1
    first_row: int = 0
    rows: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """The Parameter, by id, and the first row."""
        return id(self.parameter), self.first_row

    @property
    def said(self) -> str:
        """The table, for errors."""
        return f"table {self.store.layout.tables[self.table].name!r}" if self.store else "a Parameter"

    @property
    def is_frozen_alone(self) -> bool:
        """Return whether the table is in another Parameter at the moment."""
        return self.store is not None and self.table in self.store.origins


def stores() -> Iterator[PackedStore]:
    """Iterate over the stores of all packed modules, each once."""
    stores_by_id = {
        id(store): store for module in list(numbered.values()) if (store := vars(module).get("_store"))
    }
    yield from stores_by_id.values()


def slots_of_store(store: PackedStore, names: Iterable[str]) -> list[Slot]:
    """Return the tables that an optimizer of the Parameters ``names`` steps, in order, tied tables once."""
    own_names, slots, places = set(names), [], set()
    for number, spec in enumerate(store.layout.tables):
        origin = store.layout.parameter_names[spec.matrix], spec.first_row
        name, first_row = store.origins.get(number, origin)
        place = name, first_row, spec.num_embeddings
        if name in own_names and (place not in places or not spec.num_embeddings):
            places.add(place)
            slots.append(Slot(store.parameters[name], store, number, first_row, spec.num_embeddings))
    return slots


def names_of(store: PackedStore) -> dict[str, Any]:
    """Return the packed Parameters of a store by name, without those that ``fully_shard`` has sharded."""
    names = (name for name in store.layout.parameter_names if name in store.parameters)
    return {name: store.parameters[name] for name in names if not is_sharded(store.parameters[name])}


def slots_of_groups(optimizer: Optimizer) -> list[list[Slot]] | None:
    """Return the slots of each param group of an optimizer, or None if no Parameter is packed.

    The tables of a module are at the position of the first of its Parameters, as in ``model.parameters()`` of
    a model that was not swapped; or in the order that :func:`keep_order` has stored.
    """
    packed = {id(p): (store, name) for store in stores() for name, p in names_of(store).items()}
    result, is_packed = [], False
    for group in optimizer.param_groups:
        entries = [(parameter, *packed.get(id(parameter), (None, ""))) for parameter in group["params"]]
        slots: list[Slot] = []
        seen: set[int] = set()
        for parameter, store, _ in entries:
            if store is None:
                slots.append(Slot(parameter))
            elif id(store) not in seen:
                seen.add(id(store))
                slots += slots_of_store(store, [name for _, other, name in entries if other is store])
        is_packed |= bool(seen)
        places = {
            (id(parameter), row): at
            for at, (parameter, row) in enumerate(_orders.get(optimizer, {}).get(id(group["params"]), ()))
        }
        if all(slot.place in places for slot in slots):
            slots.sort(key=lambda slot: places[slot.place])
        result.append(slots)
    return result if is_packed else None


_Places = list[tuple[Tensor, int]]
_orders: weakref.WeakKeyDictionary[Optimizer, dict[int, _Places]] = weakref.WeakKeyDictionary()
"""By optimizer and by the id of a group's list of Parameters: Parameters and first rows in their order."""


def order_of(optimizer: Optimizer, params: list[Any]) -> _Places:
    """Return the Parameters and first rows of the slots of the group with the list ``params``."""
    slots = slots_of_groups(optimizer)
    at = next((at for at, group in enumerate(optimizer.param_groups) if group["params"] is params), None)
    if slots is None or at is None:
        return [(parameter, 0) for parameter in params]
    return [(slot.parameter, slot.first_row) for slot in slots[at]]


def keep_order(optimizer: Optimizer, params: list[Any], places: _Places) -> None:
    """Store the order of the tables of a group, which may differ from the order of their modules."""
    _orders.setdefault(optimizer, {})[id(params)] = places
