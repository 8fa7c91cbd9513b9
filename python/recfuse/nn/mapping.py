"""``Mapping``: which block of a GPU works on which bags of a batch, as the host has found ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Mapping:
    """The work of one batch, shared out by its own lengths. Made by ``collection.map(offsets)``."""

    tensor: Tensor
    """int32 ``[rows, 8]`` on the CPU; page-locked where the tables are on a GPU."""
    bags: int
    """Of each feature."""
    features: Tensor
    """int64 ``[features, 7]``, as of :func:`recfuse.fused_embedding_bag`: what it was made for."""
    schedules: Tensor
    """int32 ``[features, 6]``: those that it was made for, by which the call works."""
    warps: int
    """The most warps that an SM runs at once; 0: the default."""

    def pin_memory(self) -> Mapping:
        """The same, page-locked: torch's DataLoader calls it where it pins memory."""
        return self if self.tensor.is_pinned() else replace(self, tensor=self.tensor.pin_memory())
