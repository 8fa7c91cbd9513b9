"""Sizes to measure: low-discrepancy points, evenly spread in logarithms, and sizes that are
common in models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PRIMES = (2, 3, 5, 7, 11, 13)


def halton(number: int, base: int) -> float:
    """Return the radical inverse of a number."""
    value, fraction = 0.0, 1.0
    while number:
        fraction /= base
        number, digit = divmod(number, base)
        value += digit * fraction
    return value


def spread_points(count: int, dimensions: int, skip: int = 20) -> Iterator[tuple[float, ...]]:
    """Yield points of the unit cube that fill it evenly; another ``skip`` gives other points."""
    for number in range(skip, skip + count):
        yield tuple(halton(number, _PRIMES[dimension]) for dimension in range(dimensions))


def between(share: float, low: float, high: float, multiple: int = 1) -> int:
    """Return the size at a share of the distance from ``low`` to ``high`` in logarithms, as a multiple."""
    size = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return max(multiple, round(size / multiple) * multiple)


def choice(share: float, values: Sequence[int]) -> int:
    """Return the value at a share (0 to 1) of the list."""
    return values[min(int(share * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Extent:
    """Ranges of sizes on a device, and the number of points of each group."""

    buffer: int
    batch: tuple[int, int]
    width: tuple[int, int]
    vectors: tuple[int, int]
    dims: tuple[int, ...]
    rows: tuple[int, int]
    pooling: tuple[int, int]
    words: tuple[int, int]
    flops: float
    gathered: int
    products: int
    interactions: int
    bags: int
    others: int


CUDA = Extent(
    buffer=1 << 28, batch=(64, 16384), width=(8, 2560), vectors=(2, 210), dims=(8, 16, 32, 64, 128, 256),
    rows=(4, 4_000_000), pooling=(1, 200), words=(1 << 8, 1 << 27), flops=6e10, gathered=1 << 27,
    products=560, interactions=260, bags=600, others=60,
)  # fmt: skip
CPU = Extent(
    buffer=1 << 24, batch=(16, 4096), width=(8, 1024), vectors=(2, 60), dims=(8, 16, 32, 64, 128),
    rows=(4, 200_000), pooling=(1, 100), words=(1 << 6, 1 << 22), flops=4e8, gathered=1 << 20,
    products=120, interactions=60, bags=120, others=24,
)  # fmt: skip
TINY = Extent(
    buffer=1 << 22, batch=(16, 128), width=(8, 64), vectors=(2, 9), dims=(8, 16), rows=(4, 1000),
    pooling=(1, 8), words=(1 << 6, 1 << 12), flops=1e7, gathered=1 << 14,
    products=8, interactions=5, bags=8, others=4,
)  # fmt: skip
EXTENTS = {"cuda": CUDA, "cpu": CPU, "tiny": TINY}
