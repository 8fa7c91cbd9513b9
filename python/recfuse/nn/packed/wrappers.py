"""Refusal of wrappers of torch.distributed that do not support packed tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from recfuse.errors import ArgumentTypeError, ArgumentValueError


def check_attribute(module: torch.nn.Module, name: str) -> None:
    """Raise TypeError if FullyShardedDataParallel marks a packed module as its own, before any change.

    Its ``state_dict()`` expects an entry for each Parameter. ``fully_shard``, which works, sets the same
    attribute.
    """
    if name != "_is_fsdp_managed_module":
        return
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.fsdp._dynamo_utils":
        kind = type(module).__name__
        raise ArgumentTypeError(
            f"recfuse: FullyShardedDataParallel cannot wrap a {kind}, since its state_dict() expects an "
            "entry for each packed Parameter, and a state_dict has an entry for each table. Use "
            "torch.distributed.fsdp.fully_shard, pass ignored_modules=[the module], or call "
            "recfuse.unswap(model) first."
        )


def check_parallel(weights: Sequence[Tensor]) -> None:
    """Raise ValueError in the forward of a DistributedDataParallel that has a matrix with sparse gradients.

    It would fail in ``backward()``.
    """
    parallel = DistributedDataParallel._active_ddp_module
    if parallel is None or not torch.is_grad_enabled():
        return
    wrapped = {id(parameter) for parameter in parallel._module_parameters}
    if any(id(weight) in wrapped for weight in weights):
        raise ArgumentValueError(
            "recfuse: a DistributedDataParallel has packed tables with sparse=True, and takes sparse "
            "gradients only of torch.nn.EmbeddingBag. Use sparse=False, recfuse.swap(model, fuse=False), "
            "or name the tables in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) before it "
            "wraps the model, and call recfuse.optim.average_gradients(parameters) before step()."
        )
