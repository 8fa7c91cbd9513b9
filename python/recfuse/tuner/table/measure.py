"""Times candidates on the GPU in turns and drops slow candidates early."""

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

_COPY_BYTES = 256 << 20  # larger than any L2
# Of each heat of a race: rounds, and the slowdown against the fastest at which a candidate stays.
_HEATS = ((3, 1.3), (5, 1.1), (9, float("inf")))

Measure = Callable[[Sequence[str], int], NDArray[np.float64]]
"""Returns the seconds per batch [schedules, rounds]."""


@dataclass
class Result:
    """The result of a candidate in a race."""

    us: float
    """Median microseconds per batch."""
    rounds: int


class Bench:
    """The batches of a problem, prepared for repeated pooling."""

    def __init__(self, problem: Problem) -> None:
        """Store addresses; the problem must live as long."""
        weight, device = problem.weight, problem.weight.device
        bags = max(batch.bags for batch in problem.batches)
        # All batches share one output, because torch's allocator reuses the memory of outputs in a model.
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
        """Return the seconds per batch `[schedules, rounds]`, measured in turns, including the pinning of
        `pinned` (int64 rows).
        """
        stream = stream_of(self._problem.weight.device)
        rows = None if pinned is None else (address("pinned", pinned), pinned.numel())
        form: Any = MODES.index(self._problem.mode), self._problem.padding_idx, True
        return _C.embedding_bag_measure(
            *stream, self._table, self._batches, *form, list(schedules), rounds, rows
        )


def race(
    measure: Measure, schedules: Sequence[str], deadline: float
) -> tuple[dict[str, Result], dict[str, str]]:
    """Time candidates in one or more heats and drop slow candidates. Returns the results, and
    the errors of failed candidates.
    """
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
    """Return the samples of each candidate. A failed candidate fails the whole call, so each is
    then measured alone.
    """
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
            # Every candidate failed: the cause is not in the candidates.
            if not times and number == len(schedules) - 1:
                raise
    return times


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read and written, of the fastest of several large copies
    on the device.
    """
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_COPY_BYTES, free // 4) // 8
    source = torch.zeros(size, dtype=torch.int64, device=device)
    copy = {"copy": partial(torch.empty_like(source).copy_, source)}
    timed = timing.compare(copy, rounds=8, device=device, progress=False)
    return 2 * source.nbytes / min(timed["copy"].samples)
