"""``PackedEmbedding``: a table of a module that looks up rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from recfuse.errors import a_type
from recfuse.nn.packed.fusable import has_hooks
from recfuse.nn.packed.layout import feature_tensor, table_rows
from recfuse.nn.packed.pooling import has_kernel
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.packed.taking_part import note_table, rows_of
from recfuse.ops import fused_embedding
from recfuse.ops.library import check_tensor


class PackedEmbedding(PackedTable):
    """A table whose call looks up rows, as ``torch.nn.Embedding``; see :class:`PackedTable`."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Look up rows of this table alone; for all tables call the module."""
        spec, matrix = self.spec, self.matrix
        check_tensor("nn.PackedEmbedding", "input", input)
        if not has_kernel([matrix]):
            return functional.embedding(input, rows_of(spec, matrix), spec.padding_idx)
        ends = torch.arange(2, device=input.device) * input.numel()
        features, sparse = feature_tensor([spec._replace(matrix=0)]), self._store.layout.sparse
        flat = fused_embedding([matrix], features, input.reshape(-1), ends, spec.embedding_dim, sparse=sparse)
        note_table(flat, matrix, spec)
        return flat.view(*input.shape, spec.embedding_dim)

    def extra_repr(self) -> str:
        """Return the sizes of the table, as ``torch.nn.Embedding``."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Copy the table with its module, or copy it alone to a ``torch.nn.Embedding``."""
        if memo:
            return super().__deepcopy__(memo)
        weight = table_rows(self.spec, self.matrix).detach().clone()
        copied = torch.nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            sparse=self.sparse,
            _weight=weight,
        )
        copied.weight.requires_grad_(self.matrix.requires_grad)
        return copied.train(self.training)


def why_not_packable(tables: Iterable[Any]) -> str | None:
    """Return why embeddings cannot be packed and looked up in one call, or None if they can."""
    for number, table in enumerate(tables):
        if reason := _why_not_packable(table):
            return f"table {number} {reason}"
    return None


def _why_not_packable(table: Any) -> str | None:
    if type(table) is not torch.nn.Embedding:
        return f"is {a_type(table)}; expected a torch.nn.Embedding"
    if "forward" in vars(table):
        return "has a forward that was replaced on the object"
    if has_hooks(table):
        return "has hooks, which one call for all tables would not run"
    if len(table._parameters) > 1 or table._buffers or table._modules:
        return "has parameters, buffers or modules besides its weight"
    if not isinstance(table._parameters.get("weight"), Parameter):
        return "has a weight that is computed (parametrized, pruned) or absent"
    if table.max_norm is not None:
        return "has max_norm, which changes rows during the call"
    if table.scale_grad_by_freq:
        return "has scale_grad_by_freq"
    return None


def as_bag(table: torch.nn.Embedding) -> torch.nn.EmbeddingBag:
    """Return a bag with the Parameter of an embedding."""
    bag = torch.nn.EmbeddingBag(
        *table.weight.shape,
        mode="sum",
        sparse=table.sparse,
        include_last_offset=True,
        padding_idx=table.padding_idx,
        _weight=table.weight.detach(),
    )
    bag.weight = table.weight
    return bag.train(table.training)


def as_embedding(bag: torch.nn.EmbeddingBag) -> torch.nn.Embedding:
    """Return an embedding with the Parameter of a bag."""
    table = torch.nn.Embedding(
        *bag.weight.shape, padding_idx=bag.padding_idx, sparse=bag.sparse, _weight=bag.weight.detach()
    )
    table.weight = bag.weight
    return table.train(bag.training)
