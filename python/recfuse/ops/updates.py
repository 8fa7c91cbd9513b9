"""The update operators, and the link from a Parameter to the fused optimizer that updates it.

The operators are `recfuse::fused_embedding_bag_update` and `recfuse::rows_update`. Neither declares its
writes to autograd: the compiler refuses a backward pass that writes to a tensor which requires a gradient.
`fused_embedding_bag_update` returns an empty tensor instead, the gradient of an "anchor" of the optimizer, so
that no pass of the compiler may remove the call. FBGEMM's table-batched embedding hides its update in the
same way.
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
_call_fused_update = fused_update_operator._op  # as a call of the operator, without its Python frame
_rows_update = _ops.rows_update.default

_ATTRIBUTE = "_recfuse_update"  # of a Parameter; the compiler guards on it


unfinished: set[int] = set()
"""Updates, by id, between backward() and step() of an optimizer of torch.

Nearly always empty when a call reads it; see :func:`check_finished`.
"""


class Update:
    """The update of a Parameter, an attribute of the Parameter that its copies do not have.

    Attributes:
        states: the tensors that kernels write in addition to the weight; float32, on its device.
        anchor: an empty leaf, whose gradient is the result of a compiled update. None if deferred.
        applied: the value of ``.grad`` after an update inside backward(). None if deferred.
        updated: True if a backward pass has updated the Parameter since the last step of its optimizer.
        captured: True if that update was captured in a CUDA graph.
        step_in_state: the entry "step" that its optimizer has written into its state, or None.
    """

    def __init__(self, weight: Tensor, updater: Updater, states: Sequence[Tensor]) -> None:
        """Create the update of ``weight``, without setting the attribute."""
        self.updater, self.states = updater, list(states)
        self.updated = self.captured = False
        self.step_in_state: int | None = None
        self._weight = weakref.ref(weight)
        for tensor in (updater.numbers, *self.states):
            # As torch._dynamo.mark_static_address, which takes a second to import. Without the mark,
            # inductor's CUDA graphs would copy these inputs and update the copies.
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
        """Set ``.grad`` to the applied gradient."""
        try:
            weight.grad = self.applied
        except (RuntimeError, TypeError, ValueError):  # dtype or shape has changed
            self._new_applied(weight)
            weight.grad = self.applied

    def check(self) -> Any:
        """Return the optimizer; raise ValueError if an update now would differ from the user's intention."""
        owner = self.updater.get_owner()
        if owner is None:
            raise ArgumentValueError(
                "recfuse.optim: the optimizer that the tables of this forward pass belonged to is gone. "
                "Call the model again, or keep the optimizer until after backward()."
            )
        if self.updated:
            raise ArgumentValueError(
                f"{owner._prefix}: a second backward() came before step(), but the tables' rows are updated "
                "inside backward(), so gradients do not accumulate. "
                f"{owner._instead}, or call step() after each backward()."
            )
        if owner._bridge is not None and (weight := self.weight) is not None and weight.grad is self.applied:
            raise ArgumentValueError(
                f"{owner._prefix}: backward() came without zero_grad() since the last backward(), where "
                "torch adds gradients up, but the tables' rows are updated inside backward(), so gradients "
                "do not accumulate. "
                f"{owner._instead}, or call zero_grad() before each backward()."
            )
        return owner

    def check_finished(self, reader: str) -> None:
        """Raise ValueError if ``reader`` is called between backward() and step() of an optimizer of torch.

        Torch's own optimizer would not have changed the rows yet.
        """
        owner = self.updater.owner
        if self.updated and owner is not None and owner._bridge is not None:
            raise ArgumentValueError(
                f"{owner._prefix}: {reader} came between backward() and step(), but backward() has "
                "updated the tables' rows already, where torch leaves them until step(). "
                f"{owner._instead}, or call step() after each backward()."
            )

    def storage(self) -> list[int]:
        """Return the addresses of the states."""
        return [state.data_ptr() for state in self.states]

    @property
    def weight(self) -> Tensor | None:
        """The Parameter, or None after its deletion."""
        return self._weight()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty object of a class that torch.load allows."""
        return collections.OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None, because a copy of a Parameter belongs to no optimizer."""

    def __del__(self, discard: Callable[[int], None] = unfinished.discard) -> None:
        """Remove the update from ``unfinished``. Takes no globals, which may be deleted at exit."""
        discard(id(self))


