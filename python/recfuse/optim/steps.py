"""The work of ``step()``: the end of a step after ``backward()`` has updated rows, and deferred steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.by_table.raw_states import PART
from recfuse.ops.pending_updates import check_hooks
from recfuse.ops.training.compilers import with_old_compiler
from recfuse.ops.updates import Update, rows_update, unfinished
from recfuse.optim.surroundings import check_scaler

Owned: TypeAlias = tuple[Mapping[str, Any], Parameter, Update, dict[str, Any]]
"""A Parameter of a fused optimizer: its group, the Parameter, its update, and its state."""


def direct_step(optimizer: Any) -> None:
    """Check that ``backward()`` has made the whole step, and increment the number of steps."""
    prefix, owned = optimizer._prefix, optimizer._own()
    check_scaler(optimizer, prefix, optimizer._instead)
    _check_steps(optimizer, owned)
    captured = False
    for _, parameter, update, _ in owned:
        check_hooks(parameter, update)
        check_gradient(prefix, parameter, update)
        captured |= update.captured and update.updater.counts_on_device
    if captured and not torch.cuda.is_current_stream_capturing():
        raise ArgumentValueError(
            f"{prefix}: backward() was captured in a CUDA graph, step() was not, which raises the number of "
            "the step. Capture both in one graph."
        )
    for _, parameter, _, _ in owned:
        parameter.grad = None
    _advance(optimizer, owned)


def check_gradient(prefix: str, parameter: Tensor, update: Update) -> None:
    """Raise ValueError if a Parameter that ``backward()`` updates has a gradient of another use."""
    grad = parameter.grad
    if grad is not None and grad is not update.applied:
        text = (
            f"{prefix}: a Parameter of shape {list(parameter.shape)} has a gradient, where backward() "
            "updates its rows, so it is used outside of the calls of recfuse's modules (in a penalty on "
            "the weight, in a module of torch, under torch.func, in an exported program), or had its "
            "gradient before the optimizer was made. Set the gradient to None if it is old. Use "
            "deferred=True with lookups alone, or an optimizer of torch, otherwise."
        )
        raise ArgumentValueError(with_old_compiler(text, "does not see the optimizer"))


@torch.no_grad()
def deferred_step(optimizer: Any) -> None:
    """Update rows with the present sparse gradients."""
    prefix, owned = optimizer._prefix, optimizer._own()
    _check_steps(optimizer, owned)
    gradients = [
        (parameter, update, parameter.grad) for _, parameter, update, _ in owned if parameter.grad is not None
    ]
    for parameter, _, grad in gradients:
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            text = (
                f"{prefix}: the gradient of a Parameter of shape {list(parameter.shape)} is {grad.layout}; "
                "expected a gradient that is sparse by rows, since the Parameter is used outside of the "
                "calls of recfuse's modules. Pass it to an optimizer of torch."
            )
            raise ArgumentValueError(with_old_compiler(text, "does not see the optimizer"))
    scaled = hasattr(optimizer, "grad_scale")
    found_inf = getattr(optimizer, "found_inf", None)
    found_inf = found_inf if isinstance(found_inf, Tensor) else None
    updaters = {id(update.updater): update.updater for _, update, _ in gradients}.values()
    if scaled:
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None and any(getattr(parameter, PART, False) for parameter, _, _ in gradients):
            raise ArgumentValueError(
                f"{prefix}: a GradScaler steps sharded tables whose gradients are scaled; expected gradients "
                "that ShardedGradScaler has unscaled on every rank. Call scaler.unscale_(optimizer) before."
            )
        for updater in updaters:
            updater.scale(scale, found_inf)
    for parameter, update, grad in gradients:
        coalesced = grad.coalesce()
        rows_update(parameter, update, coalesced.indices()[0], coalesced.values())
    if scaled:
        for updater in updaters:
            updater.scale(None, None)
    _advance(optimizer, owned, found_inf)


def _check_steps(optimizer: Any, owned: Sequence[Owned]) -> None:
    for _, _, update, state in owned:
        if "step" in state:
            optimizer._check_step(state, update)


def _advance(optimizer: Any, owned: Sequence[Owned], found_inf: Tensor | None = None) -> None:
    """Increment the number of steps of updated Parameters, as torch does for each Parameter.

    If only some Parameters of an updater were updated, they get another updater. This happens after all
    others were counted, because they may then share an updater.
    """
    optimizer._is_checked = False
    for _, parameter, update, state in owned:
        if update.step_in_state is not None:  # outdated; state_dict() writes it again
            optimizer.state[parameter] = {key: value for key, value in state.items() if key != "step"}
            update.step_in_state = None
    parted: dict[int, dict[Any, int]] = {}
    for group, updater in optimizer._updaters:
        members = [(parameter, update) for _, parameter, update, _ in owned if update.updater is updater]
        updated = []
        for parameter, update in members:
            if update.updated:
                update.updated = update.captured = False
                unfinished.discard(id(update))
                updated.append(id(parameter))
        if not updated:
            continue
        if len(updated) == len(members) or not updater.counts_on_device:
            updater.tick(found_inf)
            continue
        steps_done, skipped = updater.counted_steps(), found_inf is not None and bool(found_inf)
        steps = {
            parameter: steps_done + (id(parameter) in updated and not skipped) for parameter, _ in members
        }
        parted.setdefault(id(group), {}).update(steps)
    for group in optimizer.param_groups:
        if id(group) in parted:
            steps = {p: update.updater.counted_steps() for g, p, update, _ in owned if g is group}
            optimizer._arrange(group, steps | parted[id(group)])
