"""Updates inside eager backward passes.

Updates are made at the end of a backward pass, when it no longer reads a weight: neither in the recomputed
forward of torch.utils.checkpoint, nor in a second call of the same tables. An operator updates the Parameters
of a single call. A Parameter of several calls (two towers, tied tables) is updated by their sparse gradients,
summed first, as torch would.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from recfuse.errors import ArgumentValueError
from recfuse.ops.gradients import OutputGrad, coalesced, sparse_grads
from recfuse.ops.training.scaled_losses import check_unscaled, scaled_passes
from recfuse.ops.training.update_features import matrices_only
from recfuse.ops.updates import Update, fused_update, rows_update

_FLOAT32 = 0  # the dtype's code

UpdateSink: TypeAlias = tuple[Tensor, Update]
"""A weight that a fused optimizer updates, and its update."""


def check_hooks(weight: Tensor, update: Update) -> None:
    """Raise ValueError if a weight without a gradient has a hook that waits for a gradient."""
    if update.updater.deferred:
        return
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ArgumentValueError(
            "recfuse.optim: a Parameter that a fused optimizer updates inside backward() has a hook, "
            "which would never run, since the Parameter has no gradient. Remove it, or make the "
            "optimizer with deferred=True."
        )


def update_sinks(
    weights: Sequence[Tensor], updates: Sequence[Update | None], sparse: bool
) -> list[bool | UpdateSink]:
    """Return the sinks of a call's gradients; ``sparse`` is the sink of weights without an optimizer.

    Raises:
        ValueError: hooks, or the DistributedDataParallel whose forward pass makes the call, wait for
            gradients of weights that are updated; or the backward pass that recomputes this call has updated
            them.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    sinks: list[bool | UpdateSink] = []
    for weight, update in zip(weights, updates, strict=True):
        if update is None:
            sinks.append(sparse)
            continue
        check_hooks(weight, update)
        if wrapper is not None and (owner := update.updater.get_owner()) is not None:
            owner._check_wrapper(wrapper)
        sinks.append((weight, update))
    if torch._C._current_graph_task_id() != -1:
        _check_recomputed(updates)
    return sinks


def _check_recomputed(updates: Sequence[Update | None]) -> None:
    """Raise ValueError if a forward pass inside a backward pass would read rows that are already updated.

    torch.utils.checkpoint with use_reentrant=True runs a separate backward pass for each recomputed part. It
    updates at its end, while the outer pass may recompute further parts.
    """
    if any(update is not None and update.updated for update in updates):
        raise ArgumentValueError(
            "recfuse.optim: a forward pass inside a backward pass would read rows that the same backward() "
            "has updated already. Use use_reentrant=False for torch.utils.checkpoint, or make the "
            "optimizer with deferred=True."
        )


def is_deferred(sink: UpdateSink) -> bool:
    """Return whether ``step()`` uses the gradient of a weight; raise if its optimizer cannot continue."""
    weight, update = sink
    updater = update.updater
    if (owner := updater.get_owner()) is not None:
        owner._before_update(weight, updater)
    return updater.deferred


def is_due(sink: UpdateSink, node: Any) -> bool:
    """Return whether the running backward pass updates a weight; raise if it must not.

    ``node`` accumulates the gradients of the weight. Passes of torch.autograd.grad, and of
    backward(inputs=...) for other tensors, update nothing.
    """
    weight, update = sink
    if not weight.requires_grad:  # frozen since the forward pass
        return False
    try:
        if not torch._C._will_engine_execute_node(node):
            return False
    except RuntimeError:  # torch.autograd.grad, of leaves
        return False
    update.check()
    return True


