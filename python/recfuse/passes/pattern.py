"""``Pattern``: tables of a model that one call can pool. Each subclass has its own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from recfuse.nn.packed.fusable import why_not_fusable


class Pattern(ABC):
    """Tables that ``swap`` can pool in one call, or tables that it has packed and ``unswap`` restores."""

    def __init__(self, path: str, owner: Any, holder: Any) -> None:
        """``owner``, at ``path`` ("" is the model), has the tables: children of ``holder``, unless packed."""
        self.path, self.owner, self.holder = path, owner, holder

    @classmethod
    @abstractmethod
    def find(cls, name: str, module: torch.nn.Module) -> Pattern | None:
        """Return the pattern in a module that ``swap`` visits, or None."""

    @classmethod
    @abstractmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> Pattern | None:
        """Return the fused pattern in a module that ``unswap`` visits; its ``owner`` is a PackedModule."""

    @property
    def kind(self) -> str:
        """The class of ``owner``, for the report."""
        return type(self.owner).__name__

    @property
    def tables(self) -> list[Any]:
        """The tables, in order."""
        return list(self.holder._modules.values())

    def why_not_packable(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        """Return why the tables cannot be packed; ``tensors``: the tensors of their model, with names."""
        return why_not_fusable(self.tables, tensors)

    @abstractmethod
    def why_not(self) -> str | None:
        """Return why one call cannot replace this pattern, apart from its tables; None if it can."""

    @abstractmethod
    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Pack the tables; returns a description of the result, for the report."""

    @abstractmethod
    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Undo ``fuse``, with these tables; returns a description of the result, for the report."""
