"""A column of weighted bags with weights of any magnitude."""

from __future__ import annotations

import torch

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Identity

SCALES = (1e-36, 1e-30, 1e-25, 1e-22, 1.0, 1e19, 1e30)
"""Of weights: below them rows times weights are subnormal in float32."""
LENGTHS = (3, 1, 0, 40, 5000)
POOLINGS = ("sqrtn", "mean")


def module_and_batch(pooling, scale):
    torch.manual_seed(3)
    column = Identity("bag", 60, 8, feature="bag", weighted=True, pooling=pooling)
    count = sum(LENGTHS)
    weights = (torch.rand(count) + 0.5) * scale
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0)
    batch = {"bag": (torch.randint(0, 60, (count,)), offsets, weights)}
    return EmbeddingColumns([column]), batch
