"""Predicts times of kernels by local least squares, in logarithms, over measured points of the same kind.

The time of a point is (floor + work / best rate) of its kind times a factor; factors are interpolated.
Outside the measured sizes, the factor at the edge applies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recfuse.perf.models.kinds import KINDS, form_of
from recfuse.perf.tracing.operators import Operator

Array = NDArray[np.float64]
Points = Mapping[str, Sequence[Sequence[float]]]
"""kind -> rows of sizes, microseconds, number of kernels."""

NEAREST = 16
_LEAST_US = 0.5
_SAME = 1e-6  # distance in log2 below which sizes are equal
_UNKNOWN_SPREAD = 0.5  # spread of a kind without points, in logarithms


@dataclass(frozen=True)
class KernelTime:
    """Predicted time of an operator's kernels.

    Attributes:
        us: microseconds.
        kernels: number of launches.
        spread: standard deviation of the logarithm of the time.
        measured: whether exactly these sizes were measured.
        known: whether the kind has points.
        inside: whether the sizes lie within the measured range.
    """

    us: float
    kernels: float
    spread: float
    measured: bool = False
    known: bool = True
    inside: bool = True


def log_sizes(sizes: Array) -> Array:
    """Return log2 of sizes; sizes below 1 count as 1."""
    return np.log2(np.maximum(sizes, 1.0))


def local_linear(x: Array, y: Array, query: Array, nearest: int = NEAREST) -> float:
    """Return the value at ``query`` of weighted least squares on the nearest points.

    The weights are tricube in the distance. The result stays near the values of these points.
    """
    if len(x) == 1:
        return float(y[0])
    spread = np.clip(x.std(0), 0.5, 2.0)
    delta = (x - query) / spread
    distance = np.abs(delta).max(1) + 0.5 * np.sqrt((delta**2).sum(1))
    count = min(nearest + max(0, 2 * x.shape[1] - 6), len(x))
    near = np.argpartition(distance, count - 1)[:count]
    farthest = max(float(distance[near].max()) * 1.001, 1e-9)
    weights = (1 - (distance[near] / farthest) ** 3) ** 3 + 1e-6
    design = np.c_[np.ones(len(near)), x[near] - query]
    normal = design.T @ (weights[:, None] * design) + np.diag([0.0] + [1e-3] * x.shape[1])
    value = float(np.linalg.solve(normal, design.T @ (weights * y[near]))[0])
    return min(max(value, float(y[near].min()) - 0.5), float(y[near].max()) + 0.5)


@dataclass
class KindModel:
    """The points of a kind."""

    kind: str
    x: Array
    us: Array
    kernels: Array
    floor: float = field(init=False)
    rate: float = field(init=False)
    factors: Array = field(init=False)

    def __post_init__(self) -> None:
        """Find the best rate and the factors."""
        self.floor = float(self.us.min())
        self.rate = float(np.quantile(2.0 ** form_of(self.kind).work(self.x) / self.us, 0.95))
        self.factors = np.log(self.us) - self.base(self.x)

    def base(self, x: Array) -> Array:
        """Return the logarithm of the time at the best rate."""
        return np.log(self.floor + 2.0 ** form_of(self.kind).work(x) / self.rate)

    def at(self, query: Array, exact: bool = True) -> tuple[float, float, bool, bool]:
        """Return microseconds, kernels, whether the sizes were measured, and whether they are
        inside the range.

        Not ``exact``: measured points of the same sizes are not used.
        """
        distance = np.abs(self.x - query).max(1)
        same = distance < _SAME
        kernels = float(self.kernels[int(distance.argmin())])
        base = float(self.base(query))
        if same.any() and exact:
            return math.exp(float(np.median(self.factors[same])) + base), kernels, True, True
        keep = ~same if same.any() and not same.all() else np.ones(len(same), bool)
        least, most = self.range
        edge = np.clip(query, least, most)
        factor = local_linear(self.x[keep], self.factors[keep], edge)
        low, high = least - 0.51, most + 0.51
        return math.exp(factor + base), kernels, False, bool(((query >= low) & (query <= high)).all())

    @cached_property
    def range(self) -> tuple[Array, Array]:
        """The least and the greatest sizes of its points."""
        return self.x.min(0), self.x.max(0)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the errors of points, each predicted from the others, in logarithms."""
        if len(self.x) < 6:
            return _UNKNOWN_SPREAD / 2
        errors = self.errors()
        return max(float(np.sqrt(np.mean(np.square(np.clip(errors, -1, 1))))), 0.02)

    def errors(self, most: int = 60) -> Array:
        """Return logarithms of predicted over measured times of points, each predicted from the others."""
        chosen = np.random.default_rng(0).permutation(len(self.x))[:most]
        errors = [
            local_linear(np.delete(self.x, i, 0), np.delete(self.factors, i), self.x[i]) - self.factors[i]
            for i in chosen
        ]
        return np.array(errors)


class KernelModel:
    """Predicts the kernels of operators from points.

    Attributes:
        missing: operators of kinds without points, by kind, since the model was created.
    """

    def __init__(self, points: Points) -> None:
        """Take the points of a calibration."""
        self.kinds: dict[str, KindModel] = {}
        for kind, rows in points.items():
            array = np.array(rows, float)
            if len(array):
                us = np.maximum(array[:, -2], _LEAST_US)
                self.kinds[kind] = KindModel(kind, log_sizes(array[:, :-2]), us, array[:, -1])
        self.missing: Counter[str] = Counter()
        self._found: dict[tuple[object, ...], KernelTime] = {}

    def nearest_kind(self, kind: str) -> str | None:
        """Return the kind whose points represent ``kind``: itself, or a kind of the same form and
        similar name.
        """
        if kind in self.kinds:
            return kind
        width = len(form_of(kind).sizes)
        alike = [
            other for other in self.kinds
            if form_of(other) is form_of(kind) and self.kinds[other].x.shape[1] == width
        ]  # fmt: skip
        if not alike:
            return None
        parts = kind.split("_")
        return max(alike, key=lambda other: (_common(parts, other.split("_")), -len(other)))

    def time(self, operator: Operator, exact: bool = True) -> KernelTime:
        """Return the time of an operator's kernels; not ``exact``: measured points of the same
        sizes are not used.
        """
        if operator.kind is None:
            return KernelTime(0.0, 0.0, 0.0, measured=True)
        key = (operator.kind, operator.sizes, exact)
        if key not in self._found:
            self._found[key] = self._time(operator.kind, operator.sizes, exact)
        time = self._found[key]
        if not time.known:
            self.missing[operator.kind] += 1
        return time

    def _time(self, kind: str, sizes: Sequence[float], exact: bool) -> KernelTime:
        source, known = self.nearest_kind(kind), True
        if source is None:
            source, known = self.nearest_kind("pointwise_2"), False
            work = float(form_of(kind).work(log_sizes(np.array(sizes, float))))
            sizes = [2.0**work / (4 if form_of(kind) is KINDS["recfuse"] else 1)]
        if source is None:
            return KernelTime(_LEAST_US, 1.0, 2 * _UNKNOWN_SPREAD, known=False)
        model = self.kinds[source]
        us, kernels, measured, inside = model.at(log_sizes(np.array(sizes, float)), exact)
        spread = 0.02 if measured else model.spread
        spread = max(spread, 0.15) if source != kind and known else spread
        return KernelTime(us, kernels, spread if known else _UNKNOWN_SPREAD, measured, known, inside)


def _common(words: Sequence[str], other_words: Sequence[str]) -> int:
    return sum(part in words for part in other_words)
