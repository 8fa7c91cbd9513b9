"""What works against an update inside ``backward()``, and is seen nowhere in it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError


def check_surroundings(parameters: Sequence[Tensor], where: str) -> None:
    """Raises where a gradient scaler has scaled the loss, or DistributedDataParallel waits for the
    gradients.
    """
    own = {id(parameter) for parameter in parameters}
    deferred = f"make the optimizer with deferred=True: {where}(..., deferred=True)"
    for candidate in gc.get_objects():
        kind = type(candidate)  # not isinstance, which asks proxies for their __class__
        if issubclass(kind, torch.amp.GradScaler) and _is_used(candidate):
            raise ArgumentValueError(
                f"{where}: a GradScaler is in use. The tables are updated inside backward(), before it could "
                f"unscale the gradients and look for infinities: {deferred}, or train in bfloat16 without a "
                "scaler"
            )
        if issubclass(kind, torch.nn.parallel.DistributedDataParallel) and _has(candidate, own):
            raise ArgumentValueError(
                f"{where}: a DistributedDataParallel has the tables. They are updated inside backward() by "
                f"the gradients of this process alone: {deferred}, so that the gradients of all are averaged "
                "first; or, for tables that differ from process to process, name them in "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) before it "
                "wraps the model"
            )


def _is_used(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has scaled something."""
    return bool(vars(scaler).get("_enabled")) and vars(scaler).get("_scale") is not None


def _has(parallel: torch.nn.Module, own: set[int]) -> bool:
    """Whether it reduces one of the gradients."""
    return any(id(p) in own and not getattr(p, "_ddp_ignored", False) for p in parallel.parameters())
