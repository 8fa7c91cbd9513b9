"""``Attached``: how an optimizer of this package is tied to its Parameters and to what the kernels read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import ArgumentValueError
from recfuse.nn.memory import advise_huge_pages
from recfuse.ops.updates import (
    BETA1,
    BETA2,
    EPS,
    GRAD_SCALE,
    LR,
    STATES,
    WEIGHT_DECAY,
    Update,
    Updater,
    set_update,
    update_of,
)
from recfuse.optim.surroundings import check_surroundings

_NUMBERS = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS}


class Attached(torch.optim.Optimizer):
    """Param groups whose Parameters know their updates; base of ``FusedOptimizer``."""

    _kind: int  # a position in OPTIMIZERS
    _row_state = False  # a number a row, instead of one an element
    _settings: tuple[bool, bool, int]  # deferred, stochastic_rounding, seed

    def _begin(self) -> None:
        self._updaters: list[tuple[Mapping[str, Any], Updater]] = []
        self._surroundings_checked = False
        self._held: list[weakref.ref[Any]] = []
        weakref.finalize(self, _release, self._held).atexit = False

    @property
    def _where(self) -> str:
        return f"recfuse.optim.{type(self).__name__}"

    # ---- numbers

    def _group_changed(self, group: Mapping[str, Any]) -> None:
        """Writes what has changed to the devices of its tables."""
        for own, updater in self._updaters:
            if own is group:
                self._write(group, updater)

    def _write(self, group: Mapping[str, Any], updater: Updater) -> None:
        for key, number in _NUMBERS.items():
            updater.write(number, float(group.get(key, 0)))
        for number, beta in zip((BETA1, BETA2), group.get("betas", (0, 0)), strict=True):
            updater.write(number, float(beta))
        updater.write(GRAD_SCALE, -1.0 if group.get("maximize") else 1.0)

    # ---- state

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        shape = (parameter.shape[0], 1) if self._row_state else parameter.shape
        found: dict[str, Any] = {}
        with torch.inference_mode(False):
            for name in self._state_names:
                found[name] = torch.empty(shape, dtype=torch.float32, device=parameter.device)
                advise_huge_pages(found[name])
                found[name].fill_(group.get("initial_accumulator_value", 0))
        return found

    @property
    def _state_names(self) -> tuple[str, ...]:
        return {0: (), 1: ("sum",), 2: ("exp_avg", "exp_avg_sq")}[STATES[self._kind]]

    def _arrange(self, group: Mapping[str, Any], steps: Mapping[Tensor, int]) -> None:
        """Gives each Parameter of a group its update: those with as many steps behind them share an updater,
        so that one call makes the step of all. Numbers keep their memory where they can, for graphs that have
        captured it.
        """
        spare = [updater for own, updater in self._updaters if own is group]
        self._updaters = [(own, updater) for own, updater in self._updaters if own is not group]
        together: dict[tuple[torch.device, int], list[Tensor]] = {}
        for parameter in group["params"]:
            together.setdefault((parameter.device, steps[parameter]), []).append(parameter)
        for (device, made), parameters in together.items():
            updater = next((old for old in spare if old.numbers.device == device), None)
            if updater is None:
                updater = Updater(self, self._kind, device, *self._settings)
            else:
                spare.remove(updater)
            updater.set_steps(made)
            self._write(group, updater)
            self._updaters.append((group, updater))
            for parameter in parameters:
                self._attach(parameter, updater)

    def _attach(self, parameter: Tensor, updater: Updater) -> None:
        state = self.state[parameter]
        states = [state[name].view(-1) if self._row_state else state[name] for name in self._state_names]
        old = update_of(parameter)
        if old is None or old.updater is not updater or old.storage() != [one.data_ptr() for one in states]:
            set_update(parameter, Update(parameter, updater, states))
        if not any(held() is parameter for held in self._held):
            self._held.append(weakref.ref(parameter))

    def _own(self) -> Iterable[tuple[dict[str, Any], Parameter, Update]]:
        """Each Parameter with its update, which no other optimizer has taken over."""
        for group in self.param_groups:
            for parameter in group["params"]:
                update = update_of(parameter)
                if update is None or update.updater.owner is not self:
                    raise ArgumentValueError(
                        f"{self._where}: a Parameter of shape {list(parameter.shape)} belongs to another "
                        "optimizer of recfuse.optim by now, which was made of it later"
                    )
                yield group, parameter, update

    # ---- before a step

    def _before_update(self, update: Update) -> None:
        """Looks, before a Parameter is updated, at what no backward pass can see."""
        weight = update.weight
        if weight is not None and weight.device != update.updater.numbers.device:
            raise ArgumentValueError(
                f"{self._where}: a Parameter is on {weight.device}, its optimizer on "
                f"{update.updater.numbers.device}; make the optimizer after the module was moved"
            )
        if not self._surroundings_checked:
            held = [parameter for ref in self._held if (parameter := ref()) is not None]
            check_surroundings(held, self._where, self._settings[0])
            self._surroundings_checked = True


def _release(held: list[weakref.ref[Any]]) -> None:
    """Gives Parameters of an optimizer that is gone their gradients back."""
    for ref in held:
        parameter = ref()
        if parameter is None:
            continue
        update = update_of(parameter)
        if update is not None and update.updater.owner is None:
            set_update(parameter, None)
