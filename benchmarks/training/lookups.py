"""Tables and batches of the training benchmark on a GPU, by name: NAME-SIZE, with the batch size.

A-512, D-512      models of RecFlex, int32 indices
mlperf-2048       MLPerf's 26 tables of Criteo, several lookups a sample, int64 indices dynamicemb-104857 ten
tables, one lookup a sample, int64 indices
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.batches import MLPERF_ROWS, MLPERF_SKEW, Batch, model_batches, scattered
from recfuse.data import workloads

MLPERF_LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Lookups of a sample in each table."""
DYNAMICEMB_TABLES = 10
DYNAMICEMB_EXPONENT = 1.079
"""Published: a power law of 1.05 over 25 million rows a table, and 350,280 different rows in a batch. With
8 million rows this exponent gives as many."""
DIM = 128  # of both


class Subject:
    """Tables, one a feature, and batches for them."""

    def __init__(self, name: str, rows: Sequence[int], dims: Sequence[int], size: int) -> None:
        """`size`: samples of a batch."""
        self.name, self.rows, self.dims, self.size = name, list(rows), list(dims), size

    def make(self, seeds: Sequence[int], device: torch.device) -> list[Batch]:
        """Creates a batch for each seed, without a gradient."""
        raise NotImplementedError

    def batches(self, count: int, seed: int, device: torch.device) -> list[Batch]:
        """Creates different batches with gradients; a seed always gives the same."""
        new = self.make(range(seed, seed + count), device)
        generator = torch.Generator(device).manual_seed(seed)
        for batch in new:
            batch.grad = torch.randn(self.size, sum(self.dims), device=device, generator=generator)
        return new


class ModelSubject(Subject):
    """One of RecFlex's models."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        """`name`: as `recfuse.workloads.model` takes it."""
        self._model = workloads.model(name, seed=seed)
        super().__init__(f"{name}-{size}", self._model.rows, self._model.dims, size)

    def make(self, seeds: Sequence[int], device: torch.device) -> list[Batch]:
        """Creates batches of the published lengths."""
        return model_batches(self._model, [self.size] * len(seeds), seeds, device)


class RankedSubject(Subject):
    """Tables whose bags have a fixed number of lookups; hot rows are scattered over a table."""

    def __init__(self, name: str, rows: Sequence[int], pooling: Sequence[int], size: int) -> None:
        """`pooling`: lookups a sample, of each table."""
        super().__init__(f"{name}-{size}", rows, [DIM] * len(rows), size)
        self._pooling = list(pooling)

    def ranks(self, uniform: Tensor, rows: int) -> Tensor:
        """Returns the ranks of lookups by hotness, from 0, for uniform numbers in [0, 1)."""
        raise NotImplementedError

    def make(self, seeds: Sequence[int], device: torch.device) -> list[Batch]:
        """Creates batches on the device."""
        return [self._batch(seed, device) for seed in seeds]

    def _batch(self, seed: int, device: torch.device) -> Batch:
        generator = torch.Generator(device).manual_seed(seed)
        counts = [self.size * each for each in self._pooling]
        parts = []
        for rows, count in zip(self.rows, counts, strict=True):
            uniform = torch.rand(count, device=device, generator=generator, dtype=torch.float64)
            parts.append(scattered(self.ranks(uniform, rows), rows))
        lengths = torch.tensor(self._pooling, device=device).repeat_interleave(self.size)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Batch(torch.cat(parts), offsets, np.array(counts), self.size)


class MlperfSubject(RankedSubject):
    """MLPerf's DLRM with several lookups a sample."""

    def __init__(self, size: int, most_rows: int) -> None:
        """`most_rows`: of a table."""
        rows = [min(each, most_rows) for each in MLPERF_ROWS]
        super().__init__("mlperf", rows, MLPERF_LOOKUPS, size)

    def ranks(self, uniform: Tensor, rows: int) -> Tensor:
        """Skewed."""
        return uniform**MLPERF_SKEW * rows


class DynamicembSubject(RankedSubject):
    """The case that NVIDIA publishes of dynamicemb: not pooled."""

    def __init__(self, size: int, rows: int) -> None:
        """`rows`: of a table."""
        super().__init__("dynamicemb", [rows] * DYNAMICEMB_TABLES, [1] * DYNAMICEMB_TABLES, size)

    def ranks(self, uniform: Tensor, rows: int) -> Tensor:
        """A power law's quantiles."""
        power = 1 - DYNAMICEMB_EXPONENT
        return (1 + uniform * math.expm1(power * math.log(rows))) ** (1 / power) - 1


def make_subject(text: str, seed: int, rows_cap: int, dynamicemb_rows: int) -> Subject:
    """Returns the subject of a name; ValueError for an unknown name."""
    name, _, size = text.rpartition("-")
    if not (size.isascii() and size.isdigit() and int(size) > 0):
        raise ValueError(
            f"subject is {text!r}; expected NAME-SIZE, such as A-512, mlperf-2048, dynamicemb-104857"
        )
    if name == "mlperf":
        return MlperfSubject(int(size), rows_cap)
    if name == "dynamicemb":
        return DynamicembSubject(int(size), dynamicemb_rows)
    return ModelSubject(name, int(size), seed)
