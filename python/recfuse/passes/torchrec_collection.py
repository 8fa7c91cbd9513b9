"""The patterns of TorchRec: an unsharded ``EmbeddingBagCollection`` or ``EmbeddingCollection``."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from importlib import import_module

import torch

from recfuse.nn.lookups.table import as_bag, as_embedding, why_not_packable
from recfuse.nn.packed.fusable import why_not_fusable
from recfuse.nn.packed.taking_part import take_number
from recfuse.passes.pattern import Pattern


class _Collection(Pattern):
    """A collection of TorchRec. It stays the same object: only its class changes.

    Attributes:
        original: the name of TorchRec's class.
        packed: module and name of the class that ``fuse`` sets.
        child: the name of the ModuleDict of the tables.
        caches: attributes of the packed class that TorchRec's does not have.
    """

    original: str
    packed: tuple[str, str]
    child: str
    caches: tuple[str, ...]

    @classmethod
    def find(cls, name: str, module: torch.nn.Module) -> _Collection | None:
        """Return the pattern if a module has exactly this class: a subclass may have another forward."""
        is_original = type(module) is class_of("torchrec.modules.embedding_modules", cls.original)
        return cls(name, module, getattr(module, cls.child)) if is_original else None

    @classmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> _Collection | None:
        """Return the pattern if a module has the class that ``fuse`` sets."""
        is_packed = type(module) is class_of(*cls.packed)
        return cls(name, module, getattr(module, cls.child)) if is_packed else None

    @staticmethod
    @abstractmethod
    def table_of(bag: torch.nn.EmbeddingBag) -> torch.nn.Module:
        """Return the table of TorchRec's ModuleDict that ``bag`` stands for."""

    def why_not(self) -> str | None:
        """Return a reason if the forward is replaced, or if a quantiser will look for TorchRec's class."""
        if "forward" in vars(self.owner):
            return "forward was replaced on the object"
        if getattr(self.owner, "qconfig", None) is not None:
            return "qconfig is set, and quantisers support only TorchRec's class"
        return None

    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Pack the collection; on an error it is unchanged.

        Concurrent calls always see complete tables: the old tables stay until the packed tables exist.
        """
        file, name = self.packed
        module, number = self.owner, len(self.tables)
        kind, tables = type(module), module._modules[self.child]
        attributes = set(vars(module))
        module.__class__ = getattr(import_module(file), name)
        try:
            module.pack_features(optimizers)
        except BaseException:
            module._modules[self.child] = tables
            module.__class__ = kind
            for added in set(vars(module)) - attributes:
                del vars(module)[added]
            raise
        return f"{number} tables, {len(module.layout.dims)} features in one call"

    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Restore the class and a ModuleDict of tables, which exists before the packed tables are removed."""
        module = self.owner
        names = [spec.name for spec in module.layout.tables]
        tables = torch.nn.ModuleDict(dict(zip(names, map(self.table_of, bags), strict=True)))
        tables.training = module.training
        take_number(module)
        del vars(module)["_store"]  # from here on, concurrent calls use each table separately
        module._modules[self.child] = tables
        module.__class__ = type(module).__mro__[1]
        for attribute in self.caches:
            vars(module).pop(attribute, None)
        return f"torchrec.{self.original}"


class TorchRecCollection(_Collection):
    """A collection of TorchRec that pools."""

    original = "EmbeddingBagCollection"
    packed = "recfuse.nn.keyed", "FusedKeyedEmbeddingBagCollection"
    child = "embedding_bags"
    caches = "_tuning", "_mapper", "_flat_feature_names"

    @staticmethod
    def table_of(bag: torch.nn.EmbeddingBag) -> torch.nn.Module:
        """Return ``bag``."""
        return bag

    def why_not(self) -> str | None:
        """Return a reason also if a table does not support its weights."""
        if reason := super().why_not():
            return reason
        if self.owner.is_weighted() and any(table.mode != "sum" for table in self.tables):
            return 'a table of a weighted collection has another mode; expected "sum"'
        return None


class TorchRecEmbeddings(_Collection):
    """A collection of TorchRec without pooling."""

    original = "EmbeddingCollection"
    packed = "recfuse.nn.lookups.keyed", "FusedKeyedEmbeddingCollection"
    child = "embeddings"
    caches = "_flat_feature_names", "_flat_embedding_names"
    table_of = staticmethod(as_embedding)

    def why_not_packable(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        """Return why the tables cannot be packed; ``tensors``: the tensors of their model, with names."""
        if reason := why_not_packable(self.tables):
            return reason
        return why_not_fusable(list(map(as_bag, self.tables)), tensors)


def class_of(module: str, name: str) -> type | None:
    """Return a class, or None if its module is not imported, so that no model can contain an instance."""
    return getattr(sys.modules.get(module), name, None)
