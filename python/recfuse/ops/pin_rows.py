"""``pin_rows`` and ``unpin``: rows of a table in the L2 cache of its GPU; see :class:`recfuse.PinnedRows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.ops.library import HAS_CUDA_KERNELS, check_tensor


def pin_rows(weight: Tensor, rows: Any) -> None:
    """Read rows of a table into the L2 cache of its GPU, to be evicted last, on the current stream.

    Args:
        weight: ``[rows, dim]`` on a CUDA device; on the CPU the call does nothing.
        rows: int32 or int64 ``[n]`` on the same device, or values that can be copied there.

    Raises:
        TypeError: a bad argument.
        ValueError: a bad argument.
        IndexError: a row outside the table. The GPU finds it, so a later call, or :func:`recfuse.check`,
            raises it.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16)
        >>> recfuse.pin_rows(table.weight, [3, 5])

    Note:
        :class:`recfuse.PinnedRows` selects rows and refreshes them. Gradients do not change.

    Source: Jain et al., MICRO 2024, section IV-C.
    """
    check_tensor("pin_rows", "weight", weight)
    if on_gpu(weight):
        torch.ops.recfuse.pin_rows(weight.detach(), torch.as_tensor(rows, device=weight.device))


def unpin(weight: Tensor, rows: Any = None) -> None:
    """Make pinned rows evictable like other data.

    Args:
        weight: as in :func:`pin_rows`.
        rows: as in :func:`pin_rows`. Default: all pinned data of the device.

    Raises:
        TypeError, ValueError, IndexError: as :func:`pin_rows`.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(1000, 16)
        >>> recfuse.unpin(table.weight)
    """
    check_tensor("unpin", "weight", weight)
    if on_gpu(weight):
        rows = None if rows is None else torch.as_tensor(rows, device=weight.device)
        torch.ops.recfuse.unpin(weight.detach(), rows)


def on_gpu(weight: Tensor) -> bool:
    """Return whether the weight is on a GPU, whose L2 cache can keep rows."""
    return weight.is_cuda and HAS_CUDA_KERNELS
