"""``Pattern``: tables of a model that one call can pool. A file a pattern has the class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class Pattern(ABC):
    """Tables that ``swap`` can pool in one call, or has, which ``unswap`` undoes."""

    def __init__(self, path: str, owner: Any, holder: Any) -> None:
        """``owner``, at ``path`` ("" is the model), has the tables: children of ``holder``, if not packed."""
        self.path, self.owner, self.holder = path, owner, holder

    @classmethod
    @abstractmethod
    def find(cls, name: str, module: torch.nn.Module) -> Pattern | None:
        """The pattern in a module, which ``swap`` meets."""

    @classmethod
    @abstractmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> Pattern | None:
        """What ``fuse`` has made of it, which ``unswap`` meets; ``owner`` is a PackedModule then."""

    @property
    def kind(self) -> str:
        """The class of ``owner``, for the report."""
        return type(self.owner).__name__

    @property
    def tables(self) -> list[torch.nn.EmbeddingBag]:
        """The tables, in order."""
        return list(self.holder._modules.values())

    @abstractmethod
    def why_not(self) -> str | None:
        """Why one call cannot take this pattern's place, its tables aside; None if it can."""

    @abstractmethod
    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Packs the tables; what it is now, for the report."""

    @abstractmethod
    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Undoes ``fuse``, with these tables; what it is now, for the report."""
