"""A plan of a collection, and batches for it."""

from __future__ import annotations

import torch

from recfuse import CollectionPlan
from recfuse.data.collection import jagged_batches, mean_lengths, trace_of
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.nn.collection_view import view_of
from recfuse.ops.schedules import expectations
from recfuse.plan.device import describe_device
from recfuse.plan.features import (
    CallForm,
    Occupancy,
    distinct,
    tables_of,
)
from recfuse.plan.report import Decision

POOL = "kind=pool threads=16 distance=4 station=register split=1"
COLUMNS = "kind=columns"


def collection_of():
    tables = [Table(50, 4)] * 2 + [Table(100, 8, mode="mean", padding_idx=0)] * 3
    return FusedEmbeddingBagCollection(
        [Table(**{**vars(one), "name": f"n{n}"}) for n, one in enumerate(tables)]
    )


def batches(seed=0, number=3, bags=10, lengths=(1, 0, 10, 20, 30), hot=50):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.cat(
        (torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).repeat_interleave(bags).cumsum(0))
    )
    lookups = int(offsets[-1])
    return [(torch.randint(1, hot, (lookups,), generator=generator), offsets) for _ in range(number)]


def plan_for(collection, **changes):
    own = tables_of(view_of(collection, ""))
    given = jagged_batches(batches(), len(own))
    tables, table_of = distinct(own)
    values = {
        "schedules": ["", POOL, COLUMNS],
        "schedule_of": [2, 2, 1, 1, 0],
        "expected": expectations(mean_lengths(given, len(own))).tolist(),
        "warps": 40,
        "tables": tables,
        "table_of": table_of,
        "form": CallForm("int64", "int64", False),
        "trace": trace_of(given, own),
        "device": describe_device(torch.device("cpu")),
        "default_us": 200.0,
        "best_us": 160.0,
        "seconds": 1.5,
        "created": "2026-01-02T03:04:05+00:00",
        "occupancies": [Occupancy(40, 190.0, 160.0), Occupancy(64, 210.0, None)],
        "decisions": [
            Decision("occupancy", "", 200.0, True, "schedules without a plan, 64 registers"),
            Decision("local 40", "4 float32 sum: kind=columns", None, True, "the fewest cycles"),
        ],
    }
    return CollectionPlan(**{**values, **changes})
