"""Columns of all kinds, and a batch for them."""

from __future__ import annotations

import torch

from recfuse.nn.columns import Bucketize, Cast, Cross, Hash, Identity, Log1p, Numeric

COLUMNS = [
    Bucketize("age", [18, 25, 35], 8),
    Hash("city", 100, 4, feature="place"),
    Identity("tags", 50, 16, pooling="sum", invalid="drop", fill_value=2.5),
    Identity(
        "weighted", 50, 16, feature="tags", weighted=True, table="tags", pooling="sqrtn", invalid="drop"
    ),
    Identity("aside", 50, 16, feature="tags", weights="w", table="tags", invalid="drop"),
    Cross("pairs", ("tags", "place"), 30, 4),
    Numeric("price", 2, preprocess=[Log1p()]),
    Identity("many", 10, 4, pooling="max", preprocess=[Cast()]),
]
SUMS = [column for column in COLUMNS if getattr(column, "pooling", "") != "max"]
BATCH = 6


def parts(seed=0, batch=BATCH):
    """Tensors of a batch, by name; `offsets` are of place and tags."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2, batch), generator=generator)
    offsets = [torch.cat((torch.zeros(1, dtype=torch.int64), own.cumsum(0))) for own in lengths]
    places, tags = (int(own[-1]) for own in offsets)
    return {
        "age": torch.rand(batch, generator=generator) * 60,
        "place": torch.randint(-(2**60), 2**60, (places,), generator=generator),
        "tags": torch.randint(-3, 60, (tags,), generator=generator),
        "offsets": offsets,
        "lengths": list(lengths),
        "own": torch.rand(tags, generator=generator),
        "w": torch.rand(tags, generator=generator),
        "price": torch.rand(batch, 2, generator=generator),
        "many": torch.rand(batch, 3, generator=generator) * 9.99,
    }


def mapping(given):
    """The batch with tuples for jagged inputs."""
    return {
        "age": given["age"],
        "place": (given["place"], given["offsets"][0]),
        "tags": (given["tags"], given["offsets"][1], given["own"]),
        "w": given["w"],
        "price": given["price"],
        "many": given["many"],
    }
