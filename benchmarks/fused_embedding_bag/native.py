"""What the ablations ask recfuse's C side for: one kernel for given schedules, and its times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from fused_embedding_bag.setting import Batch, Subject
from fused_embedding_bag.streams import Run
from recfuse import _C
from recfuse.ops.schedules import KINDS, SIXTEENTHS
from recfuse.plan.device import architecture

Schedules = NDArray[np.int32]  # [features, 5]; columns below
KIND, THREADS, SPLIT, EXPECTED = 0, 1, 3, 4
_POOL, _COLUMNS = (KINDS.index(name) + 1 for name in ("pool", "columns"))
_LONGEST_OF_COLUMNS = 2 * SIXTEENTHS  # by default
_COLUMN = -1  # of a feature's first column, in a row of `features`
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INTEGERS = {torch.int32: 0, torch.int64: 1}


def schedules_of(module: Any) -> tuple[Schedules, int]:
    """The schedules that a collection runs by, its plan's or what it learned, and its warps an SM."""
    packed = module
    if packed.schedules is None:
        return np.zeros((len(packed.layout.dims), EXPECTED + 1), np.int32), packed.warps
    return packed.schedules.numpy().copy(), packed.warps


def never_staged(schedules: Schedules) -> Schedules:
    """The same, with the kinds that defaults stand for where no table is staged."""
    tiled = (schedules[:, THREADS] == 0) & (schedules[:, EXPECTED] <= _LONGEST_OF_COLUMNS)
    changed = schedules.copy()
    changed[:, KIND] = np.where(schedules[:, KIND] == 0, np.where(tiled, _COLUMNS, _POOL), schedules[:, KIND])
    return changed


class Native:
    """The tables of a collection, or that of one of its features alone, as the C side takes them."""

    def __init__(self, module: Any, subject: Subject, feature: int | None = None) -> None:
        """`module`: keeps the tables. `feature`: this one alone."""
        self._module, self._subject = module, subject
        features = module.layout.features.numpy()
        if feature is not None:
            features = features[feature : feature + 1].copy()
            features[:, _COLUMN] = 0
        self._dtype = module.packed_weights()[0].dtype
        self._columns = subject.output_dim if feature is None else subject.dims[feature]
        buffers = [
            (buffer.data_ptr(), buffer.numel(), _DTYPES[buffer.dtype]) for buffer in module.packed_weights()
        ]
        self._call = (buffers, features, _DTYPES[self._dtype], self._columns)

    def candidates(self, feature: int = 0) -> list[tuple[int, ...]]:
        """Schedules that a feature can run by."""
        return _C.fused_embedding_bag_candidates(self._call, feature)

    def compile(self, sets: Sequence[Schedules], warps: int = 0) -> None:
        """Compiles a kernel for each set of schedules, side by side, so that none is waited for later."""
        if self._subject.device.type != "cuda":
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda schedules: self._compile(schedules[None], warps, timed=False), sets)
            list(tqdm(made, total=len(sets), desc="compile", leave=False, delay=2))

    def compile_together(self, candidates: Schedules) -> dict[str, Any]:
        """One kernel with all candidates [candidates, 6] of this feature, each of which can be timed."""
        return self._compile(candidates[:, None], 0, timed=True)

    def _compile(self, sets: NDArray[np.int32], warps: int, timed: bool) -> dict[str, Any]:
        arch, kind = architecture(self._subject.device), _INTEGERS[self._subject.index_dtype]
        sets = np.ascontiguousarray(sets)
        return _C.fused_embedding_bag_compile(arch, self._call, kind, kind, False, True, sets, warps, timed)

    def measure(
        self, sets: Sequence[Schedules], batches: Sequence[Batch], warps: int, rounds: int
    ) -> NDArray[np.float64]:
        """Seconds a batch [sets, rounds] of all features, each set by its own kernel, in turns."""
        device = self._subject.device
        most = max(batch.size for batch in batches)
        output = torch.empty(most, self._columns, dtype=self._dtype, device=device)
        described = [self._described(batch, output) for batch in batches]
        cuda = device.type == "cuda"
        index = torch.cuda.current_device() if cuda and device.index is None else device.index or 0
        stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
        stacked = np.ascontiguousarray(np.stack(sets))
        return _C.fused_embedding_bag_measure(
            index, stream, self._call, described, stacked, warps, rounds, False
        )

    @staticmethod
    def _described(batch: Batch, output: Tensor) -> tuple[int, ...]:
        kind = _INTEGERS[batch.indices.dtype]
        return (
            batch.indices.data_ptr(), len(batch.indices), kind, batch.offsets.data_ptr(), batch.size, kind,
            0, output.data_ptr(), batch.host_offsets.ctypes.data,
        )  # fmt: skip

    def run(self, schedules: Schedules, warps: int = 0) -> Run:
        """The operator with these schedules, all features together."""
        layout, rows = self._module.layout, torch.from_numpy(np.ascontiguousarray(schedules))

        @torch.inference_mode()
        def run(batch: Batch) -> Tensor:
            return torch.ops.recfuse.fused_embedding_bag(
                self._module.packed_weights(), layout.features, batch.indices, batch.offsets,
                layout.output_dim, schedules=rows, warps=warps,
            )  # fmt: skip

        return run
