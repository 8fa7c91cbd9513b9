"""``pin_rows`` and ``unpin``: rows of a table in the L2 cache of its GPU; see :class:`recfuse.PinnedRows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recfuse.ops.library import HAS_CUDA_KERNELS, check_tensor


def pin_rows(weight: Tensor, rows: Any) -> None:
    """Brings rows of a table into the L2 cache of its GPU, marked to be evicted last, on the current stream.

    Args:
        weight: ``[rows, dim]`` on a CUDA device; elsewhere nothing happens.
        rows: int32 or int64 ``[n]`` on the same device, or anything that can be copied there.

    Raises:
        ValueError, TypeError: a bad argument. IndexError: a row outside the table, found on the GPU, so
            raised by a later call, or by :func:`recfuse.check`.
    """
    check_tensor("pin_rows", "weight", weight)
    if on_gpu(weight):
        torch.ops.recfuse.pin_rows(weight.detach(), torch.as_tensor(rows, device=weight.device))


def unpin(weight: Tensor, rows: Any = None) -> None:
    """Lets rows be evicted from L2 like any others; without ``rows``, all that is pinned on the device.

    Arguments and errors are those of :func:`pin_rows`.
    """
    check_tensor("unpin", "weight", weight)
    if on_gpu(weight):
        rows = None if rows is None else torch.as_tensor(rows, device=weight.device)
        torch.ops.recfuse.unpin(weight.detach(), rows)


def on_gpu(weight: Tensor) -> bool:
    """Whether there is an L2 cache to keep rows in."""
    return weight.is_cuda and HAS_CUDA_KERNELS
