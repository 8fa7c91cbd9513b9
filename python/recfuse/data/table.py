"""Batches of lookups of a table, and their statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recfuse.data.forms import BagLookups, each_batch, moved, of_embedding_bag

_TOP = 0.1  # share of a batch's rows for its coverage


def batches_of(
    batches: Iterable[Any],
    include_last_offset: bool = False,
    device: torch.device | None = None,
    function: str = "recfuse",
) -> list[BagLookups]:
    """Return batches as calls of an `nn.EmbeddingBag`, on `device` (None: on their own devices); see `forms`.

    Raises:
        TypeError, ValueError: another form, or no batches.
    """
    return [
        moved(of_embedding_bag(batch, include_last_offset, where), device, where)
        for where, batch in each_batch(batches, function)
    ]


@dataclass(frozen=True)
class Hotness:
    """Statistics of batches; means are over batches."""

    batches: int
    lookups: float
    """Mean lookups of a batch."""
    bags: float
    """Mean bags of a batch."""
    unique_share: float
    """Different rows of a batch divided by its lookups; the mean."""
    coverage: float
    """Share of a batch's lookups that read the hottest tenth of its rows; the mean."""
    rows_in_use: int
    """Different rows of all batches together."""
    sha256: str
    """The start of the hash of all indices."""

    @property
    def pooling(self) -> float:
        """The mean pooling factor."""
        return self.lookups / self.bags if self.bags else 0.0


def hotness(batches: list[BagLookups]) -> Hotness:
    """Return the statistics of batches."""
    digest = hashlib.sha256()
    shares, coverages, rows = [], [], [np.empty(0, np.int64)]
    for batch in batches:
        indices = batch.indices.cpu().numpy().astype(np.int64)
        digest.update(indices.tobytes())
        unique, counts = np.unique(indices, return_counts=True)
        rows.append(unique)
        if len(indices):
            top = np.sort(counts)[::-1][: max(1, int(len(counts) * _TOP))]
            shares.append(len(counts) / len(indices))
            coverages.append(float(top.sum()) / len(indices))
    return Hotness(
        batches=len(batches),
        lookups=float(np.mean([batch.indices.numel() for batch in batches])),
        bags=float(np.mean([batch.bags for batch in batches])),
        unique_share=float(np.mean(shares)) if shares else 0.0,
        coverage=float(np.mean(coverages)) if coverages else 0.0,
        rows_in_use=len(np.unique(np.concatenate(rows))),
        sha256=digest.hexdigest()[:16],
    )
