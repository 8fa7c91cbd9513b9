"""Calls of tables that a fused optimizer updates: the backward pass updates their rows instead of giving
gradients.

Eager: what a backward pass asks for is done at its end, when nothing in it reads a weight any more: not the
recomputed forward of torch.utils.checkpoint, and not a second call of the same tables. A Parameter of one
call is updated by one operator; one of several calls (two towers, tied tables) by their sparse gradients,
summed first, as torch would.

Compiled: the call is another operator, whose arguments have what the optimizer keeps, and the update is a
part of the backward graph. There it is refused that two calls look rows up in one Parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from recfuse.errors import ArgumentValueError
from recfuse.ops.autograd import eager_apply
from recfuse.ops.gradients import (
    WeightGradCall,
    find_winners,
    sample_weights_grad,
    used_of,
    weight_grad,
    weight_grads,
)
from recfuse.ops.library import call_below_autograd, dtype_code
from recfuse.ops.training.scaled_losses import check_unscaled
from recfuse.ops.training.update_features import matrices_only
from recfuse.ops.updates import Update, fused_update, rows_update

_FLOAT32 = 0  # its code


class Lookups(NamedTuple):
    """What a call looks up, in the form of fused calls."""

    features: Tensor
    indices: Tensor
    offsets: Tensor
    output_dim: int
    any_max: bool
    sparse: bool  # of weights without an optimizer here


class Forms(NamedTuple):
    """Shape and code of the dtype of a weight."""

    rows: int
    dim: int
    dtype: int


def forms_of(weights: Sequence[Tensor]) -> list[Forms]:
    """The form of each weight."""
    return [Forms(*weight.shape, dtype_code(weight, "fused_embedding_bag", "weights")) for weight in weights]


def check_hooks(weights: Sequence[Tensor], updates: Sequence[Update | None]) -> None:
    """Raises where a weight without a gradient has a hook that waits for one."""
    for weight, update in zip(weights, updates, strict=True):
        if update is None or update.updater.deferred:
            continue
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ArgumentValueError(
                "recfuse.optim: a Parameter that a fused optimizer updates inside backward() has a hook, "
                "which would never run, since the Parameter has no gradient: remove it, or make the "
                "optimizer with deferred=True"
            )


# ---- eager


def updated_call(
    operator: Callable[..., Tensor],
    call: tuple[Any, ...],
    lookups: Lookups,
    updates: Sequence[Update | None],
    sample_weights: Tensor | None,
    weights: Sequence[Tensor],
) -> Tensor:
    """Calls an operator with the arguments ``call``; see the Function."""
    check_hooks(weights, updates)
    if (wrapper := DistributedDataParallel._get_active_ddp_module()) is not None:  # whose forward this is in
        for update in updates:
            if update is not None and (owner := update.updater.owner) is not None:
                owner._check_wrapper(wrapper)
    found: Tensor = _apply(operator, call, lookups, updates, sample_weights, *weights)
    return found


class UpdatedCall(torch.autograd.Function):
    """A call of one of the operators, in whose backward pass some weights are updated."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Callable[..., Tensor],
        call: tuple[Any, ...],
        lookups: Lookups,
        updates: Sequence[Update | None],
        sample_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        """Pools; ``call`` are the operator's arguments."""
        if torch._C._current_graph_task_id() != -1:
            _check_recomputed(updates)
        output = call_below_autograd(operator, *call)
        where = lookups[:3]
        winners = None
        if lookups.any_max:
            winners = call_below_autograd(find_winners, weights, *where, lookups.output_dim)
        kept = weights if sample_weights is not None and ctx.needs_input_grad[4] else ()
        ctx.save_for_backward(*where, sample_weights, winners, *kept)
        ctx.weights, ctx.updates, ctx.sparse = weights, updates, lookups.sparse
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the other weights and of per_sample_weights; asks for the updates."""
        features, indices, offsets, sample_weights, winners, *kept = ctx.saved_tensors
        needed, nodes = ctx.needs_input_grad, ctx.next_functions  # made again each time that they are read
        grads: list[Tensor | None] = [None] * len(needed)
        lookups, count = (features, indices, offsets), len(ctx.weights)
        used_lookups = lookups
        if (used := used_of(ctx, features, grad)) is not None:
            used_lookups = used.features, indices, offsets
        direct: dict[int, tuple[Tensor, Update]] = {}
        calls: list[WeightGradCall] = []
        sparse: list[bool] = []
        for group, (weight, update) in enumerate(zip(ctx.weights, ctx.updates, strict=True)):
            at = group - count
            if not needed[at] or (used is not None and group not in used.groups):
                continue
            if update is not None:
                updater = update.updater
                if (owner := updater.owner) is not None:
                    owner._before_update(weight, updater)
                if not updater.deferred:
                    if weight.requires_grad and _is_wanted(nodes[at][0]):  # may be frozen by now
                        update.check()
                        direct[group] = weight, update
                    continue
            form = forms_of([weight])[0]
            calls.append(WeightGradCall(grad, *used_lookups, group, *form, sample_weights, winners))
            sparse.append(ctx.sparse or update is not None)
        if calls:
            places = [call.group - count for call in calls]
            for at, found in zip(places, weight_grads(ctx, calls, sparse, places), strict=True):
                grads[at] = found
        if needed[4]:
            grads[4] = sample_weights_grad(grad, kept, lookups, sample_weights.dtype)
        if direct:
            _ask(_Asked(grad, *used_lookups, sample_weights, winners, direct, count, _stream_of(grad)))
        return tuple(grads)


_apply = eager_apply(UpdatedCall)


def _check_recomputed(updates: Sequence[Update | None]) -> None:
    """Raises where a forward pass inside a backward pass would read rows that this has updated already. What
    torch.utils.checkpoint recomputes with use_reentrant=True has a backward pass of its own, at whose end it
    updates, while the outer one may recompute more.
    """
    if any(update is not None and update.updated for update in updates):
        raise ArgumentValueError(
            "recfuse.optim: a forward pass inside a backward pass would read rows that the same backward() "
            "has updated already. If this is torch.utils.checkpoint, use use_reentrant=False; else make the "
            "optimizer with deferred=True"
        )


def _is_wanted(node: Any) -> bool:
    """Whether this pass would bring a gradient to a Parameter: not one of torch.autograd.grad, or of
    backward(inputs=...) for others.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad, of leaves
        return False


