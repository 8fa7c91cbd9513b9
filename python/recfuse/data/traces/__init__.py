"""Traces: the indices that a model looks up in an embedding table, in order.

>>> from recfuse import traces
>>> trace = traces.generate("medium")          # int64 [429951], like Meta's production trace
>>> print(traces.statistics(trace, rows=500_000))
>>> indices, offsets = traces.bags(trace, batch=2048, pooling=150)

The levels of hotness are those of Jain et al., "Pushing the Performance Envelope of DNN-based
Recommendation Systems Inference on GPUs" (MICRO'24, section III-B): one_item, high, medium, low, random.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recfuse import _C
from recfuse._arguments import integer, row_indices
from recfuse._progress import hidden
from recfuse.data.traces.files import Table, read, read_tables
from recfuse.data.traces.statistics import Statistics, statistics
from recfuse.errors import ArgumentValueError

__all__ = [
    "HOTNESS",
    "Statistics",
    "Table",
    "bags",
    "generate",
    "hottest",
    "read",
    "read_tables",
    "statistics",
]

HOTNESS = ("one_item", "high", "medium", "low", "random")
"""The levels of hotness, the hottest first."""

_ROWS = 500_000
"""Rows of the table that the recipes describe."""
_MAX_LOOKUPS = 2**31 - 2


@dataclass(frozen=True)
class _Recipe:
    """A trace over a table of `_ROWS` rows: the frequencies of rows, and their clustering in time.

    Up to the last point, the frequency of the row at rank r is a power law through `points` (rank, count).
    After them come `rare[n - 1]` rows that are read n times. With probability `burst`, a lookup of a row
    follows its previous lookup after lognormal(log `median`, `sigma`) lookups; else its position is uniform.
    """

    lookups: int
    points: tuple[tuple[float, float], ...]
    rare: tuple[int, ...]
    burst: float
    median: float
    sigma: float

    @property
    def head(self) -> int:
        """The number of rows on the curve."""
        return int(self.points[-1][0])

    @property
    def unique(self) -> int:
        """The number of rows that occur."""
        return self.head + sum(self.rare)

    def counts_at(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the lookups of the rows at (fractions of) ranks, from 1."""
        first, last = np.array(self.points).T
        counts = _C.trace_curve(first, last, ranks)
        # The rarest rows are last: after the head come the rows read len(rare) times, ..., twice, once.
        ends = self.head + np.cumsum(self.rare[::-1])
        is_rare = ranks > self.head
        step = np.searchsorted(ends, ranks[is_rare] - 0.5)
        counts[is_rare] = len(self.rare) - np.minimum(step, len(self.rare) - 1)
        return counts


_RECIPES = {
    # Zipf with exponent 0.9 over 20,250 rows: the published share of unique rows, and the published
    # coverage of their hottest tenth. Its bursts are not published; those of medium are used.
    "high": _Recipe(500_000, ((1, 28_650), (20_250, 3.82)), (), burst=0.89, median=430, sigma=1.92),
    "medium": _Recipe(
        429_951,
        ((1, 980), (2, 485), (5, 233), (10, 173), (30, 96), (100, 60), (300, 39), (1_000, 24), (3_000, 16),
         (10_000, 9), (20_000, 6), (29_206, 5)),
        (32_135, 19_232, 12_651, 9_300),
        burst=0.89, median=430, sigma=1.92,
    ),
    "low": _Recipe(
        379_910,
        ((1, 184), (10, 113), (100, 35), (1_000, 9), (2_310, 6.5), (5_588, 4.5)),
        (147_415, 54_190, 17_761, 6_096),
        burst=0.33, median=1_300, sigma=2.02,
    ),
}  # fmt: skip


