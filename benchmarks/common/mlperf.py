"""MLPerf's tables of Criteo, and which of their rows are hot."""

from __future__ import annotations

from torch import Tensor

MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155,
    4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MLPERF_SKEW = 5  # rank = u ** 5 * rows
_SCATTER = 2654435761  # a prime: ranks times it, modulo the rows, are the rows in another order


def scattered(ranks: Tensor, rows: int) -> Tensor:
    """The rows that have these ranks, of floating point: the hot rows lie all over the table."""
    return ranks.long().clamp_(0, rows - 1) * _SCATTER % rows
