"""A plan of one table, batches for it, and changes to its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recfuse import Plan
from recfuse.data.table import batches_of, hotness
from recfuse.plan.device import describe_device
from recfuse.plan.report import Decision
from recfuse.plan.table import Table


def batches(rows=100, number=3, seed=0, hot=0):
    """Lookups of ten bags of ten; with `hot`, only of that many rows."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(0, 100, 10)
    return [(torch.randint(0, hot or rows, (100,), generator=generator), offsets) for _ in range(number)]


def plan_for(module, **changes):
    values = {
        "schedule": "station=register distance=4 warps=32",
        "table": Table(
            module.num_embeddings,
            module.embedding_dim,
            "float32",
            module.mode,
            False,
            False,
            "int64",
            "int64",
        ),
        "trace": hotness(batches_of(batches())),
        "device": describe_device(module.weight.device),
        "default_us": 20.0,
        "best_us": 10.0,
        "floor_us": 8.0,
        "seconds": 1.5,
        "created": "2026-01-02T03:04:05+00:00",
        "decisions": [
            Decision(
                "default", "station=register distance=8 warps=32", 20.0, True, "schedule without a plan"
            ),
            Decision("prefetch", "station=register distance=4 warps=32", 10.0, True, "the fastest"),
            Decision("prefetch", "station=local distance=4 warps=64", None, False, "spills 8 bytes"),
        ],
    }
    return Plan(**{**values, **changes})


def at(*keys: str | int, value: Any = None, drop: bool = False) -> Callable[[Path], None]:
    """Changes a file of JSON: replaces or drops the value at the keys."""

    def change(path: Path) -> None:
        record = inner = json.loads(path.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if drop:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        path.write_text(json.dumps(record))

    return change
