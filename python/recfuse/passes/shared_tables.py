"""``check_fused_alone``: tables whose steps are fused may belong only to modules of recfuse."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.optim.adoptable import form_of


def check_fused_alone(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    weights: Iterable[Tensor],
    served: Collection[int],
    what: str,
) -> None:
    """Check that no module of torch has a table whose rows are updated inside ``backward()``.

    Such a module would give the table a gradient, which only its first step would report.

    Args:
        model: the model before the swap.
        optimizers: the optimizers whose steps are fused.
        weights: the tables of recfuse's modules after the swap.
        served: the ids of the modules that recfuse's calls replace.
        what: the prefix of the message.

    Raises:
        ValueError: a module outside of ``served`` has one of the weights.
    """
    tables = {id(weight) for weight in weights}
    kinds = {
        id(parameter): type(optimizer).__name__
        for optimizer in optimizers
        if form_of(optimizer) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in tables
    }
    names: dict[int, str] = {}
    sharers: list[tuple[int, str]] = []
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if id(parameter) not in kinds:
                continue
            if id(module) in served:
                names.setdefault(id(parameter), name)
            else:
                sharers.append((id(parameter), f"{name or 'the model'} ({type(module).__name__})"))
    for parameter, other in sharers:
        raise ArgumentValueError(
            f"{what}: {kinds[parameter]} of the table {names.get(parameter, '')!r} cannot be fused, since "
            f"its weight belongs to {other} too, which would compute a gradient for it. Use separate "
            "weights, or pass fuse_optimizers=False."
        )
