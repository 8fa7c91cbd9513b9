"""The heterogeneous embedding models A to F of RecFlex, and batches of them, from a seed.

A model is a list of *groups* of features: the features of a group share their bag lengths and their
absences, each draws its own rows from its own table. The groups, the embedding dimensions and the
distribution of batch sizes are those published with Pan et al., "RecFlex: Enabling Feature
Heterogeneity-Aware Optimization for Deep Recommendation Models with Flexible Schedules" (SC'24,
section VI-A and its artifact). The published rows are nearly uniform; `skew` and `rows_scale` make
the variants in which caches matter. The same seed gives the same bits on every platform.

>>> import recfuse.data.workloads
>>> collection = recfuse.workloads.model("A", seed=0)
>>> indices, offsets = collection.batch(187, seed=1)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recfuse import _C
from recfuse._arguments import integer, real
from recfuse.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["NAMES", "Batch", "Group", "Model", "batch_sizes", "model"]

NAMES = ("A", "B", "C", "D", "E", "F")
"""The published models."""

_DIMS = (4, 8, 16, 32, 64, 128)
_ONE_HOT_ROWS, _MULTI_HOT_ROWS, _ONE_SIDE_ROWS = 1024, 4096, 4 * 4096
_MAX_ROWS = 2**31 - 1
_MAX_COUNT = 2**31 - 1  # samples of a batch, or batches
_VARIANT = re.compile(r"(?P<base>[A-F])(-zipf(?P<skew>\d+(\.\d+)?))?(-rows(?P<rows>\d+))?")


@dataclass(frozen=True)
class Group:
    """Features that share their bag lengths and absences; a table each.

    A bag's length is the floor of a normal (`mean`, `deviation`) truncated to [0, `maximum`], or the
    mean where the deviation is 0; with probability 1 - `coverage` the bag is empty instead.
    """

    kind: str
    """"one-hot", "multi-hot", "static" or "one-side"."""
    features: int
    rows: int
    mean: float
    deviation: float = 0.0
    maximum: float = inf
    coverage: float = 1.0


class Batch(NamedTuple):
    """One batch of B samples, feature-major.

    Bag b of feature f is `indices[offsets[f * B + b]:offsets[f * B + b + 1]]`.
    """

    indices: NDArray[np.integer]
    """[lookups], int32 or int64."""
    offsets: NDArray[np.integer]
    """[features * batch + 1], of the same type."""


@dataclass(frozen=True)
class Model:
    """A collection of tables, one a feature, and the distribution of its input. Tables are fp32."""

    name: str
    seed: int
    skew: float
    """0: nearly uniform rows, as published; else the exponent of a Zipf distribution over the rows."""
    groups: tuple[Group, ...]
    rows: tuple[int, ...]
    """[features]: rows of each table."""
    dims: tuple[int, ...]
    """[features]: embedding dimension of each table."""
    group_of: tuple[int, ...]
    """[features]: the index in `groups` of each feature."""
    pooling: str = "sum"

    @property
    def features(self) -> int:
        """Number of features, which is that of the tables."""
        return len(self.rows)

    @property
    def output_dim(self) -> int:
        """Columns of the concatenated output."""
        return sum(self.dims)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tables in fp32."""
        return 4 * sum(rows * dim for rows, dim in zip(self.rows, self.dims, strict=True))

    def lengths(self, size: int, seed: int) -> NDArray[np.int32]:
        """Bag lengths [groups, size] of the batch that `batch(size, seed)` gives."""
        seed, size = _seed(seed), integer("workloads: size", size, 0, _MAX_COUNT)
        return _C.workload_lengths(self._group_array(), size, seed)

    def batch(self, size: int, seed: int, dtype: np.typing.DTypeLike = np.int32) -> Batch:
        """A batch of `size` samples.

        `dtype` is int32 or int64, of indices and offsets. Raises ValueError for another, for a negative
        size or seed, and where int32 cannot hold the number of lookups.
        """
        try:
            dtype = np.dtype(dtype)
        except TypeError as error:
            raise ArgumentTypeError(
                f"workloads: dtype is {dtype!r}, must be NumPy's int32 or int64"
            ) from error
        if dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise ArgumentValueError(f"workloads: dtype is {dtype}, allowed are int32 and int64")
        lengths = self.lengths(size, seed)
        repeats = [group.features for group in self.groups]
        lookups = int(lengths.sum(axis=1, dtype=np.int64) @ np.array(repeats))
        if lookups > np.iinfo(dtype).max:
            raise ArgumentValueError(
                f"workloads: {lookups} lookups do not fit {dtype} offsets; pass dtype=numpy.int64"
            )
        offsets = np.zeros(self.features * size + 1, dtype)
        np.cumsum(np.repeat(lengths, repeats, axis=0), dtype=dtype, out=offsets[1:])
        indices = _C.workload_indices(
            self._group_array(), lengths, self.skew, self.seed, seed, dtype == np.dtype(np.int64)
        )
        return Batch(indices, offsets)

    def _group_array(self) -> NDArray[np.float64]:
        return np.array(
            [(g.features, g.rows, g.mean, g.deviation, g.maximum, g.coverage) for g in self.groups],
            np.float64,
        )


