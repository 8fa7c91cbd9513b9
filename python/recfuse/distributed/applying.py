"""``Prepared``: a checked module, and its change into a sharded module."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from recfuse.distributed.agreement import Description
from recfuse.distributed.creation import broadcast_copies, copy_parts, draw_parts
from recfuse.distributed.exchanges.choices import Chooser
from recfuse.distributed.exchanges.collectives import CollectiveExchange
from recfuse.distributed.exchanges.header import Names
from recfuse.distributed.exchanges.routes import route_of
from recfuse.distributed.local import LocalTables, arranged, parts_of
from recfuse.distributed.modules import sharded_class
from recfuse.distributed.placements import Placed
from recfuse.distributed.sharding import Sharding
from recfuse.distributed.tables import ShardedTable, ShardedTables
from recfuse.nn.packed.layout import WeightForm, layout_of
from recfuse.nn.packed.optimizer_state import Piece, Target
from recfuse.nn.packed.optimizers import Move
from recfuse.nn.packed.row_wise import watch
from recfuse.nn.packed.store import PackedStore
from recfuse.ops import fused_dtype


class Prepared:
    """A module that can be sharded; :meth:`apply` changes it."""

    def __init__(
        self,
        name: str,
        module: Any,
        placed: tuple[Placed, ...],
        keys: tuple[str, ...],
        mesh: Any,
        device: torch.device,
        forms: Sequence[WeightForm],
        move: Move,
    ) -> None:
        """Store the facts; see :func:`prepare`."""
        self.name, self.module, self.placed, self.keys = name, module, placed, keys
        self.mesh, self.device, self.forms, self.move = mesh, device, tuple(forms), move
        self.rank = mesh.get_local_rank()
        layout = module.layout
        self.parts = parts_of(layout.tables, placed, self.forms, self.rank)
        self.is_meta = bool(module.packed_weights()[0].is_meta)
        self.sharding = Sharding(name, type(module), layout, self.forms, placed, mesh, self.rank, self.parts)

    def description(self) -> Description:
        """Return the facts that all ranks must have in common."""
        layout = self.module.layout
        found: Description = [(f"module {self.name!r} of class", type(self.module).__name__)]
        for spec, form, key, table in zip(layout.tables, self.forms, self.keys, self.placed, strict=True):
            shape = f"{spec.num_embeddings} x {spec.embedding_dim}, {spec.mode}, {form.dtype}"
            facts = f"{shape}, padding_idx {spec.padding_idx}, trained {form.requires_grad}"
            found += [("a table", key), (f"table {key!r} of", facts), (f"placement of {key!r}", str(table))]
        features = hashlib.sha256(repr((layout.table_of_feature, self._feature_names())).encode()).hexdigest()
        found += [
            (f"the features of {self.name!r}", features[:16]),
            (f"tables of {self.name!r} on meta", str(self.is_meta)),
            (f"sparse of {self.name!r}", str(layout.sparse)),
        ]
        return found

    def _feature_names(self) -> list[str]:
        names = getattr(self.module, "_flat_feature_names", None) or getattr(
            self.module, "feature_names", None
        )
        layout = self.module.layout
        return list(names or (layout.tables[number].name for number in layout.table_of_feature))

    def apply(self, number: int, average: bool, exchange_dtype: torch.dtype | None) -> CollectiveExchange:
        """Shard the module; a collective call. ``number`` is the number of the module in this process."""
        module, layout, sharding = self.module, self.module.layout, self.sharding
        old = module.packed_weights()
        parameters, targets = self._new_parameters(layout, old)
        self._replace_tables(parameters)
        self.move.apply(targets)
        modes = [layout.tables[table].mode for table in layout.table_of_feature]
        padding = [spec.padding_idx for spec in layout.tables]
        route = route_of(
            layout.table_of_feature,
            self.placed,
            [spec.mode for spec in layout.tables],
            padding,
            self.mesh.size(),
        )
        dtypes = [form.dtype for form in self.forms]
        result = fused_dtype([matrix.dtype for matrix in old])
        sharding.dtype = result
        is_split = any(
            table.kind == "rows" and form.dtype != torch.float32
            for table, form in zip(self.placed, self.forms, strict=True)
        )
        pooled = torch.float32 if is_split or len(set(dtypes)) > 1 else result
        table_of_feature = layout.table_of_feature
        tables = LocalTables(sharding.store, self.parts, table_of_feature, modes, pooled, self.device)
        specs = [layout.tables[table] for table in table_of_feature]
        names = Names(self.name, self._feature_names(), [spec.num_embeddings for spec in specs])
        can_add = pooled == torch.float32
        chooser = Chooser(route, table_of_feature, layout.tables, self.forms, self.placed, can_add)
        sharding.exchange = CollectiveExchange(
            number, route, tables, chooser, specs, names, sharding.group, average, exchange_dtype
        )
        return sharding.exchange  # type: ignore[no-any-return]

    def _new_parameters(
        self, layout: Any, old: Sequence[torch.Tensor]
    ) -> tuple[dict[str, Parameter], list[Target]]:
        """Create this rank's Parameters with their values; describe where their rows come from."""
        like = self.forms[0]
        matrices = arranged(self.parts, like)
        own: list[Any] = [None] * len(self.parts)
        parameters, targets = {}, []
        names = [part.spec.name for part in self.parts]
        for name, parameter, matrix in self.module._allocate(matrices, names):
            parameters[name] = parameter
            pieces = []
            for number, first_row in matrix.members:
                if number >= len(self.parts):
                    continue
                part = self.parts[number]
                own[number] = parameter.data.narrow(0, first_row, part.part.rows)
                spec = layout.tables[part.table]
                pieces.append(Piece(spec.matrix, spec.first_row + part.part.row, part.part.rows, first_row))
            targets.append(Target(parameter, self.module._below(name), pieces))
        if self.is_meta:
            inits = vars(self.module).get("_inits", {})
            draw_parts(layout.tables, self.forms, self.parts, own, self.device, inits)
        else:
            copy_parts(layout.tables, old, self.parts, own)
        broadcast_copies(self.placed, self.parts, own, self.sharding.group)
        specs = [part.spec for part in self.parts]
        weights = range(len(self.parts))
        self._local = layout_of(specs, weights, [], matrices, layout.sparse)
        for part in self.parts:
            if self.placed[part.table].kind == "columns":
                parameters[self._name_of(part)]._recfuse_cut_columns = part.spec.name
        return parameters, targets

    def _name_of(self, part: Any) -> str:
        local = self._local.tables[self.parts.index(part)]
        return self._local.parameter_names[local.matrix]

    def _replace_tables(self, parameters: dict[str, Parameter]) -> None:
        """Give the module its new class, tables and Parameters."""
        module, sharding = self.module, self.sharding
        is_holder = not module._tables_name
        old_names = module._store.layout.parameter_names
        module.__class__ = sharded_class(type(module), is_holder)
        vars(module)["_sharding"] = sharding
        if is_holder:
            holder = module
            module._modules.clear()
            for name in old_names:
                del module._parameters[name]
        else:
            holder = ShardedTables()
        for name, parameter in parameters.items():
            torch.nn.Module.register_parameter(holder, name, parameter)
        store = PackedStore(self._local, module, holder)
        store.sharding = sharding
        sharding.store = store
        for number, spec in enumerate(sharding.specs):
            table = ShardedTable(sharding, number)
            table.training = module.training
            holder._modules[spec.name] = table
        vars(module)["_store"] = store
        vars(holder)["_store"] = store
        if not is_holder:
            module._modules[module._tables_name] = holder
        watch(module)
