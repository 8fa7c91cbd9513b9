"""The last line of a run: its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.report import load_notes
from common.table import times
from recfuse import timing

LEAST = 0.02
"""Two medians nearer to each other than this are called level."""


def interval(result: timing.Comparison, candidate: str, baseline: str) -> tuple[float, float]:
    """Returns the 95 % confidence interval of how many times faster the candidate is.

    It uses the ratios round by round, because within a round both had the same input at about the same time.
    The ends are order statistics, which assume no distribution.
    """
    pairs = zip(result[baseline].samples, result[candidate].samples, strict=True)
    ratios = sorted(slow / fast for slow, fast in pairs)
    beyond = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    return ratios[beyond], ratios[-1 - beyond]


def is_level(result: timing.Comparison, candidate: str, baseline: str) -> bool:
    """Returns true if the two cannot be distinguished."""
    low, high = interval(result, candidate, baseline)
    return low <= 1 <= high or abs(result.ratio(candidate, baseline) - 1) < LEAST


def agreement(differences: Sequence[float]) -> str:
    """Returns the difference of outputs in words."""
    worst = max(differences)
    return "outputs identical" if worst == 0 else f"outputs within {worst:.0e}"


def verdict(
    results: Mapping[str, timing.Comparison],
    candidate: str,
    baseline: str,
    against: str,
    differences: Sequence[float],
) -> str:
    """ "recfuse: 1.33x faster than nn.EmbeddingBag in a loop, outputs identical", or slower, or level.

    results: by case. against: the baseline in words. differences: of outputs, none of them NaN.
    """
    ratios = [result.ratio(candidate, baseline) for result in results.values()]
    low, high = min(ratios), max(ratios)
    level = [is_level(result, candidate, baseline) for result in results.values()]
    if len(ratios) == 1:
        if level[0]:
            speed = f"level with {against} ({times(low)})"
        else:
            speed = (
                f"{times(low)} faster than {against}"
                if low > 1
                else f"{times(1 / low)} slower than {against}"
            )
    elif low > 1 and not any(level):
        speed = f"{times(low)} to {times(high)} faster than {against} in {len(ratios)} cases"
    elif high < 1 and not any(level):
        speed = f"{times(1 / high)} to {times(1 / low)} slower than {against} in {len(ratios)} cases"
    else:
        speed = f"{times(low)} to {times(high)} as fast as {against} in {len(ratios)} cases"
    doubt = " (not a quiet machine: measure again)" if load_notes(results.values()) else ""
    return f"{candidate}: {speed}, {agreement(differences)}{doubt}"
