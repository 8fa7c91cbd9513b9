"""``torch.distributed.checkpoint.state_dict`` of optimizers, by table.

This holds for ``get_state_dict``, ``set_state_dict`` and the functions for optimizers only. They name
states by the Parameters of ``model.named_parameters()``. Wrappers of their inner functions convert names and
states of packed Parameters to those of the tables when they save, and back when they load. Parameters that
``fully_shard`` has sharded keep their own names; a whole state by table loads into them too.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.forms import form_of
from recfuse.nn.packed.by_table.raw_states import by_table, refuse_raw_states
from recfuse.nn.packed.by_table.slots import Slot, slots_of_store
from recfuse.nn.packed.by_table.states import joined, split
from recfuse.nn.packed.layout import is_sharded
from recfuse.nn.packed.store import PackedStore

_MODULE = "torch.distributed.checkpoint.state_dict"
_ATTRIBUTE = "_recfuse_by_table"
_is_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("is_loading", default=False)


def follow_checkpoints() -> None:
    """Patch the functions to use entries by table, if their module is imported."""
    tool: Any = sys.modules.get(_MODULE)
    if tool is None or hasattr(tool, _ATTRIBUTE):
        return
    get, load = tool._get_optim_state_dict, tool._load_optim_state_dict

    @functools.wraps(get)
    def get_by_table(model: torch.nn.Module, optimizers: tuple[Optimizer, ...], info: Any) -> Any:
        with by_table():
            by_parameter = get(model, optimizers, info)
        refuse_raw_states(optimizers)
        return by_parameter if _is_loading.get() else _Names(tool, model, optimizers).to_tables(by_parameter)

    @functools.wraps(load)
    def load_by_table(
        model: torch.nn.Module, optimizers: tuple[Optimizer, ...], state_dict: Any, info: Any
    ) -> None:
        is_whole = bool(info.full_state_dict)
        state_dict = _Names(tool, model, optimizers).to_parameters(state_dict, is_whole)
        token = _is_loading.set(True)
        try:
            with by_table():
                load(model, optimizers, state_dict, info)
        finally:
            _is_loading.reset(token)
        refuse_raw_states(optimizers)

    tool._get_optim_state_dict, tool._load_optim_state_dict = get_by_table, load_by_table
    setattr(tool, _ATTRIBUTE, True)


class _Packed(NamedTuple):
    """A packed Parameter with its optimizer, its group, and its tables by name."""

    store: PackedStore
    parameter: Tensor
    optimizer: Optimizer
    group: Mapping[str, Any]
    slots: dict[str, Slot]

    def is_sharded(self) -> bool:
        """Return whether ``fully_shard`` has sharded the Parameter."""
        return is_sharded(self.parameter)


class _Names:
    """The packed Parameters of a model that optimizers hold, with their tables, by the names of the tool."""

    def __init__(self, tool: Any, model: torch.nn.Module, optimizers: Iterable[Optimizer]) -> None:
        groups = {
            id(p): (optimizer, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

        def name_of(path: str, parameter_name: str) -> str:
            (name,) = tool._get_fqns(model, f"{path}.{parameter_name}" if path else parameter_name)
            return str(name)

        self.packed: dict[str, _Packed] = {}
        self.all_tables: dict[int, list[str]] = {}  # by the id of a sharded module's store
        self._groups: dict[int, int] = {}
        for path, module in model.named_modules():
            store = vars(module).get("_store")
            if store is None or module is not store.holder:
                continue
            slots = slots_of_store(store, store.layout.parameter_names)
            for parameter_name, parameter in store.parameters.items():
                if id(parameter) in groups and parameter_name in store.layout.parameter_names:
                    tables = {
                        name_of(path, f"{store.layout.tables[slot.table].name}.weight"): slot
                        for slot in slots
                        if slot.parameter is parameter
                    }
                    optimizer, group = groups[id(parameter)]
                    self.packed[name_of(path, parameter_name)] = _Packed(
                        store, parameter, optimizer, group, tables
                    )
                    if store.sharding is not None:
                        self._add_tables(store, group, name_of, path)

    def _add_tables(self, store: PackedStore, group: Mapping[str, Any], name_of: Any, path: str) -> None:
        """Record the names of all tables of a sharded module; every rank then saves the same groups.

        Raises:
            ValueError: tables in several groups, of which this rank does not know all.
        """
        if self._groups.setdefault(id(store), id(group)) != id(group):
            raise ArgumentValueError(
                f"recfuse.distributed: tables of module {store.sharding.name!r} are in several param groups; "
                "expected a single group, since ranks save their states under the names of all tables"
            )
        specs = store.sharding.specs
        self.all_tables[id(store)] = [name_of(path, f"{spec.name}.weight") for spec in specs]

    def to_tables(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a dictionary by table, in the form of the tool, nested or flat."""
        form = form_of(state_dict)
        renamed: dict[tuple[int, int], tuple[list[str], dict[str, Slot]]] = {}
        for name, packed in self.packed.items():
            state = form.pop_state(name)
            if packed.is_sharded() and not (state and _is_whole(state)):
                if state is not None:
                    form.set_state(name, state)
                continue
            for table, slot in packed.slots.items():
                if state is not None and (table_state := split(packed.optimizer, slot, state)) is not None:
                    if packed.store.sharding is not None:
                        table_state = packed.store.sharding.state_to_entries(slot.table, table_state)
                    form.set_state(table, table_state)
            olds, slots = renamed.setdefault((id(packed.store), id(packed.group)), ([], {}))
            olds.append(name)
            slots.update(packed.slots)
        for (store, _), (olds, slots) in renamed.items():
            names = sorted(slots, key=lambda table: slots[table].table)
            form.rename(olds, self.all_tables.get(store, names))
        return form.whole()

    def to_parameters(self, state_dict: dict[str, Any], is_whole: bool) -> dict[str, Any]:
        """Convert a dictionary by table to a dictionary by Parameter; keep a dictionary by Parameter."""
        if not state_dict:
            return state_dict
        form = form_of(state_dict)
        renamed: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
        for name, packed in self.packed.items():
            if name in form.names() or not (form.names() & set(packed.slots) or not packed.slots):
                continue
            states = [form.pop_state(table) for table in packed.slots]
            if packed.store.sharding is not None:
                states = [
                    state and packed.store.sharding.state_from_entries(slot.table, table, state)
                    for state, (table, slot) in zip(states, packed.slots.items(), strict=True)
                ]
            if packed.is_sharded() and not (is_whole and all(_is_whole(state) for state in states if state)):
                raise ArgumentValueError(
                    "recfuse: torch.distributed.checkpoint.state_dict: the state of "
                    f"{type(packed.optimizer).__name__} is by table ({next(iter(packed.slots))}), and "
                    f"fully_shard has cut the packed Parameter {name} over processes. Load a whole state by "
                    "table with StateDictOptions(full_state_dict=True), or a state of a swapped model."
                )
            state = joined(packed.optimizer, packed.group, list(packed.slots.values()), states)
            if state is not None:
                form.set_state(name, state)
            olds, names = renamed.setdefault((id(packed.store), id(packed.group)), ([], []))
            olds.extend(self.all_tables.get(id(packed.store), packed.slots))
            names.append(name)
        for olds, names in renamed.values():
            form.rename(olds, names)
        return form.whole()


def _is_whole(state: Mapping[str, Any]) -> bool:
    return not any(hasattr(value, "device_mesh") for value in state.values())