class _PendingUpdate(NamedTuple):
    """Updates of the weights of a call."""

    output: OutputGrad
    sinks: dict[int, UpdateSink]  # by the numbers of the weights in the call
    weights: int  # number of weights of the call
    stream: tuple[int, int, int] | None  # of the gradient's GPU; see _stream_of

    def wait(self) -> None:
        """Make the current stream wait for the gradient, if another stream computes it."""
        grad, _, *rest, _ = self.output
        if self.stream is None or self.stream == _stream_of(grad):
            return
        number, device, kind = self.stream
        current = torch.cuda.current_stream(device)
        current.wait_stream(torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind))
        for tensor in (grad, *rest):
            if tensor is not None:
                tensor.record_stream(current)

    def run(self, numbers: Sequence[int]) -> None:
        """Update some of the weights, which share an updater."""
        output, sinks = self.output, self.sinks
        if len(numbers) < self.weights:
            output = output[0], matrices_only(output[1], numbers), *output[2:]
        weights, updates = zip(*[sinks[number] for number in numbers], strict=True)
        fused_update(output, weights, updates)

    def gradient(self, number: int) -> Tensor:
        """Return the sparse gradient of a weight, in float32."""
        form = number, *self.sinks[number][0].shape, _FLOAT32
        with torch.no_grad():
            ((rows, values),) = sparse_grads(self.output, [form])
            return coalesced(form, rows, values)


def _stream_of(tensor: Tensor) -> tuple[int, int, int]:
    """Return number, device and kind of device of the current stream of a tensor's GPU.

    A tuple takes less time to create than a Stream.
    """
    return torch._C._cuda_getCurrentStream(tensor.get_device())


class _Pass:
    """A backward pass, and the updates at its end."""

    def __init__(self, task: int) -> None:
        self.task = task  # the engine's number
        self.pending: list[_PendingUpdate] = []

    def finish(self) -> None:
        """Make the updates. The engine calls it, on the caller's stream, unless the pass has failed."""
        _passes.pop(self.task, None)
        pending, self.pending = self.pending, []
        uses: dict[int, int] = {}
        owners: dict[int, Any] = {}
        for call in pending:
            if call.stream is not None:
                call.wait()
            for weight, update in call.sinks.values():
                owner = update.check()
                owners[id(owner)] = owner
                uses[id(weight)] = uses.get(id(weight), 0) + 1
        shared: dict[int, list[tuple[_PendingUpdate, int]]] = {}
        for call in pending:
            groups: dict[int, list[int]] = {}
            for number, (weight, update) in call.sinks.items():
                if uses[id(weight)] == 1:
                    groups.setdefault(id(update.updater), []).append(number)
                else:
                    shared.setdefault(id(weight), []).append((call, number))
            for numbers in groups.values():
                call.run(numbers)
        for calls in shared.values():
            first, number = calls[0]
            total = functools.reduce(torch.add, (call.gradient(at) for call, at in calls)).coalesce()
            rows_update(*first.sinks[number], total.indices()[0], total.values())
        for owner in owners.values():
            owner._pass_finished()


_passes: dict[int, weakref.ref[_Pass]] = {}
"""The running passes, by the engine's number; the engine keeps each until its end."""


def update_later(output: OutputGrad, sinks: dict[int, UpdateSink], count: int) -> None:
    """Make updates at the end of the running backward pass.

    ``sinks`` has the numbers of weights in a call of ``count`` weights as keys.
    """
    task = torch._C._current_graph_task_id()
    reference = _passes.get(task)
    running = None if reference is None else reference()
    if running is None:
        if scaled_passes:
            check_unscaled(next(iter(sinks.values()))[1].updater.owner)
        if _passes:  # of passes that failed, or of other threads
            for old in [number for number, ref in list(_passes.items()) if ref() is None]:
                _passes.pop(old, None)
        running = _Pass(task)
        _passes[task] = weakref.ref(running)
        torch.autograd.Variable._execution_engine.queue_callback(running.finish)
    stream = _stream_of(output[0]) if output[0].is_cuda else None
    running.pending.append(_PendingUpdate(output, sinks, count, stream))
