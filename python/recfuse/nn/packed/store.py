"""``PackedStore``: data that a packed module shares with its tables."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.layout import Layout


def matrices_of(holder: torch.nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Return the packed matrices of ``holder`` with these names."""
    parameters = holder._parameters
    try:
        return [parameters[name] for name in names]  # type: ignore[misc]
    except KeyError:  # parametrized or pruned: computed by the class or by a hook
        return [getattr(holder, name) for name in names]


class PackedStore:
    """The layout of a packed module, and the dictionary of its packed Parameters.

    The module, the holder of its Parameters and its tables share a store, also in a copy of them. Tables
    reach their rows through it. It does not keep the module alive, so that a deleted model frees its memory
    immediately; a table that outlives its module keeps the Parameters.

    Attributes:
        layout: the positions of the tables. A change creates a new object.
        parameters: the holder's own dictionary of Parameters.
        origins: by the number of a table that is frozen alone: the name of the matrix to which it returns
            when it is trained again, and its first row there.
        number: the number of the module in compiled programs.
        loading: the list of errors of the last ``load_state_dict`` that has loaded all tables.
        sharding: the ``recfuse.distributed.sharding.Sharding`` of a module whose tables are on several ranks;
            the layout then has the parts of this rank.
    """

    def __init__(self, layout: Layout, owner: torch.nn.Module, holder: torch.nn.Module) -> None:
        """Create the store of a module and of the holder of its tables and Parameters."""
        self.layout = layout
        self.parameters: dict[str, Any] = holder._parameters
        self.origins: dict[int, tuple[str, int]] = {}
        self.loading: list[str] | None = None
        self.number = -1
        self.sharding: Any = None
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.bind(owner, holder)

    def bind(self, owner: torch.nn.Module, holder: torch.nn.Module) -> None:
        """Bind a module and its holder, which a copied store does not refer to.

        Shallow copies of a module share a store.
        """
        self._owners.add(owner)
        self._holders.add(holder)

    @property
    def owners(self) -> list[Any]:
        """The packed module and its shallow copies; empty if all were deleted."""
        return list(self._owners)

    @property
    def holder(self) -> Any:
        """A module that has the Parameters, or None if all were deleted."""
        return next(iter(self._holders), None)

    def matrix(self, number: int) -> Tensor:
        """Return the packed matrix with the rows of table ``number``."""
        name = self.layout.parameter_names[self.layout.tables[number].matrix]
        parameter = self.parameters.get(name)
        return getattr(self.holder, name) if parameter is None else parameter

    def origin(self, number: int) -> Tensor | None:
        """Return the Parameter with which optimizers step table ``number``, or None if it is computed."""
        spec = self.layout.tables[number]
        name, _ = self.origins.get(number, (self.layout.parameter_names[spec.matrix], spec.first_row))
        return self.parameters.get(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to modules; a copy binds its own modules."""
        return {name: value for name, value in vars(self).items() if name not in ("_owners", "_holders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy, whose modules bind themselves."""
        vars(self).update(state, _owners=weakref.WeakSet(), _holders=weakref.WeakSet(), loading=None)
