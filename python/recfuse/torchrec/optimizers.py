"""The optimizers of table-batched embeddings: the update in a backward pass ends a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter

from recfuse import optim
from recfuse.ops.training.optimizers import EPS, KINDS
from recfuse.optim.base import FusedOptimizer
from recfuse.torchrec.options import Options


class _InBackward(FusedOptimizer):
    """An optimizer whose step ends with the backward pass that updates rows, as in FBGEMM's module.

    The caller never calls ``step()``. Several forward passes may precede their backward passes.
    """

    def _pass_finished(self) -> None:
        self.step()
        self._correct_eps()

    def set_steps(self, steps: int) -> None:
        """Set the number of past updates."""
        for _, updater in self._updaters:
            updater.set_steps(steps)
        self._correct_eps()

    def _correct_eps(self) -> None:
        """Scale eps for the next update.

        FBGEMM computes ``m / (sqrt(v / c) + eps)``. The kernel computes the equal ``m sqrt(c) /
        (sqrt(v) + eps sqrt(c))``.
        """
        for group, updater in self._updaters:
            if "betas" in group:
                correction = 1 - group["betas"][1] ** (updater.steps_done + 1)
                updater.write(EPS, group["eps"] * math.sqrt(correction))


_IN_BACKWARD: dict[str, Any] = {
    kind.name: type(kind.name, (_InBackward, getattr(optim, kind.name)), {"__module__": __name__})
    for kind in KINDS
}
"""The optimizers of recfuse.optim, which step in the backward pass. The library finds kernels by name."""
globals().update(_IN_BACKWARD)  # where pickle and the list of known optimizers look a class up


def in_backward(kind: type[FusedOptimizer], params: Sequence[Parameter], options: Options) -> Any:
    """Return an optimizer of a class of ``recfuse.optim`` that steps after each backward pass."""
    numbers: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    numbers["stochastic_rounding"] = options.stochastic_rounding and options.dtype.itemsize == 2
    if kind is not optim.SGD:
        numbers["eps"] = options.eps
    if kind is optim.Adam:
        numbers["betas"] = options.beta1, options.beta2
    optimizer = _IN_BACKWARD[kind.__name__](params, **numbers)
    optimizer._correct_eps()
    return optimizer