def generate(hotness: str, rows: int = _ROWS, lookups: int | None = None, seed: int = 0) -> NDArray[np.int64]:
    """Generate a synthetic trace of a level of hotness.

    Args:
        hotness: one of `HOTNESS`. "medium" and "low" have the popularity and the bursts of the published
            production traces. Of "high", only a few points are published; a Zipf distribution fits them.
        rows: rows of the table. The number of rows in use grows with it.
        lookups: length of the trace. A shorter trace is a prefix of the default; a longer trace reads the
            same rows more often. Default: the length of the published trace, scaled with `rows`.
        seed: the same seed gives the same trace on every platform. Default: 0.

    Returns:
        ndarray: int64 ``[lookups]``, rows in [0, `rows`).

    Raises:
        ValueError: an unknown hotness, rows or lookups outside [1, 2^31 - 1), or a bad seed.

    Example:
        >>> recfuse.traces.generate("medium", rows=1000, lookups=100).shape
        (100,)

    Source: Jain et al., MICRO 2024, section III-B.
    """
    if hotness not in HOTNESS:
        raise ArgumentValueError(f"traces: hotness is {hotness!r}; expected {', '.join(HOTNESS)}")
    rows = integer("traces: rows", rows, 1, _MAX_LOOKUPS)
    lookups = None if lookups is None else integer("traces: lookups", lookups, 1, _MAX_LOOKUPS)
    seed = integer("traces: seed", seed, 0, 2**64 - 1)

    if hotness in ("one_item", "random"):
        length = _scaled(_ROWS, rows) if lookups is None else lookups
        different = 1 if hotness == "one_item" else length
        return np.resize(_C.uniform(different, rows, seed), length)

    recipe = _RECIPES[hotness]
    with tqdm(total=3, desc=f"trace {hotness}", delay=2, leave=False, disable=hidden()) as bar:
        whole = _scaled(recipe.lookups, rows)
        length = max(whole, lookups or whole)
        counts = _counts(recipe, rows, length)
        bar.update()
        times = _C.trace_times(counts, float(length), recipe.burst, recipe.median, recipe.sigma, seed)
        bar.update()
        names = _C.permutation(rows, seed)[: len(counts)]
        trace = np.repeat(names, counts)[np.argsort(times, kind="stable")]
        bar.update()
    return trace[:lookups]


def bags(
    trace: NDArray[np.integer], batch: int, pooling: int, number: int = 0, include_last_offset: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut a batch of equal bags out of a trace.

    Args:
        trace: indices ``[lookups]``; repeated at its end.
        batch: bags of the batch.
        pooling: lookups of a bag.
        number: the number of the batch; it begins ``number * batch * pooling`` lookups into the trace.
        include_last_offset: return offsets ``[batch + 1]`` instead of ``[batch]``.

    Returns:
        tuple: int64 indices ``[batch * pooling]`` and offsets.

    Raises:
        ValueError: a trace that is empty or not one-dimensional, a negative number.

    Example:
        >>> trace = recfuse.traces.generate("random", rows=1000)
        >>> indices, offsets = recfuse.traces.bags(trace, batch=4, pooling=5)
        >>> indices.shape, offsets.shape
        ((20,), (4,))
    """
    trace = row_indices("traces: trace", trace)
    if len(trace) == 0:
        raise ArgumentValueError("traces: trace has the shape (0,); expected one dimension that is not empty")
    batch = integer("traces: batch", batch, 0, _MAX_LOOKUPS)
    pooling = integer("traces: pooling", pooling, 0, _MAX_LOOKUPS)
    number = integer("traces: number", number, 0, 2**63 - 1)
    size = batch * pooling
    start = number * size % len(trace)
    indices = np.resize(np.roll(trace, -start) if start else trace, size).astype(np.int64)
    offsets = np.arange(batch + include_last_offset, dtype=np.int64) * pooling
    return indices, offsets


def hottest(trace: NDArray[np.integer], count: int | None = None) -> NDArray[np.int64]:
    """Return the most frequent rows of a trace, in descending order; ties in the order of rows.

    ``statistics(trace).hottest`` has the same rows; its other statistics take longer.

    Args:
        trace: indices ``[lookups]``.
        count: the number of rows. Default: all.

    Returns:
        ndarray: int64 ``[count]``.

    Raises:
        ValueError: a trace that is not one-dimensional, a negative count.

    Example:
        >>> recfuse.traces.hottest([5, 2, 5, 7, 5, 2], count=2).tolist()
        [5, 2]
    """
    rows, counts = np.unique(row_indices("traces: trace", trace), return_counts=True)
    count = None if count is None else integer("traces: count", count, 0, 2**63 - 1)
    return rows[np.argsort(-counts, kind="stable")][:count].astype(np.int64)


def _scaled(value: int, rows: int) -> int:
    return max(1, round(value * rows / _ROWS))


def _counts(recipe: _Recipe, rows: int, length: int) -> NDArray[np.int64]:
    """Return the lookups of each row in use, the hottest first; their sum is `length`."""
    unique = min(_scaled(recipe.unique, rows), length)
    ranks = (np.arange(unique) + 0.5) * (recipe.unique / unique) + 0.5
    values = recipe.counts_at(np.maximum(ranks, 1))
    counts = np.maximum(np.rint(values * (length / fsum(values))), 1).astype(np.int64)
    # Rounding changes the sum by up to a percent: the difference is spread over frequent rows.
    order = np.argsort(-counts, kind="stable")
    while (missing := length - int(counts.sum())) != 0:
        able = order[counts[order] > 5]
        if len(able) == 0:
            able = order if missing > 0 else order[counts[order] > 1]
        chosen = able[np.linspace(0, len(able) - 1, min(abs(missing), len(able))).astype(int)]
        counts[np.unique(chosen)] += np.sign(missing)
    return np.sort(counts)[::-1]
