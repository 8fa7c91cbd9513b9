"""``average_gradients``: the average of sparse gradients over processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.optim.parameters import check_has_gradients


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], group: Any = None) -> None:
    """Average sparse gradients over processes, between ``backward()`` and ``step()`` on all of them.

    DistributedDataParallel expects sparse gradients only of ``torch.nn.EmbeddingBag``, and NCCL cannot reduce
    them. So name tables that each process has a copy of in
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)`` before it wraps the
    model, give them the same initial values, and call this function. It gathers rows and values in the order
    of ranks, so the result is bit-identical on all processes.

    Args:
        parameters: Parameters, in the same order on each process. A ``grad`` of None counts as a gradient
            without rows.
        group: a process group. Default: the default group.

    Raises:
        ValueError: a dense gradient, which DistributedDataParallel averages itself; a table that is updated
            inside ``backward()``.

    Example:
        >>> loss.backward()  # doctest: +SKIP
        >>> recfuse.optim.average_gradients(tables.parameters())  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """
    parameter_list = list(parameters)
    check_has_gradients(parameter_list, "recfuse.optim.average_gradients")
    grads = [_coalesced(parameter) for parameter in parameter_list]
    if not parameter_list:
        return
    world = dist.get_world_size(group)
    row_counts = torch.tensor(
        [0 if grad is None else grad._nnz() for grad in grads], device=parameter_list[0].device
    )
    gathered = [torch.empty_like(row_counts) for _ in range(world)]
    dist.all_gather(gathered, row_counts, group=group)
    for number, counts in enumerate(torch.stack(gathered, dim=1).tolist()):
        if most := max(counts):
            parameter_list[number].grad = _average(parameter_list[number], grads[number], counts, most, group)


def _coalesced(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    if grad is not None and grad.layout is not torch.sparse_coo:
        raise ArgumentValueError(
            f"recfuse.optim.average_gradients: the gradient of a Parameter of shape {list(parameter.shape)} "
            f"is {grad.layout}; expected a sparse gradient. Leave dense gradients to "
            "DistributedDataParallel."
        )
    return None if grad is None else grad.coalesce()


def _average(parameter: Tensor, grad: Tensor | None, counts: list[int], most: int, group: Any) -> Tensor:
    rows = torch.zeros(most, dtype=torch.int64, device=parameter.device)
    values = torch.zeros((most, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    if grad is not None:
        rows[: grad._nnz()] = grad.indices()[0]
        values[: grad._nnz()] = grad.values() / len(counts)
    gathered = []
    for local in (rows, values):
        parts = [torch.empty_like(local) for _ in counts]
        dist.all_gather(parts, local, group=group)
        gathered.append(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
    return torch.sparse_coo_tensor(
        gathered[0][None], gathered[1], parameter.shape, check_invariants=False
    ).coalesce()
