"""Batches of many features, one table each, as the collections of this project take them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.peers import Part

MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155,
    4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_SKEW = 5  # rank = u ** 5 * rows
_SCATTER = 2654435761  # a prime: rank * _SCATTER modulo the rows permutes the rows


@dataclass
class Batch:
    """A batch, feature by feature, on the device."""

    indices: Tensor  # [lookups]
    offsets: Tensor  # [features * size + 1], of the same type
    lengths: NDArray[np.int64]  # [features]: lookups of each
    size: int
    host_offsets: NDArray[np.integer] | None = None  # `offsets` on the host, if they were created there
    grad: Tensor | None = None  # [size, columns] float32, of the output

    @cached_property
    def parts(self) -> list[Part]:
        """The indices and offsets [size] of each feature, relative to its first lookup."""
        starts = self.offsets[:-1].view(-1, self.size)
        pieces = self.indices.split(self.lengths.tolist())
        return list(zip(pieces, (starts - starts[:, :1]).unbind(), strict=True))


def from_host(
    indices: NDArray[np.integer], offsets: NDArray[np.integer], size: int, device: torch.device
) -> Batch:
    """Copies a batch of host arrays to the device."""
    lengths = np.diff(offsets[::size].astype(np.int64))
    moved = (torch.from_numpy(array).to(device) for array in (indices, offsets))
    return Batch(*moved, lengths, size, host_offsets=offsets)


def side_by_side(make: Callable[..., Any], *given: Iterable[Any]) -> list[Any]:
    """Calls `make` for each element, with a thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(make, *given))


def model_batches(
    model: Any, sizes: Sequence[int], seeds: Iterable[int], device: torch.device
) -> list[Batch]:
    """Batches of a `recfuse.workloads.Model`."""
    raw = side_by_side(model.batch, sizes, seeds)
    return [from_host(*arrays, size, device) for arrays, size in zip(raw, sizes, strict=True)]


def scattered(ranks: Tensor, rows: int) -> Tensor:
    """Maps ranks (floating point) to rows, so that hot rows are scattered over the table."""
    return ranks.long().clamp_(0, rows - 1) * _SCATTER % rows
