"""Timing of calls in a stream of different batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.batches import Batch
from recfuse._clock import clock

Run = Callable[[Batch], Tensor]
# Clock cycles of the device per second, or slightly more.
_CYCLES = 2.0e9
# Most seconds of a pause that lets the host get ahead of the device.
_LONGEST_PAUSE = 0.3


@dataclass
class Stream:
    """One candidate in a stream of batches."""

    device_s: NDArray[np.float64]  # [rounds, batches]: seconds that the device spent on each
    called_s: NDArray[np.float64]  # [rounds]: seconds of all batches as called, host included

    @property
    def medians(self) -> NDArray[np.float64]:
        """[batches]: seconds of each batch, the median over rounds."""
        return np.median(self.device_s, axis=0)

    def to_json(self) -> dict[str, Any]:
        """Every sample."""
        return {"device_s": self.device_s.tolist(), "called_s": self.called_s.tolist()}


def time_stream(
    runs: Mapping[str, Run], batches: Sequence[Batch], device: torch.device, rounds: int
) -> dict[str, Stream]:
    """Times each batch of a stream, candidates in turns, a pass over all batches at a time.

    The host queues the whole pass while the device pauses, so that each next batch is ready in time. The time
    of a batch is that between two events, including the cost of a launch. Caches hold the data of the
    previous batches.
    """
    names = list(runs)
    for run in runs.values():
        for batch in batches:  # compiles, and fills the caches that depend on a batch's size
            run(batch)
    device_s: dict[str, list[list[float]]] = {name: [] for name in names}
    called_s: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                queued, total = _called(runs[name], batches, device)
                called_s[name].append(total)
                device_s[name].append(_backlogged(runs[name], batches, device, queued))
    finally:
        if collecting:
            gc.enable()
    return {name: Stream(np.array(device_s[name]), np.array(called_s[name])) for name in names}


def _called(run: Run, batches: Sequence[Batch], device: torch.device) -> tuple[float, float]:
    """Seconds that the host needs to queue a pass, and until the device is done with it."""
    finish = clock(device).finish
    finish()
    start = time.perf_counter()
    for batch in batches:
        run(batch)
    queued = time.perf_counter() - start
    finish()
    return queued, time.perf_counter() - start


def _backlogged(run: Run, batches: Sequence[Batch], device: torch.device, queued: float) -> list[float]:
    """Seconds of each batch of a pass."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for batch in batches:
            run(batch)
            marks.append(time.perf_counter())
        return np.diff(marks).tolist()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda._sleep(int(min(1.5 * queued + 1e-3, _LONGEST_PAUSE) * _CYCLES))
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        run(batch)
        event.record()
    clock(device).finish()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
