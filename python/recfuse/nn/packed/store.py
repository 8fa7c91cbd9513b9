"""``PackedStore``: what a packed module and its tables have in common."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.nn.packed.layout import Layout


def matrices_of(holder: torch.nn.Module, names: Sequence[str]) -> list[Tensor]:
    """The packed matrices that ``holder`` has under these names."""
    parameters = holder._parameters
    try:
        return [parameters[name] for name in names]  # type: ignore[misc]
    except KeyError:  # parametrized or pruned: computed by the class or by a hook
        return [getattr(holder, name) for name in names]


class PackedStore:
    """The layout of a packed module, and the dictionary of its packed Parameters. The module, the holder of
    its Parameters and its tables share one store, also in a copy of them.

    Tables reach their rows through it. It does not keep the module alive, so that a deleted model gives its
    memory back at once; a table that outlives its module keeps the Parameters.

    Attributes:
        layout: where the tables lie. Another layout is another object.
        parameters: the holder's own dictionary of Parameters.
        homes: of each table that is frozen alone, by number: the name of the matrix to which it returns when
            it is trained again, and its first row there.
        number: of the module, as compiled programs know it.
        loading: the list of errors of the ``load_state_dict`` that has loaded all tables last.
    """

    def __init__(self, layout: Layout, owner: torch.nn.Module, holder: torch.nn.Module) -> None:
        """Of a module, and of the module that holds its tables and Parameters."""
        self.layout = layout
        self.parameters: dict[str, Any] = holder._parameters
        self.homes: dict[int, tuple[str, int]] = {}
        self.loading: list[str] | None = None
        self.number = -1
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.bind(owner, holder)

    def bind(self, owner: torch.nn.Module, holder: torch.nn.Module) -> None:
        """Notes a module and its holder, of which a copied store knows nothing. Shallow copies of a module
        have one store.
        """
        self._owners.add(owner)
        self._holders.add(holder)

    @property
    def owners(self) -> list[Any]:
        """The packed module and its shallow copies; empty: it is gone."""
        return list(self._owners)

    @property
    def holder(self) -> Any:
        """A module that has the Parameters; None: it is gone."""
        return next(iter(self._holders), None)

    def matrix(self, number: int) -> Tensor:
        """The packed matrix with the rows of table ``number``."""
        name = self.layout.parameter_names[self.layout.tables[number].matrix]
        found = self.parameters.get(name)
        return getattr(self.holder, name) if found is None else found

    def home(self, number: int) -> Tensor | None:
        """The Parameter by which optimizers have table ``number``; None: it is computed."""
        spec = self.layout.tables[number]
        name, _ = self.homes.get(number, (self.layout.parameter_names[spec.matrix], spec.first_row))
        return self.parameters.get(name)

    def __getstate__(self) -> dict[str, Any]:
        """State without references to modules, which a copy binds itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_owners", "_holders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose modules bind themselves."""
        vars(self).update(state, _owners=weakref.WeakSet(), _holders=weakref.WeakSet(), loading=None)