def _stream_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Number, device and kind of device of the current stream of a tensor's GPU: what a Stream is made of,
    which takes longer than to look.
    """
    return torch._C._cuda_getCurrentStream(tensor.get_device()) if tensor.is_cuda else None


class _Asked(NamedTuple):
    """Updates of one call."""

    grad: Tensor
    features: Tensor
    indices: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    winners: Tensor | None
    weights: dict[int, tuple[Tensor, Update]]  # by their numbers in the call
    matrices: int  # weights of the call
    stream: tuple[int, int, int] | None  # of the GPU, which has the gradient; see _stream_of

    def bring_here(self) -> None:
        """Makes the current stream wait for the gradient, where another one has it."""
        if self.stream is None or self.stream == _stream_of(self.grad):
            return
        number, device, kind = self.stream
        here = torch.cuda.current_stream(device)
        here.wait_stream(torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind))
        for tensor in (self.grad, self.indices, self.offsets, self.sample_weights, self.winners):
            if tensor is not None:
                tensor.record_stream(here)

    def run(self, numbers: Sequence[int]) -> None:
        """Updates some of the weights, which share an updater."""
        features = self.features
        if len(numbers) < self.matrices:
            features = matrices_only(features, numbers)
        weights, updates = zip(*(self.weights[number] for number in numbers), strict=True)
        lookups = features, self.indices, self.offsets
        fused_update(self.grad, weights, updates, lookups, self.sample_weights, self.winners)

    def gradient(self, number: int) -> Tensor:
        """The sparse gradient of one weight, in float32."""
        weight, _ = self.weights[number]
        rest = *weight.shape, _FLOAT32, self.sample_weights, self.winners
        call = WeightGradCall(self.grad, self.features, self.indices, self.offsets, number, *rest)
        with torch.no_grad():
            return weight_grad(None, call, sparse=True, argument=0)


class _Pass:
    """A backward pass, and the updates that its end is to make."""

    def __init__(self) -> None:
        self.asked: list[_Asked] = []

    def finish(self) -> None:
        """Makes the updates. The engine calls it, on the caller's stream, unless the pass has failed."""
        asked, self.asked = self.asked, []
        uses: dict[int, int] = {}
        for call in asked:
            call.bring_here()
            for weight, update in call.weights.values():
                update.check()
                uses[id(weight)] = uses.get(id(weight), 0) + 1
        owners = {id(u.updater.owner): u.updater.owner for call in asked for _, u in call.weights.values()}
        several: dict[int, list[tuple[_Asked, int]]] = {}
        for call in asked:
            groups: dict[int, list[int]] = {}
            for number, (weight, update) in call.weights.items():
                if uses[id(weight)] == 1:
                    groups.setdefault(id(update.updater), []).append(number)
                else:
                    several.setdefault(id(weight), []).append((call, number))
            for numbers in groups.values():
                call.run(numbers)
        for calls in several.values():
            weight, update = calls[0][0].weights[calls[0][1]]
            total = functools.reduce(torch.add, (call.gradient(number) for call, number in calls)).coalesce()
            rows_update(weight, update, total.indices()[0], total.values())
        for owner in owners.values():
            owner._pass_finished()


# The passes that run now, by the engine's number of them; the engine keeps each until its end.
_passes: dict[int, weakref.ref[_Pass]] = {}


def _ask(call: _Asked) -> None:
    """Asks the running backward pass to make updates at its end."""
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    running = None if found is None else found()
    if running is None:
        check_unscaled(next(iter(call.weights.values()))[1].updater.owner)
        for old in [number for number, ref in list(_passes.items()) if ref() is None]:
            _passes.pop(old, None)
        running = _Pass()
        _passes[task] = weakref.ref(running)
        torch.autograd.Variable._execution_engine.queue_callback(running.finish)
    running.asked.append(call)
