"""``clip_grad_norm_`` for gradients of which some are sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from recfuse.optim.parameters import check_has_gradients


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """:func:`torch.nn.utils.clip_grad_norm_` for dense and sparse gradients: the same arguments and result.
    torch's own does not take sparse gradients.

    Sparse gradients are coalesced first, since a row's norm is that of its sum. Waits for no device.

    Args:
        parameters: dense and sparse gradients together make up the norm.
        max_norm: gradients are scaled down so that the norm of all is at most this.
        norm_type: the p of the norm.
        error_if_nonfinite: raises where the norm is not finite.
        foreach: as of torch's.

    Returns:
        The norm before.

    Raises:
        ValueError: a table that is updated inside ``backward()``, whose gradient is nowhere.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    check_has_gradients(given, "recfuse.optim.clip_grad_norm_")
    parts = []
    for parameter in given:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = parameter.grad.coalesce()
            parts.append(parameter.grad.values())
        else:
            parts.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(parts, norm_type, error_if_nonfinite, foreach)
    stand_ins = []
    for part in parts:  # Parameters that have what is to be scaled as their gradients
        stand_in = torch.nn.Parameter(part)
        stand_in.grad = part
        stand_ins.append(stand_in)
    torch.nn.utils.clip_grads_with_norm_(stand_ins, max_norm, norm, foreach)
    return norm
