"""Predicts times of recfuse's calls on many tables, table by table, for placement and sharding.

A call is one launch, or a fixed number of launches, over all tables of a rank. Its time is the time of the
launches plus the time of its tables: bytes and operations at measured rates. All three are fitted to a
calibration's points of recfuse's kernels, separately for the forward and the backward pass. They are not
negative, so that times grow with the batch, the pooling factor, the rows and the dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recfuse.errors import ArgumentValueError

FORWARD, BACKWARD = "recfuse_fused_embedding_bag", "recfuse_fused_embedding_bag_sparse_backward"
_LEAST_POINTS = 4
_INDEX, _OFFSET, _FLOAT = 8, 8, 4  # bytes
_DIGIT_BITS = 10  # of a pass that sorts lookups by row
_KEYS, _PASS, _COUNT, _ENTRY = 10, 22, 10, 8  # bytes per lookup that the sort by row moves


@dataclass(frozen=True)
class Bags:
    """The work of a step on a table, or a shard of a table, on its rank.

    Attributes:
        bags: bags of the step, of all features that look up the table.
        lookups: lookups of all bags.
        rows, dim: size of the shard.
        unique: distinct rows among the lookups; None: the largest possible number.
        itemsize, output_itemsize: bytes of an element of the table, and of the pooled output.
        weighted: with per-sample weights.
    """

    bags: float
    lookups: float
    rows: float
    dim: float
    unique: float | None = None
    itemsize: float = 4
    output_itemsize: float = 4
    weighted: bool = False

    @property
    def touched(self) -> float:
        """The number of rows that the step reads."""
        return min(self.lookups, self.rows) if self.unique is None else self.unique

    @property
    def elements(self) -> float:
        """The number of elements of the rows that the step reads."""
        return self.touched * self.dim

    @property
    def inputs(self) -> float:
        """Bytes of indices, offsets and weights."""
        return self.lookups * (_INDEX + _FLOAT * self.weighted) + self.bags * _OFFSET

    @property
    def outputs(self) -> float:
        """Bytes of the pooled output, or of its gradient."""
        return self.bags * self.dim * self.output_itemsize


@dataclass(frozen=True)
class States:
    """The number of float32 optimizer states of a table: per element, and per row."""

    of_element: int = 0
    of_row: int = 0


@dataclass(frozen=True)
class Rates:
    """Microseconds of a call's launches, of a byte that they move, and of an operation."""

    launches: float
    byte: float
    operation: float

    @classmethod
    def fit(cls, kind: str, points: Sequence[Sequence[float]]) -> Rates:
        """Fit points of bytes, operations, blocks, microseconds and launches by least squares of
        relative errors.

        Raises:
            ValueError: fewer points than a fit needs.
        """
        if len(points) < _LEAST_POINTS:
            raise ArgumentValueError(
                f"recfuse.perf: the calibration has {len(points)} points of {kind}; expected "
                f"{_LEAST_POINTS} or more. Calibrate again on the GPU with recfuse predict --calibrate."
            )
        array = np.array(points, float)
        us = array[:, -2]
        columns = np.c_[np.ones(len(us)), array[:, :2]] / us[:, None]
        return cls(*(float(value) for value in _non_negative(columns)))

    def us(self, moved: float, operations: float) -> float:
        """Return the microseconds that bytes and operations add to a call."""
        return moved * self.byte + operations * self.operation


def _non_negative(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return non-negative factors of a few columns whose sum is nearest to 1."""
    scale = columns.max(0)
    best, least = np.zeros(columns.shape[1]), math.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(columns.shape[1]), size)):
            scaled = columns[:, subset] / scale[subset]
            factors = np.linalg.lstsq(scaled, np.ones(len(columns)), rcond=None)[0]
            error = float(np.square(scaled @ factors - 1).sum())
            if (factors >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[subset] = factors / scale[subset]
    return best


class BagModel:
    """Predicts the time that a table adds to the calls of its rank, in microseconds.

    The rates are fitted on first use; raises ValueError if the calibration has too few points.
    """

    def __init__(self, points: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take the points of a calibration."""
        self._points = points

    @cached_property
    def forward_rates(self) -> Rates:
        """Rates of lookup and pooling."""
        return Rates.fit(FORWARD, self._points.get(FORWARD, ()))

    @cached_property
    def backward_rates(self) -> Rates:
        """Rates of the backward pass and of the update."""
        return Rates.fit(BACKWARD, self._points.get(BACKWARD, ()))

    def forward(self, bags: Bags) -> float:
        """Return the microseconds of lookup and pooling."""
        return self.forward_rates.us(*forward_traffic(bags))

    def backward(self, bags: Bags, states: States | None = None) -> float:
        """Return the microseconds of the backward pass with the update of the rows.

        ``states`` None: it computes row gradients instead of an update.
        """
        return self.backward_rates.us(*backward_traffic(bags, states))


def forward_traffic(bags: Bags) -> tuple[float, float]:
    """Return the bytes and operations of a lookup, as ``recfuse.explain`` counts them."""
    return bags.elements * bags.itemsize + bags.inputs + bags.outputs, bags.lookups * bags.dim


def backward_traffic(bags: Bags, states: States | None) -> tuple[float, float]:
    """Return the bytes and operations of a backward pass.

    It sorts lookups by row, sums gradients, and reads and writes rows and states.
    """
    passes = max(math.ceil(math.log2(max(bags.rows, 2)) / _DIGIT_BITS), 1)
    partial_sums = bags.dim / 4
    sort = _KEYS + _PASS * passes + _COUNT * (passes - 1) + _ENTRY + partial_sums
    rows = bags.elements * bags.itemsize
    if states is not None:
        of_states = bags.elements * states.of_element + bags.touched * states.of_row
        rows = 2 * (rows + of_states * _FLOAT)
    return bags.outputs + bags.inputs + bags.lookups * sort + rows, bags.lookups * bags.dim
