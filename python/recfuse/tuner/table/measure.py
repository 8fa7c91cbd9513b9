"""Candidates timed on the GPU, in turns, the slow ones dropped early."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse import _C, timing
from recfuse._codes import DTYPES, MODES
from recfuse.tuner.log import first_line
from recfuse.tuner.native import address, float_weights, lookups, stream_of
from recfuse.tuner.table.problem import Problem

_COPY_BYTES = 256 << 20  # more than any L2
# Rounds of a race, and how much slower than the fastest a candidate may be to run on.
_HEATS = ((3, 1.3), (5, 1.1), (9, float("inf")))

Measure = Callable[[Sequence[str], int], NDArray[np.float64]]
"""Seconds a batch [schedules, rounds]."""


@dataclass
class Result:
    """What a race says of one candidate."""

    us: float
    """Median microseconds a batch."""
    rounds: int


class Bench:
    """The batches of a problem, ready to be pooled again and again."""

    def __init__(self, problem: Problem) -> None:
        """Takes the addresses; the problem must live as long."""
        weight, device = problem.weight, problem.weight.device
        bags = max(batch.bags for batch in problem.batches)
        # All share one output, as calls in a model share what torch's allocator hands out again.
        self._output = torch.empty((bags, weight.shape[1]), dtype=weight.dtype, device=device)
        self._weights = float_weights(problem.batches)
        self._problem = problem
        self._table: Any = (
            address("weight", weight),
            *weight.shape,
            weight.stride(0),
            DTYPES.index(weight.dtype),
        )
        self._batches = [
            (
                *lookups(batch),
                batch.include_last_offset,
                address("per_sample_weights", weights),
                address("output", self._output),
            )
            for batch, weights in zip(problem.batches, self._weights, strict=True)
        ]

    def measure(
        self, schedules: Sequence[str], rounds: int, pinned: Tensor | None = None
    ) -> NDArray[np.float64]:
        """Seconds a batch `[schedules, rounds]`, in turns; pinning `pinned`, int64 rows, is inside of it."""
        stream = stream_of(self._problem.weight.device)
        rows = None if pinned is None else (address("pinned", pinned), pinned.numel())
        form: Any = MODES.index(self._problem.mode), self._problem.padding_idx, True
        return _C.embedding_bag_measure(
            *stream, self._table, self._batches, *form, list(schedules), rounds, rows
        )


def race(
    measure: Measure, schedules: Sequence[str], deadline: float
) -> tuple[dict[str, Result], dict[str, str]]:
    """Times candidates, one heat at least, and drops slow ones: results, and errors of those that failed."""
    results: dict[str, Result] = {}
    errors: dict[str, str] = {}
    samples: dict[str, NDArray[np.float64]] = {}
    running = list(schedules)
    for rounds, limit in _HEATS:
        for name, times in _heat(measure, running, rounds, errors).items():
            samples[name] = np.append(samples.get(name, []), times)
            results[name] = Result(float(np.median(samples[name])) * 1e6, len(samples[name]))
        running = [name for name in running if name in results and name not in errors]
        if not running:
            break
        fastest = min(results[name].us for name in running)
        running = [name for name in running if results[name].us <= limit * fastest]
        if time.monotonic() > deadline:
            break
    return {name: result for name, result in results.items() if name not in errors}, errors


def _heat(
    measure: Measure, schedules: Sequence[str], rounds: int, errors: dict[str, str]
) -> dict[str, NDArray[np.float64]]:
    """Samples of each candidate. One that fails fails them all, so they are then tried one by one."""
    try:
        return dict(zip(schedules, measure(schedules, rounds), strict=True))
    except Exception:
        if len(schedules) == 1:
            raise
    times = {}
    for number, name in enumerate(schedules):
        try:
            times[name] = measure([name], rounds)[0]
        except Exception as error:
            errors[name] = first_line(error)
            if not times and number == len(schedules) - 1:  # not the candidates' fault
                raise
    return times


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device: the best of some."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_COPY_BYTES, free // 4) // 8
    source = torch.zeros(size, dtype=torch.int64, device=device)
    copy = {"copy": partial(torch.empty_like(source).copy_, source)}
    timed = timing.compare(copy, rounds=8, device=device, progress=False)
    return 2 * source.nbytes / min(timed["copy"].samples)
