"""Parameters of fused optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse._codes import DTYPES
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type
from recfuse.nn.embedding_bag import EmbeddingBag
from recfuse.nn.packed.by_table.raw_states import PART
from recfuse.nn.packed.moving import own_parameters
from recfuse.nn.packed.table import PackedTable
from recfuse.nn.packed.table_dict import TableHolder
from recfuse.nn.packed.table_weight import TableWeight
from recfuse.ops import HAS_CUDA_KERNELS
from recfuse.ops.updates import update_of


def embedding_parameters(model: torch.nn.Module) -> list[Parameter]:
    """Return the Parameters of the embedding tables of a model that optimizers of ``recfuse.optim`` accept.

    Give the other Parameters to an optimizer of torch. A single table of a packed module
    (``model.emb_l[3]``) moves to a separate Parameter.

    Args:
        model: a module.

    Returns:
        list: the Parameters, in the order of ``model.parameters()``.

    Example:
        >>> model = torch.nn.Sequential(recfuse.nn.EmbeddingBag(100, 16), torch.nn.Linear(16, 1))
        >>> [parameter.shape for parameter in recfuse.optim.embedding_parameters(model)]
        [torch.Size([100, 16])]
    """
    if isinstance(model, PackedTable):
        return own_parameters([model.place])
    owners = (module for module in model.modules() if isinstance(module, (EmbeddingBag, TableHolder)))
    tables = {id(parameter) for owner in owners for parameter in owner.parameters(recurse=False)}
    return [parameter for parameter in model.parameters() if id(parameter) in tables]


def dense_tables(model: torch.nn.Module) -> set[int]:
    """Return the ids of the weights of a model's embedding bags that have dense gradients."""
    dense: set[int] = set()
    for module in model.modules():
        if isinstance(module, TableHolder):
            if not module._store.layout.sparse:
                dense.update(map(id, module.parameters(recurse=False)))
        elif isinstance(module, (torch.nn.EmbeddingBag, torch.nn.Embedding)) and not (
            isinstance(module, PackedTable) or module.sparse
        ):
            dense.add(id(module.weight))
    return dense


def parameters_of(params: Any, prefix: str) -> Any:
    """Return the argument ``params`` as ``torch.optim.Optimizer`` takes it.

    Raises:
        ValueError: a module without tables, or with Parameters of another kind, which would not be trained.
    """
    if isinstance(params, PackedTable):
        return own_parameters([params.place])
    if not isinstance(params, torch.nn.Module):
        return params
    parameters = embedding_parameters(params)
    numbers = {id(parameter) for parameter in parameters}
    remaining = [
        name for name, value in params.named_parameters() if value.requires_grad and id(value) not in numbers
    ]
    if remaining:
        more = f" and {len(remaining) - 1} more" if len(remaining) > 1 else ""
        raise ArgumentValueError(
            f"{prefix}: the module has Parameters that are no embedding tables of recfuse "
            f"({remaining[0]}{more}) and would not be trained. Pass "
            "recfuse.optim.embedding_parameters(model), and the others to an optimizer of torch."
        )
    if not parameters:
        raise ArgumentValueError(
            f"{prefix}: the module has no embedding tables of recfuse. Call recfuse.swap(model) first."
        )
    return parameters


def without_views(params: Any) -> Any:
    """Return the ``params`` of a group without views of packed matrices.

    Weights of packed tables become Parameters with only these tables, at the position of the first weight.
    """
    entries = [params] if isinstance(params, Tensor) else list(params)
    at = next((number for number, entry in enumerate(entries) if isinstance(entry, TableWeight)), None)
    if at is None:
        return entries
    own = own_parameters([entry._table.place for entry in entries if isinstance(entry, TableWeight)])
    others = [[e for e in part if not isinstance(e, TableWeight)] for part in (entries[:at], entries[at:])]
    return [*others[0], *own, *others[1]]


def check_parameter(parameter: Tensor, prefix: str) -> None:
    """Raise an error unless kernels can update a Parameter."""
    shape = list(parameter.shape)
    if not parameter.is_leaf or type(parameter) not in (Tensor, Parameter):
        raise ArgumentTypeError(
            f"{prefix}: {a_type(parameter)} of shape {shape} is no Parameter of its own. Pass the module's "
            "Parameters, which for packed tables are the packed matrices."
        )
    if parameter.dtype == torch.uint8:
        raise ArgumentTypeError(
            f"{prefix}: a Parameter is uint8 {shape}, codes of a quantised table. Call "
            "recfuse.dequantize(model) to train it."
        )
    if parameter.dim() != 2 or parameter.dtype not in DTYPES:
        raise ArgumentValueError(
            f"{prefix}: a Parameter is {str(parameter.dtype).removeprefix('torch.')} {shape}; expected an "
            "embedding table [rows, dim] of float32, float16 or bfloat16"
        )
    device = parameter.device.type
    if device != "cpu" and not (device == "cuda" and HAS_CUDA_KERNELS):
        raise ArgumentValueError(
            f"{prefix}: a Parameter of shape {shape} is on {parameter.device}; expected CPU or CUDA"
        )
    if not parameter.is_contiguous():
        raise ArgumentValueError(f"{prefix}: a Parameter of shape {shape} is not contiguous")


def check_has_gradients(parameters: Iterable[Tensor], prefix: str) -> None:
    """Raise ValueError for Parameters that are updated inside ``backward()``, which never have a gradient."""
    for parameter in parameters:
        if getattr(parameter, PART, False):
            raise ArgumentValueError(
                f"{prefix}: a Parameter of shape {list(parameter.shape)} has the rows of this rank alone, of "
                "tables that recfuse.distributed has sharded. Leave it out, or call "
                "recfuse.distributed.clip_grad_norm_."
            )
        update = update_of(parameter)
        if update is None or update.updater.deferred or not parameter.requires_grad:
            continue
        if (owner := update.updater.owner) is not None:
            raise ArgumentValueError(
                f"{prefix}: a Parameter of shape {list(parameter.shape)} is updated inside backward() by "
                f"recfuse.optim.{type(owner).__name__}, and has no gradient. Leave it out, or make its "
                "optimizer with deferred=True."
            )
