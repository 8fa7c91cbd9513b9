"""The modules of a model that can be sharded, and the change of one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from recfuse._codes import DTYPES, row_bytes
from recfuse.distributed.applying import Prepared
from recfuse.distributed.modules import ShardedPooling
from recfuse.distributed.placements import Placed
from recfuse.distributed.plans import WHERE, TableFacts
from recfuse.distributed.tables import ShardedTable, ShardedTables
from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.layout import WeightForm, is_sharded
from recfuse.nn.packed.module import PackedModule
from recfuse.nn.packed.optimizers import Move
from recfuse.nn.packed.tables import PackedTables

_CLASSES = ("FusedEmbeddingBagCollection", "FusedEmbeddingBagList", "FusedKeyedEmbeddingBagCollection")


def shardable(model: torch.nn.Module, where: str = WHERE) -> list[tuple[str, Any]]:
    """Return the modules of a model that can be sharded, with their names; ``where`` begins errors.

    Raises:
        ValueError: no such module; a module that is sharded already.
    """
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, ShardedPooling):
            raise ArgumentValueError(
                f"{where}: module {name!r} is sharded already; expected unsharded modules. Call "
                "recfuse.distributed.unshard(model) first."
            )
        if type(module).__name__ in _CLASSES and isinstance(module, PackedModule):
            found.append((name, module))
    if not found:
        raise ArgumentValueError(
            f"{where}: the module has no {', '.join(_CLASSES[:2])} or swapped EmbeddingBagCollection of "
            "TorchRec. Call recfuse.swap(model) first."
        )
    return found


def why_left(model: torch.nn.Module, name: str, module: torch.nn.Module) -> str | None:
    """Return why a module with embedding tables was left, or None for other modules."""
    if isinstance(module, (ShardedPooling, ShardedTable, ShardedTables)):
        return None
    if isinstance(module, PackedTables):
        return f"its class is {type(module).__name__}; expected {', '.join(_CLASSES)}"
    parent = model.get_submodule(name.rpartition(".")[0]) if name else None
    is_bag = isinstance(module, (torch.nn.EmbeddingBag, torch.nn.Embedding))
    if is_bag and not hasattr(module, "_store") and not isinstance(parent, PackedTables):
        return "the table is not in one call with others. Call recfuse.swap(model) before."
    return None


def facts_of(name: str, module: Any) -> list[TableFacts]:
    """Return the facts of the tables of a module, under the names of its ``state_dict``."""
    path = ".".join(part for part in (name, module._tables_name) if part)
    counts = [0] * len(module.layout.tables)
    for number in module.layout.table_of_feature:
        counts[number] += 1
    matrices = module.packed_weights()
    return [
        TableFacts(
            f"{path}.{spec.name}" if path else spec.name,
            spec.num_embeddings,
            spec.embedding_dim,
            matrices[spec.matrix].dtype,
            counts[number],
        )
        for number, spec in enumerate(module.layout.tables)
    ]


def check_memory(prepared: Sequence[Prepared], total: int) -> None:
    """Raise ValueError if this rank's parts, with a whole table that is drawn, exceed a GPU's memory."""
    own = most = 0
    for each in prepared:
        for part in each.parts:
            own += part.part.rows * row_bytes(part.part.columns, part.form.dtype)
        if each.is_meta:
            most = max([most, *(form.rows * row_bytes(form.dim, form.dtype) for form in each.forms)])
    if own + most > total:
        drawn = f", and a table of {most:,} bytes is drawn" if most else ""
        raise ArgumentValueError(
            f"{WHERE}: this rank has tables of {own:,} bytes{drawn}; expected at most the {total:,} bytes of "
            "its GPU. Use more ranks, or a plan of recfuse.distributed.plan with this memory."
        )


def prepare(
    name: str,
    module: Any,
    placed: Sequence[Placed],
    keys: Sequence[str],
    mesh: Any,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Prepared:
    """Check a module and its optimizers, without a change.

    Raises:
        ValueError, TypeError: tables, or optimizers, that cannot be sharded.
    """
    where = f"{WHERE}: module {name!r}"
    layout, matrices = module.layout, module.packed_weights()
    if module._store.origins:
        raise ArgumentValueError(
            f"{where}: a table was frozen alone; expected whole packed Parameters. Call requires_grad_() of "
            "the table first, or freeze the module."
        )
    for matrix in matrices:
        if is_sharded(matrix) or not isinstance(matrix, Parameter):
            raise ArgumentValueError(f"{where}: a packed Parameter is computed, or sharded by fully_shard")
        if matrix.dtype not in DTYPES:
            raise ArgumentValueError(
                f"{where}: a table is {matrix.dtype}; expected float32, float16 or bfloat16"
            )
        if matrix.device.type not in ("meta", device.type):
            raise ArgumentValueError(
                f"{where}: a table is on {matrix.device}; expected {device} or meta. Move the model first."
            )
        if matrix.grad is not None:
            raise ArgumentValueError(f"{where}: a table has a gradient. Set it to None first.")
    if len({matrix.is_meta for matrix in matrices}) > 1:
        raise ArgumentValueError(f"{where}: some tables are on meta; expected all or none")
    places = [(spec.matrix, spec.first_row, spec.num_embeddings) for spec in layout.tables]
    tied = [number for number, place in enumerate(places) if place[2] and places.index(place) != number]
    if tied:
        names = layout.tables[places.index(places[tied[0]])].name, layout.tables[tied[0]].name
        raise ArgumentValueError(f"{where}: tables {names[0]!r} and {names[1]!r} share their rows")
    move = Move(optimizers, matrices, WHERE)
    forms = [
        WeightForm(
            spec.num_embeddings,
            spec.embedding_dim,
            matrices[spec.matrix].dtype,
            device,
            matrices[spec.matrix].requires_grad,
            move.tags[spec.matrix],
        )
        for spec in layout.tables
    ]
    for spec, table in zip(layout.tables, placed, strict=True):
        has_state = any(optimizer.state.get(matrices[spec.matrix]) for optimizer in optimizers)
        if table.kind == "columns" and has_state:
            raise ArgumentValueError(
                f"{where}: table {spec.name!r} is cut by columns and has the state of an optimizer; expected "
                "a state of whole rows. Create the optimizer afterwards, or cut the table by rows."
            )
    return Prepared(name, module, tuple(placed), tuple(keys), mesh, device, forms, move)
