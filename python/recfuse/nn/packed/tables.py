"""``PackedTables``: packed Parameters with an interface by table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError, a_type, refuse_scripting
from recfuse.nn.packed.frozen_alone import note_frozen
from recfuse.nn.packed.layout import Layout
from recfuse.nn.packed.moving import settle
from recfuse.nn.packed.parameters import PackedParameters
from recfuse.nn.packed.pooling import has_kernel, on_gpu
from recfuse.nn.packed.row_wise import watch
from recfuse.nn.packed.store import PackedStore
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.packed.table_dict import Tables
from recfuse.nn.packed.wrappers import check_attribute


class PackedTables(PackedParameters):
    """Mixin for modules with packed tables: ``tables`` by name, and a ``state_dict`` by table.

    Calls, compiled and exported programs and optimizers only read and write the packed Parameters.
    """

    _table_class = PackedTable
    """The class of the tables."""

    def _publish(
        self, layout: Layout, parameters: Mapping[str, Parameter], training: Sequence[bool] = ()
    ) -> None:
        holder = Tables() if self._tables_name else self
        for name, parameter in parameters.items():
            holder.register_parameter(name, parameter)
        store = PackedStore(layout, self, holder)
        for number, spec in enumerate(layout.tables):
            table = holder._modules[spec.name] = self._table_class(store, number)
            table.training = training[number] if training else self.training
        holder._store = store
        if self._tables_name:
            self._modules[self._tables_name] = holder
        self._store = store  # last: a call of another thread that finds it reads all of the above
        watch(self)
        self._layout_changed()

    def _layout_changed(self) -> None:
        """Update attributes that depend on the layout, after a change."""

    def origin_of(self, table: PackedTable) -> tuple[int, int]:
        """Return the matrix and the first row with which optimizers of packed Parameters step a table.

        For a table that is frozen alone, these are the matrix and the row before it was frozen.
        """
        spec = table.spec
        name, first_row = self._store.origins.get(table.place[1], ("", spec.first_row))
        return self.layout.parameter_names.index(name) if name else spec.matrix, first_row

    def _why_not_movable(self) -> str | None:
        """Return the reason why no table can move to another matrix, or None if all can."""
        return None

    def _check_frozen(self) -> None:
        if not torch.compiler.is_compiling():
            settle(self._store)
        elif any(self._store.matrix(number).requires_grad for number in self._store.origins):
            raise ArgumentValueError(
                "recfuse: tables that were frozen alone were set to have gradients, by the Parameter of "
                "their matrix. Call requires_grad_() of the tables, or the module once, before it is "
                "compiled."
            )

    def _weights_changed(self) -> None:
        """Update attributes that depend on dtypes and device of the weights, after a possible change."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as every module.

        Refuses a module with the name of a property such as ``tables``, and a packed Parameter of the holder.
        """
        check_attribute(self, name)
        if isinstance(value, torch.nn.Module) and isinstance(getattr(type(self), name, None), property):
            raise AttributeError(
                f"recfuse: {name} of {a_type(self)} cannot be set, since calls would not use it. Assign to "
                f"the weights, as in {name}[key].weight = ..., or call recfuse.unswap(model) first."
            )
        if isinstance(value, Tensor) and self._tables_name and name.startswith("packed_dim"):
            raise AttributeError(
                f"recfuse: {name} of {a_type(self)} cannot be set, since its Parameters are those of "
                f"{self._tables_name}. Set {self._tables_name}.{name}."
            )
        super().__setattr__(name, value)

    @property
    def tables(self) -> Tables:
        """The tables by name, each with ``weight`` (a view), rows, dim and mode."""
        return self.holder  # type: ignore[return-value]

    @property
    def has_kernel(self) -> bool:
        """True if one call can pool all tables: on a single device, which has kernels for their dtypes."""
        return has_kernel(self.packed_weights())

    @property
    def on_cuda(self) -> bool:
        """True if all tables are on the same CUDA device."""
        weights = self.packed_weights()
        return on_gpu(weights) and has_kernel(weights)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new tables, in order, from a normal distribution; padding rows are zero."""
        for table in self.tables.values():
            table.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTables:
        super()._apply(fn, recurse)
        self._weights_changed()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state."""
        super().__setstate__(state)
        self._store.bind(self, self.holder)
        if self._store.origins:
            note_frozen(self._store)
        watch(self)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError."""
        refuse_scripting(self)
