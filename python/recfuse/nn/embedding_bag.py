"""``EmbeddingBag``: ``torch.nn.EmbeddingBag`` on recfuse's kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from recfuse.ops import embedding_bag


class EmbeddingBag(torch.nn.EmbeddingBag):
    """Drop-in for :class:`torch.nn.EmbeddingBag`: the same constructor, parameters, state_dict and results.

    Holds no state of its own, so a ``torch.nn.EmbeddingBag`` becomes one by a change of class.
    """

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools bags of rows.

        Args:
            input: int32 or int64; ``[lookups]`` with ``offsets``, or ``[bags, n]`` without.
            offsets: ``[bags]``, or ``[bags + 1]`` with ``include_last_offset``.
            per_sample_weights: of the shape of ``input`` and the weight's dtype; mode "sum" only.

        Returns:
            ``[bags, embedding_dim]`` of the weight's dtype.

        Raises:
            As :func:`recfuse.embedding_bag`.
        """
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