def model(name: str, seed: int = 0, skew: float | None = None, rows_scale: int | None = None) -> Model:
    """One of the models A to F, or a skewed variant of it.

    Args:
        name: "A" to "F", or a variant such as "A-zipf1.0" or "A-zipf0.9-rows100": Zipf with that
            exponent over rows, that many times the rows.
        seed: which of the tables of a group have which of the published dimensions (A to C), and which
            rows are hot.
        skew: the exponent by argument instead of by name; None or 0: nearly uniform, as published.
        rows_scale: the factor on the rows by argument instead of by name.

    Raises:
        ValueError: an unknown name, a negative seed, a skew outside [0, 16], a factor below 1 or one
            that gives more than 2^31 - 1 rows, or a variant given both by name and by argument.
    """
    match = _VARIANT.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ArgumentValueError(
            f"workloads: name is {name!r}, allowed are {', '.join(NAMES)} and variants such as "
            "'A-zipf1.0', 'A-rows100' and 'A-zipf0.9-rows100'"
        )
    if (match["skew"] and skew is not None) or (match["rows"] and rows_scale is not None):
        raise ArgumentValueError(
            f"workloads: name is {name!r} and the variant is given by argument too; give it once"
        )
    skew = float(match["skew"] or 0) if skew is None else real("workloads: skew", skew)
    seed = _seed(seed)
    if not 0 <= skew <= 16:
        raise ArgumentValueError(f"workloads: skew is {skew}, allowed is [0, 16]")
    base = match["base"]
    groups = _groups(base)
    largest = _MAX_ROWS // max(group.rows for group in groups)
    rows_scale = int(match["rows"] or 1) if rows_scale is None else rows_scale
    rows_scale = integer("workloads: rows_scale", rows_scale, 1, largest)
    groups = [Group(**{**vars(group), "rows": group.rows * rows_scale}) for group in groups]
    variant = (f"-zipf{skew:g}" if skew else "") + (f"-rows{rows_scale}" if rows_scale > 1 else "")
    return Model(
        name=base + variant,
        seed=seed,
        skew=skew,
        groups=tuple(groups),
        rows=tuple(group.rows for group in groups for _ in range(group.features)),
        dims=_dims(base, groups, seed),
        group_of=tuple(number for number, group in enumerate(groups) for _ in range(group.features)),
    )


def batch_sizes(
    count: int, seed: int, median: float = 256, spread: float = 128, maximum: int = 512
) -> NDArray[np.int64]:
    """Sizes [count] of the batches that a server sees, as published for the models A to F.

    A request's size is the floor of a lognormal, exp(normal(log `median`, log `spread`)), at least 1;
    a request above `maximum` is served in pieces of `maximum` and a rest, of which one is picked.
    """
    seed, count = _seed(seed), integer("workloads: count", count, 0, _MAX_COUNT)
    median, spread = real("workloads: median", median), real("workloads: spread", spread)
    maximum = integer("workloads: maximum", maximum, 1, _MAX_ROWS)
    return _C.batch_sizes(median, spread, maximum, seed, count)


def _seed(seed: int) -> int:
    return integer("workloads: seed", seed, 0, 2**64 - 1)


def _one_hot(features: int) -> list[Group]:
    return [Group("one-hot", features, _ONE_HOT_ROWS, 1)] * 10


def _multi_hot(features: int, mean: float, deviation: float, maximum: float, coverage: float) -> Group:
    return Group("multi-hot", features, _MULTI_HOT_ROWS, mean, deviation, maximum, coverage)


def _static(features: int, length: int, coverage: float) -> Group:
    return Group("static", features, _MULTI_HOT_ROWS, length, coverage=coverage)


