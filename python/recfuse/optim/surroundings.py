"""What works against an update inside ``backward()``, and is seen nowhere in it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError

_KINDS = torch.amp.GradScaler, torch.nn.parallel.DistributedDataParallel


class Surroundings:
    """Scalers and wrappers around an optimizer's tables, looked for when there may be new ones."""

    def __init__(self) -> None:
        """Nothing was looked for yet."""
        self._classes: list[type] = []
        self._references = -1
        self._seen: list[weakref.ref[Any]] = []

    def may_be_new(self) -> bool:
        """Whether they are to be looked for again, found out in a microsecond: an instance or a subclass
        refers to its class, so that with a new one the class has more references, unless an old one is gone.
        """
        if sum(map(sys.getrefcount, self._classes)) != self._references:
            return True
        for ref in self._seen:
            if (seen := ref()) is None or (isinstance(seen, torch.amp.GradScaler) and _is_used(seen)):
                return True
        return False

    def check(self, parameters: Sequence[Tensor], where: str, deferred: bool) -> None:
        """Looks for them; see :func:`check_surroundings`."""
        self._seen = list(map(weakref.ref, check_surroundings(parameters, where, deferred)))
        self._classes = list(_with_subclasses(_KINDS))
        self._references = sum(map(sys.getrefcount, self._classes))


def _with_subclasses(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(kind.__subclasses__())


def check_surroundings(parameters: Sequence[Tensor], where: str, deferred: bool) -> list[Any]:
    """Raises where a gradient scaler has scaled the loss of tables that are updated inside ``backward()``, or
    DistributedDataParallel waits for gradients that it will not have, or not as they are. Returns the scalers
    and wrappers that do no harm now.
    """
    harmless = []
    own = {id(parameter) for parameter in parameters}
    instead = f"create the optimizer with deferred=True: {where}(..., deferred=True)"
    ignored = (
        "name them in DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names) "
        "before it wraps the model"
    )
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), _KINDS):  # not isinstance, which asks proxies for their __class__
            continue
        if isinstance(candidate, torch.amp.GradScaler):
            if not deferred and _is_used(candidate):
                raise ArgumentValueError(
                    f"{where}: a GradScaler is in use. The tables are updated inside backward(), before it "
                    f"could unscale the gradients and look for infinities: {instead}, or train in bfloat16 "
                    "without a scaler"
                )
        elif _waits_for(candidate, own, deferred):
            if deferred:
                raise ArgumentValueError(
                    f"{where}: a DistributedDataParallel has tables whose gradients are sparse, which it "
                    f"expects of torch.nn.EmbeddingBag with sparse=True alone: {ignored}, and call "
                    "recfuse.optim.average_gradients(parameters) before step()"
                )
            raise ArgumentValueError(
                f"{where}: a DistributedDataParallel has the tables. They are updated inside backward() "
                f"by the gradients of this process alone: {ignored}; for tables that shall be the same "
                f"on all processes, also {instead}, and call recfuse.optim.average_gradients(parameters) "
                "before step()"
            )
        harmless.append(candidate)
    return harmless


def check_scaler(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises where ``step()`` is called by a gradient scaler, too late for the tables of a direct one."""
    if hasattr(optimizer, "grad_scale"):  # set by a GradScaler around its call of step()
        raise ArgumentValueError(
            f"{where}: step() is called by a GradScaler, whose scaled gradients the tables were updated with "
            "inside backward(): create the optimizer with deferred=True"
        )


def _is_used(scaler: torch.amp.GradScaler) -> bool:
    """Whether it has scaled something."""
    return bool(vars(scaler).get("_enabled")) and vars(scaler).get("_scale") is not None


def _waits_for(parallel: torch.nn.Module, own: set[int], deferred: bool) -> bool:
    """Whether it reduces one of the gradients, and does not know that it is sparse."""
    sparse = [
        id(module.weight)
        for module in parallel.modules()
        if deferred and isinstance(module, torch.nn.EmbeddingBag) and module.sparse
    ]
    return any(
        id(p) in own and id(p) not in sparse and p.requires_grad and not getattr(p, "_ddp_ignored", False)
        for p in parallel.parameters()
    )
