"""The interface of the ablations to recfuse's C side: one kernel for given schedules, and its times."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from common.batches import Batch
from fused_embedding_bag.setting import Subject
from fused_embedding_bag.streams import Run
from recfuse import _C
from recfuse._codes import INTEGERS
from recfuse.nn.collection_view import native_call, view_of
from recfuse.ops.schedules import FIELDS, KINDS, SIXTEENTHS
from recfuse.plan.device import architecture
from recfuse.tuner.compile import compile_launches

Schedules = NDArray[np.int32]  # [features, FIELDS]; columns below
KIND, THREADS, SPLIT, EXPECTED = 0, 1, 3, 4
_POOL, _COLUMNS = (KINDS.index(name) + 1 for name in ("pool", "columns"))
_LONGEST_OF_COLUMNS = 2 * SIXTEENTHS  # the default
_COLUMN = -1  # of a feature's first column, in a row of `features`


def schedules_of(module: Any) -> tuple[Schedules, int]:
    """Returns the schedules of a collection, of its plan or calibrated, and its warps per SM."""
    if module.schedules is None:
        return np.zeros((view_of(module, "benchmark").features, FIELDS), np.int32), module.warps
    return module.schedules.numpy().copy(), module.warps


def never_staged(schedules: Schedules) -> Schedules:
    """Returns the same, with defaults replaced by their kinds without staged tables."""
    tiled = (schedules[:, THREADS] == 0) & (schedules[:, EXPECTED] <= _LONGEST_OF_COLUMNS)
    changed = schedules.copy()
    changed[:, KIND] = np.where(schedules[:, KIND] == 0, np.where(tiled, _COLUMNS, _POOL), schedules[:, KIND])
    return changed


def operator_run(module: Any, options: Callable[[Batch], dict[str, Any]]) -> Run:
    """Returns a call of a collection's operator with other options."""
    view = view_of(module, "benchmark")
    weights, features = view.weights, torch.from_numpy(view.feature_rows)

    @torch.inference_mode()
    def run(batch: Batch) -> Tensor:
        lookups = batch.indices, batch.offsets
        return torch.ops.recfuse.fused_embedding_bag(
            weights, features, *lookups, view.output_dim, **options(batch)
        )

    return run


class Native:
    """The tables of a collection, or of one of its features, in the form of the C side."""

    def __init__(self, module: Any, subject: Subject, feature: int | None = None) -> None:
        """`module`: keeps the tables. `feature`: only this feature."""
        self._module, self._subject = module, subject
        view = view_of(module, "benchmark")
        features, self._columns = view.feature_rows, view.output_dim
        if feature is not None:
            features, self._columns = features[feature : feature + 1].copy(), subject.dims[feature]
            features[:, _COLUMN] = 0
        self._dtype = view.weights[0].dtype
        self._call = native_call(view.weights, features, self._columns)

    def candidates(self, feature: int = 0) -> list[tuple[int, ...]]:
        """Schedules that a feature can run by."""
        return _C.fused_embedding_bag_candidates(self._call, feature)

    def compile(self, sets: Sequence[Schedules], warps: int = 0) -> None:
        """Compiles a kernel for each set of schedules in parallel, so that no later call waits."""
        if self._subject.device.type != "cuda":
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = pool.map(lambda schedules: self._compile(schedules[None], warps, timed=False), sets)
            list(tqdm(done, total=len(sets), desc="compile", leave=False, delay=2))

    def compile_in_one(self, candidates: Schedules) -> dict[str, Any]:
        """Compiles one kernel with all candidates [candidates, FIELDS] of this feature; each can be timed."""
        return self._compile(candidates[:, None], 0, timed=True)

    def _compile(self, sets: NDArray[np.int32], warps: int, timed: bool) -> dict[str, Any]:
        arch, kind = architecture(self._subject.device), INTEGERS.index(self._subject.index_dtype)
        sets = np.ascontiguousarray(sets)
        launches, _ = _C.fused_embedding_bag_lower(
            arch, self._call, kind, kind, False, True, sets, warps, timed
        )
        return compile_launches(launches)

    def measure(
        self, sets: Sequence[Schedules], batches: Sequence[Batch], warps: int, rounds: int
    ) -> NDArray[np.float64]:
        """Seconds a batch [sets, rounds] of all features, each set by its own kernel, in turns."""
        device = self._subject.device
        most = max(batch.size for batch in batches)
        output = torch.empty(most, self._columns, dtype=self._dtype, device=device)
        described = [self._described(batch, output) for batch in batches]
        cuda = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
        stacked = np.ascontiguousarray(np.stack(sets))
        return _C.fused_embedding_bag_measure(
            device.index or 0, stream, self._call, described, stacked, warps, rounds, False
        )

    @staticmethod
    def _described(batch: Batch, output: Tensor) -> tuple[int, ...]:
        kind = INTEGERS.index(batch.indices.dtype)
        return (
            batch.indices.data_ptr(), len(batch.indices), kind, batch.offsets.data_ptr(), batch.size, kind,
            0, output.data_ptr(), batch.host_offsets.ctypes.data,
        )  # fmt: skip

    def run(self, schedules: Schedules, warps: int = 0) -> Run:
        """Returns the operator with these schedules, all features in one launch."""
        options = {"schedules": torch.from_numpy(np.ascontiguousarray(schedules)), "warps": warps}
        return operator_run(self._module, lambda batch: options)
