"""Optimizers of torch whose embedding tables are updated inside ``backward()``.

The user goes on with the optimizer of torch alone. It keeps all its Parameters: those of the tables have no
gradients, so its own step passes over them. A fused optimizer beside it makes their steps, with the same
numbers (what is written to a param group reaches both) and the same state (the tensors are shared), driven by
hooks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recfuse.errors import ArgumentValueError
from recfuse.ops.updates import set_update, update_of
from recfuse.optim.base import FusedOptimizer, states_by_parameter, step_was_set
from recfuse.optim.groups import OFF, ParamGroup, check_groups, check_number, check_off
from recfuse.optim.kinds import SGD, Adagrad, Adam
from recfuse.optim.surroundings import check_scaler

_FUSED: dict[type[Optimizer], type[FusedOptimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.SparseAdam: Adam,
}
_DENSE_ADAM = (
    "moves each row of a table at each step, looked up or not, as a fused one never does: use "
    "torch.optim.SparseAdam for the tables (with sparse=True), or make recfuse.optim.Adam of them"
)
_WHY_NOT = {torch.optim.Adam: _DENSE_ADAM, torch.optim.AdamW: _DENSE_ADAM}
_ATTRIBUTE = "_recfuse_adoption"  # of the optimizer of torch
_AMP = "_step_supports_amp_scaling"


class Adoption:
    """The link between an optimizer of torch and the fused one that makes steps for it."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], what: str) -> None:
        """Takes over the steps of those of ``parameters`` that the optimizer has; see
        :func:`check_adoptable`.
        """
        self._optimizer, self._what = optimizer, what
        tables = {id(parameter) for parameter in parameters}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            if own := [parameter for parameter in group["params"] if id(parameter) in tables]:
                groups.append((number, own))
        self._numbers = [number for number, _ in groups]
        self.parameters = [parameter for _, own in groups for parameter in own]
        self.fused: FusedOptimizer = _FUSED[type(optimizer)](
            [{"params": own, **self._options(optimizer.param_groups[number])} for number, own in groups]
        )
        self.fused._also_check = self._check_groups
        self._groups: list[ParamGroup] = []
        self._before: list[
            tuple[Mapping[str, Any], dict[str, Any]]
        ] = []  # groups that were there, and copies
        self._loaded: Mapping[Any, Any] | None = None
        self._noted: dict[Tensor, int] = {}  # the number of the step that torch's state has
        self._take({parameter: optimizer.state.get(parameter, {}) for parameter in self.parameters})
        self._amp = vars(optimizer).get(_AMP)
        setattr(optimizer, _AMP, True)  # a GradScaler then shows itself, around its call of step()
        optimizer.step = _not_compiled(optimizer)  # type: ignore[method-assign]
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
            optimizer.register_state_dict_pre_hook(lambda *_: self._note_steps(exact=True)),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._after_load()),
        ]
        setattr(optimizer, _ATTRIBUTE, self)

    # ---- groups

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = set(self.fused.defaults) if hasattr(self, "fused") else set()
        names |= {"lr", "eps", "betas", "maximize", "initial_accumulator_value"}
        return {name: group[name] for name in names if name in group and name not in OFF}

    def _check_option(self, key: str, value: Any) -> None:
        _check_option(self._what, key, value)

    def _group_changed(self, group: Mapping[str, Any]) -> None:
        for one, own in zip(self._groups, self.fused.param_groups, strict=True):
            if one is group:
                for name in ("lr", "eps", "betas", "maximize"):
                    if name in group:
                        own[name] = group[name]

    # ---- state

    def _take(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Takes over states, and shares its own."""
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
        self.fused._take_states(states)
        for parameter in self.parameters:
            own = {name: value for name, value in self.fused.state[parameter].items() if name != "step"}
            if own:
                self._optimizer.state[parameter] = {"step": 0, **own}
        self._noted = {}
        self._note_steps(exact=False)

    def _note_steps(self, exact: bool) -> None:
        """Writes the number of steps where torch has it; ``exact``: as the device has counted it."""
        kind = self.fused._step_type
        if kind is None:
            return
        for parameter in self.parameters:
            update, state = update_of(parameter), self._optimizer.state[parameter]
            assert update is not None
            self.fused._check_shared(state, update)
            found = state.get("step")
            if parameter in self._noted and (found is None or int(found) != self._noted[parameter]):
                raise step_was_set(self._what, found)
            made = update.updater.steps_made() if exact else update.updater.made
            if int(state["step"]) != made or type(state["step"]) is not type(kind(made)):
                state["step"] = kind(made)
            self._noted[parameter] = made

    def _check_groups(self) -> None:
        there = {id(group) for group in self._optimizer.param_groups}
        own = [group for group in self._groups if id(group) in there]
        check_groups(own, len(self._groups), self, self._what)
        for group, copy in self._before:
            if group != copy:
                raise ArgumentValueError(
                    f"{self._what}: a param group from before the swap was written to, which nothing reads "
                    "any more: take optimizer.param_groups anew"
                )

    def _before_step(self) -> None:
        check_scaler(self._optimizer, self._what)
        self._check_groups()
        self._note_steps(exact=False)

    def _stepped(self) -> None:
        self.fused.step()
        self._note_steps(exact=False)

    def _before_load(self, state_dict: Mapping[str, Any]) -> None:
        self._check_groups()
        places = {id(group): at for at, group in enumerate(self._optimizer.param_groups)}
        self._numbers = [places[id(group)] for group in self._groups]
        for group in (state_dict["param_groups"][number] for number in self._numbers):
            check_group(group, self._what)
        self._loaded = states_by_parameter(state_dict, self._optimizer.param_groups)

    def _after_load(self) -> None:
        given, self._loaded = self._loaded or {}, None
        state = (
            self._optimizer.state
        )  # as hooks of the user have it, but torch has rounded that of half tables
        self._take(
            {
                parameter: (state if parameter.dtype == torch.float32 else given).get(parameter, {})
                for parameter in self.parameters
            }
        )

    def release(self) -> None:
        """Gives the steps back: the optimizer is torch's again, with a state of its own."""
        self._note_steps(exact=True)
        for handle in self._handles:
            handle.remove()
        delattr(self._optimizer, _ATTRIBUTE)
        delattr(self._optimizer, _AMP)
        if self._amp is not None:
            setattr(self._optimizer, _AMP, self._amp)
        for group in self._groups:
            group.watch(None)
        for parameter in self.parameters:
            set_update(parameter, None)
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if name != "step":
                    self._optimizer.state[parameter][name] = value.to(parameter.dtype)
        self.fused.param_groups = []
        self.fused.state.clear()


def _not_compiled(optimizer: Optimizer) -> Any:
    """``optimizer.step``, which dynamo could not follow through groups that are no plain dicts. It stays when
    the optimizer is torch's again, since a scheduler may have wrapped it.
    """
    step = optimizer.step
    if hasattr(step, _ATTRIBUTE):
        return step

    @torch._disable_dynamo
    @functools.wraps(step)
    def stepped(_: Optimizer, *arguments: Any, **options: Any) -> Any:
        return step(*arguments, **options)

    setattr(stepped, _ATTRIBUTE, True)
    return types.MethodType(stepped, optimizer)  # schedulers ask for __func__


def _check_option(what: str, key: str, value: Any) -> None:
    if key == "weight_decay" and value != 0:
        raise ArgumentValueError(
            f"{what}: weight_decay is {value!r}: torch's changes each row of a table at each step, a fused "
            "one the rows that are looked up; give the tables a param group without it, or make an optimizer "
            "of recfuse.optim"
        )
    if key in ("lr", "eps"):
        check_number(what, key, value)
    elif key not in ("dampening", "nesterov"):  # which mean nothing without momentum
        check_off(what, key, value)


def check_group(group: Mapping[str, Any], what: str) -> None:
    """Raises where a fused step would be another than that of this group of torch's."""
    for key, value in group.items():
        if key not in ("params", "param_names"):
            _check_option(what, key, value)


def check_adoptable(optimizers: Sequence[Optimizer], weights: Iterable[Tensor], what: str) -> None:
    """Raises, before anything changes, where the steps of an optimizer that has some of the weights cannot be
    fused.

    Raises:
        ValueError: it is of another class, or has options with which a fused step would be another.
    """
    tables = {id(weight) for weight in weights}
    for optimizer in optimizers:
        own = [group for group in optimizer.param_groups if any(id(p) in tables for p in group["params"])]
        kind = type(optimizer)
        if own and kind not in _FUSED and not isinstance(optimizer, FusedOptimizer):
            why = _WHY_NOT.get(kind, "has no fused step: SGD, Adagrad and SparseAdam have")
            raise ArgumentValueError(f"{what}: {kind.__name__} {why}. Or pass fuse_optimizers=False")
        if kind in _FUSED:
            for group in own:
                check_group(group, f"{what}: {kind.__name__} of tables")


def adopt(optimizer: Optimizer, parameters: Sequence[Tensor], what: str) -> FusedOptimizer | None:
    """Makes the steps of the optimizer's tables fused ones; None: it has none of them."""
    release(optimizer)
    tables = {id(parameter) for parameter in parameters}
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in tables]
    if not own or type(optimizer) not in _FUSED:
        return None
    return Adoption(optimizer, own, f"{what}: {type(optimizer).__name__} of tables").fused


def release(optimizer: Optimizer) -> None:
    """Undoes :func:`adopt`, if that was."""
    found = vars(optimizer).get(_ATTRIBUTE)
    if found is not None:
        found.release()
