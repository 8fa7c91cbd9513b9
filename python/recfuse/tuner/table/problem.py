"""What is tuned: a table, the batches of lookups it serves, and what a search found for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recfuse._codes import DTYPES, INTEGERS, MODES
from recfuse.data.forms import BagLookups
from recfuse.data.table import batches_of
from recfuse.errors import ArgumentValueError
from recfuse.ops import HAS_CUDA_KERNELS, embedding_bag
from recfuse.plan.parts import Decision, Pinned, Table


@dataclass
class Found:
    """What a search came to."""

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

    weight: Tensor  # [rows, dim], elements of a row side by side
    mode: str
    padding_idx: int  # -1: none
    batches: list[BagLookups]

    @classmethod
    def of(cls, module: torch.nn.EmbeddingBag, batches: Iterable[Any]) -> Problem:
        """The problem that a module and calls of it are.

        Raises:
            NotImplementedError: no kernel takes this weight. TypeError, ValueError: bad batches, or nothing
                to do.
        """
        weight = module.weight.detach()
        if weight.dtype not in DTYPES or not (weight.is_cpu or (weight.is_cuda and HAS_CUDA_KERNELS)):
            raise NotImplementedError(
                f"recfuse.tune: no kernel for a {weight.dtype} table on {weight.device}; there are for "
                "float32, float16 and bfloat16, on the CPU and on CUDA devices"
            )
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        padding_idx = -1 if module.padding_idx is None else module.padding_idx
        calls = batches_of(batches, module.include_last_offset, weight.device, "recfuse.tune")
        if not weight.numel() or not any(batch.indices.numel() for batch in calls):
            raise ArgumentValueError(
                "recfuse.tune: the table or all of the batches are empty; nothing to time"
            )
        return cls(weight, module.mode, padding_idx, calls)

    @property
    def table(self) -> Table:
        """The table as a plan describes it, with the integers of the first batch."""
        first = self.batches[0]
        return Table(
            rows=self.weight.shape[0],
            dim=self.weight.shape[1],
            dtype=_name(self.weight.dtype),
            mode=self.mode,
            padded=self.padding_idx >= 0,
            weighted=first.weights is not None,
            indices=_name(first.indices.dtype),
            offsets=_name(first.offsets.dtype),
        )

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.weight.shape[1] * self.weight.element_size()

    @property
    def lanes(self) -> int:
        """Threads that read one row: a power of two up to a warp."""
        return min(32, power_of_two(self.row_bytes // alignment(self.weight)))

    def pool(self, batch: BagLookups, **options: Any) -> Tensor:
        """One batch, by the operator."""
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

    def compile_arguments(self, arch: str, schedule: str) -> tuple[Any, ...]:
        """Arguments of `_C.embedding_bag_compile`."""
        first = self.batches[0]
        return (
            arch,
            self.weight.shape[1],
            self.weight.stride(0),
            alignment(self.weight),
            DTYPES.index(self.weight.dtype),
            INTEGERS.index(first.indices.dtype),
            INTEGERS.index(first.offsets.dtype),
            MODES.index(self.mode),
            first.weights is not None,
            self.padding_idx >= 0,
            True,
            first.indices.numel(),
            first.bags,
            schedule,
            self.weight.shape[0],
        )


def alignment(weight: Tensor) -> int:
    """The largest power of two up to 16 that the address of every row, and the size of one, is a multiple
    of.
    """
    size = weight.element_size()
    together = weight.data_ptr() | weight.stride(0) * size | weight.shape[1] * size | 16
    return together & -together


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(least - 1, 0).bit_length()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
