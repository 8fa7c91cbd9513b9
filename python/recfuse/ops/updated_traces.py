"""The operators that compiled programs have for calls of tables that a fused optimizer updates.

``recfuse::_fused_embedding_bag_updated`` and ``recfuse::_embedding_bag_updated`` take what the optimizer
keeps, then the arguments of the operators whose names they have, and give what those give. In their backward
pass ``fused_embedding_bag_update`` stands among the other operators. Its arguments order it behind all in
that pass that
reads the weights: the forward pass where it is recomputed (torch.utils.checkpoint), and the gradient of the
sample weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.ops.autograd import apply, refused_jvp
from recfuse.ops.gradients import WeightGradCall, sample_weights_grad, used_of, weight_grad
from recfuse.ops.library import (
    below_autograd,
    call_below_autograd,
    library,
    needs_derivatives,
    register_fake,
)
from recfuse.ops.training.scaled_losses import check_unscaled
from recfuse.ops.updated_calls import Lookups, forms_of
from recfuse.ops.updates import OPTIONS, STATES, Update, Updater, is_written

_ops = torch.ops.recfuse
_fused_update = _ops.fused_embedding_bag_update.default
_ORDINARY, _DEFERRED = -2, -1  # in `updater_of`, where no updater of the list has the weight

ARGUMENTS = "Tensor[] states, Tensor[] numbers, Tensor[] anchors, int[] updater_of, int[] options"


class Updates(NamedTuple):
    """What optimizers keep of a call's weights, as arguments of an operator."""

    states: Sequence[Tensor]  # of the weights with an updater, in order
    numbers: Sequence[Tensor]  # of each updater
    anchors: Sequence[Tensor]  # of the weights with an updater
    updater_of: Sequence[int]  # of each weight: its updater, or one of the above
    options: Sequence[int]  # of each updater: OPTIONS

    @staticmethod
    def of(updates: Sequence[Update | None]) -> Updates:
        """In a form that dynamo follows."""
        states: list[Tensor] = []
        anchors: list[Tensor] = []
        updaters: list[Updater] = []
        updater_of: list[int] = []
        for update in updates:
            if update is None:
                updater_of.append(_ORDINARY)
            elif update.anchor is None:
                updater_of.append(_DEFERRED)
            else:
                if not any(update.updater is updater for updater in updaters):
                    updaters.append(update.updater)
                for number, updater in enumerate(updaters):
                    if update.updater is updater:
                        updater_of.append(number)
                states.extend(update.states)
                anchors.append(update.anchor)
        options = [option for updater in updaters for option in updater.options]
        return Updates(states, [updater.numbers for updater in updaters], anchors, updater_of, options)


class Family(NamedTuple):
    """One of the two operators, and how its arguments are those of a fused call."""

    operator: Callable[..., Tensor]
    with_winners: Callable[..., tuple[Tensor, Tensor]]
    lookups_of: Callable[..., tuple[Sequence[Tensor], Lookups, Tensor | None]]


