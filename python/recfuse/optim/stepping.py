"""``step()`` and ``zero_grad()`` without torch's records for its profiler and without the compiler's wrapper.

The records take twenty microseconds per step, even without a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from recfuse.nn.packed.row_wise import has_other_hooks
from recfuse.optim.steps import deferred_step, direct_step


def _step(fused: Stepping, closure: Callable[[], Any] | None = None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    (deferred_step if fused.deferred else direct_step)(fused)
    return loss


@torch._disable_dynamo
def _uncompiled(method: Callable[..., Any], *arguments: Any) -> Any:
    return method(*arguments)


_recorded_step = Optimizer.profile_hook_step(_step)


class Stepping(Optimizer):
    """The methods that each step calls."""

    deferred: bool

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as every optimizer. Tables that ``backward()`` updates have no gradients."""
        if torch.compiler.is_dynamo_compiling():
            _uncompiled(Stepping.zero_grad, self, set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    super().zero_grad(set_to_none)
                    return

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """End a step: increment the number of steps of tables that ``backward()`` has updated.

        With ``deferred``, update the rows of tables with ``.grad``.

        Args:
            closure: computes the loss, and calls ``backward()``.

        Returns:
            The result of ``closure``.

        Raises:
            ValueError: a Parameter has a gradient of other uses than lookups; see :mod:`recfuse.optim`.
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(Stepping.step, self, closure)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or has_other_hooks()
            or torch.autograd._profiler_enabled()
        ):
            return _recorded_step(self) if closure is None else _recorded_step(self, closure)
        return _step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # keeps torch from wrapping it
