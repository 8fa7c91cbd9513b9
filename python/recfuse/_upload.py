"""Small tensors for a GPU, made without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# What a captured graph copies from at each of its replays.
_captured: list[Tensor] = []


def integers_on(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[len(values)]`` on a device."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return torch.tensor(values, dtype=torch.int64, device=device)
    pinned = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)