_direct: weakref.WeakSet[Update] = weakref.WeakSet()  # updates inside backward()


def is_written(tensors: Sequence[Tensor]) -> list[bool]:
    """Return, for each tensor, whether its memory is that of a Parameter or state updated inside backward().

    False means that the tensor is a copy.
    """
    addresses = set()
    for update in list(_direct):
        weight = update.weight
        if weight is not None:
            addresses.update((weight.data_ptr(), *update.storage()))
    return [tensor.data_ptr() in addresses for tensor in tensors]


class _Compiled:
    """The hook after an update of a compiled backward pass, which runs no Python itself."""

    def __init__(self, update: Update) -> None:
        self._update = weakref.ref(update)

    @torch._disable_dynamo
    def __call__(self, anchor: Tensor) -> None:
        """Record the update; raise for a second update, which has already changed the Parameter."""
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
                    "forward and the backward pass of a compiled program, which has updated its rows. "
                    "Freeze tables before the forward pass."
                )


def note(weights: Sequence[Tensor], updates: Sequence[Update]) -> None:
    """Record that a backward pass has updated ``weights``, which are on one device.

    Increments their versions, so that a graph that has saved a weight cannot read it any more. An explained
    call updates nothing.
    """
    if _C.explain_lowers():
        return
    captured = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
    for weight, update in zip(weights, updates, strict=True):
        update.updated, update.captured = True, captured
        if update.applied is not None:
            if weight.grad is None:
                update.set_applied(weight)
            if (owner := update.updater.get_owner()) is not None and owner._bridge is not None:
                unfinished.add(id(update))
    torch.autograd.graph.increment_version([weight for weight in weights if not weight.is_inference()])


def check_finished(weights: Sequence[Tensor], reader: str) -> None:
    """Raise ValueError if ``reader`` reads weights between backward() and step() of an optimizer of torch.

    Call it if ``unfinished`` is not empty.
    """
    for weight in weights:
        update = update_of(weight)
        if update is not None and id(update) in unfinished:
            update.check_finished(reader)


def set_update(weight: Tensor, update: Update | None) -> None:
    """Set the update of ``weight``; None gives it gradients, as any Parameter."""
    old = update_of(weight)
    if old is not None and old.applied is not None and weight.grad is old.applied:
        weight.grad = None
    if update is not None:
        setattr(weight, _ATTRIBUTE, update)
    elif hasattr(weight, _ATTRIBUTE):
        delattr(weight, _ATTRIBUTE)


def update_of(weight: Tensor) -> Update | None:
    """Return the update of ``weight``, or None without a fused optimizer."""
    return getattr(weight, _ATTRIBUTE, None) or None


def updates_of(weights: Sequence[Tensor]) -> list[Update | None] | None:
    """Return the update of each weight that requires a gradient, or None if no weight has an update."""
    if not torch.is_grad_enabled():
        return None
    updates: list[Update | None] = []
    has_any = False
    for weight in weights:
        update = getattr(weight, _ATTRIBUTE, None) or None if weight.requires_grad else None
        has_any = has_any or update is not None
        updates.append(update)
    return updates if has_any else None


def fused_update(output: OutputGrad, weights: Sequence[Tensor], updates: Sequence[Update]) -> None:
    """Update weights that share an updater with a call's gradient.

    The first column of its features has positions in ``weights``, or -1.
    """
    updater, states = updates[0].updater, updates[0].states
    for update in updates[1:]:
        states = states + update.states
    grad, *lookups, _ = output
    rounding = updater.stochastic_rounding, updater.seed
    with below_autograd():
        _call_fused_update(grad, weights, states, *lookups, updater.numbers, [], updater.kind, *rounding)
    note(weights, updates)


def rows_update(weight: Tensor, update: Update, rows: Tensor, sums: Tensor) -> None:
    """Update rows, each of which occurs once, with their summed gradients."""
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
