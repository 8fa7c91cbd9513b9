"""Updates inside the backward graphs of compiled programs.

``fused_embedding_bag_update`` is an operator of such a graph. Its arguments order it after all operators that
read the weights: a recomputed forward pass (torch.utils.checkpoint), and the gradient of the sample weights.
Two calls that look rows up in the same Parameter raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse.errors import ArgumentValueError
from recfuse.ops.gradients import OutputGrad
from recfuse.ops.library import below_autograd, library, register_fake
from recfuse.ops.training.optimizers import STATES
from recfuse.ops.training.scaled_losses import check_unscaled
from recfuse.ops.training.updaters import OPTIONS, Updater
from recfuse.ops.updates import Update, fused_update_operator, is_written

_ops = torch.ops.recfuse
_ORDINARY, _DEFERRED = -2, -1  # in `updater_of`, for weights without an updater of the list

ARGUMENTS = "Tensor[] states, Tensor[] numbers, Tensor[] anchors, int[] updater_of, int[] options"


class Updates(NamedTuple):
    """The states of optimizers for a call's weights, as arguments of an operator."""

    states: Sequence[Tensor]  # of the weights with an updater, in order
    numbers: Sequence[Tensor]  # of each updater
    anchors: Sequence[Tensor]  # of the weights with an updater
    updater_of: Sequence[int]  # of each weight: its updater, _ORDINARY or _DEFERRED
    options: Sequence[int]  # of each updater: OPTIONS

    @staticmethod
    def of(updates: Sequence[Update | None]) -> Updates:
        """Convert updates, in a form that dynamo can trace."""
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


class TracedSink(NamedTuple):
    """A weight of a call that an updater of `Updates` updates."""

    updater: int
    anchor: int  # the anchor's number
    first_state: int


def sinks_of(updates: Updates, sparse: bool) -> list[bool | TracedSink]:
    """Return a sink for each weight of a call; ``sparse`` is the sink of weights without an optimizer."""
    sinks: list[bool | TracedSink] = []
    anchor = state = 0
    for updater in updates.updater_of:
        if updater < 0:
            sinks.append(sparse or updater == _DEFERRED)
            continue
        sinks.append(TracedSink(updater, anchor, state))
        anchor += 1
        state += STATES[updates.options[updater * OPTIONS]]
    return sinks


def update_in_graph(
    output: OutputGrad,
    weights: Sequence[Tensor],
    sinks: dict[int, TracedSink],
    kept: Sequence[Tensor],
    options: Sequence[int],
    after: Sequence[Tensor],
    nodes: Sequence[Any],
) -> dict[int, Tensor]:
    """Add the updates of weights to the running backward graph; return gradients of anchors by their numbers.

    ``sinks`` has the numbers of weights in a call as keys. The updates run after the tensors ``after`` are
    computed. ``kept`` are the states and numbers of `Updates`; ``nodes`` are the nodes of its anchors in the
    graph.
    """
    tokens: dict[int, Tensor] = {}
    count = len(options) // OPTIONS
    for updater, numbers in enumerate(kept[-count:]):
        groups = [group for group, sink in sinks.items() if sink.updater == updater]
        if not groups:
            continue
        updated = output
        if len(groups) < len(weights):
            updated = output[0], _ops._features_of(output[1], groups), *output[2:]
        own_options = options[updater * OPTIONS : (updater + 1) * OPTIONS]
        own_weights = [weights[group] for group in groups]
        own_states: list[Tensor] = []
        for group in groups:
            first = sinks[group].first_state
            own_states += kept[first : first + STATES[own_options[0]]]
        order = [*after, _ops._once_a_pass(output[0], own_weights, own_states)]
        grad, *rest, _ = updated
        kind, stochastic_rounding, seed = own_options
        rounding = bool(stochastic_rounding), seed
        with below_autograd():
            token = fused_update_operator(
                grad, own_weights, own_states, *rest, numbers, order, kind, *rounding
            )
        for group in groups:
            anchor = sinks[group].anchor
            _once_a_graph(nodes[anchor])
            tokens[anchor] = token
    return tokens


def _once_a_graph(anchor: Any) -> None:
    """Raise ValueError, during tracing, if the backward graph already updates this anchor's Parameter."""
    task = torch._C._current_graph_task_id()
    if anchor.metadata.get("recfuse") == task:
        raise ArgumentValueError(
            "recfuse.optim: two calls of one compiled program look rows up in the same Parameter, which "
            "the compiled backward would update twice. Create the optimizer with deferred=True, or do not "
            "compile these calls."
        )
    anchor.metadata["recfuse"] = task


_NOTED = 4096
"""The most entries of `_pass_of`; more than the Parameters of a model."""
_pass_of: dict[int, int] = {}  # by the address of a weight: the last backward pass that has updated it


def _once_a_pass(grad: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
    """Raise ValueError before a compiled program updates a copy, or a weight twice in a backward pass.

    The anchor cannot detect a second update: it only receives the sum of both gradients. The argument
    ``grad`` keeps the operator out of the forward graph. Returns a tensor that orders the update after this
    check.
    """
    check_unscaled()
    task = torch._C._current_graph_task_id()
    for tensor, is_own in zip((*weights, *states), is_written((*weights, *states)), strict=True):
        if tensor.numel() > 0 and not is_own:
            raise ArgumentValueError(
                "recfuse.optim: the backward pass of a compiled program would update a copy of a "
                f"Parameter, or of its state, of shape {list(tensor.shape)}, as hooks of saved tensors make "
                "them, such as torch.autograd.graph.save_on_cpu. Call the tables outside of such hooks, "
                "create the optimizer with deferred=True, or do not compile these calls."
            )
    for weight in weights:
        address = weight.data_ptr()
        if task >= 0 and _pass_of.get(address) == task and weight.numel() > 0:
            raise ArgumentValueError(
                "recfuse.optim: two calls of compiled programs look rows up in one Parameter, of shape "
                f"{list(weight.shape)}, in one backward(), which would update it twice, and has once. "
                "Create the optimizer with deferred=True, or do not compile these calls."
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
