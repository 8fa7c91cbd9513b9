"""``FusedOptimizer``: the base class of the optimizers of this package."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recfuse._arguments import integer
from recfuse.errors import ArgumentValueError
from recfuse.nn.memory import advise_huge_pages
from recfuse.ops.training.optimizers import BETA1, BETA2, EPS, GRAD_SCALE, KINDS, LR, WEIGHT_DECAY, Kind
from recfuse.ops.training.scaled_losses import watch_scalers
from recfuse.ops.training.updaters import Updater
from recfuse.ops.updates import Update, set_update, update_of
from recfuse.optim.groups import ParamGroup, check_betas, check_groups, check_number, check_off
from recfuse.optim.parameters import check_parameter, parameters_of, without_views
from recfuse.optim.states import check_state, states_by_parameter
from recfuse.optim.stepping import Stepping
from recfuse.optim.steps import Owned
from recfuse.optim.surroundings import check_wrapper

_NUMBERS = {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS}


class FusedOptimizer(Stepping):
    """An optimizer of embedding tables, whose step is a kernel over rows; see :mod:`recfuse.optim`."""

    _step_supports_amp_scaling = True  # for torch.amp.GradScaler: step() reads found_inf on the device
    _kind: Kind
    _prefix = "recfuse.optim"  # the subject of errors
    _instead = ""  # for errors: the way to have gradients
    _bridge: Any = None  # a weak reference to the OptimizerBridge that uses this optimizer

    def __init_subclass__(cls, **options: Any) -> None:
        """Set the texts of errors, which have the name of the class."""
        super().__init_subclass__(**options)
        cls._prefix = f"recfuse.optim.{cls.__name__}"
        cls._instead = f"Create the optimizer as {cls._prefix}(..., deferred=True)"

    def __init__(
        self, params: Any, defaults: dict[str, Any], deferred: bool, stochastic_rounding: bool, seed: int
    ) -> None:
        """Create an optimizer of Parameters, param groups, or a module; see the classes."""
        prefix = self._prefix
        self._settings = (
            bool(deferred),
            bool(stochastic_rounding),
            integer(f"{prefix}: seed", seed, 0, 2**63 - 1),
        )
        self._begin()
        for key, value in defaults.items():
            self._check_option(key, value)
        super().__init__(parameters_of(params, prefix), defaults)
        if not deferred:
            watch_scalers()

    def _begin(self) -> None:
        self._updaters: list[tuple[Mapping[str, Any], Updater]] = []
        self._is_checked = False
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # checked without errors
        self._held: list[weakref.ref[Any]] = []
        self._count = 0  # of param groups
        weakref.finalize(self, _release, self._held).atexit = False

    @property
    def deferred(self) -> bool:
        """True if ``step()`` updates rows, False if ``backward()`` does."""
        return self._settings[0]

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in every optimizer.

        From then on this optimizer updates its tables, instead of an earlier optimizer.
        """
        for key, value in param_group.items():
            if key != "params":
                self._check_option(key, value)
        super().add_param_group({**param_group, "params": without_views(param_group["params"])})
        group = ParamGroup(self.param_groups[-1], self)
        try:
            for parameter in group["params"]:
                check_parameter(parameter, self._prefix)
                self._check_columns(parameter)
        except Exception:
            self.param_groups.pop()
            raise
        self.param_groups[-1] = group
        self._wrappers.clear()
        self._count += 1
        for parameter in group["params"]:
            self.state[parameter] = self._new_state(parameter, group)
        self._arrange(group, dict.fromkeys(group["params"], 0))

    def _check_option(self, key: str, value: Any) -> None:
        if key in (*_NUMBERS, "initial_accumulator_value"):
            check_number(self._prefix, key, value)
        elif key == "betas":
            check_betas(self._prefix, value)
        else:
            check_off(self._prefix, key, value)

    def _group_changed(self, group: ParamGroup) -> None:
        """Write changed options to the devices of the group's tables."""
        for updated_group, updater in self._updaters:
            if updated_group is group:
                self._write(group, updater)

    def _write(self, group: Mapping[str, Any], updater: Updater) -> None:
        for key, number in _NUMBERS.items():
            updater.write(number, float(group.get(key, 0)))
        for number, beta in zip((BETA1, BETA2), group.get("betas", (0, 0)), strict=True):
            updater.write(number, float(beta))
        updater.write(GRAD_SCALE, -1.0 if group.get("maximize") else 1.0)

    def _check_columns(self, parameter: Tensor) -> None:
        """Raise ValueError for a state by row of a table that ``recfuse.distributed`` has cut by columns."""
        table = getattr(parameter, "_recfuse_cut_columns", None)
        if self._kind.by_row and table is not None:
            raise ArgumentValueError(
                f"{self._prefix}: table {table!r} is cut by columns, and a state by row is a mean over all "
                "columns. Cut the table by rows, or place it on one rank."
            )

    # ---- state

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        with torch.inference_mode(False):
            for name in self._kind.states:
                state[name] = torch.empty(
                    self._state_shape(parameter), dtype=torch.float32, device=parameter.device
                )
                advise_huge_pages(state[name])
                state[name].fill_(group.get("initial_accumulator_value", 0))
        return state

    def _state_shape(self, parameter: Tensor) -> tuple[int, ...]:
        return (parameter.shape[0], 1) if self._kind.by_row else tuple(parameter.shape)

    def _arrange(self, group: Mapping[str, Any], steps: Mapping[Tensor, int]) -> None:
        """Give each Parameter of a group its update.

        Parameters with the same number of steps share an updater, so that a single call makes the step of
        all. Numbers keep their memory if possible, for graphs that have captured it.
        """
        if isinstance(group, ParamGroup):
            group.keep(group["params"])
        spare = [updater for updated_group, updater in self._updaters if updated_group is group]
        self._updaters = [
            (updated_group, updater)
            for updated_group, updater in self._updaters
            if updated_group is not group
        ]
        together: dict[tuple[torch.device, int], list[Tensor]] = {}
        for parameter in group["params"]:
            together.setdefault((parameter.device, steps[parameter]), []).append(parameter)
        for (device, steps_done), parameters in together.items():
            updater = next((old for old in spare if old.device == device), None)
            if updater is None:
                updater = Updater(self, KINDS.index(self._kind), device, *self._settings)
            else:
                spare.remove(updater)
            updater.set_steps(steps_done)
            self._write(group, updater)
            self._updaters.append((group, updater))
            for parameter in parameters:
                self._attach(parameter, updater)

    def _attach(self, parameter: Tensor, updater: Updater) -> None:
        state = self.state[parameter]
        states = [state[name].view(-1) if self._kind.by_row else state[name] for name in self._kind.states]
        update = update_of(parameter)
        if (
            update is None
            or update.updater is not updater
            or update.storage() != [state.data_ptr() for state in states]
        ):
            update = Update(parameter, updater, states)
            set_update(parameter, update)
        update.step_in_state = updater.steps_done if "step" in state else None
        if not any(held() is parameter for held in self._held):
            self._held.append(weakref.ref(parameter))

    def _check_groups(self) -> None:
        check_groups(self.param_groups, self._count, self, self._prefix)
        if self._bridge is not None and (bridge := self._bridge()) is not None:
            bridge.check_groups()

    def _own(self) -> list[Owned]:
        """Return all Parameters; raise if another optimizer has taken over, or a state was replaced."""
        self._check_groups()
        owned: list[Owned] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                update = update_of(parameter)
                if update is None or update.updater.get_owner() is not self:
                    raise ArgumentValueError(
                        f"{self._prefix}: a Parameter of shape {list(parameter.shape)} belongs to another "
                        "optimizer of recfuse.optim now, which was created later"
                    )
                state = self.state[parameter]
                if update.states:
                    self._check_shared(state, update)
                owned.append((group, parameter, update, state))
        return owned

    def _check_step(self, state: Mapping[str, Any], update: Update) -> None:
        """Raise ValueError if the user has changed the number of the step in the state."""
        step = state.get("step")
        if step is not None and int(step) != update.step_in_state:
            raise step_was_set(self._prefix, step)

    def _check_shared(self, state: Mapping[str, Any], update: Update) -> None:
        """Raise ValueError if an entry of a state is not the tensor that kernels write to."""
        for name, shared in zip(self._kind.states, update.states, strict=True):
            tensor = state.get(name)
            if tensor is not shared and (tensor is None or tensor.data_ptr() != shared.data_ptr()):
                raise ArgumentValueError(
                    f"{self._prefix}: {name} in the state of a Parameter was removed or replaced by another "
                    "tensor, which backward() would not know of. Write into it with copy_(), or call "
                    "load_state_dict()."
                )

    # ---- steps

    def _before_update(self, weight: Tensor, updater: Updater) -> None:
        """Check, before an update of a Parameter, conditions that a backward pass cannot see."""
        if weight.device != updater.device:
            raise ArgumentValueError(
                f"{self._prefix}: a Parameter is on {weight.device}, its optimizer on {updater.device}. Make "
                "the optimizer after the module was moved."
            )
        if not self._is_checked:  # since the last step
            self._check_groups()
            self._is_checked = True

    def _pass_finished(self) -> None:
        """React to the end of a backward pass that has updated Parameters; does nothing here."""

    def _check_wrapper(self, parallel: torch.nn.Module) -> None:
        """Check a DistributedDataParallel whose forward pass calls the tables."""
        if parallel not in self._wrappers:
            held = [parameter for ref in self._held if (parameter := ref()) is not None]
            check_wrapper(parallel, held, self._prefix, self._instead, self.deferred)
            self._wrappers.add(parallel)

    # ---- dictionaries and copies

    def _before_move(self) -> None:
        """Write the number of steps into the state, as torch's optimizers do."""
        step = self._kind.step
        if step is not None or self._settings[1]:
            for _, _, update, state in self._own():
                self._check_step(state, update)
                steps_done = update.updater.counted_steps()
                state["step"] = steps_done if step is None else step(steps_done)
                update.step_in_state = steps_done

    def state_dict(self) -> dict[str, Any]:
        """Return a ``state_dict`` that torch's optimizer of the same name can load.

        Waits for the tables' device.
        """
        self._before_move()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class, or of torch's class of the same name.

        States keep their memory, so that a CUDA graph that was captured before uses the loaded values.

        Raises:
            ValueError, TypeError: groups of other Parameters, options that must be off, states of another
                optimizer, shape or dtype, a step that is no number of steps. Nothing has changed then.
        """
        groups_before, state_before = self.param_groups, self.state
        before = [dict(group) for group in self.param_groups]
        states = {parameter: dict(state) for _, parameter, _, state in self._own()}
        raw: dict[Any, Mapping[str, Any]] = {}

        def check(_: Any, arguments: dict[str, Any]) -> None:
            raw.update(states_by_parameter(arguments, self.param_groups, self._prefix))
            for group in arguments.get("param_groups", ()):
                for key, value in group.items():
                    if key not in ("params", "param_names"):
                        self._check_option(key, value)
            for parameter in states:
                self._check_loaded(parameter, raw.get(parameter, {}))

        handle = self.register_load_state_dict_pre_hook(check)  # after the user's hooks, which may change it
        try:
            super().load_state_dict(state_dict)
        except BaseException:  # from a hook, after the groups were loaded
            self.param_groups, self.state = groups_before, state_before
            raise
        finally:
            handle.remove()
        groups: list[dict[str, Any]] = [
            ParamGroup({**old, **new}, self) for old, new in zip(before, self.param_groups, strict=True)
        ]
        self._updaters = [
            (groups[number], updater)
            for own, updater in self._updaters
            for number, old in enumerate(before)
            if own["params"] is old["params"]
        ]
        self.param_groups = groups
        self.state.update(states)
        self._take_states(raw)

    def _take_states(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Copy states into the existing tensors; a Parameter without a state gets a new optimizer's."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._load(parameter, group, dict(self.state[parameter]), states.get(parameter, {}))
            self._arrange(group, {p: int(self.state[p].get("step", 0)) for p in group["params"]})

    def _check_loaded(self, parameter: Tensor, loaded: Mapping[str, Any]) -> None:
        check_state(loaded, self._kind.states, self._state_shape(parameter), self._prefix)

    def _load(
        self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any], loaded: Mapping[str, Any]
    ) -> None:
        """Copy a loaded state into the existing tensors; without a state, set that of a new optimizer."""
        with torch.no_grad():
            for name in self._kind.states:
                if loaded.get(name) is not None:
                    state[name].copy_(loaded[name].reshape(state[name].shape))
                else:
                    state[name].fill_(group.get("initial_accumulator_value", 0))
        self.state[parameter] = {**state, **({"step": loaded["step"]} if "step" in loaded else {"step": 0})}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state, with the number of steps."""
        self._before_move()
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy, and give its Parameters their updates."""
        super().__setstate__(state)
        if "_settings" in state:
            self._begin()
            self._after_move()

    def _after_move(self, old: Iterable[Tensor] = ()) -> None:
        """Create updates again after Parameters and their state were replaced in the groups.

        The ``old`` Parameters have no update from then on.
        """
        for parameter in old:
            update = update_of(parameter)
            if update is not None and update.updater.owner is self:
                set_update(parameter, None)
        groups: list[dict[str, Any]] = [
            group if isinstance(group, ParamGroup) else ParamGroup(group, self) for group in self.param_groups
        ]
        self.param_groups, self._count = groups, len(groups)
        for group in groups:
            self._arrange(group, {p: int(self.state[p].get("step", 0)) for p in group["params"]})


def _release(held: list[weakref.ref[Any]]) -> None:
    """Give Parameters of a deleted optimizer gradients again."""
    for ref in held:
        parameter = ref()
        if parameter is None:
            continue
        update = update_of(parameter)
        if update is not None and update.updater.owner is None:
            set_update(parameter, None)


def step_was_set(prefix: str, step: Any) -> ArgumentValueError:
    """Return the error for a number of the step that the user has written into a state."""
    return ArgumentValueError(
        f"{prefix}: step in the state of a Parameter was set to {step} by hand, which no kernel reads, "
        "since kernels count steps themselves. Set it in a state_dict(), and call load_state_dict()."
    )
