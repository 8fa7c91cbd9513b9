"""Optimizers of torch whose embedding tables are updated inside ``backward()``.

The user continues to use only the optimizer of torch. It keeps all its Parameters. A fused optimizer makes
the steps of the tables with the same numbers (writes to a param group reach both) and the same state (the
tensors are shared), driven by hooks. ``backward()`` sets ``.grad`` of a table to an AppliedGradient, which
stays as long as torch's gradient would: until ``zero_grad()``. torch's own step does not see it.

This file refers to the optimizer of torch only weakly. After its deletion the tables have gradients again, so
that a script may create another optimizer for them.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.ops.updates import Update, set_update, update_of
from recfuse.optim.adoptable import check_group, check_option, form_of
from recfuse.optim.base import FusedOptimizer, step_was_set
from recfuse.optim.groups import OFF, ParamGroup, check_groups
from recfuse.optim.states import states_by_parameter
from recfuse.optim.steps import check_gradient

_ATTRIBUTE = "_recfuse_adoption"  # of the optimizer of torch
_INSTEAD = "Call recfuse.swap without fuse_optimizers=True, so that torch's optimizer has gradients"


class OptimizerBridge:
    """The link between an optimizer of torch and the fused optimizer that makes its steps."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], prefix: str) -> None:
        """Take over the optimizer's steps for ``parameters`` that it has; see :func:`check_adoptable`."""
        self._reference, self._prefix = weakref.ref(optimizer), prefix
        tables = {id(parameter) for parameter in parameters}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            if embedded := [parameter for parameter in group["params"] if id(parameter) in tables]:
                groups.append((number, embedded))
        self._numbers = [number for number, _ in groups]
        self.parameters = [parameter for _, parameters in groups for parameter in parameters]
        form = form_of(optimizer)
        assert form is not None
        self._form = form
        create: Any = form.fused
        self.fused: FusedOptimizer = create(
            [
                {"params": parameters, **self._options(optimizer.param_groups[number])}
                for number, parameters in groups
            ]
        )
        self.fused._bridge = weakref.ref(self)
        self.fused._prefix, self.fused._instead = prefix, _INSTEAD
        self._groups: list[ParamGroup] = []
        self._before: list[tuple[Mapping[str, Any], dict[str, Any]]] = []  # groups from before, and copies
        self._loaded: Mapping[Any, Any] | None = None
        self._noted: dict[Tensor, int] = {}  # the number of the step in torch's state
        self._take({parameter: optimizer.state.get(parameter, {}) for parameter in self.parameters})
        self._applied: list[Tensor] = []  # Parameters whose gradients torch's step must not see
        _intercept(optimizer, "step", OptimizerBridge._order_hooks)
        _intercept(optimizer, "zero_grad", OptimizerBridge._before_zero_grad)
        self._last = optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(args, kwargs))
        self._first = optimizer.register_step_post_hook(lambda *_: self._stepped())
        self._handles = [
            self._last,
            self._first,
            optimizer.register_state_dict_pre_hook(lambda *_: self._before_save()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._after_load()),
        ]
        setattr(optimizer, _ATTRIBUTE, self)
        self._end = weakref.finalize(optimizer, self._part)
        self._end.atexit = False

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    # ---- groups

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = set(self.fused.defaults) if hasattr(self, "fused") else set()
        names |= {"lr", "eps", "betas", "maximize", "initial_accumulator_value"}
        options = {name: group[name] for name in names if name in group and name not in OFF}
        if self._form.dlrm:  # it ignores the groups' values
            options["initial_accumulator_value"] = self._optimizer.defaults["initial_accumulator_value"]
        return options

    def _check_option(self, key: str, value: Any) -> None:
        check_option(self._prefix, key, value)

    def _group_changed(self, group: Mapping[str, Any]) -> None:
        for one, own in zip(self._groups, self.fused.param_groups, strict=True):
            if one is group:
                for name in ("lr", "eps", "betas", "maximize"):
                    if name in group:
                        own[name] = group[name]

    # ---- state

    def _take(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over states, and share the tensors of the fused optimizer."""
        groups: list[dict[str, Any]] = list(self._optimizer.param_groups)
        self._groups, self._before = [], []
        for number in self._numbers:
            group = groups[number]
            if not isinstance(group, ParamGroup):
                self._before.append((group, dict(group)))
                groups[number] = group = ParamGroup(group, self)
            group.watch(self)
            group.keep(self.parameters)
            self._groups.append(group)
        self._optimizer.param_groups = groups
        for group in self._groups:
            self._group_changed(group)
        for parameter in self.parameters:
            self._form.check(states.get(parameter, {}), parameter, self._prefix)
        self.fused._take_states({p: self._form.to_fused(self._optimizer, states[p]) for p in states})
        for parameter in self.parameters:
            if entries := self._form.from_fused(self.fused.state[parameter]):
                self._optimizer.state[parameter] = {"step": 0, **entries}
        self._noted = {}
        self._note_steps(exact=False)

    def _note_steps(self, exact: bool) -> None:
        """Write the number of steps to torch's state; with ``exact``, the device's count."""
        kind = self._form.step_type
        if kind is None:
            return
        for parameter in self.parameters:
            update, state = update_of(parameter), self._optimizer.state[parameter]
            assert update is not None
            self.fused._check_shared(self._form.tensors(state), update)
            step = state.get("step")
            if parameter in self._noted and (step is None or int(step) != self._noted[parameter]):
                raise step_was_set(self._prefix, step)
            steps_done = update.updater.counted_steps() if exact else update.updater.steps_done
            if int(state["step"]) != steps_done or type(state["step"]) is not type(kind(steps_done)):
                state["step"] = kind(steps_done)
            self._noted[parameter] = steps_done

    def check_groups(self) -> None:
        """Raise ValueError if groups of tables were replaced, or groups from before the swap changed."""
        there = {id(group) for group in self._optimizer.param_groups}
        groups = [group for group in self._groups if id(group) in there]
        check_groups(groups, len(self._groups), self, self._prefix)
        for group, copy in self._before:
            if group != copy:
                raise ArgumentValueError(
                    f"{self._prefix}: a param group from before the swap was written to, which nothing reads "
                    "any more. Read optimizer.param_groups again."
                )

    # ---- steps

    def _order_hooks(self) -> None:
        """Move this object's hooks next to the step, so that the user's hooks see the gradients."""
        before: Any = self._optimizer._optimizer_step_pre_hooks
        after: Any = self._optimizer._optimizer_step_post_hooks
        before.move_to_end(self._last.id)
        after.move_to_end(self._first.id, last=False)

    def _before_zero_grad(self) -> None:
        for parameter in self.parameters:
            self._update_of(parameter).check_finished("zero_grad()")

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_groups()
        self._note_steps(exact=False)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._hide()
            return None

        def closed() -> Any:
            loss = closure()
            self._hide()
            return loss

        return (args[0], closed, *args[2:]), {key: kwargs[key] for key in kwargs if key != "closure"}

    def _hide(self) -> None:
        """Remove the gradients before torch's step; raise ValueError if the step would differ."""
        hidden = []
        for parameter in self.parameters:
            update = self._update_of(parameter)
            check_gradient(self._prefix, parameter, update)
            if parameter.grad is None:
                update.check_finished("setting the gradient of a table to None")
            elif update.updated:
                hidden.append(parameter)
            else:
                raise ArgumentValueError(
                    f"{self._prefix}: a second step() came for the gradients of one backward(), without "
                    "zero_grad(), but a table's rows are updated inside backward(), once. "
                    f"{_INSTEAD}, or call zero_grad() after each step()."
                )
        for parameter in hidden:
            parameter.grad = None
        self._applied = hidden

    def _stepped(self) -> None:
        self.fused.step()
        for parameter in self._applied:
            parameter.grad = self._update_of(parameter).applied
        self._applied = []
        self._note_steps(exact=False)

    def _update_of(self, parameter: Tensor) -> Update:
        update = update_of(parameter)
        if update is None or update.updater.owner is not self.fused:
            raise ArgumentValueError(
                f"{self._prefix}: a Parameter of shape {list(parameter.shape)} belongs to another optimizer "
                "of recfuse.optim now, which was created later"
            )
        return update

    # ---- state dictionaries

    def _before_save(self) -> None:
        for parameter in self.parameters:
            self._update_of(parameter).check_finished("state_dict()")
        self._note_steps(exact=True)

    def _before_load(self, state_dict: Mapping[str, Any]) -> None:
        self.check_groups()
        places = {id(group): at for at, group in enumerate(self._optimizer.param_groups)}
        self._numbers = [places[id(group)] for group in self._groups]
        groups = state_dict["param_groups"]
        if len(groups) == len(self._optimizer.param_groups):  # else torch raises
            for number in self._numbers:
                check_group(groups[number], self._prefix)
        self._loaded = states_by_parameter(state_dict, self._optimizer.param_groups, self._prefix)
        for parameter in self.parameters:
            self._form.check(self._loaded.get(parameter, {}), parameter, self._prefix)

    def _after_load(self) -> None:
        loaded, self._loaded = self._loaded or {}, None
        # With changes by the user's hooks, but torch has rounded the states of half tables.
        state = self._optimizer.state
        self._take(
            {
                parameter: (state if parameter.dtype == torch.float32 else loaded).get(parameter, {})
                for parameter in self.parameters
            }
        )

    def release(self) -> None:
        """Return the steps to the optimizer of torch, with a separate state."""
        for parameter in self.parameters:
            if (update := update_of(parameter)) is not None:
                update.check_finished("recfuse.unswap() or another swap")
        self._note_steps(exact=True)
        for handle in self._handles:
            handle.remove()
        delattr(self._optimizer, _ATTRIBUTE)
        self._end.detach()
        self._part()
        for group in self._groups:
            group.watch(None)
        for parameter in self.parameters:
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if name != "step" and not self._form.dlrm:
                    self._optimizer.state[parameter][name] = value.to(parameter.dtype)

    def _part(self) -> None:
        """Give the tables gradients again."""
        for parameter in self.parameters:
            update = update_of(parameter)
            if update is not None and update.updater.owner is self.fused:
                set_update(parameter, None)
        for _, updater in self.fused._updaters:
            updater.disown()
        self.fused.param_groups = []
        self.fused.state.clear()


def _intercept(optimizer: Optimizer, name: str, before: Callable[[OptimizerBridge], None]) -> None:
    """Wrap a method of an optimizer to call ``before`` first.

    Dynamo does not trace it, because it cannot trace groups that are no plain dicts. The wrapper stays after
    a release, because a scheduler may have wrapped it.
    """
    method = getattr(optimizer, name)
    if hasattr(method, _ATTRIBUTE):
        return
    function = getattr(method, "__func__", method)  # a scheduler's wrapper has no __func__, and refers weakly
    is_bound = function is not method
    reference = weakref.ref(optimizer)

    @torch._disable_dynamo
    @functools.wraps(function)
    def call(_: Optimizer, *arguments: Any, **options: Any) -> Any:
        own = reference()
        adoption = vars(own).get(_ATTRIBUTE)
        if adoption is not None:
            before(adoption)
        return function(own, *arguments, **options) if is_bound else function(*arguments, **options)

    setattr(call, _ATTRIBUTE, True)
    setattr(optimizer, name, types.MethodType(call, weakref.proxy(optimizer)))  # schedulers read __func__


def adopt(optimizer: Optimizer, parameters: Sequence[Tensor], prefix: str) -> FusedOptimizer | None:
    """Fuse the steps of the optimizer's tables; return None if it has no such table."""
    release(optimizer)
    _collect_once()
    tables = {id(parameter) for parameter in parameters}
    embeddings = [p for group in optimizer.param_groups for p in group["params"] if id(p) in tables]
    if not embeddings or form_of(optimizer) is None:
        return None
    return OptimizerBridge(optimizer, embeddings, f"{prefix}: {type(optimizer).__name__} of tables").fused


@functools.cache
def _collect_once() -> None:
    """Collect garbage once, so that the first optimizer of the process is deleted with its last reference.

    Its constructor imports torch's compiler, which leaves reference cycles to it.
    """
    gc.collect()


def release(optimizer: Optimizer) -> None:
    """Undo :func:`adopt`, if it was called."""
    bridge = vars(optimizer).get(_ATTRIBUTE)
    if bridge is not None:
        bridge.release()
