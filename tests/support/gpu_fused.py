"""Shared by the tests of fused calls on a GPU: tables of any alignment, calls, and kernels compiled ahead."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse import _C
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support import gpu
from support.collection import SPECS, collection_of, lookups_of
from support.fused import Problem
from support.gpu import DTYPES, INTEGERS, moved
from support.kernels import compile_fused
from support.reference import Feature, assert_close_to_reference, tolerance

OPS = torch.ops.recfuse
SUMS = [Table(9, 4), Table(7, 8), Table(5, 4, feature_names=("x", "y")), (6, 3), (40, 64)]


def shifted(values: Tensor, lead: int) -> Tensor:
    """Returns the same on the device, ``lead`` elements after an aligned address; contiguous."""
    memory = torch.empty(values.numel() + lead, dtype=values.dtype, device=gpu.DEVICE)
    memory[lead:].copy_(values.reshape(-1))
    return memory[lead:].view(values.shape)


class Fused:
    """A problem whose tensors are on the device, with NaN around the tables."""

    def __init__(self, problem: Problem, lead: int = 0, schedules: Any = None, warps: int = 0) -> None:
        self.problem = problem
        self.weights = [shifted(weight, lead) for weight in problem.weights]
        if schedules is not None:
            schedules = torch.as_tensor(schedules, dtype=torch.int32)
        self.schedules, self.warps = schedules, warps

    @property
    def output_dtype(self) -> torch.dtype:
        """Of the result."""
        dtypes = {buffer.dtype for buffer in self.weights}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def call(self) -> tuple[Any, ...]:
        """Returns the arguments of the functions of `_C`."""
        buffers = [(one.data_ptr(), one.numel(), DTYPES.index(one.dtype)) for one in self.weights]
        code = DTYPES.index(self.output_dtype)
        return buffers, self.problem.rows.numpy(), code, self.problem.output_dim

    def sets(self) -> np.ndarray:
        """The schedules as one set of several."""
        if self.schedules is None:
            return np.zeros((1, len(self.problem.features), 5), np.int32)
        return self.schedules.numpy()[None]

    def expecting(self, offsets: Tensor) -> Fused:
        """Returns the same schedules, with the mean lengths of these bags."""
        features = len(self.problem.features)
        bags = (offsets.numel() - 1) // features
        rows = torch.from_numpy(self.sets()[0].copy())
        lookups = offsets.long()[::bags].diff() * 16.0 / bags
        rows[:, -1] = lookups.round().clamp(min=1).int()
        self.schedules = rows
        return self

    def map(self, offsets: Tensor) -> Tensor:
        """This batch's work, shared out by the host."""
        described = _C.fused_embedding_bag_describe(self.call(), self.sets()[0], self.warps)
        return torch.from_numpy(_C.fused_embedding_bag_map(described, offsets.numpy()))

    def run(self, indices: Tensor, offsets: Tensor, factors: Tensor | None = None, **changes: Any) -> Tensor:
        """The operator on the device; tensors that are not there yet are moved."""
        moved = [None if one is None else one.to(gpu.DEVICE) for one in (indices, offsets, factors)]
        arguments = {
            "weights": self.weights, "features": self.problem.rows, "indices": moved[0], "offsets": moved[1],
            "output_dim": self.problem.output_dim, "per_sample_weights": moved[2],
            "schedules": self.schedules, "warps": self.warps,
        }  # fmt: skip
        return OPS.fused_embedding_bag(**{**arguments, **changes})

    def check(self, got: Tensor, indices: Tensor, offsets: Tensor, factors: Tensor | None = None) -> None:
        """Compares with the reference on the CPU."""
        problem, bags = self.problem, (offsets.numel() - 1) // max(len(self.problem.features), 1)
        assert got.dtype == self.output_dtype and got.device == self.weights[0].device
        assert got.is_contiguous() and got.shape == (bags, problem.output_dim)
        want = problem.expected(indices, offsets, factors)
        magnitude = problem.expected(
            indices, offsets, None if factors is None else factors.abs(), [t.abs() for t in problem.tables]
        )
        longest = int(offsets.long().diff().max()) if offsets.numel() > 1 else 0
        assert_close_to_reference(got.cpu(), want, tolerance(magnitude, longest, got.dtype))

    def run_and_check(
        self, indices: Tensor, offsets: Tensor, factors: Tensor | None = None, **changes: Any
    ) -> Tensor:
        """One call."""
        got = self.run(indices, offsets, factors, **changes)
        self.check(got, indices, offsets, factors)
        return got

    def job(self, index: torch.dtype, offset: torch.dtype, weighted: bool, check: bool) -> tuple[Any, ...]:
        """For `_C.fused_embedding_bag_lower`."""
        codes = INTEGERS.index(index), INTEGERS.index(offset)
        return (gpu.arch(), self.call(), *codes, weighted, check, self.sets(), self.warps, False)


