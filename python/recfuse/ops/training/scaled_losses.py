"""The backward passes of scaled losses of a ``torch.amp.GradScaler``.

An optimizer sees a scaler only in ``scaler.step()``, after ``backward()``. This is too late if backward() has
updated the rows with scaled gradients. So ``GradScaler.scale`` adds a gradient hook to the loss, which runs
first in its backward pass and records the pass. Scalers of other models record passes of other losses. A
subclass that overrides ``scale`` is refused later, when it reads the gradients.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from recfuse.errors import ArgumentValueError

_ATTRIBUTE = "_recfuse_watched"
scaled_passes: collections.deque[int] = collections.deque(maxlen=16)  # the engine's numbers of them


def watch_scalers() -> None:
    """Patch GradScaler to record backward passes of scaled losses, from now on."""
    scale = GradScaler.scale
    if hasattr(scale, _ATTRIBUTE):
        return

    @functools.wraps(scale)
    def watched(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled() and not torch.compiler.is_compiling():
            for loss in scaled if isinstance(scaled, (list, tuple)) else (scaled,):
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.register_hook(_note)
        return scaled

    setattr(watched, _ATTRIBUTE, True)
    GradScaler.scale = watched  # type: ignore[method-assign, assignment]


def _note(_: Tensor) -> None:
    scaled_passes.append(torch._C._current_graph_task_id())


def check_unscaled(owner: Any = None) -> None:
    """Raise ValueError in a backward pass of a scaled loss, before it updates rows."""
    if scaled_passes and torch._C._current_graph_task_id() in scaled_passes:
        prefix = "recfuse.optim" if owner is None else owner._prefix
        instead = "Create the optimizer with deferred=True" if owner is None else owner._instead
        raise ArgumentValueError(
            f"{prefix}: a GradScaler is in use, which has scaled this loss, but the tables' rows are updated "
            f"inside backward(), before it could unscale the gradients and look for infinities. {instead}, "
            "or train in bfloat16 without a scaler."
        )
