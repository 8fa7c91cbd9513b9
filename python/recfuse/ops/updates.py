"""The update operators (`recfuse::fused_embedding_bag_update`, `recfuse::rows_update`), and what a Parameter
knows of the fused optimizer that updates it.

Neither operator declares what it writes where autograd could see it: a backward pass that is said to write to
a tensor which requires a gradient is refused by the compiler. `fused_embedding_bag_update` returns an empty
tensor instead, the gradient of an "anchor" of the optimizer, so that no pass of the compiler may leave the
call out. FBGEMM's table-batched embedding hides its update in the same way.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recfuse import _C
from recfuse.errors import ArgumentValueError
from recfuse.ops.autograd import register
from recfuse.ops.gradients import OutputGrad
from recfuse.ops.library import below_autograd, register_fake
from recfuse.ops.training.applied_gradients import AppliedGradient
from recfuse.ops.training.updaters import Updater

_ops = torch.ops.recfuse
fused_update_operator = _ops.fused_embedding_bag_update.default
_rows_update = _ops.rows_update.default

_ATTRIBUTE = "_recfuse_update"  # of a Parameter; the compiler guards on it


unfinished: set[int] = set()
"""Updates, by id, between backward() and step() of an optimizer of torch. Nearly always empty when a call
looks: see :func:`check_finished`.
"""


class Update:
    """The update of one Parameter, an attribute of it, which copies of it do not have.

    Attributes:
        states: what the kernels write beside the weight; float32, on its device.
        anchor: an empty leaf, whose gradient is what a compiled update returns. None where it is deferred.
        applied: what stands in ``.grad`` after an update inside backward(). None where it is deferred.
        updated: whether a backward pass has updated the Parameter since the last step of its optimizer.
        captured: whether that was in a CUDA graph.
        step_in_state: the entry "step" that its optimizer has written into its state; None: there is none.
    """

    def __init__(self, weight: Tensor, updater: Updater, states: Sequence[Tensor]) -> None:
        """Of ``weight``, whose attribute it is not yet."""
        self.updater, self.states = updater, list(states)
        self.updated = self.captured = False
        self.step_in_state: int | None = None
        self._weight = weakref.ref(weight)
        for tensor in (updater.numbers, *self.states):
            # As torch._dynamo.mark_static_address, which takes a second to import: inductor's CUDA graphs
            # would copy other inputs, and the update be that of the copies.
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        self.anchor: Tensor | None = None
        self.applied: Tensor | None = None
        if updater.deferred:
            return
        self._new_applied(weight)
        _direct.add(self)
        with torch.inference_mode(False):
            self.anchor = torch.zeros(0, device=weight.device, requires_grad=True)
        self.anchor.register_post_accumulate_grad_hook(_Compiled(self))

    def _new_applied(self, weight: Tensor) -> None:
        self.applied = AppliedGradient(self, weight.shape, weight.dtype, weight.device)

    def set_applied(self, weight: Tensor) -> None:
        """Has ``.grad`` say that the gradient is applied."""
        try:
            weight.grad = self.applied
        except (RuntimeError, TypeError, ValueError):  # of another dtype or shape than before
            self._new_applied(weight)
            weight.grad = self.applied

    def check(self) -> None:
        """Raises where an update now would not be the one that the user meant."""
        owner = self.updater.owner
        if owner is None:
            raise ArgumentValueError(
                "recfuse.optim: the optimizer that the tables of this forward pass belonged to is gone; call "
                "the model again, or keep the optimizer until after backward()"
            )
        if self.updated:
            raise ArgumentValueError(
                f"{owner._where}: a second backward() before step(). The tables' rows are updated inside "
                "backward(), so gradients do not accumulate: call step() after each backward(), or "
                f"{owner._instead}"
            )
        if (
            owner._adoption is not None
            and (weight := self.weight) is not None
            and weight.grad is self.applied
        ):
            raise ArgumentValueError(
                f"{owner._where}: backward() without zero_grad() since the last one, where torch adds "
                "gradients up. The tables' rows are updated inside backward(), so gradients do not "
                f"accumulate: call zero_grad() before each backward(), or {owner._instead}"
            )

    def check_finished(self, what: str) -> None:
        """Raises where ``what`` comes between backward() and step() of an optimizer of torch, which would
        have left the rows as they were.
        """
        owner = self.updater.owner
        if self.updated and owner is not None and owner._adoption is not None:
            raise ArgumentValueError(
                f"{owner._where}: {what} between backward() and step(). backward() has updated the tables' "
                "rows already, where torch leaves them until step(): call step() after each backward(), or "
                f"{owner._instead}"
            )

    def storage(self) -> list[int]:
        """Where the states are."""
        return [state.data_ptr() for state in self.states]

    @property
    def weight(self) -> Tensor | None:
        """The Parameter, or None once it is deleted."""
        return self._weight()

    def __reduce__(self) -> tuple[Any, ...]:
        """What a pickled Parameter has instead: nothing, of a class that torch.load allows."""
        return collections.OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a Parameter belongs to no optimizer."""

    def __del__(self, discard: Callable[[int], None] = unfinished.discard) -> None:
        """No call has to wait for its step. At the end of the process, globals may be gone."""
        discard(id(self))


