"""Classes of optimizers that are known to step each row of a Parameter independently.

With these, the step of a packed Parameter equals the separate steps of its tables. LAMB, LARS and Adafactor
scale a step by norms of the whole Parameter, so packing would change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer

from recfuse.ops.training.optimizers import KINDS


class Known(NamedTuple):
    """Options on which the step of a class depends. None instead of options means always.

    Attributes:
        moves_idle: options with which a step of zeros moves a row or changes its state.
        counts: options with which a step depends on the number of steps.
    """

    moves_idle: tuple[str, ...] | None = ()
    counts: tuple[str, ...] | None = None


_LR_DECAY = Known(("lr_decay", "weight_decay"), ("lr_decay",))
_WRAPPER = Known()  # calls other optimizers, and at most scales all gradients by a number
KNOWN: dict[str, Known] = {
    "torch.optim.sgd.SGD": Known(("momentum", "weight_decay"), ("dampening",)),
    "torch.optim.adagrad.Adagrad": _LR_DECAY,
    "torch.optim.adam.Adam": Known(None),
    "torch.optim.adamw.AdamW": Known(None),
    "torch.optim.adadelta.Adadelta": Known(None, ()),
    "torch.optim.adamax.Adamax": Known(None),
    "torch.optim.nadam.NAdam": Known(None),
    "torch.optim.radam.RAdam": Known(None),
    "torch.optim.rmsprop.RMSprop": Known(None, ()),
    "torch.optim.rprop.Rprop": Known(None, ()),
    "torch.optim.asgd.ASGD": Known(None),
    "torch.optim.sparse_adam.SparseAdam": Known(None),
    "torch.optim.lbfgs.LBFGS": Known(),  # treats all Parameters as one vector, in which None is zeros
    **{  # step only rows that were looked up
        f"recfuse.{module}.{kind.name}": Known((), None if kind.counts else ())
        for module in ("optim.kinds", "torchrec.optimizers")
        for kind in KINDS
    },
    "optim.rwsadagrad.RWSAdagrad": _LR_DECAY,  # of facebookresearch/dlrm
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _LR_DECAY,
    "torchrec.optim.keyed.KeyedOptimizerWrapper": _WRAPPER,
    "torchrec.optim.keyed.CombinedOptimizer": _WRAPPER,
    "torchrec.optim.warmup.WarmupOptimizer": _WRAPPER,
    "torchrec.optim.clipping.GradientClippingOptimizer": _WRAPPER,
    "accelerate.optimizer.AcceleratedOptimizer": _WRAPPER,
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": _WRAPPER,
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": _WRAPPER,
}
"""The known optimizers, by the names of their classes."""


def name_of(kind: type) -> str:
    """Return the name of a class in `KNOWN`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_counted(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step with a param group depends on the number of steps."""
    known = next((KNOWN[name] for name in map(name_of, type(optimizer).__mro__) if name in KNOWN), Known())
    return known.counts is None or any(group.get(option) for option in known.counts)
