"""Batches of lookups as `nn.EmbeddingBag` takes them, and what they are like."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recfuse.errors import ArgumentTypeError, ArgumentValueError

_TOP = 0.1  # share of a batch's rows that its coverage is of


class Batch(NamedTuple):
    """The lookups of one call."""

    indices: Tensor  # [lookups] int32 or int64
    offsets: Tensor  # [bags], or [bags + 1] with include_last_offset
    include_last_offset: bool
    weights: Tensor | None  # [lookups]

    @property
    def bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - int(self.include_last_offset)


def batches_of(
    batches: Iterable[Any], include_last_offset: bool = False, device: torch.device | None = None
) -> list[Batch]:
    """Calls of an `nn.EmbeddingBag` as batches, on `device` (None: where they are).

    Each is a tensor `[bags, n]`, or a tuple of what `forward` takes: (input, offsets) or
    (input, offsets, per_sample_weights).

    Raises:
        TypeError, ValueError: something else, or no batches.
    """
    found = [_batch_of(batch, number, include_last_offset, device) for number, batch in enumerate(batches)]
    if not found:
        raise ArgumentValueError("recfuse: batches is empty, must have at least one")
    return found


def _batch_of(batch: Any, number: int, include_last_offset: bool, device: torch.device | None) -> Batch:
    given = (batch,) if isinstance(batch, Tensor) else batch
    if not (
        isinstance(given, (tuple, list))
        and 1 <= len(given) <= 3
        and isinstance(given[0], Tensor)
        and all(one is None or isinstance(one, Tensor) for one in given)
    ):
        raise ArgumentTypeError(
            f"recfuse: batches[{number}] is a {type(batch).__name__}, must be a tensor [bags, n] or a tuple "
            "(input, offsets) or (input, offsets, per_sample_weights) of tensors"
        )
    indices, offsets, weights = (*given, None, None)[:3]
    if indices.dim() == 2 and offsets is None:
        bags, size = indices.shape
        offsets = torch.arange(bags, dtype=torch.int64, device=indices.device) * size
        include_last_offset = False
    elif indices.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise ArgumentValueError(
            f"recfuse: batches[{number}] has an input of {indices.dim()} dimensions "
            f"{'without' if offsets is None else 'with'} offsets, must have 2 without or 1 with 1-D offsets"
        )
    kept = [indices.reshape(-1), offsets, None if weights is None else weights.reshape(-1)]
    indices, offsets, weights = (
        None if one is None else one.detach().to(device).contiguous() for one in kept
    )
    return Batch(indices, offsets, include_last_offset, weights)


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


def hotness(batches: list[Batch]) -> Hotness:
    """What batches are like."""
    digest = hashlib.sha256()
    shares, coverages, rows = [], [], [np.empty(0, np.int64)]
    for batch in batches:
        ids = batch.indices.cpu().numpy().astype(np.int64)
        digest.update(ids.tobytes())
        unique, counts = np.unique(ids, return_counts=True)
        rows.append(unique)
        if len(ids):
            top = np.sort(counts)[::-1][: max(1, int(len(counts) * _TOP))]
            shares.append(len(counts) / len(ids))
            coverages.append(float(top.sum()) / len(ids))
    return Hotness(
        batches=len(batches),
        lookups=float(np.mean([batch.indices.numel() for batch in batches])),
        bags=float(np.mean([batch.bags for batch in batches])),
        unique_share=float(np.mean(shares)) if shares else 0.0,
        coverage=float(np.mean(coverages)) if coverages else 0.0,
        rows_in_use=len(np.unique(np.concatenate(rows))),
        sha256=digest.hexdigest()[:16],
    )
