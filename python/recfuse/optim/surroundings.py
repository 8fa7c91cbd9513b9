"""Checks for wrappers and scalers that expect gradients which tables do not have, or have in another form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError


def check_wrapper(
    parallel: torch.nn.Module, parameters: Sequence[Tensor], prefix: str, instead: str, deferred: bool
) -> None:
    """Raise ValueError if a DistributedDataParallel that calls tables waits for gradients of ``parameters``.

    These are updated inside ``backward()``, or have sparse gradients that it does not expect.
    """
    if not _waits_for(parallel, {id(parameter) for parameter in parameters}, deferred):
        return
    ignored = (
        "Name them in DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) "
        "before it wraps the model"
    )
    if deferred:
        raise ArgumentValueError(
            f"{prefix}: a DistributedDataParallel has tables whose gradients are sparse, which it expects "
            f"only of torch.nn.EmbeddingBag with sparse=True. {ignored}, and call "
            "recfuse.optim.average_gradients(parameters) before step()."
        )
    raise ArgumentValueError(
        f"{prefix}: a DistributedDataParallel has the tables, which are updated inside backward() by the "
        f"gradients of this process alone. {ignored}. {instead}, and call "
        "recfuse.optim.average_gradients(parameters) before step(), for tables that are the same on all "
        "processes."
    )


def check_scaler(optimizer: torch.optim.Optimizer, prefix: str, instead: str) -> None:
    """Raise ValueError if a gradient scaler calls ``step()``, which is too late for updated tables."""
    if hasattr(optimizer, "grad_scale"):  # set by a GradScaler around its call of step()
        raise ArgumentValueError(
            f"{prefix}: step() is called by a GradScaler, but backward() has updated the tables' rows "
            f"already. {instead}."
        )


def _waits_for(parallel: torch.nn.Module, numbers: set[int], deferred: bool) -> bool:
    """Return whether the wrapper reduces a gradient of ``numbers`` without support for sparse gradients."""
    sparse = [
        id(module.weight)
        for module in parallel.modules()
        if deferred and isinstance(module, torch.nn.EmbeddingBag) and module.sparse
    ]
    return any(
        id(p) in numbers and id(p) not in sparse and p.requires_grad and not getattr(p, "_ddp_ignored", False)
        for p in parallel.parameters()
    )
