"""Batches of lookups of a collection, and their statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse.data.forms import Lookups, each_batch, moved, of_tuple
from recfuse.errors import ArgumentValueError

_HASHED = 1 << 16  # indices of a batch that the hash covers
_COUNTED = 8  # batches whose different rows are counted


@dataclass(frozen=True)
class CollectionTrace:
    """Statistics of batches of a collection."""

    batches: int
    bags: float
    """Bags of a feature in a batch; the median over batches."""
    lookups: float
    """Lookups of a batch; the mean over batches."""
    unique_share: float
    """Bytes of the different rows of a batch divided by those of its lookups; the mean of some batches."""
    sha256: str
    """The start of the hash of all offsets and some of the indices."""


class Table(Protocol):
    """The table of a feature."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""


class Jagged(NamedTuple):
    """The lookups of a call."""

    indices: Tensor  # [lookups] int32 or int64
    offsets: Tensor  # [features * bags + 1] int32 or int64
    weights: Tensor | None  # [lookups]
    host_offsets: NDArray[np.integer]  # offsets in host memory
    bags: int  # of each feature

    def lookups(self, features: int) -> NDArray[np.int64]:
        """Return the number of lookups of each feature."""
        if not self.bags:
            return np.zeros(features, np.int64)
        bounds = self.host_offsets[:: self.bags].astype(np.int64)
        return bounds[1:] - bounds[:-1]


def jagged_batches(
    batches: Iterable[Any],
    features: int,
    device: torch.device | None = None,
    lookups_of: Callable[[Any, str], Lookups] | None = None,
    function: str = "recfuse",
) -> list[Jagged]:
    """Return batches as the calls of a collection, on `device` (None: on their own devices).

    `lookups_of` is the adapter of the collection's class; None: batches are tuples (indices, offsets) or
    (indices, offsets, per_sample_weights), feature by feature.

    Raises:
        TypeError, ValueError: another form, no batches, or offsets that descend.
    """
    flat_batches = []
    for where, batch in each_batch(batches, function):
        lookups = of_tuple(batch, features, where) if lookups_of is None else lookups_of(batch, where)
        flat_batches.append(_jagged(lookups, features, device, where))
    return flat_batches


def _jagged(batch: Lookups, features: int, device: torch.device | None, prefix: str) -> Jagged:
    tensors = moved(batch, device, prefix)
    on_host = batch.offsets.detach().cpu().contiguous().numpy()
    lookups = batch.indices.numel()
    if on_host[0] != 0 or on_host[-1] != lookups or (np.diff(on_host) < 0).any():
        raise ArgumentValueError(
            f"{prefix} has offsets from {on_host[0]} to {on_host[-1]}; expected offsets that rise from 0 to "
            f"the {lookups} lookups"
        )
    return Jagged(*tensors, on_host, (on_host.size - 1) // features)


def mean_lengths(batches: Sequence[Jagged], features: int) -> NDArray[np.float64]:
    """Return the mean pooling factors `[features]` over all bags of all batches."""
    lookups = sum((batch.lookups(features) for batch in batches), np.zeros(features, np.int64))
    return lookups / max(sum(batch.bags for batch in batches), 1)


def trace_of(batches: Sequence[Jagged], tables: Sequence[Table]) -> CollectionTrace:
    """Return the statistics of batches."""
    chosen = batches[:: -(-len(batches) // _COUNTED)]
    rows = torch.tensor([table.rows for table in tables])
    row_bytes = np.array([table.row_bytes for table in tables], np.float64)
    shares = []
    for batch in chosen:
        lookups = batch.lookups(len(tables))
        if lookups.any():
            shares.append(float(_unique(batch, lookups, rows) @ row_bytes / (lookups @ row_bytes)))
    return CollectionTrace(
        batches=len(batches),
        bags=float(np.median([batch.bags for batch in batches])),
        lookups=float(np.mean([batch.indices.numel() for batch in batches])),
        unique_share=float(np.mean(shares)) if shares else 0.0,
        sha256=_hash(batches),
    )


def _unique(batch: Jagged, lookups: NDArray[np.int64], rows: Tensor) -> NDArray[np.int64]:
    """Return the number of different rows that a batch reads for each feature."""
    device = batch.indices.device
    ends = torch.cumsum(rows, 0).to(device)
    starts = ends - rows.to(device)
    repeats = torch.from_numpy(lookups).to(device)
    rows_read = torch.unique(batch.indices + torch.repeat_interleave(starts, repeats))
    counts = torch.bincount(torch.searchsorted(ends, rows_read, right=True), minlength=len(rows))
    return counts[: len(rows)].cpu().numpy()  # an invalid index may lie after all tables


def _hash(batches: Sequence[Jagged]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        step = -(-max(batch.indices.numel(), 1) // _HASHED)
        for values in (batch.host_offsets, batch.indices[::step].cpu().numpy()):
            digest.update(np.ascontiguousarray(values, np.int64).tobytes())
    return digest.hexdigest()[:16]
