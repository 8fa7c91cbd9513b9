"""The largest batch whose step stays under a latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recfuse.errors import ArgumentValueError
from recfuse.perf.prediction import Prediction

MOST = 1 << 20
_CLOSE = 1.02  # batches whose ratio is below this count as equal


@dataclass(frozen=True)
class Capacity:
    """The largest batch under a limit in one regime.

    Attributes:
        regime: ``"eager"``, ``"compiled"`` or ``"graph"``.
        batch: the batch; 0: a single sample exceeds the latency or the memory.
        seconds: its predicted time.
        by: the reason of the limit: ``"latency"``, ``"memory"``, or ``"batch"`` for the largest
            batch that was tried.
    """

    regime: str
    batch: int
    seconds: float
    by: str


def largest_batches(
    predict: Callable[[int], Prediction], limit: float, most: int = MOST, memory_bytes: int | None = None
) -> list[Capacity]:
    """Return the largest batch of each regime that takes at most ``limit`` seconds and fits in memory.

    Args:
        predict: returns the prediction for a batch.
        limit: seconds.
        most: the largest batch to try.
        memory_bytes: memory of the device; default: as the prediction says.

    Raises:
        ValueError: the limit is not above 0.
    """
    if not limit > 0:
        raise ArgumentValueError(f"recfuse.predict: the limit is {limit} seconds; expected more than 0")
    predictions: dict[int, Prediction] = {}

    def at(batch: int) -> Prediction:
        if batch not in predictions:
            predictions[batch] = predict(batch)
        return predictions[batch]

    def fits(batch: int) -> bool:
        room = memory_bytes or at(batch).memory_bytes
        return not room or at(batch).peak_bytes <= room

    def holds(batch: int, regime: str) -> bool:
        return at(batch).regimes[regime].seconds <= limit and fits(batch)

    capacities = []
    for regime in at(1).regimes:
        if not holds(1, regime):
            capacities.append(
                Capacity(regime, 0, at(1).regimes[regime].seconds, "latency" if fits(1) else "memory")
            )
            continue
        low, high = 1, 2
        while high <= most and holds(high, regime):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1 and high > low * _CLOSE:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle, regime) else (low, middle)
        by = "batch" if low >= most else "latency" if fits(high) else "memory"
        capacities.append(Capacity(regime, low, at(low).regimes[regime].seconds, by))
    return capacities