def _one_side(features: int, mean: float, deviation: float, coverage: float) -> Group:
    return Group("one-side", features, _ONE_SIDE_ROWS, mean, deviation, inf, coverage)


def _groups(base: str) -> list[Group]:
    if base == "A":
        return [
            *_one_hot(50),
            _multi_hot(50, 10, 10, 50, 0.8),
            _multi_hot(50, 50, 10, 100, 0.8),
            _multi_hot(50, 50, 10, 100, 0.3),
            _multi_hot(50, 100, 50, 200, 0.8),
            _multi_hot(50, 100, 100, 500, 0.3),
            _static(50, 10, 1),
            _static(50, 50, 1),
            _static(50, 50, 0.8),
            _one_side(50, 100, 50, 0.5),
            _one_side(50, 200, 100, 0.3),
        ]
    if base == "B":
        return [*_one_hot(100), _multi_hot(100, 20, 10, 100, 0.8), _multi_hot(100, 20, 50, 100, 0.5)]
    if base == "C":
        return [
            _static(100, 10, 1),
            _static(100, 20, 1),
            _static(100, 50, 0.3),
            _multi_hot(100, 10, 10, 50, 0.8),
            _multi_hot(100, 50, 10, 100, 0.8),
            _multi_hot(100, 50, 10, 100, 0.3),
            _one_side(100, 10, 20, 0.5),
            _one_side(100, 50, 50, 0.2),
        ]
    sizes = (50, 450) if base == "F" else (50,)
    return [group for features in sizes for group in _groups_of_d(features)]


def _groups_of_d(features: int) -> list[Group]:
    return [
        *_one_hot(features),
        _multi_hot(features, 10, 10, 50, 0.8),
        _multi_hot(features, 50, 10, 100, 0.8),
        _multi_hot(features, 50, 10, 100, 0.3),
        _multi_hot(features, 100, 50, 200, 0.8),
        _multi_hot(features, 100, 100, 1024, 0),
        _static(features, 10, 1),
        _static(features, 50, 1),
        _static(features, 50, 0.8),
        _multi_hot(features, 100, 100, 500, 0.3),
        _multi_hot(features, 100, 100, 1024, 0.5),
    ]


# How many tables of dimension 4, 8, ... 128 the published models have: over all one-hot features, then in
# each of the other groups. They were drawn once, with weights 8:8:4:2:1:1 (one-hot) and 2:2:2:1:1:1;
# another draw moves the bytes a sample gathers by several percent, so the draw is part of the model.
_DIM_COUNTS: dict[str, tuple[tuple[int, ...], Sequence[tuple[int, ...]]]] = {
    "A": (
        (170, 164, 83, 43, 17, 23),
        (
            (8, 10, 12, 4, 9, 7),
            (11, 11, 14, 2, 7, 5),
            (13, 12, 11, 7, 4, 3),
            (12, 9, 8, 6, 7, 8),
            (14, 9, 12, 1, 9, 5),
            (8, 13, 12, 3, 8, 6),
            (15, 5, 9, 6, 10, 5),
            (13, 15, 7, 5, 5, 5),
            (12, 10, 10, 5, 8, 5),
            (7, 8, 17, 9, 4, 5),
        ),
    ),
    "B": ((320, 355, 177, 79, 42, 27), ((25, 23, 21, 10, 11, 10), (21, 30, 14, 10, 10, 15))),
    "C": (
        (0, 0, 0, 0, 0, 0),
        (
            (24, 20, 16, 17, 13, 10),
            (14, 23, 22, 10, 16, 15),
            (21, 22, 25, 15, 6, 11),
            (17, 27, 24, 15, 10, 7),
            (24, 22, 19, 14, 12, 9),
            (20, 22, 19, 19, 8, 12),
            (11, 23, 26, 10, 22, 8),
            (23, 30, 15, 12, 14, 6),
        ),
    ),
}
_FIXED_DIM = {"D": 8, "E": 32, "F": 8}


def _dims(base: str, groups: Sequence[Group], seed: int) -> tuple[int, ...]:
    if base in _FIXED_DIM:
        return (_FIXED_DIM[base],) * sum(group.features for group in groups)
    one_hot, others = _DIM_COUNTS[base]
    dims: list[int] = []
    for number, counts in enumerate((one_hot, *others)):
        pool = np.repeat(_DIMS, counts)
        dims += pool[_C.permutation(len(pool), seed ^ (number << 56))].tolist()
    return tuple(dims)
