"""State that a traced step changes and gets back: gradients, states of optimizers, flags of their groups."""

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

    `torch.optim.Optimizer` chooses its form by the device: on a GPU the one that treats many tensors in a
    launch (``foreach``). A step is traced on the CPU, so that groups which leave the choice are set to it.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._states: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def keep_grad(self, tensor: Tensor) -> None:
        """Remember the gradient of a leaf, the first time."""
        if id(tensor) not in self._grads:
            self._grads[id(tensor)] = tensor, tensor.grad

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the states of an optimizer, the first time, and choose the GPU's form."""
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
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

    def has_new_states(self) -> bool:
        """Return whether an optimizer has states of more Parameters than before."""
        return any(len(one.state) > len(states) for one, states, _ in self._states.values())

    def restore(self) -> None:
        """Give everything back."""
        for tensor, grad in self._grads.values():
            tensor.grad = grad
        for optimizer, states, groups in self._states.values():
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = state
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                for name in [name for name in group if name != "params" and name not in kept]:
                    del group[name]
                group.update(kept)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember within the context what the step changes, and give it back at its end."""
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
    """A copy of a small tensor, which a step changes for real; the tensor itself else, which it does not."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
