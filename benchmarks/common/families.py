"""Comparisons on the CPU: of each family of peers the fastest counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from common.checks import largest_difference
from common.settings import Setting
from common.table import milliseconds, times
from recfuse import timing

BASELINE, OURS = "torch", "recfuse"
TOLERANCE = 1e-5
"""Of the largest difference between two outputs, relative to the largest value."""


def compare(
    candidates: Mapping[str, Callable[[Any], Tensor]],
    families: Mapping[str, Sequence[str]],
    batches: Sequence[Any],
    setting: Setting,
    least_bytes: float,
) -> dict[str, Any]:
    """Compares candidates; returns the record for the JSON file, with a key "comparison" that
    `comparisons_of` removes.

    Args:
        families: names of candidates by the name of their family.
        least_bytes: of a batch, for the share of the bandwidth.
    """
    with torch.no_grad():
        difference = largest_difference(candidates, batches[0], BASELINE)
        result = timing.compare(
            candidates, inputs=[(batch,) for batch in batches], rounds=setting.arguments.rounds,
            cache=setting.arguments.cache, progress=False,
        )  # fmt: skip
    fastest = {family: result.fastest(names) for family, names in families.items()}
    return {
        "least_bytes": least_bytes,
        "read_bandwidth_bytes_per_s": setting.copy_speed,
        "share_of_bandwidth": least_bytes / result[OURS].median / setting.copy_speed,
        "relative_difference": difference,
        "fastest": fastest,
        "ratio": {family: result.ratio(OURS, peer) for family, peer in fastest.items()},
        "measured": result.to_json(environment=False),
        "comparison": result,
    }


def comparisons_of(records: Sequence[dict[str, Any]]) -> list[timing.Comparison]:
    """Removes the comparisons from records, which then are plain values."""
    return [record.pop("comparison") for record in records]


def spent_cells(record: Mapping[str, Any], result: timing.Comparison) -> list[str]:
    """Milliseconds of the fastest of each family, and of recfuse."""
    return [milliseconds(result[name]) for name in [*record["fastest"].values(), OURS]]


def mean_cells(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Geometric means of the ratios to each family."""
    ratios = [record["ratio"] for record in records]
    return [times(geometric_mean(ratio[family] for ratio in ratios)) for family in ratios[0]]


def worst_difference(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a note on the outputs."""
    worst = max(record["relative_difference"] for record in records)
    return f"Largest difference between any two outputs: {worst:.1e} of the largest value."
