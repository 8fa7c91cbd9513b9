"""The pattern of TorchRec: an unsharded ``EmbeddingCollection``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from recfuse.nn.lookups.table import as_bag, as_embedding, why_not_packable
from recfuse.nn.packed.fusable import why_not_fusable
from recfuse.nn.packed.taking_part import take_number
from recfuse.passes.pattern import Pattern
from recfuse.passes.torchrec_collection import class_of


class TorchRecEmbeddings(Pattern):
    """A collection of TorchRec without pooling. It stays the same object: only its class changes."""

    @classmethod
    def find(cls, name: str, module: torch.nn.Module) -> TorchRecEmbeddings | None:
        """Return the pattern if a module has exactly this class: a subclass may have another forward."""
        found = type(module) is class_of("torchrec.modules.embedding_modules", "EmbeddingCollection")
        return cls(name, module, module.embeddings) if found else None

    @classmethod
    def find_fused(cls, name: str, module: torch.nn.Module) -> TorchRecEmbeddings | None:
        """Return the pattern if a module has the class that ``fuse`` sets."""
        found = type(module) is class_of("recfuse.nn.lookups.keyed", "FusedKeyedEmbeddingCollection")
        return cls(name, module, module.embeddings) if found else None

    def why_not_packable(self, others: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        """Return why the tables cannot be packed; ``others`` are tensors of their model, with names."""
        if reason := why_not_packable(self.tables):
            return reason
        return why_not_fusable(list(map(as_bag, self.tables)), others)

    def why_not(self) -> str | None:
        """Return a reason if the forward is replaced, or if a quantiser will look for TorchRec's class."""
        if "forward" in vars(self.owner):
            return "forward was replaced on the object"
        if getattr(self.owner, "qconfig", None) is not None:
            return "qconfig is set, and quantisers support only TorchRec's class"
        return None

    def fuse(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Pack the collection; on an error it is unchanged."""
        from recfuse.nn.lookups.keyed import FusedKeyedEmbeddingCollection

        module, number = self.owner, len(self.tables)
        kind, tables = type(module), module._modules["embeddings"]
        attributes = set(vars(module))
        module.__class__ = FusedKeyedEmbeddingCollection
        try:
            module.pack_features(optimizers)
        except BaseException:
            module._modules["embeddings"] = tables
            module.__class__ = kind
            for name in set(vars(module)) - attributes:
                del vars(module)[name]
            raise
        return f"{number} tables, {len(module.layout.dims)} features in one call"

    def restore(self, bags: Sequence[torch.nn.EmbeddingBag]) -> str:
        """Restore the class and a ModuleDict of tables, which exists before the packed tables are removed."""
        module = self.owner
        names = [spec.name for spec in module.layout.tables]
        tables = torch.nn.ModuleDict(dict(zip(names, map(as_embedding, bags), strict=True)))
        tables.training = module.training
        take_number(module)
        del vars(module)["_store"]  # from here on, concurrent calls look each table up separately
        module._modules["embeddings"] = tables
        module.__class__ = type(module).__mro__[1]
        for attribute in ("_flat_feature_names", "_flat_embedding_names"):
            vars(module).pop(attribute, None)
        return "torchrec.EmbeddingCollection"
