"""``QuantizedTable``: a table of a quantised collection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.nn.quantized.rows import Rows, floats_of


class QuantizedTable:
    """A table of a :class:`QuantizedEmbeddingBagCollection`; a view of the collection.

    Attributes:
        name, num_embeddings, embedding_dim, mode, padding_idx: as of a table of floats.
        dtype: "int8" or "int4", or the name of a dtype of floats.

    Example:
        >>> collection = recfuse.nn.FusedEmbeddingBagCollection([(1000, 16)])
        >>> report = recfuse.quantize(collection, "int8")
        >>> collection.tables["t0"].weight.shape
        torch.Size([1000, 16])
    """

    def __init__(self, owner: Any, number: int) -> None:
        """Create the view of a table of ``owner``, a ``QuantizedEmbeddingBagCollection``."""
        spec = owner.layout.tables[number]
        self._owner, self._number = owner, number
        self.name, self.mode, self.padding_idx = spec.name, spec.mode, spec.padding_idx
        self.num_embeddings, self.embedding_dim = spec.num_embeddings, spec.embedding_dim
        self.dtype = owner.kinds[spec.matrix]

    @property
    def rows(self) -> Rows:
        """The rows, views of the collection's buffers."""
        return self._owner.rows_of(self._number)

    @property
    def codes(self) -> Tensor:
        """The codes, uint8 ``[rows, bytes]``; of a table of floats its rows."""
        return self.rows.data

    @property
    def parameters(self) -> Tensor:
        """The scale and the bias of each row, float16 ``[rows, 2]``; empty for a table of floats."""
        return self.rows.parameters

    @property
    def weight(self) -> Tensor:
        """The values, float32 ``[rows, dim]``: a new tensor, computed at each access."""
        return floats_of(self.rows, torch.float32)

    def __repr__(self) -> str:
        """Return name, shape and dtype."""
        return f"QuantizedTable({self.name!r}, {self.num_embeddings}, {self.embedding_dim}, {self.dtype})"
