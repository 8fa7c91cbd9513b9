"""The heterogeneous embedding models A to F of RecFlex, and batches of them, from a seed.

A model is a list of *groups* of features: the features of a group share their pooling factors and their
absences; each feature draws its own rows from its own table. The groups, the embedding dimensions and the
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recfuse import _C
from recfuse._arguments import integer, real
from recfuse.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["NAMES", "Batch", "Group", "Model", "batch_sizes", "model"]

NAMES = ("A", "B", "C", "D", "E", "F")
"""The published models."""

_DIMS = (4, 8, 16, 32, 64, 128)
_ROWS = {"one-hot": 1024, "multi-hot": 4096, "static": 4096, "one-side": 4 * 4096}
_MAX_ROWS = 2**31 - 1
_MAX_COUNT = 2**31 - 1  # samples of a batch, or batches
_VARIANT = re.compile(r"(?P<base>[A-F])(-zipf(?P<skew>\d+(\.\d+)?))?(-rows(?P<rows>\d+))?")


@dataclass(frozen=True)
class Group:
    """Features that share their pooling factors and absences; each feature has a table.

    The pooling factor of a bag is the floor of a normal (``mean``, ``deviation``) truncated to [0,
    ``maximum``], or the mean if the deviation is 0. With probability 1 - ``coverage`` the bag is empty.

    Attributes:
        kind: "one-hot", "multi-hot", "static" or "one-side".
        features: the number of features.
        rows: rows of each table.
        mean, deviation, maximum: the distribution of pooling factors.
        coverage: the probability that a bag is not empty.

    Example:
        >>> recfuse.workloads.model("B").groups[0].kind
        'one-hot'
    """

    kind: str
    features: int
    rows: int
    mean: float
    deviation: float = 0.0
    maximum: float = inf
    coverage: float = 1.0


class Batch(NamedTuple):
    """A batch of B samples, feature by feature.

    Bag b of feature f is ``indices[offsets[f * B + b]:offsets[f * B + b + 1]]``.

    Attributes:
        indices: ``[lookups]``, int32 or int64.
        offsets: ``[features * batch + 1]``, of the same type.

    Example:
        >>> batch = recfuse.workloads.model("B").batch(4, seed=0)
        >>> batch.offsets.shape
        (4801,)
    """

    indices: NDArray[np.integer]
    offsets: NDArray[np.integer]


@dataclass(frozen=True)
class Model:
    """A collection of float32 tables, a table for each feature, and the distribution of its input.

    Attributes:
        name: the name of the model or variant.
        seed: the seed.
        skew: 0 for nearly uniform rows, as published; else the exponent of a Zipf distribution over the rows.
        groups: the groups of features.
        rows: ``[features]``, rows of each table.
        dims: ``[features]``, the dim of each table.
        group_of: ``[features]``, the position in ``groups`` of each feature.
        pooling: the mode of all bags, "sum".

    Example:
        >>> model = recfuse.workloads.model("B")
        >>> model.features, len(model.dims)
        (1200, 1200)
    """

    name: str
    seed: int
    skew: float
    groups: tuple[Group, ...]
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    group_of: tuple[int, ...]
    pooling: str = "sum"

    @property
    def features(self) -> int:
        """The number of features, equal to that of the tables."""
        return len(self.rows)

    @property
    def output_dim(self) -> int:
        """The columns of the concatenated output."""
        return sum(self.dims)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tables in float32."""
        return 4 * sum(rows * dim for rows, dim in zip(self.rows, self.dims, strict=True))

    def lengths(self, size: int, seed: int) -> NDArray[np.int32]:
        """Return the pooling factors of the batch ``batch(size, seed)``.

        Args:
            size: the number of samples.
            seed: the seed.

        Returns:
            ndarray: int32 ``[groups, size]``.

        Raises:
            ValueError: a negative size or seed.
        """
        seed, size = _seed(seed), integer("workloads: size", size, 0, _MAX_COUNT)
        return _C.workload_lengths(self._group_array(), size, seed)

    def batch(self, size: int, seed: int, dtype: np.typing.DTypeLike = np.int32) -> Batch:
        """Generate a batch.

        Args:
            size: the number of samples.
            seed: the seed.
            dtype: NumPy's int32 or int64, of indices and offsets. Default: int32.

        Returns:
            Batch: indices and offsets.

        Raises:
            ValueError: another dtype, a negative size or seed, more lookups than int32 can count.
        """
        try:
            dtype = np.dtype(dtype)
        except TypeError as error:
            text = f"workloads: dtype is {dtype!r}; expected NumPy's int32 or int64"
            raise ArgumentTypeError(text) from error
        if dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise ArgumentValueError(f"workloads: dtype is {dtype}; expected int32 or int64")
        lengths = self.lengths(size, seed)
        repeats = [group.features for group in self.groups]
        lookups = int(lengths.sum(axis=1, dtype=np.int64) @ np.array(repeats))
        if lookups > np.iinfo(dtype).max:
            raise ArgumentValueError(
                f"workloads: {lookups} lookups do not fit {dtype} offsets. Pass dtype=numpy.int64."
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
    """Return one of the models A to F, or a skewed variant.

    Args:
        name: "A" to "F", or a variant such as "A-zipf1.0" or "A-zipf0.9-rows100": a Zipf distribution with
            that exponent over the rows, and that factor of rows.
        seed: assigns the published dims to tables of a group (A to C), and selects the frequent rows.
            Default: 0.
        skew: the exponent as an argument instead of in the name; 0 is nearly uniform, as published.
        rows_scale: the factor of rows as an argument instead of in the name.

    Returns:
        Model: the model.

    Raises:
        ValueError: an unknown name, a negative seed, a skew outside [0, 16], a factor below 1 or with more
            than 2^31 - 1 rows, a variant both in the name and as an argument.

    Example:
        >>> recfuse.workloads.model("A").features
        1000

    Source: Pan et al., RecFlex, SC 2024, section VI-A and its artifact.
    """
    match = _VARIANT.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ArgumentValueError(
            f"workloads: name is {name!r}; expected {', '.join(NAMES)} and variants such as 'A-zipf1.0', "
            "'A-rows100' and 'A-zipf0.9-rows100'"
        )
    if (match["skew"] and skew is not None) or (match["rows"] and rows_scale is not None):
        raise ArgumentValueError(
            f"workloads: name is {name!r} and the variant is given by argument too. Give it once."
        )
    skew = float(match["skew"] or 0) if skew is None else real("workloads: skew", skew)
    seed = _seed(seed)
    if not 0 <= skew <= 16:
        raise ArgumentValueError(f"workloads: skew is {skew}; expected [0, 16]")
    base = match["base"]
    largest = _MAX_ROWS // max(_ROWS[kind] for _, groups in _GROUPS[base] for kind, *_ in groups)
    rows_scale = int(match["rows"] or 1) if rows_scale is None else rows_scale
    rows_scale = integer("workloads: rows_scale", rows_scale, 1, largest)
    groups = [
        Group(kind, features, _ROWS[kind] * rows_scale, *lengths)
        for features, described in _GROUPS[base]
        for kind, *lengths in described
    ]
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
    """Generate sizes of the batches of a server, as published for the models A to F.

    The size of a request is the floor of a lognormal, exp(normal(log ``median``, log ``spread``)), at least
    1. A request above ``maximum`` is divided into parts of ``maximum`` and a rest; a random part is chosen.

    Args:
        count: the number of sizes.
        seed: the seed.
        median, spread: the lognormal. Default: 256 and 128.
        maximum: the largest size. Default: 512.

    Returns:
        ndarray: integers ``[count]``.

    Raises:
        ValueError: a negative count or seed, a maximum below 1.

    Example:
        >>> recfuse.workloads.batch_sizes(3, seed=0).shape
        (3,)

    Source: Pan et al., RecFlex, SC 2024, section VI-A and its artifact.
    """
    seed, count = _seed(seed), integer("workloads: count", count, 0, _MAX_COUNT)
    median, spread = real("workloads: median", median), real("workloads: spread", spread)
    maximum = integer("workloads: maximum", maximum, 1, _MAX_ROWS)
    return _C.batch_sizes(median, spread, maximum, seed, count)


def _seed(seed: int) -> int:
    return integer("workloads: seed", seed, 0, 2**64 - 1)


# Each group, without its features: its kind, then the mean, the deviation, the maximum and the coverage.
_ONE_HOT: list[tuple[Any, ...]] = [("one-hot", 1)] * 10
_MULTI_HOT: list[tuple[Any, ...]] = [
    ("multi-hot", 10, 10, 50, 0.8),
    ("multi-hot", 50, 10, 100, 0.8),
    ("multi-hot", 50, 10, 100, 0.3),
    ("multi-hot", 100, 50, 200, 0.8),
]
_STATIC: list[tuple[Any, ...]] = [("static", 10), ("static", 50), ("static", 50, 0, inf, 0.8)]
_GROUPS_A = [
    *_ONE_HOT,
    *_MULTI_HOT,
    ("multi-hot", 100, 100, 500, 0.3),
    *_STATIC,
    ("one-side", 100, 50, inf, 0.5),
    ("one-side", 200, 100, inf, 0.3),
]
_GROUPS_B = [*_ONE_HOT, ("multi-hot", 20, 10, 100, 0.8), ("multi-hot", 20, 50, 100, 0.5)]
_GROUPS_C = [
    ("static", 10),
    ("static", 20),
    ("static", 50, 0, inf, 0.3),
    *_MULTI_HOT[:3],
    ("one-side", 10, 20, inf, 0.5),
    ("one-side", 50, 50, inf, 0.2),
]
_GROUPS_D = [
    *_ONE_HOT,
    *_MULTI_HOT,
    ("multi-hot", 100, 100, 1024, 0),
    *_STATIC,
    ("multi-hot", 100, 100, 500, 0.3),
    ("multi-hot", 100, 100, 1024, 0.5),
]
_GROUPS = {
    "A": [(50, _GROUPS_A)],
    "B": [(100, _GROUPS_B)],
    "C": [(100, _GROUPS_C)],
    "D": [(50, _GROUPS_D)],
    "E": [(50, _GROUPS_D)],
    "F": [(50, _GROUPS_D), (450, _GROUPS_D)],
}
"""Groups of each model, with the number of features in each group."""

# Numbers of tables of dimension 4, 8, ... 128 in the published models: over all one-hot features, then in
# each of the other groups. They were drawn once, with weights 8:8:4:2:1:1 (one-hot) and 2:2:2:1:1:1.
# Another draw changes the bytes that a sample gathers by several percent, so the draw is part of the model.
_DIM_COUNTS: dict[str, Sequence[tuple[int, ...]]] = {
    "A": (
        (170, 164, 83, 43, 17, 23),
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
    "B": ((320, 355, 177, 79, 42, 27), (25, 23, 21, 10, 11, 10), (21, 30, 14, 10, 10, 15)),
    "C": (
        (0, 0, 0, 0, 0, 0),
        (24, 20, 16, 17, 13, 10),
        (14, 23, 22, 10, 16, 15),
        (21, 22, 25, 15, 6, 11),
        (17, 27, 24, 15, 10, 7),
        (24, 22, 19, 14, 12, 9),
        (20, 22, 19, 19, 8, 12),
        (11, 23, 26, 10, 22, 8),
        (23, 30, 15, 12, 14, 6),
    ),
}
_FIXED_DIM = {"D": 8, "E": 32, "F": 8}


def _dims(base: str, groups: Sequence[Group], seed: int) -> tuple[int, ...]:
    if base in _FIXED_DIM:
        return (_FIXED_DIM[base],) * sum(group.features for group in groups)
    dims: list[int] = []
    for number, counts in enumerate(_DIM_COUNTS[base]):
        pool = np.repeat(_DIMS, counts)
        dims += pool[_C.permutation(len(pool), seed ^ (number << 56))].tolist()
    return tuple(dims)
