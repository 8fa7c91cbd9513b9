"""The schedules of a module's features on a GPU: those of a plan, and the calibration from batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import INTEGERS
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.ops.schedules import EXPECTED, FIELDS, FusedSchedule, expectations

_MOST = torch.iinfo(torch.int32).max


class Lengths:
    """Lookups and bags of each feature, summed over batches."""

    def __init__(self, features: int) -> None:
        """Begin without batches."""
        self.features = features
        self.lookups = torch.zeros(features, dtype=torch.int64, device="cpu")
        self.bags = 0

    def add(self, offsets: Tensor) -> bool:
        """Add the offsets of a batch, ``[features * bags + 1]`` on any device, and wait for the device.

        Returns False, and adds nothing, if the batch has no lookups or its offsets are invalid.
        """
        if offsets.dim() != 1 or offsets.dtype not in INTEGERS or not self.features:
            return False
        bags, rest = divmod(offsets.numel() - 1, self.features)
        if bags <= 0 or rest:
            return False
        bounds = offsets[::bags].to("cpu", torch.int64)
        lookups = bounds.diff()
        if bounds[0] != 0 or bounds[-1] == 0 or lookups.min() < 0:
            return False
        self.lookups += lookups
        self.bags += bags
        return True

    def mean_sixteenths(self) -> Tensor:
        """Return mean lookups of a bag in sixteenths, int32 ``[features]``, at least 1.

        A feature without lookups may have lookups in later batches.
        """
        sixteenths = expectations(self.lookups.numpy() / max(self.bags, 1))
        return torch.from_numpy(np.maximum(sixteenths, 1))


class Tuning:
    """Schedules of the features of a module. They never change the results of a call."""

    def __init__(self, features: int) -> None:
        """Begin with defaults, without expected pooling factors."""
        self.features = features
        self.schedules: Tensor | None = None  # int32 [features, FIELDS] on the host; None: unknown
        self.warps = 0
        self.plan: Any = None
        self._tables: list[tuple[int, torch.dtype]] | None = None

    def fit(self, tables: list[tuple[int, torch.dtype]]) -> None:
        """Store dims and dtypes of the features; after a change, keep only the expected pooling factors."""
        if self._tables not in (None, tables) and self.schedules is not None:
            self._expect(None, self.schedules[:, EXPECTED])
            self.warps, self.plan = 0, None
        self._tables = tables

    def set(self, schedules: Any, warps: int = 0) -> None:
        """Set the schedules, as :meth:`PackedModule.set_plan`."""
        if isinstance(warps, bool) or not isinstance(warps, int):
            raise wrong_type("recfuse: warps", warps, "an int")
        if warps < 0:
            raise ArgumentValueError(f"recfuse: warps is {warps}; expected >= 0")
        self.schedules = None if schedules is None else self._rows(schedules)
        self.warps, self.plan = warps, None

    def _rows(self, schedules: Any) -> Tensor:
        if not isinstance(schedules, (Tensor, np.ndarray)):
            schedules = _parsed(schedules)
        rows = torch.as_tensor(schedules).detach().to("cpu")
        if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise ArgumentTypeError(f"recfuse: schedules is {rows.dtype}; expected int32")
        if rows.shape != (self.features, FIELDS):
            raise ArgumentValueError(
                f"recfuse: schedules has shape {list(rows.shape)}; expected [{self.features}, {FIELDS}], a "
                "row a feature with kind, threads, distance, split, expected lookups of a bag times 16"
            )
        if rows.numel() and (rows.min() < -1 or rows.max() > _MOST):
            wrong = int(rows.max() if rows.max() > _MOST else rows.min())
            raise ArgumentValueError(f"recfuse: schedules has {wrong}; expected -1 to {_MOST}")
        return rows.to(torch.int32, copy=True).contiguous()

    def _expect(self, schedules: Tensor | None, sixteenths: Tensor) -> None:
        with torch.inference_mode(False):  # else a first call in that mode would bind later calls to it
            rows = torch.zeros(self.features, FIELDS, dtype=torch.int32, device="cpu")
            if schedules is not None:
                rows.copy_(schedules)
            rows[:, EXPECTED] = sixteenths
        self.schedules = rows

    def learn(self, offsets: Tensor) -> None:
        """Calibrate from the offsets of a first batch and wait for them; do nothing during a capture."""
        if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        lengths = Lengths(self.features)
        if lengths.add(offsets):
            self._expect(None, lengths.mean_sixteenths())

    def calibrate(self, offsets: Iterable[Tensor]) -> None:
        """Calibrate from the offsets of several batches, regardless of their order."""
        lengths = Lengths(self.features)
        added = [lengths.add(of_batch) for of_batch in offsets]
        if not any(added):
            raise ArgumentValueError(
                f"recfuse: no batch of {len(added)} has lookups, and offsets of {self.features} * bags + 1 "
                "elements that rise from 0"
            )
        self._expect(self.schedules, lengths.mean_sixteenths())


def _parsed(schedules: Any) -> list[list[int]]:
    """Return the rows of schedules, each a text or a parsed schedule."""
    if not isinstance(schedules, Sequence) or isinstance(schedules, str):
        needed = "an int32 tensor or array, or a sequence of texts, a text a feature"
        raise wrong_type("recfuse: schedules", schedules, needed)
    rows = []
    for number, item in enumerate(schedules):
        try:
            schedule = FusedSchedule.parse(item) if isinstance(item, str) else item
            rows.append(list(schedule.row()))
        except AttributeError as error:
            needed = 'a text such as "kind=pool threads=16", or an int32 tensor or array for all'
            raise wrong_type(f"recfuse: schedules[{number}]", item, needed) from error
        except ValueError as error:
            raise ArgumentValueError(f"recfuse: schedules[{number}]: {error}") from error
    return rows
