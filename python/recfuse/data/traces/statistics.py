"""Statistics of a trace of indices: popularity, bursts, and hit rates of caches."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recfuse import _C
from recfuse._arguments import integer, row_indices
from recfuse._progress import hidden

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

COVERAGE_PERCENTS = (1, 5, 10, 20, 50)
RANKS = (1, 10, 100, 1_000, 10_000, 30_000, 100_000)
OCCURRENCES = (1, 2, 3, 4)
GAP_PERCENTILES = (10, 50, 90)
LRU_ROWS = (1_000, 10_000, 60_000)


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Statistics of a trace: ``str`` returns a table, :meth:`plot` a figure, :meth:`as_dict` the numbers.

    Attributes:
        lookups: the number of lookups.
        rows: rows of the table.
        bag: lookups of a bag; bags begin at the start of the trace.
        window: lookups of a batch.
        counts: ``[unique]``, lookups of each row that occurs, the hottest first.
        hottest: ``[unique]``, the indices of the rows in ``counts``.
        gaps: ``[lookups - unique]``, sorted: the lookups since the previous read of the same row.
        lru_hits: ``[unique + 1]``, lookups that hit in an LRU cache of 0, 1, 2 ... rows.
        duplicates_percent: percent of lookups whose bag has already read the row, in complete bags only; NaN
            without complete bags.
        window_unique: different rows in a window, the mean over all windows; NaN if the trace is shorter.

    Example:
        >>> statistics = recfuse.traces.statistics([5, 2, 5, 7], rows=10)
        >>> statistics.counts.tolist(), statistics.hottest.tolist()
        ([2, 1, 1], [5, 2, 7])
    """

    lookups: int
    rows: int
    bag: int
    window: int
    counts: NDArray[np.int64]
    hottest: NDArray[np.int64]
    gaps: NDArray[np.int64]
    lru_hits: NDArray[np.int64]
    duplicates_percent: float
    window_unique: float

    @property
    def unique(self) -> int:
        """The number of different rows."""
        return len(self.counts)

    @property
    def unique_percent(self) -> float:
        """Different rows, in percent of the rows of the table."""
        return 100 * self.unique / self.rows if self.rows else float("nan")

    def coverage(self, percent: float) -> float:
        """Return the share of lookups that read the first rows by frequency, in percent.

        Args:
            percent: the share of the rows in use; at least one row counts.

        Returns:
            float: percent of the lookups; 0 for 0 percent, NaN without lookups.

        Raises:
            ValueError: a percent outside of [0, 100].
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"traces: percent is {percent}; expected [0, 100]")
        hottest = self.counts[: max(int(self.unique * percent / 100), int(percent > 0))]
        return 100 * float(hottest.sum()) / self.lookups if self.lookups else float("nan")

    def count_at(self, rank: int) -> int:
        """Return the lookups of the row at a rank; 0 after the last.

        Args:
            rank: 1 for the most frequent row.

        Raises:
            ValueError: a rank below 1.
        """
        if rank < 1:
            raise ValueError(f"traces: rank is {rank}; expected >= 1")
        return int(self.counts[rank - 1]) if rank <= self.unique else 0

    def rows_with(self, occurrences: int) -> int:
        """Return the number of rows with exactly this many lookups.

        Args:
            occurrences: lookups of a row, at least 1.
        """
        return int(np.count_nonzero(self.counts == occurrences))

    def gap_percentile(self, percent: float) -> float:
        """Return a percentile of the reuse gaps, in lookups; NaN if no row occurs twice.

        Args:
            percent: the percentile, in [0, 100].
        """
        return float(np.percentile(self.gaps, percent)) if len(self.gaps) else float("nan")

    def lru_hit_rate(self, cache_rows: int) -> float:
        """Return the hit rate of an LRU cache that is empty at first; NaN without lookups.

        Args:
            cache_rows: rows of the cache.

        Raises:
            ValueError: a negative number of rows.
        """
        if cache_rows < 0:
            raise ValueError(f"traces: cache_rows is {cache_rows}; expected >= 0")
        hits = float(self.lru_hits[min(cache_rows, self.unique)])
        return hits / self.lookups if self.lookups else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers at the usual points, for JSON."""
        return {
            "lookups": self.lookups,
            "rows": self.rows,
            "unique": self.unique,
            "unique_percent": self.unique_percent,
            "coverage_percent": {str(percent): self.coverage(percent) for percent in COVERAGE_PERCENTS},
            "count_at_rank": {str(rank): self.count_at(rank) for rank in RANKS if rank <= self.unique},
            "rows_with_occurrences": {str(times): self.rows_with(times) for times in OCCURRENCES},
            "window": self.window,
            "window_unique": self.window_unique,
            "gap_percentile": {str(percent): self.gap_percentile(percent) for percent in GAP_PERCENTILES},
            "bag": self.bag,
            "duplicates_percent": self.duplicates_percent,
            "lru_hit_rate": {str(size): self.lru_hit_rate(size) for size in LRU_ROWS},
        }

    def __rich__(self) -> Table:
        """The table that rich prints."""
        from rich.table import Table

        table = Table("statistic", "at", "value", title=f"{self.lookups:,} lookups of {self.rows:,} rows")

        def add(name: str, at: str, values: dict[str, float], form: str) -> None:
            points = " / ".join(f"{int(point):,}" for point in values)
            texts = " / ".join(format(value, form) for value in values.values())
            table.add_row(name, at.format(points), texts)

        numbers = self.as_dict()
        table.add_row("rows in use", "", f"{self.unique:,} ({self.unique_percent:.4g} %)")
        add("coverage, %", "hottest {} % of them", numbers["coverage_percent"], ".1f")
        add("lookups of a row", "rank {}", numbers["count_at_rank"], ",d")
        add("rows", "read {} times", numbers["rows_with_occurrences"], ",d")
        table.add_row("rows in use", f"in a window of {self.window:,}", f"{self.window_unique:,.0f}")
        add("reuse gap, lookups", "percentile {}", numbers["gap_percentile"], ",.0f")
        table.add_row("duplicates, %", f"in a bag of {self.bag:,}", f"{self.duplicates_percent:.2f}")
        add("LRU hit rate", "{} rows", numbers["lru_hit_rate"], ".3f")
        return table

    def __str__(self) -> str:
        """The table as text."""
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=110).print(self.__rich__())
        return text.getvalue()

    def plot(self) -> Figure:
        """Draw coverage, reuse gaps and LRU hit rate. Needs matplotlib (the extra ``bench``).

        Returns:
            Figure: matplotlib's figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.6), layout="constrained")
        coverage, gaps, cache = figure.subplots(1, 3)
        coverage.plot(
            np.linspace(0, 100, self.unique + 1), 100 * np.cumsum([0, *self.counts]) / max(self.lookups, 1)
        )
        coverage.set(xlabel="hottest rows, % of those in use", ylabel="lookups, %", title="Coverage")
        gaps.plot(self.gaps, np.linspace(0, 100, len(self.gaps)))
        gaps.set(xlabel="reuse gap, lookups", ylabel="reuses, %", title="Reuse gaps", xscale="log")
        cache.plot(np.arange(self.unique + 1), self.lru_hits / max(self.lookups, 1))
        cache.set(xlabel="rows of an LRU cache", ylabel="hit rate", title="LRU", xscale="symlog", ylim=(0, 1))
        for axes in (coverage, gaps, cache):
            axes.grid(alpha=0.3)
        return figure


def statistics(
    trace: NDArray[np.integer], rows: int | None = None, bag: int = 150, window: int = 2048 * 150
) -> Statistics:
    """Compute statistics of a trace.

    Compare with the statistics of `numpy.random.permutation(trace)` to see the effect of the order.

    Args:
        trace: indices ``[lookups]``, integers in [0, `rows`).
        rows: rows of the table. Default: one more than the largest index.
        bag: lookups of a bag. Default: 150.
        window: lookups of a batch. Default: 2048 * 150.

    Returns:
        Statistics: the statistics.

    Raises:
        TypeError: indices that are not integers.
        ValueError: a trace that is not one-dimensional or too long, indices out of range, bag or window below
            1.

    Example:
        >>> recfuse.traces.statistics([5, 2, 5, 7], rows=10).unique
        3
    """
    trace = row_indices("traces: trace", trace)
    bag, window = integer("traces: bag", bag, 1, 2**63 - 1), integer("traces: window", window, 1, 2**63 - 1)
    lowest, highest = (int(trace.min()), int(trace.max())) if len(trace) else (0, -1)
    rows = highest + 1 if rows is None else integer("traces: rows", rows, 0, 2**63 - 1)
    if lowest < 0 or highest >= rows:
        raise ValueError(f"traces: trace has row ids in [{lowest}, {highest}]; expected [0, {rows - 1}]")

    with tqdm(total=4, desc="trace statistics", delay=2, leave=False, disable=hidden()) as bar:
        rows_read, names, counts = np.unique(trace, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        bar.update()
        gaps, distances = _C.trace_reuse(names.astype(np.int64), len(counts))
        bar.update()
        reuses = np.flatnonzero(gaps > 0)
        hits = np.bincount(distances[reuses] + 1, minlength=len(counts) + 1).cumsum()
        bar.update()
        whole = len(trace) // bag * bag
        repeated = reuses[reuses < whole]
        duplicates = int(np.count_nonzero(gaps[repeated] <= repeated % bag))
        result = Statistics(
            lookups=len(trace),
            rows=rows,
            bag=bag,
            window=window,
            counts=counts[order].astype(np.int64),
            hottest=rows_read[order].astype(np.int64),
            gaps=np.sort(gaps[reuses]),
            lru_hits=hits,
            duplicates_percent=100 * duplicates / whole if whole else float("nan"),
            window_unique=_window_unique(gaps, window),
        )
        bar.update()
    return result


def _window_unique(gaps: NDArray[np.int64], window: int) -> float:
    """Return the different rows in a window, the mean over all windows; NaN if the trace is shorter."""
    starts = len(gaps) - window + 1
    if starts < 1:
        return float("nan")
    # Lookup i is the first of its row in the windows that start after the row's previous lookup, i - gap.
    lookup = np.arange(len(gaps))
    before = np.where(gaps > 0, lookup - gaps, -1)
    first = np.maximum(before + 1, lookup - window + 1)
    last = np.minimum(lookup, starts - 1)
    return float(np.maximum(last - first + 1, 0).sum()) / starts
