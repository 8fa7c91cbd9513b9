"""Which optimizers may make the step of several tables in one Parameter, and the error for the others.

A packed Parameter has the rows of many tables. Its step is that of the tables alone where each element, or
each row, is treated by itself (SGD, Adam, row-wise Adagrad). LAMB, LARS and Adafactor scale a step by norms
of the whole Parameter, so packing would change it. Only classes that are listed here, and those for which the
user vouches, are taken for row-wise.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer, optimizer

from recfuse.errors import ArgumentValueError

VOUCHED = "recfuse_row_wise"
"""Attribute of an optimizer, or of its class: True says that it treats each row for itself, False that each
table must keep a Parameter of its own.
"""
_OF_TORCH = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
    "SparseAdam",
    "LBFGS",  # takes all Parameters for one vector, however they are cut
)  # fmt: skip


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_ROW_WISE = {_name(getattr(torch.optim, name)) for name in _OF_TORCH} | {
    f"recfuse.optim.kinds.{name}" for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
} | {
    "optim.rwsadagrad.RWSAdagrad",  # of facebookresearch/dlrm
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
    # These call other optimizers, and scale all gradients by one number at most.
    "torchrec.optim.keyed.KeyedOptimizerWrapper",
    "torchrec.optim.keyed.CombinedOptimizer",
    "torchrec.optim.warmup.WarmupOptimizer",
    "torchrec.optim.clipping.GradientClippingOptimizer",
    "accelerate.optimizer.AcceleratedOptimizer",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
}  # fmt: skip


def is_row_wise(found: Optimizer) -> bool:
    """Whether the step of packed tables is that of the tables; False where that is not known."""
    vouched = getattr(found, VOUCHED, None)
    return _is_listed(type(found)) if vouched is None else bool(vouched)


@functools.lru_cache(maxsize=256)
def _is_listed(kind: type) -> bool:
    """Whether a class is in the list, or derived from such a one and overrides no method but ``__init__``."""
    for at, own in enumerate(kind.__mro__):
        if _name(own) in _ROW_WISE:
            return True
        bases = kind.__mro__[at + 1 : -1]
        for name, value in vars(own).items():
            inherited = next((vars(base)[name] for base in bases if name in vars(base)), None)
            is_method = callable(value) and callable(inherited) and name != "__init__"
            if is_method and _unhooked(value) is not _unhooked(inherited):
                return False
    return False


def _unhooked(step: Any) -> Any:
    """A method without what torch puts around ``step`` of each class whose object it creates."""
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


# ---- optimizers that are created later

_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_hooks: list[Any] = []  # of all optimizers' steps; one, once a module was packed


def watch(module: Any) -> None:
    """Has each optimizer refused, at its first step, that is not row-wise and holds a Parameter of ``module``
    in which several tables lie.
    """
    _modules.add(module)
    if not _hooks:
        _hooks.append(optimizer.register_optimizer_step_pre_hook(_before_step))


def has_other_hooks() -> bool:
    """Whether anything but this file hooks the steps of all optimizers."""
    return len(optimizer._global_optimizer_pre_hooks) > len(_hooks) or bool(
        optimizer._global_optimizer_post_hooks
    )


def shared_matrices() -> dict[int, int]:
    """How many tables lie in a Parameter, by its id, where there are several."""
    found: dict[int, int] = {}
    for module in list(_modules):
        names = module.layout.parameter_names
        for number, name in enumerate(names):
            parameter = module._parameters.get(name)
            tables = {spec.first_row for spec in module.layout.tables if spec.matrix == number}
            if parameter is not None and len(tables) > 1:
                found[id(parameter)] = len(tables)
    return found


def _before_step(found: Optimizer, args: Any, options: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or not is_row_wise(found):
        _check_step(found)


@torch._disable_dynamo
def _check_step(found: Optimizer) -> None:
    if is_row_wise(found):
        return
    shared = shared_matrices()
    for group in found.param_groups:
        for parameter in group["params"]:
            if tables := shared.get(id(parameter)):
                kind = type(found).__name__
                raise ArgumentValueError(
                    f"recfuse: {kind} is about to make a step of a packed Parameter of shape "
                    f"{list(parameter.shape)}, in which {tables} tables lie, and is not known to treat each "
                    "row for itself: it may scale the step by the whole Parameter. Create it before the swap "
                    "and pass it, recfuse.swap(model, optimizers=[optimizer]): each table then keeps a "
                    "Parameter of its own. If the step of a row depends on that row alone, set "
                    f"{kind}.{VOUCHED} = True"
                )
