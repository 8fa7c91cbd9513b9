"""``Updater``: the numbers that kernels read to update Parameters, and the count of steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recfuse.ops.training.optimizers import GRAD_SCALE, KINDS, SKIP, STEP

_WHOLE = 1 << 24
"""float32 represents every whole number up to this value."""
OPTIONS = 3
"""The number of options of an updater: kind, stochastic_rounding, seed."""


class Updater:
    """The numbers and the step that Parameters share which an optimizer updates in one call.

    Attributes:
        kind: the code of the optimizer, see `KINDS`.
        numbers: float32 ``[8]`` on the Parameters' device, which the kernels read when they run; see LR and
            the names after it. STEP is the step of the next update.
        deferred: the backward pass leaves sparse gradients, instead of updates.
        counts_on_device: True if kernels read the number of the step.
        owner: the optimizer, or None after its deletion; ``get_owner()`` returns it in less time.
        device: the device of ``numbers``.
        steps_done: the number of steps by the host's count.
    """

    def __init__(
        self,
        owner: Any,
        kind: int,
        device: torch.device,
        deferred: bool,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        """Begin with numbers that change nothing: an lr of 0."""
        self.kind, self.deferred = kind, deferred
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self.options = kind, int(self.stochastic_rounding), self.seed
        self.counts_on_device = KINDS[kind].counts or stochastic_rounding
        self.get_owner: Callable[[], Any] = weakref.ref(owner)
        self.steps_done = 0
        self.device = device
        self._written = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
        with torch.inference_mode(False):
            self.numbers = torch.tensor(self._written, dtype=torch.float32, device=device)
            self._step = self.numbers[STEP]

    @property
    def owner(self) -> Any:
        """The optimizer, or None."""
        return self.get_owner()

    def disown(self) -> None:
        """Detach from the optimizer, as if it were deleted."""
        self.get_owner = lambda: None

    def write(self, number: int, value: float) -> None:
        """Write a number, asynchronously, unless it is equal already."""
        if self._written[number] != value:
            self._written[number] = value
            self._put(number, value)

    def _put(self, number: int, value: float | Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.numbers[number].fill_(value)

    def set_steps(self, steps_done: int) -> None:
        """Set the number of steps."""
        self.steps_done = steps_done
        self._put(
            STEP, steps_done + 1 if steps_done < _WHOLE else _WHOLE // 2 + (steps_done + 1) % (_WHOLE // 2)
        )

    def counted_steps(self) -> int:
        """Return the number of steps; waits for the device if that counts them.

        Beyond 2^24 it is the host's count, which excludes steps of replayed graphs.
        """
        if not self.counts_on_device:
            return self.steps_done
        counted = round(self.numbers[STEP].item()) - 1
        return counted if counted < _WHOLE // 2 else max(counted, self.steps_done)

    def tick(self, found_inf: Tensor | None = None) -> None:
        """Count a step, unless ``found_inf`` marks it as skipped."""
        self.steps_done += 1
        if self.counts_on_device:
            if found_inf is None:
                self._step.add_(1)
            else:
                self._step.add_(found_inf.to(self.device, non_blocking=True).reshape(()) == 0)
            if self.stochastic_rounding:
                # A constant step would round with the same bits forever. A cycle of half of 2^24 steps is
                # long enough, and Adam's corrections are 1 there.
                self._step.add_(self._step >= _WHOLE, alpha=-(_WHOLE // 2))

    def scale(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Set the results of a gradient scaler.

        Kernels divide gradients by ``grad_scale``, and skip the update if ``found_inf`` is not 0. None
        disables both.
        """
        device, sign = self.device, self._written[GRAD_SCALE]
        if grad_scale is not None:
            self._put(GRAD_SCALE, (sign / grad_scale.to(device, non_blocking=True)).reshape(()))
        else:
            self._put(GRAD_SCALE, sign)
        self._put(SKIP, 0.0 if found_inf is None else found_inf.to(device, non_blocking=True).reshape(()))
