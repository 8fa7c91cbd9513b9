"""Moves of tables between packed matrices: to freeze or train a table alone, or to give it a Parameter.

A table that is frozen alone moves from its matrix to a matrix without a gradient, so that neither a backward
pass nor an optimizer of the matrix changes its rows. It returns to its rows when it is trained again, and an
optimizer of the matrix steps it as before. If all tables of a matrix are frozen, the matrix itself is frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.frozen_alone import note_frozen
from recfuse.nn.packed.layout import Layout, TableSpec, aligned, feature_tensor, is_sharded, table_rows
from recfuse.nn.packed.store import PackedStore


def train_table(store: PackedStore, number: int, trained: bool) -> None:
    """Train or freeze table ``number`` of a store, and the tables that are tied to it.

    Raises:
        ValueError: the tables of its module cannot move.
    """
    if store.matrix(number).requires_grad == trained:
        return
    tied = _tied(store.layout, number)
    origin_name = store.origins[number][0] if number in store.origins else _name_of(store.layout, number)
    origin, residents = _parameter(store, origin_name, number), _residents(store.layout, origin_name)
    if trained:
        if not origin.requires_grad:
            _move(store, residents - tied, f"{origin_name}_frozen", origin)
            origin.requires_grad_(True)
        _return_tables(store, tied)
    elif residents == tied:
        origin.requires_grad_(False)
        _return_tables(store, {guest for guest, (name, _) in store.origins.items() if name == origin_name})
    else:
        _move(store, tied, f"{origin_name}_frozen", origin)


def settle(store: PackedStore) -> None:
    """Move tables back whose matrix of frozen tables was set to have gradients.

    ``model.requires_grad_(True)`` does so, for example. Optimizers may not have that matrix.
    """
    trained = {number for number in store.origins if store.matrix(number).requires_grad}
    for name in {store.origins[number][0] for number in trained}:
        store.parameters[name].requires_grad_(True)
    _return_tables(store, trained)


def own_parameters(tables: Iterable[tuple[PackedStore, int]]) -> list[Parameter]:
    """Return Parameters that have the rows of these tables and of no others.

    A packed matrix whose tables are all among these is returned itself. Other tables move to a new Parameter,
    without gradients.

    Raises:
        ValueError: the tables of a module cannot move.
    """
    numbers: dict[tuple[PackedStore, str], set[int]] = {}
    for store, number in tables:
        key = store, _name_of(store.layout, number)
        numbers.setdefault(key, set()).update(_tied(store.layout, number))
    parameters = []
    for (store, name), own in numbers.items():
        matrix = _parameter(store, name, min(own))
        if own != _residents(store.layout, name) or any(
            origin == name for origin, _ in store.origins.values()
        ):
            name = next(new for new in _names(name) if new not in store.parameters)
            _move(store, own, name, matrix, matrix.requires_grad)
            for number in own:
                store.origins.pop(number, None)
        parameters.append(store.parameters[name])
    return parameters


def _names(name: str) -> Iterator[str]:
    base = "_".join(name.split("_")[:2])
    return (f"{base}_{count}" for count in range(1, 1 << 62))


def _name_of(layout: Layout, number: int) -> str:
    return layout.parameter_names[layout.tables[number].matrix]


def _residents(layout: Layout, name: str) -> set[int]:
    """Return the tables with rows in a matrix."""
    matrix = layout.parameter_names.index(name)
    return {number for number, spec in enumerate(layout.tables) if spec.matrix == matrix}


def _tied(layout: Layout, number: int) -> set[int]:
    """Return the table, and other tables with the same rows."""
    place = _place(layout.tables[number])
    return {at for at, other in enumerate(layout.tables) if _place(other) == place and place[2]} or {number}


def _place(spec: TableSpec) -> tuple[int, int, int]:
    return spec.matrix, spec.first_row, spec.num_embeddings


def _parameter(store: PackedStore, name: str, number: int) -> Parameter:
    """Return the matrix of table ``number``, if the table may move, else raise ValueError."""
    reason = None
    if not store.owners:
        reason = "its module is gone"
    elif name not in store.parameters:
        reason = f"its packed matrix {name} is computed (parametrized or pruned)"
    elif is_sharded(store.parameters[name]):
        reason = f"fully_shard has cut its packed matrix {name} over processes"
    elif why_not := store.owners[0]._why_not_movable():
        reason = why_not
    if reason is not None:
        raise ArgumentValueError(
            f"recfuse: packed table {store.layout.tables[number].name!r} cannot be trained, frozen or "
            f"stepped alone, since {reason}. Change all tables of the module, or change the table before it "
            "is packed."
        )
    return store.parameters[name]


def _move(
    store: PackedStore, numbers: Collection[int], name: str, model: Parameter, requires_grad: bool = False
) -> None:
    """Move tables to the matrix ``name``, which grows or is created in the form of ``model``."""
    if not numbers:
        return
    layout, parameter = store.layout, store.parameters.get(name)
    residents = [] if parameter is None else [layout.tables[number] for number in _residents(layout, name)]
    end = max((spec.first_row + spec.num_embeddings for spec in residents), default=0)
    places: dict[tuple[int, int, int], int] = {}
    for spec in (layout.tables[number] for number in sorted(numbers)):
        if _place(spec) not in places:
            places[_place(spec)] = aligned(end, spec.embedding_dim, model.dtype)
            end = places[_place(spec)] + spec.num_embeddings
    with torch.inference_mode(False), torch.no_grad():
        if parameter is None or parameter.shape[0] < end:
            rows = end if parameter is None else max(end, min(2 * parameter.shape[0], model.shape[0]))
            data = torch.zeros((rows, model.shape[1]), dtype=model.dtype, device=model.device)
            if parameter is None:
                store.holder.register_parameter(name, Parameter(data, requires_grad=requires_grad))
            else:
                data[: parameter.shape[0]].copy_(parameter)
                parameter.data = data
        target = store.parameters[name]
        for (matrix, first_row, count), row in places.items():
            source = store.parameters[layout.parameter_names[matrix]]
            target.narrow(0, row, count).copy_(source.narrow(0, first_row, count))
    moved = {}
    for number in numbers:
        spec = layout.tables[number]
        moved[number] = name, places[_place(spec)]
        if not requires_grad:
            store.origins[number] = layout.parameter_names[spec.matrix], spec.first_row
            note_frozen(store)
    _relocate(store, moved)


def _return_tables(store: PackedStore, numbers: Collection[int]) -> None:
    """Move tables back to the rows that they have left."""
    places = {number: store.origins[number] for number in numbers if number in store.origins}
    with torch.inference_mode(False), torch.no_grad():
        for number, (name, first_row) in places.items():
            spec = store.layout.tables[number]
            rows = table_rows(spec, store.matrix(number))
            store.parameters[name].narrow(0, first_row, spec.num_embeddings).copy_(rows)
    for number in places:
        del store.origins[number]
    _relocate(store, places)


def _relocate(store: PackedStore, places: dict[int, tuple[str, int]]) -> None:
    """Change the layout to these positions of tables; remove matrices without tables."""
    if not places:
        return
    layout = store.layout
    all_places = [
        places.get(number, (layout.parameter_names[spec.matrix], spec.first_row))
        for number, spec in enumerate(layout.tables)
    ]
    used = {name for name, _ in (*all_places, *store.origins.values())}
    order = dict.fromkeys((*layout.parameter_names, *(name for name, _ in places.values())))
    names = tuple(name for name in order if name in used)
    tables = tuple(
        spec._replace(matrix=names.index(name), first_row=first_row)
        for spec, (name, first_row) in zip(layout.tables, all_places, strict=True)
    )
    features = feature_tensor([tables[number] for number in layout.table_of_feature])
    store.layout = layout._replace(tables=tables, parameter_names=names, features=features)
    for name in set(layout.parameter_names) - used:
        del store.parameters[name]
    for owner in store.owners:
        owner._layout_changed()
