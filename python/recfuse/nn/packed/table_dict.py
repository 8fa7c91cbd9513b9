"""``Tables``: the tables of a packed module by name, and the Parameters with their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from recfuse.nn.packed import state_dict as state_dicts
from recfuse.nn.packed.layout import Layout
from recfuse.nn.packed.store import PackedStore, matrices_of
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.refusals import NoParameters

_NAMES_SHOWN = 8


def refuse_replacement(key: Any) -> NoReturn:
    """Raise TypeError: calls would not use a module that replaces a packed table."""
    raise TypeError(
        f"recfuse: the packed table {key!r} cannot be replaced by another object, which calls would not "
        "use. Assign to its weight, or call recfuse.unswap(model) first."
    )


def refuse_change(method: str) -> Any:
    """Return a method that refuses to add or remove tables."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"recfuse: {method} of packed tables is not supported, since their rows are a part of packed "
            "Parameters. Call recfuse.unswap(model), change the tables, and swap again, or make a new "
            "module."
        )

    refuse.__name__, refuse.__doc__ = method, "Refuses: packed tables are fixed."
    return refuse


class TableHolder(torch.nn.Module):
    """Mixin for the module whose children are packed tables, and whose Parameters have their rows.

    Its ``state_dict`` has the tables instead of the Parameters.
    """

    _store: PackedStore

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as every module; refuse to replace a table."""
        if isinstance(self._modules.get(name) if "_modules" in vars(self) else None, PackedTable):
            refuse_replacement(name)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state_dicts.save(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )
        tables = state_dicts.load(self, state_dict, prefix, local_metadata, error_msgs)
        self._store.loading = error_msgs
        packed = {prefix + name for name in self._store.layout.parameter_names}
        missing_keys.extend(key for key in missing if key not in packed)
        if strict:
            missing_keys.extend(key for key in tables if key not in state_dict)
        for owner in self._store.owners:
            owner._weights_changed()


class Tables(TableHolder, torch.nn.ModuleDict):
    """The tables of a packed module by name, in order, as a ModuleDict that cannot be changed.

    It has the packed Parameters.
    """

    @property
    def layout(self) -> Layout:
        """The positions of the tables."""
        return self._store.layout

    def packed_weights(self) -> list[Tensor]:
        """Return the current packed Parameters."""
        return matrices_of(self, self._store.layout.parameter_names)

    def values(self) -> list[PackedTable]:  # type: ignore[override]
        """Return the tables, in order."""
        return list(self._modules.values())  # type: ignore[arg-type]

    def items(self) -> list[tuple[str, PackedTable]]:  # type: ignore[override]
        """Return names and tables, in order."""
        return list(self._modules.items())  # type: ignore[arg-type]

    def __setitem__(self, name: str, table: Any) -> NoReturn:
        """Raise TypeError; see :func:`refuse_replacement`."""
        refuse_replacement(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tables:
        super()._apply(fn, recurse)
        for owner in self._store.owners:
            owner._weights_changed()
        return self

    def __repr__(self) -> str:
        """Return some names, and the Parameters with the tables, on a single line."""
        names = list(self)
        some = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        parameters = ", ".join(self._store.layout.parameter_names)
        return f"<{len(names)} packed tables: {some}; their Parameters: {parameters}>"


for _method in ("__delitem__", "clear", "pop", "update"):
    setattr(Tables, _method, refuse_change(_method))

TABLE_CLASSES = (Tables, PackedTable, NoParameters, PackedStore)
"""The classes of tables that `torch.save` of a packed module writes."""
