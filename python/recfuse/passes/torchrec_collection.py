"""The pattern of TorchRec: an unsharded ``EmbeddingBagCollection``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from recfuse.nn.packed.taking_part import take_number
from recfuse.passes.pattern import Pattern


class TorchRecCollection(Pattern):
    """A collection of TorchRec. It stays the same object: only its class changes."""

    @classmethod
    def find(cls, name: str, module: torch.nn.Module) -> TorchRecCollection | None:
        """Return the pattern if a module has exactly this class: a subclass may have another forward."""
        found = type(module) is class_of("torchrec.modules.embedding_modules", "EmbeddingBagCollection")
        return cls(name, module, module.embedding_bags) if found else None

    @classmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> TorchRecCollection | None:
        """Return the pattern if a module has the class that ``fuse`` sets."""
        found = type(module) is class_of("recfuse.nn.keyed", "FusedKeyedEmbeddingBagCollection")
        return cls(name, module, module.embedding_bags) if found else None

    def why_not(self) -> str | None:
        """Return a reason if the forward is replaced, or if a table does not support its weights."""
        if "forward" in vars(self.owner):
            return "forward was replaced on the object"
        if getattr(self.owner, "qconfig", None) is not None:
            return "qconfig is set, and quantisers support only TorchRec's class"
        if self.owner.is_weighted() and any(table.mode != "sum" for table in self.tables):
            return 'a table of a weighted collection has another mode; expected "sum"'
        return None

    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Pack the collection; on an error it is unchanged.

        Concurrent calls always see complete tables: the old tables stay until the packed tables exist.
        """
        from recfuse.nn.keyed import FusedKeyedEmbeddingBagCollection

        module, number = self.owner, len(self.tables)
        kind, bags = type(module), module._modules["embedding_bags"]
        attributes = set(vars(module))
        module.__class__ = FusedKeyedEmbeddingBagCollection
        try:
            module.pack_features(optimizers)
        except BaseException:
            module._modules["embedding_bags"] = bags
            module.__class__ = kind
            for name in set(vars(module)) - attributes:
                del vars(module)[name]
            raise
        return f"{number} tables, {len(module.layout.dims)} features in one call"

    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Restore the class and a ModuleDict of tables, which exists before the packed tables are removed."""
        module = self.owner
        names = [spec.name for spec in module.layout.tables]
        tables = torch.nn.ModuleDict(dict(zip(names, bags, strict=True)))
        tables.training = module.training
        take_number(module)
        del vars(module)["_store"]  # from here on, concurrent calls pool each table separately
        module._modules["embedding_bags"] = tables
        module.__class__ = type(module).__mro__[1]
        for attribute in ("_tuning", "_mapper", "_flat_feature_names"):
            vars(module).pop(attribute, None)
        return "torchrec.EmbeddingBagCollection"


def class_of(module: str, name: str) -> type | None:
    """Return a class, or None if its module is not imported, so that no model can contain an instance."""
    return getattr(sys.modules.get(module), name, None)
