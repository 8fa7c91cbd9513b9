"""Batches of lookups of one table, and what they are like."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recfuse.data.forms import BagLookups, each_batch, moved, of_embedding_bag

_TOP = 0.1  # share of a batch's rows that its coverage is of


def batches_of(
    batches: Iterable[Any],
    include_last_offset: bool = False,
    device: torch.device | None = None,
    function: str = "recfuse",
) -> list[BagLookups]:
    """Calls of an `nn.EmbeddingBag` as batches, on `device` (None: where they are); see `forms`.

    Raises:
        TypeError, ValueError: something else, or no batches.
    """
    return [
        moved(of_embedding_bag(batch, include_last_offset, where), device, where)
        for where, batch in each_batch(batches, function)
    ]


@dataclass(frozen=True)
class Hotness:
    """What a number of batches is like, in few numbers; means over batches."""

    batches: int
    lookups: float
    """Of a batch."""
    bags: float
    """Of a batch."""
    unique_share: float
    """Different rows of a batch over its lookups."""
    coverage: float
    """Share of a batch's lookups that go to the hottest tenth of its rows."""
    rows_in_use: int
    """Different rows of all batches together."""
    sha256: str
    """The start of the hash of all indices."""

    @property
    def pooling(self) -> float:
        """Lookups of a bag."""
        return self.lookups / self.bags if self.bags else 0.0


def hotness(batches: list[BagLookups]) -> Hotness:
    """What batches are like."""
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
