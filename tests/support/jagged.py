"""Configurations and batches of TorchRec."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

CONFIGS = [
    {"name": "t1", "embedding_dim": 8, "num_embeddings": 20, "feature_names": ["f1"]},
    {
        "name": "t2",
        "embedding_dim": 4,
        "num_embeddings": 9,
        "feature_names": ["f2", "f3"],
        "pooling": PoolingType.MEAN,
    },
    {"name": "t3", "embedding_dim": 16, "num_embeddings": 30, "feature_names": ["f3"]},
]


def configs(**changes):
    return [EmbeddingBagConfig(**{**config, **changes}) for config in CONFIGS]


def keyed(keys=("f1", "f2", "f3"), bags=5, weighted=False):
    lengths = torch.randint(0, 4, (len(keys) * bags,))
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, 9, (count,)),
        lengths=lengths,
        weights=torch.rand(count) if weighted else None,
    )