def precompile(
    fused: Iterable[Fused],
    index: Sequence[torch.dtype] = (torch.int64,),
    offset: Sequence[torch.dtype] = (torch.int64,),
    weighted: Sequence[bool] = (False,),
    check: Sequence[bool] = (True,),
) -> None:
    """Compiles kernels into the cache on disk, with a thread per core.

    A failure repeats, and is reported, when the kernel runs.
    """
    if gpu.DEVICE.type != "cuda":
        return
    jobs = [
        one.job(i, o, w, c) for one in fused for i in index for o in offset for w in weighted for c in check
    ]

    def make(job: tuple[Any, ...]) -> None:
        with contextlib.suppress(Exception):
            compile_fused(*job)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, jobs))


def bags_of(sizes: Sequence[Sequence[int]], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns random lookups for bags of these lengths, ``[features][bags]``, in tables of that many rows."""
    lengths = torch.tensor(sizes, dtype=torch.int64)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)))
    parts = [
        torch.randint(0, max(most, 1), (int(own.sum()),)) for most, own in zip(rows, lengths, strict=True)
    ]
    return torch.cat(parts), offsets


def on_gpu(specs: Any = SPECS, **options: Any) -> FusedEmbeddingBagCollection:
    """A collection there, its tables drawn there."""
    return collection_of(specs, device=gpu.DEVICE, **options)


def batch(collection: FusedEmbeddingBagCollection, bags: int = 6, longest: int = 5) -> tuple[Tensor, Tensor]:
    """Random lookups on the device."""
    return moved(lookups_of(collection, bags, longest))


def twin_of(collection: FusedEmbeddingBagCollection) -> FusedEmbeddingBagCollection:
    """Returns the same on the CPU."""
    return copy.deepcopy(collection).cpu()


def check(collection: FusedEmbeddingBagCollection, *given: Any, **options: Any) -> Tensor:
    """Against the same on the CPU."""
    got = collection(*given, **options)
    indices, offsets, *rest = (one if one is None else one.cpu() for one in given)
    used = int(offsets[-1])  # lookups after the last bag, which graphs have room for, are an error on the CPU
    want = twin_of(collection)(indices[:used], offsets, *(one if one is None else one[:used] for one in rest))
    assert got.device == given[0].device and got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    return got


BAGS, FEATURES = 2, 3
LENGTHS = [[2, 1], [0, 3], [2, 2]]
OFFSETS = [0, 2, 3, 3, 6, 8, 10]
ROWS = (10, 5, 8)
SCHEDULES = {
    "pool": [1, 0, 0, 0, 32],
    "columns": [2, 0, 0, 0, 32],
    "one lookup": [2, 0, 0, 0, 16],
    "default": [0, 0, 0, 0, 32],
    "wide bags": [1, 64, 2, 1, 32],
    "split": [1, 64, 1, 4, 32],
}


def ones(mode: str = "sum") -> Problem:
    """Tables of 10, 5 and 8 rows whose row k is k + 1 everywhere, of dims 16, 4 and 33."""
    problem = Problem(
        [(rows, dim, torch.float32) for rows, dim in zip(ROWS, (16, 4, 33), strict=True)],
        [Feature(number, mode, None) for number in range(FEATURES)],
    )
    for table, place in zip(problem.tables, problem.places, strict=True):
        table.copy_(torch.arange(1.0, table.shape[0] + 1)[:, None].expand_as(table))
        problem.weights[place[0]].view(-1)[place[1] : place[1] + table.numel()] = table.reshape(-1)
    return problem


GOOD = [0, 9, 4, 0, 1, 4, 7, 0, 1, 2]
RESULT = [[11.0, 0.0, 9.0], [5.0, 8.0, 5.0]]