class TracedCall(torch.autograd.Function):
    """A call in whose backward graph weights are updated. The last arguments: weights, then anchors."""

    @staticmethod
    def forward(
        family: Family,
        call: tuple[Any, ...],
        lookups: Lookups,
        updates: Updates,
        sample_weights: Tensor | None,
        *_: Tensor,
    ) -> Any:
        """Pools; with any_max also gives the winners."""
        operator = family.with_winners if lookups.any_max else family.operator
        return call_below_autograd(operator, *call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the gradients and the updates need."""
        _, _, lookups, updates, sample_weights, *rest = inputs
        weights, winners = rest[: len(updates.updater_of)], None
        if lookups.any_max:
            output, winners = output
            ctx.set_materialize_grads(False)
        last = output if updates.anchors else None
        kept = *updates.states, *updates.numbers, *weights
        ctx.save_for_backward(*lookups[:3], sample_weights, winners, last, *kept)
        ctx.updates = updates._replace(states=len(updates.states), numbers=len(updates.numbers), anchors=())
        ctx.sparse, ctx.forms = lookups.sparse, forms_of(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients, with those of the anchors from the updates."""
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad is None:
            return tuple(grads)
        features, indices, offsets, sample_weights, winners, output, *kept = ctx.saved_tensors
        updates, lookups = ctx.updates, (features, indices, offsets)
        used = used_of(ctx, features, grad)
        used_lookups = lookups if used is None else (used.features, indices, offsets)
        states, kept = kept[: updates.states], kept[updates.states :]
        numbers, weights = kept[: updates.numbers], kept[updates.numbers :]
        first = 5  # of the weights among the arguments
        nodes = len(ctx.next_functions) - len(grads)  # from the end, where all are tensors
        after = [output]
        for group, (updater, form) in enumerate(zip(updates.updater_of, ctx.forms, strict=True)):
            if used is not None and group not in used.groups:
                continue
            if updater < 0 and ctx.needs_input_grad[first + group]:
                call = WeightGradCall(grad, *used_lookups, group, *form, sample_weights, winners)
                sparse = ctx.sparse or updater == _DEFERRED
                grads[first + group] = weight_grad(ctx, call, sparse, first + group + nodes)
        if ctx.needs_input_grad[4]:
            grads[4] = sample_weights_grad(grad, weights, lookups, sample_weights.dtype)
            after.append(grads[4])
        updated = [group for group, updater in enumerate(updates.updater_of) if updater >= 0]
        states_of = _shared_out(states, updated, updates)
        for updater, own_numbers in enumerate(numbers):
            groups = [group for group in updated if updates.updater_of[group] == updater]
            if used is not None:
                groups = [group for group in groups if group in used.groups]
            if not groups:
                continue
            own = used_lookups[0]
            own = own if len(groups) == len(weights) else _ops._features_of(own, groups)
            kind, *rounding = updates.options[updater * OPTIONS : (updater + 1) * OPTIONS]
            own_weights = [weights[group] for group in groups]
            own_states = [state for group in groups for state in states_of[group]]
            with below_autograd():
                token = _fused_update(
                    grad,
                    own_weights,
                    own_states,
                    own,
                    indices,
                    offsets,
                    sample_weights,
                    winners,
                    own_numbers,
                    [*after, _ops._once_a_pass(grad, own_weights, own_states)],
                    kind,
                    bool(rounding[0]),
                    rounding[1],
                )
            for group in groups:
                at = first + len(weights) + updated.index(group)
                _once_a_graph(ctx.next_functions[at + nodes][0])
                grads[at] = token
        return tuple(grads)

    jvp = refused_jvp("embedding_bag")


def _shared_out(states: Sequence[Tensor], updated: Sequence[int], updates: Any) -> dict[int, list[Tensor]]:
    """The states of each updated weight."""
    found, at = {}, 0
    for group in updated:
        count = STATES[updates.options[updates.updater_of[group] * OPTIONS]]
        found[group] = list(states[at : at + count])
        at += count
    return found


def _once_a_graph(anchor: Any) -> None:
    """Raises where a backward graph has an update of this anchor's Parameter already: while it is traced."""
    task = torch._C._current_graph_task_id()
    if anchor.metadata.get("recfuse") == task:
        raise ArgumentValueError(
            "recfuse.optim: two calls of one compiled program look rows up in the same Parameter, which the "
            "compiled backward would update twice: create the optimizer with deferred=True, or do not "
            "compile these calls"
        )
    anchor.metadata["recfuse"] = task


_NOTED = 4096
"""Of the passes below; more than the Parameters of a model."""
_pass_of: dict[int, int] = {}  # by the address of a weight: the backward pass that has last updated it


def _once_a_pass(grad: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """Raises where a compiled program is about to update a copy; or a weight that another call of one has
    updated in the same backward pass: the anchor, whose gradient is what both return, is told of their sum
    alone. ``grad`` keeps it out of the forward graph. Returns something for the update to wait for.
    """
    check_unscaled()
    task = torch._C._current_graph_task_id()
    for tensor, is_own in zip((*weights, *states), is_written((*weights, *states)), strict=True):
        if tensor.numel() > 0 and not is_own:
            raise ArgumentValueError(
                "recfuse.optim: the backward pass of a compiled program would update a copy of a Parameter, "
                f"or of its state, of shape {list(tensor.shape)}. Hooks of saved tensors make copies, as "
                "those of torch.autograd.graph.save_on_cpu: call the tables outside of them, create the "
                "optimizer with deferred=True, or do not compile these calls"
            )
    for weight in weights:
        address = weight.data_ptr()
        if task >= 0 and _pass_of.get(address) == task and weight.numel() > 0:
            raise ArgumentValueError(
                "recfuse.optim: two calls of compiled programs look rows up in one Parameter, of shape "
                f"{list(weight.shape)}, in one backward(), which would update it twice, and has once: create "
                "the optimizer with deferred=True, or do not compile these calls"
            )
        _pass_of[address] = task
    if len(_pass_of) > _NOTED:
        _pass_of.clear()
    return weights[0].new_empty(0, dtype=torch.float32)


library.define("_once_a_pass(Tensor grad, Tensor[] weights, Tensor[] states) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl("_once_a_pass", _once_a_pass, _key)


@register_fake("_once_a_pass", follows="weights")
def _(grad: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    return weights[0].new_empty(0, dtype=torch.float32)


def define_updated(name: str, family: Family, shape: Callable[..., Tensor], follows: str) -> Any:
    """Defines the operator for the calls of ``name``; ``shape`` is the fake of that one, whose outputs are
    where the argument ``follows`` is.
    """
    own = f"_{name}_updated"
    arguments = str(getattr(_ops, name).default._schema).partition("(")[2]
    library.define(f"{own}({ARGUMENTS}, {arguments}")

    def run(states: Any, numbers: Any, anchors: Any, updater_of: Any, options: Any, *call: Any) -> Tensor:
        return family.operator(*call)

    def autograd(
        states: Any, numbers: Any, anchors: Any, updater_of: Any, options: Any, *call: Any
    ) -> Tensor:
        weights, lookups, sample_weights = family.lookups_of(*call)
        if not needs_derivatives((*weights, sample_weights)):
            with below_autograd():
                return family.operator(*call)
        updates = Updates(states, numbers, anchors, tuple(updater_of), tuple(options))
        found = apply(TracedCall, family, call, lookups, updates, sample_weights, *weights, *anchors)
        return found[0] if isinstance(found, tuple) else found

    for key in ("CPU", "CUDA"):
        library.impl(own, run, key)
    library.impl(own, autograd, "Autograd")
    register_fake(own, follows)(lambda *given: shape(*given[5:]))
    return getattr(_ops, own).default
