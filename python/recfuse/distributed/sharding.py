"""``Sharding``: the facts of a sharded module that its calls, tables and checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.distributed.entries import entry_of, part_of_entry
from recfuse.distributed.local import LocalPart
from recfuse.distributed.placements import Placed
from recfuse.errors import ArgumentValueError
from recfuse.nn.memory import own_storage
from recfuse.nn.packed.layout import Layout, TableSpec, WeightForm, table_rows
from recfuse.nn.packed.store import PackedStore


class Sharding:
    """A sharded module.

    Attributes:
        name: the name of the module in its model.
        original: its class before it was sharded.
        layout: the layout of whole tables: names, features and columns.
        forms: the form of each whole table.
        placed: the placement of each table.
        mesh, group, rank: the ranks, their process group, and the number of this rank in it.
        parts: the parts of this rank.
        store: the store of this rank's packed Parameters.
        exchange: pools batches; see :class:`recfuse.distributed.exchanges.collectives.Exchange`.
        dtype: the dtype of a call's result.
        calls: the number of calls that have begun an exchange.
        loading: the list of errors of the last ``load_state_dict`` that has loaded all tables.
    """

    store: PackedStore
    exchange: Any
    dtype: torch.dtype

    def __init__(
        self,
        name: str,
        original: type,
        layout: Layout,
        forms: Sequence[WeightForm],
        placed: Sequence[Placed],
        mesh: Any,
        rank: int,
        parts: Sequence[LocalPart],
    ) -> None:
        """Create the facts; the caller sets ``store`` and ``exchange``."""
        self.name, self.original, self.layout = name, original, layout
        self.forms, self.placed, self.parts = tuple(forms), tuple(placed), tuple(parts)
        self.mesh, self.group, self.rank = mesh, mesh.get_group(), rank
        self.loading: list[str] | None = None
        self.calls = 0
        self._local = {part.table: number for number, part in enumerate(parts)}

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return self.layout.tables

    def matrices(self) -> list[Tensor]:
        """Return this rank's packed Parameters."""
        return [self.store.parameters[name] for name in self.store.layout.parameter_names]

    def rows(self, number: int) -> Tensor | None:
        """Return this rank's values of a table, a view, or None if it holds no part."""
        local = self._local.get(number)
        if local is None:
            return None
        spec = self.store.layout.tables[local]
        return table_rows(spec, self.store.matrix(local))

    def entry(self, number: int) -> Tensor | None:
        """Return the entry of a table in a ``state_dict``, over the same memory, or None."""
        rows = self.rows(number)
        return None if rows is None else self._wrapped(number, own_storage(rows))

    def _wrapped(self, number: int, local: Tensor) -> Tensor:
        part = self.parts[self._local[number]].part
        return entry_of(local, self.placed[number], part, self._shape(number), self.mesh)

    def _shape(self, number: int) -> tuple[int, int]:
        spec = self.specs[number]
        return spec.num_embeddings, spec.embedding_dim

    def load(
        self, number: int, key: str, state_dict: Mapping[str, Any], strict: bool, missing: list[str],
        errors: list[str],
    ) -> None:  # fmt: skip
        """Copy this rank's part of an entry into its rows."""
        rows = self.rows(number)
        if rows is None:
            return
        if key not in state_dict:
            if strict:
                missing.append(key)
            return
        part = self.parts[self._local[number]].part
        try:
            value = part_of_entry(key, state_dict[key], part, self._shape(number), tuple(rows.shape))
        except ArgumentValueError as error:
            errors.append(str(error))
            return
        with torch.no_grad():
            rows.copy_(value)

    def state_to_entries(self, local: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state of a table by its local number, with entries for its tensors."""
        number, part = self.parts[local].table, self.parts[local].part
        found = {}
        for key, value in state.items():
            has_rows = key != "step" and isinstance(value, Tensor) and value.dim() > 0
            found[key] = self._wrapped(number, value) if has_rows and len(value) == part.rows else value
        return found

    def state_from_entries(self, local: int, key: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of this rank's part from a state with entries."""
        number, part = self.parts[local].table, self.parts[local].part
        rows, columns = self._shape(number)
        found = {}
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
                local_shape: tuple[int, ...] = (part.rows, *value.shape[1:])
                if value.dim() == 2 and value.shape[1] == columns:
                    local_shape = (part.rows, part.columns)
                value = part_of_entry(f"{key}.{name}", value, part, tuple(value.shape), local_shape)
            found[name] = value
        return found

    def check_move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError if a function of ``module._apply`` changes the dtype or device of tables."""
        for matrix in self.matrices():
            probe = fn(matrix.detach()[:0])
            if (probe.dtype, probe.device) != (matrix.dtype, matrix.device):
                raise ArgumentValueError(
                    f"recfuse.distributed: module {self.name!r} is moved from {matrix.dtype} on "
                    f"{matrix.device} to {probe.dtype} on {probe.device}; expected the form in which it was "
                    "sharded. Move the model before shard()."
                )
