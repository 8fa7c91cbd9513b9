"""The limit of the GPU for many tables: the greater of two times measured in the same run.

Each row in use, the indices, the offsets and the output once, at the speed of a large copy; and all rows of
the lookups, in their order, by a kernel that only reads (kernels/gather.cu): one launch per row size over the
tables of all features of that size, so that all together read the rows of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.batches import Batch
from common.ceilings import SHAPES, Shape, fastest_shape, gather, options
from fused_embedding_bag.setting import Subject
from recfuse import timing

_LEAST_ROW = 16  # bytes that the gather reads at once; of narrower rows it reads two at once


@dataclass
class Limit:
    """Of one batch, the mean of several: the least bytes, and the least time."""

    unique_bytes: float  # rows in use
    other_bytes: float  # indices, offsets, output
    gathered_bytes: float  # rows of all lookups
    copy_s: float
    gather_s: float

    @property
    def seconds(self) -> float:
        """The greater of both."""
        return max(self.copy_s, self.gather_s)

    @property
    def least_bytes(self) -> float:
        """Everything once."""
        return self.unique_bytes + self.other_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "limit_s": self.seconds}


class Ceilings:
    """Limits of subjects, from one copy speed."""

    def __init__(self, copy_speed: float) -> None:
        """`copy_speed`: bytes a second, read and written together."""
        self.copy_speed = copy_speed
        self._compiled: set[int] = set()
        self._shapes: dict[tuple[str, int], Shape] = {}

    def limit(self, subject: Subject, dtype: torch.dtype, batches: Sequence[Batch]) -> Limit:
        """For these batches, with tables of this type."""
        streams = _Streams(subject, dtype, batches)
        pieces = [(*streams.gathered(row_bytes), row_bytes) for row_bytes in streams.row_sizes]
        self._compile([max(row_bytes, _LEAST_ROW) for row_bytes in streams.row_sizes], subject.device)
        requests = []
        for table, indices, row_bytes in pieces:
            key = subject.name, row_bytes
            if key not in self._shapes:
                self._shapes[key] = fastest_shape([(table, indices)], subject.device)[0]
            requests.append((self._shapes[key], table, indices))

        def gather_all() -> None:
            for request in requests:
                gather(*request)

        graph = timing.graphed(gather_all, subject.device)
        result = timing.compare({"gather": graph}, rounds=9, device=subject.device, progress=False)
        count = len(batches)
        output = subject.output_dim * dtype.itemsize * sum(batch.size for batch in batches)
        other = output + sum(batch.indices.nbytes + batch.offsets.nbytes for batch in batches)
        unique, gathered = streams.unique_bytes, streams.gathered_bytes
        copy_s = (unique + other) / self.copy_speed / count
        gather_s = result["gather"].median / count
        return Limit(unique / count, other / count, gathered / count, copy_s, gather_s)

    def _compile(self, row_sizes: Sequence[int], device: torch.device) -> None:
        """All shapes of the gather, side by side."""
        missing = {
            tuple(options(shape, size)): (shape, size)
            for size in row_sizes
            for shape in SHAPES
            if size not in self._compiled
        }
        self._compiled.update(row_sizes)

        def compile_one(shape: Shape, row_bytes: int) -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.synchronize()  # this thread now has the device's context
            table = torch.zeros(1, row_bytes // 4, device=device)
            gather(shape, table, torch.zeros(1, dtype=torch.int64, device=device))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda case: compile_one(*case), missing.values()))


class _Streams:
    """The rows of the lookups of batches, a stream for each row size."""

    def __init__(self, subject: Subject, dtype: torch.dtype, batches: Sequence[Batch]) -> None:
        self._subject, self._dtype, self._batches = subject, dtype, batches
        self._row_bytes = np.array([dim * dtype.itemsize for dim in subject.dims])
        self.row_sizes = sorted(set(self._row_bytes.tolist()))

    def _rows(self, row_bytes: int, batch: Batch) -> Tensor:
        """Rows of a batch, counted over all tables with rows of this size."""
        subject, of_size = self._subject, self._row_bytes == row_bytes
        rows = np.where(of_size, subject.rows, 0)
        first = np.cumsum(rows) - rows
        # int64 [features]; -1 for features with other rows.
        bases = torch.from_numpy(np.where(of_size, first, -1)).to(subject.device)
        lengths = torch.from_numpy(batch.lengths).to(subject.device)
        base = torch.repeat_interleave(bases, lengths, output_size=len(batch.indices))
        chosen = base >= 0
        return batch.indices[chosen] + base[chosen]

    def gathered(self, row_bytes: int) -> tuple[Tensor, Tensor]:
        """Returns a table [rows, words], with rows of at least 16 bytes, and the rows of all batches in
        it."""
        subject = self._subject
        flat = torch.cat(
            [
                table.reshape(-1)
                for table, size in zip(subject.tables(self._dtype), self._row_bytes, strict=True)
                if size == row_bytes
            ]
        )
        indices = torch.cat([self._rows(row_bytes, batch) for batch in self._batches])
        narrow = max(1, _LEAST_ROW // row_bytes)  # rows that are read as one row
        width = row_bytes * narrow // self._dtype.itemsize
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % width))
        return flat.view(-1, width), indices // narrow if narrow > 1 else indices

    @cached_property
    def unique_bytes(self) -> int:
        """Bytes of the different rows of each batch."""
        return sum(
            len(self._rows(row_bytes, batch).unique()) * row_bytes
            for row_bytes in self.row_sizes
            for batch in self._batches
        )

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of the rows of all lookups."""
        return sum(int(batch.lengths @ self._row_bytes) for batch in self._batches)
