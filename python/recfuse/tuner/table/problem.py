"""The input of a search over a table (the table and batches of its lookups), and its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recfuse import _C
from recfuse._codes import DTYPE_NAMES, DTYPES, INTEGER_NAMES, MODES, Mode, row_bytes
from recfuse.data.forms import BagLookups
from recfuse.data.table import batches_of
from recfuse.errors import ArgumentValueError
from recfuse.ops import HAS_CUDA_KERNELS, embedding_bag
from recfuse.plan.report import Decision
from recfuse.plan.table import Pinned, Table
from recfuse.tuner.compile import compile_launches
from recfuse.tuner.native import address, alignment, integer_codes, power_of_two


@dataclass
class Found:
    """The result of a search."""

    schedule: str
    default_us: float
    best_us: float
    floor_us: float | None = None
    pinned: Pinned | None = None
    hottest: Any = None
    decisions: list[Decision] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """A table and batches, on one device."""

    weight: Tensor  # [rows, dim], contiguous within a row
    mode: Mode
    padding_idx: int  # -1: no padding index
    batches: list[BagLookups]

    @classmethod
    def of(cls, module: torch.nn.EmbeddingBag, batches: Iterable[Any]) -> Problem:
        """Build the problem from a module and its calls; raise the errors of `recfuse.tune`."""
        weight = module.weight.detach()
        if weight.dtype not in DTYPES or not (weight.is_cpu or (weight.is_cuda and HAS_CUDA_KERNELS)):
            raise NotImplementedError(
                f"recfuse.tune: no kernel for a {weight.dtype} table on {weight.device}; expected float32, "
                "float16 or bfloat16, on the CPU or a CUDA device"
            )
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        padding_idx = -1 if module.padding_idx is None else module.padding_idx
        calls = batches_of(batches, module.include_last_offset, weight.device, "recfuse.tune")
        if not weight.numel() or not any(batch.indices.numel() for batch in calls):
            text = "the table or all batches are empty; expected lookups to time"
            raise ArgumentValueError(f"recfuse.tune: {text}")
        return cls(weight, MODES[MODES.index(module.mode)], padding_idx, calls)

    @property
    def table(self) -> Table:
        """The description of the table in a plan, with the integer types of the first batch."""
        first = self.batches[0]
        indices, offsets = (INTEGER_NAMES[code] for code in integer_codes(first))
        return Table(
            rows=self.weight.shape[0],
            dim=self.weight.shape[1],
            dtype=DTYPE_NAMES[DTYPES.index(self.weight.dtype)],
            mode=self.mode,
            padded=self.padding_idx >= 0,
            weighted=first.weights is not None,
            indices=indices,
            offsets=offsets,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.weight.shape[1], self.weight.dtype)

    @property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides the address and the size, in bytes, of every row."""
        pitch = row_bytes(self.weight.stride(0), self.weight.dtype)
        return alignment(address("weight", self.weight), pitch, self.row_bytes)

    @property
    def lanes(self) -> int:
        """Threads that read a row: a power of two up to a warp."""
        return min(32, power_of_two(self.row_bytes // self.alignment))

    def pool(self, batch: BagLookups, **options: Any) -> Tensor:
        """Pool a batch with the operator."""
        return embedding_bag(
            batch.indices,
            self.weight,
            batch.offsets,
            mode=self.mode,
            per_sample_weights=batch.weights,
            include_last_offset=batch.include_last_offset,
            padding_idx=self.padding_idx if self.padding_idx >= 0 else None,
            **options,
        )

    def compile(self, arch: str, schedule: str) -> dict[str, Any]:
        """Compile the kernel of a schedule. Returns the compiler's report, with the complete schedule."""
        first = self.batches[0]
        launches, complete = _C.embedding_bag_lower(
            arch,
            self.weight.shape[1],
            self.weight.stride(0),
            self.alignment,
            DTYPES.index(self.weight.dtype),
            *integer_codes(first),
            MODES.index(self.mode),
            first.weights is not None,
            self.padding_idx >= 0,
            True,
            first.indices.numel(),
            first.bags,
            schedule,
            self.weight.shape[0],
        )
        return compile_launches(launches, schedule=complete)
