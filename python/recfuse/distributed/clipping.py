"""``clip_grad_norm_`` of a model with sharded tables, over the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse._arguments import real, wrong_type
from recfuse.distributed.modules import ShardedPooling
from recfuse.distributed.sharding import Sharding
from recfuse.errors import ArgumentValueError
from recfuse.ops.updates import update_of

_WHERE = "recfuse.distributed.clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(model: torch.nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the norm of the gradients of a model with sharded tables; a collective call.

    The norm is that of one process: parts of tables are added over ranks, copied tables and all other
    Parameters count once. The others must have the same gradients on all ranks, as after
    DistributedDataParallel. Call it after ``backward()`` and before ``step()``, on all ranks.

    Args:
        model: a model that :func:`shard` has sharded.
        max_norm: the maximal norm; larger gradients are scaled down.
        norm_type: the p of the norm, a finite number greater than 0. Default: 2.

    Returns:
        Tensor: the norm before the clipping, the same on all ranks.

    Raises:
        TypeError: no module, no number. ValueError: a norm_type out of range, a model without sharded tables,
            tables that are updated inside ``backward()`` and have no gradient.

    Example:
        >>> loss.backward()  # doctest: +SKIP
        >>> recfuse.distributed.clip_grad_norm_(model, max_norm=1.0)  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(f"{_WHERE}: model", model, "a torch.nn.Module")
    limit, power = real(f"{_WHERE}: max_norm", max_norm), real(f"{_WHERE}: norm_type", norm_type)
    if not 0 < power < float("inf"):
        raise ArgumentValueError(f"{_WHERE}: norm_type is {power}; expected a finite number greater than 0")
    modules = (module for module in model.modules() if isinstance(module, ShardedPooling))
    shardings = [module._sharding for module in modules]
    if not shardings:
        raise ArgumentValueError(f"{_WHERE}: the model has no sharded tables. Call torch.nn.utils' function.")
    if any(sharding.group is not shardings[0].group for sharding in shardings):
        raise ArgumentValueError(f"{_WHERE}: tables are sharded over several meshes; expected a single mesh")
    parts = {id(matrix): matrix for sharding in shardings for matrix in sharding.matrices()}
    _check_updates(parts.values())
    device = next(iter(parts.values())).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of all ranks' parts, of the rest
    for sharding in shardings:
        for grad in _parts_to_count(sharding):
            sums[0] += grad.double().abs().pow(power).sum()
    dist.all_reduce(sums[:1], group=shardings[0].group)
    others = [p for p in model.parameters() if id(p) not in parts and p.grad is not None]
    for parameter in others:
        sums[1] += _values(parameter).double().abs().pow(power).sum().to(device)
    norm = sums.sum().pow(1 / power)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*parts.values(), *others):
        if parameter.grad is not None:
            _values(parameter).mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
    return norm.float()


def _values(parameter: Tensor) -> Tensor:
    """Return the values of a gradient; a sparse gradient is coalesced first."""
    grad: Any = parameter.grad
    if grad.layout is torch.sparse_coo:
        parameter.grad = grad = grad.coalesce()
        return grad.values()  # type: ignore[no-any-return]
    return grad  # type: ignore[no-any-return]


def _parts_to_count(sharding: Sharding) -> Iterator[Tensor]:
    """Iterate over the gradients of this rank's parts; copied tables count on the first rank."""
    for number, part in enumerate(sharding.parts):
        if sharding.placed[part.table].kind == "copies" and sharding.rank != 0:
            continue
        matrix = sharding.store.matrix(number)
        if matrix.grad is None:
            continue
        spec, values = sharding.store.layout.tables[number], _values(matrix)
        first, end = spec.first_row, spec.first_row + spec.num_embeddings
        if matrix.grad.layout is torch.sparse_coo:
            rows = matrix.grad.indices()[0]
            yield values[(rows >= first) & (rows < end)]
        else:
            yield values[first:end]


def _check_updates(matrices: Any) -> None:
    for matrix in matrices:
        update = update_of(matrix)
        if update is not None and not update.updater.deferred and update.updater.owner is not None:
            raise ArgumentValueError(
                f"{_WHERE}: a table is updated inside backward() by recfuse.optim."
                f"{type(update.updater.owner).__name__}, and has no gradient. Make its optimizer with "
                "deferred=True."
            )
