"""``clip_grad_norm_`` for dense and sparse gradients."""

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
    """Clip the norm of gradients, as :func:`torch.nn.utils.clip_grad_norm_`, also of sparse gradients.

    It coalesces sparse gradients first, because the norm of a row is the norm of its sum. It waits for no
    device.

    Args:
        parameters: Parameters; dense and sparse gradients together have one norm.
        max_norm: the maximal norm; larger gradients are scaled down.
        norm_type: the p of the norm. Default: 2.
        error_if_nonfinite: raise if the norm is not finite. Default: False.
        foreach: as in torch.

    Returns:
        Tensor: the norm before the clipping.

    Raises:
        ValueError: a table that is updated inside ``backward()``, and has no gradient.

    Example:
        >>> table = recfuse.nn.EmbeddingBag(100, 16, mode="sum", sparse=True)
        >>> table(torch.tensor([[1, 2], [3, 4]])).sum().backward()
        >>> recfuse.optim.clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(8.)
    """
    parameter_list = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    check_has_gradients(parameter_list, "recfuse.optim.clip_grad_norm_")
    parts = []
    for parameter in parameter_list:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is torch.sparse_coo:
            parameter.grad = parameter.grad.coalesce()
            parts.append(parameter.grad.values())
        else:
            parts.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(parts, norm_type, error_if_nonfinite, foreach)
    stand_ins = []
    for part in parts:  # temporary Parameters, whose gradients are the tensors to scale
        stand_in = torch.nn.Parameter(part)
        stand_in.grad = part
        stand_ins.append(stand_in)
    torch.nn.utils.clip_grads_with_norm_(stand_ins, max_norm, norm, foreach)
    return norm
