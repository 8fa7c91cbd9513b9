"""Saves and restores the state that a traced step changes: gradients, states of optimizers,
options of their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class KeptState:
    """Gradients and states of optimizers as they were before a traced step.

    `torch.optim.Optimizer` chooses its implementation by the device: on a GPU it updates many
    tensors in a launch (``foreach``). Because a step is traced on the CPU, groups that leave the
    choice open are set to ``foreach``.
    """

    def __init__(self, foreach: bool = True) -> None:
        """Create an empty record; ``foreach`` False: leave the choice, as for a step on the CPU."""
        self._foreach = foreach
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def keep_grad(self, tensor: Tensor) -> None:
        """Save the gradient of a leaf, on the first call."""
        if id(tensor) not in self._grads:
            self._grads[id(tensor)] = tensor, tensor.grad

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the states of an optimizer on the first call, and choose the GPU's implementation."""
        if id(optimizer) in self._states:
            return
        states = {
            parameter: {name: _copied(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        groups = [
            {name: group[name] for name in group if name != "params"} for group in optimizer.param_groups
        ]
        self._states[id(optimizer)] = optimizer, states, groups
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.keep_grad(parameter)
            if self._foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

    def has_new_states(self) -> bool:
        """Return whether an optimizer has states of more Parameters than before."""
        return any(len(optimizer.state) > len(states) for optimizer, states, _ in self._states.values())

    def restore(self) -> None:
        """Restore all gradients, states and options."""
        for tensor, grad in self._grads.values():
            tensor.grad = grad
        for optimizer, states, groups in self._states.values():
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = state
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for name in [name for name in group if name != "params" and name not in saved]:
                    del group[name]
                group.update(saved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Save the state that the step changes within the context, and restore it at the end."""
        zero_optimizer, zero_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

        def of_optimizer(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.keep_optimizer(optimizer)
            return zero_optimizer(optimizer, *args, **kwargs)

        def of_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for parameter in module.parameters():
                self.keep_grad(parameter)
            return zero_module(module, *args, **kwargs)

        hook: Callable[..., None] = lambda optimizer, args, kwargs: self.keep_optimizer(optimizer)  # noqa: E731
        handle = register_optimizer_step_pre_hook(hook)
        try:
            with (
                mock.patch.object(torch.optim.Optimizer, "zero_grad", of_optimizer),
                mock.patch.object(nn.Module, "zero_grad", of_module),
                torch.random.fork_rng(devices=[]),
            ):
                yield
        finally:
            handle.remove()
            self.restore()


def _copied(value: Any) -> Any:
    """Return a copy of a scalar tensor, which a traced step really changes, else the value itself."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
