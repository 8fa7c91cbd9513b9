"""A small model of torch's tables or of packed tables, to compare the effects of code on both."""

from __future__ import annotations

import torch
from torch import nn

from recfuse.nn import FusedEmbeddingBagList

SIZES = ((10, 4, None), (7, 8, 2), (12, 4, None), (5, 4, None))  # rows, dim, padding_idx
LOOKUPS, OFFSETS = torch.tensor([0, 3, 4, 1, 2, 4]), torch.tensor([0, 2, 2])


class Model(nn.Module):
    """A list of tables and a layer on top."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        bags = [nn.EmbeddingBag(*size, mode="sum", padding_idx=padding) for *size, padding in SIZES]
        self.top = nn.Linear(20, 1)
        self.emb_l = FusedEmbeddingBagList(bags) if packed else nn.ModuleList(bags)

    def forward(self, indices=LOOKUPS, offsets=OFFSETS):
        """Pools the tables."""
        if isinstance(self.emb_l, FusedEmbeddingBagList):
            pooled = self.emb_l.pool([offsets] * 4, [indices] * 4)
        else:
            pooled = [bag(indices, offsets) for bag in self.emb_l]
        return self.top(torch.cat(pooled, dim=1))


def backward(model):
    """A loss and its gradients."""
    model().tanh().square().mean().backward()


def init(module):
    """For a model's ``apply``."""
    if isinstance(module, nn.EmbeddingBag):
        torch.manual_seed(module.num_embeddings)
        nn.init.xavier_uniform_(module.weight)


def assert_equal(ours, theirs):
    """Compares trees of tensors and plain values."""
    found, wanted = (torch.utils._pytree.tree_flatten(value) for value in (ours, theirs))
    assert found[1] == wanted[1]
    for own, other in zip(found[0], wanted[0], strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(own, other, check_stride=False)
        else:
            assert own == other