_direct: weakref.WeakSet[Update] = weakref.WeakSet()  # those that are made inside backward()


def is_written(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor has the memory of a Parameter, or of a state, that is updated inside backward():
    whether it is no copy of one.
    """
    addresses = set()
    for update in list(_direct):
        weight = update.weight
        if weight is not None:
            addresses.update((weight.data_ptr(), *update.storage()))
    return [tensor.data_ptr() in addresses for tensor in tensors]


class _Compiled:
    """What follows the update of a compiled backward pass, in which no Python runs."""

    def __init__(self, update: Update) -> None:
        self._update = weakref.ref(update)

    @torch._disable_dynamo
    def __call__(self, anchor: Tensor) -> None:
        """Notes it; raises, too late for this Parameter, where it was a second one."""
        anchor.grad = None
        update = self._update()
        if update is None:
            return
        weight = update.weight
        if weight is not None:
            update.check()
            if (owner := update.updater.owner) is not None:
                owner._before_update(weight, update.updater)
            note([weight], [update])
            if not weight.requires_grad:
                raise ArgumentValueError(
                    f"recfuse.optim: a Parameter of shape {list(weight.shape)} was frozen between the "
                    "forward and the backward pass of a compiled program, which has updated its rows: freeze "
                    "tables before the forward pass"
                )


def note(weights: Sequence[Tensor], updates: Sequence[Update]) -> None:
    """Notes that a backward pass has updated ``weights``, of one device: a graph that kept one must not read
    it any more. A call that is explained for a GPU updates nothing.
    """
    if _C.explain_lowers():
        return
    captured = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
    for weight, update in zip(weights, updates, strict=True):
        update.updated, update.captured = True, captured
        if update.applied is not None:
            if weight.grad is None:
                update.set_applied(weight)
            if (owner := update.updater.owner) is not None and owner._adoption is not None:
                unfinished.add(id(update))
    torch.autograd.graph.increment_version([weight for weight in weights if not weight.is_inference()])


def check_finished(weights: Sequence[Tensor], what: str) -> None:
    """Raises where ``what`` reads weights between backward() and step() of an optimizer of torch. Call it
    where ``unfinished`` is not empty.
    """
    for weight in weights:
        update = update_of(weight)
        if update is not None and id(update) in unfinished:
            update.check_finished(what)


def set_update(weight: Tensor, update: Update | None) -> None:
    """Says how ``weight`` is updated; None: by nobody, so it has gradients as any Parameter."""
    old = update_of(weight)
    if old is not None and old.applied is not None and weight.grad is old.applied:
        weight.grad = None
    if update is not None:
        setattr(weight, _ATTRIBUTE, update)
    elif hasattr(weight, _ATTRIBUTE):
        delattr(weight, _ATTRIBUTE)


def update_of(weight: Tensor) -> Update | None:
    """How ``weight`` is updated, None: by nobody."""
    return getattr(weight, _ATTRIBUTE, None) or None


def updates_of(weights: Sequence[Tensor]) -> list[Update | None] | None:
    """The same of each weight that requires a gradient; None where there is none at all."""
    if not torch.is_grad_enabled():
        return None
    found: list[Update | None] = [
        getattr(weight, _ATTRIBUTE, None) or None if weight.requires_grad else None for weight in weights
    ]
    for update in found:
        if update is not None:
            return found
    return None


def fused_update(output: OutputGrad, weights: Sequence[Tensor], updates: Sequence[Update]) -> None:
    """Updates weights that share an updater by a call's gradient. The first column of its features has
    positions in ``weights``, or -1.
    """
    updater = updates[0].updater
    states = [state for update in updates for state in update.states]
    how: tuple[Any, ...] = updater.numbers, [], updater.kind, updater.stochastic_rounding, updater.seed
    with below_autograd():
        fused_update_operator(output[0], weights, states, *output[1:6], *how)
    note(weights, updates)


def rows_update(weight: Tensor, update: Update, rows: Tensor, sums: Tensor) -> None:
    """Updates rows, each of which occurs once, by their summed gradients."""
    updater = update.updater
    rounding = updater.stochastic_rounding, updater.seed
    with below_autograd():
        _rows_update(weight, update.states, rows, sums, updater.numbers, updater.kind, *rounding)
    note([weight], [update])


@register_fake("fused_embedding_bag_update")
def _(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty((0,), dtype=torch.float32)


@register_fake("rows_update")
def _(weight: Tensor, states: Sequence[Tensor], rows: Tensor, *_: Any) -> None:
    return None


for _name in ("fused_embedding_bag_update", "rows_update"):
    register(_name)
