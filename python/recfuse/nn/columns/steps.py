"""Steps: operations on each value of a feature, in order, before the value becomes a row.

A value is a float32 or an int64. Steps that take a float first round an integer to the nearest float32. Steps
that take an integer refuse a float: put :class:`Cast` before them. Parameters of a step that are floats are
rounded to float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recfuse._arguments import integer, real
from recfuse._storage import check_storages
from recfuse.errors import ArgumentTypeError, ArgumentValueError, a_type

LEAST, MOST = -(2**63), 2**63 - 1  # the range of int64
MOST_BUCKETS = 2**31 - 1
MOST_SEED = 2**64 - 1


@dataclass(frozen=True)
class Step:
    """Base of all steps; ``kind`` is the name in JSON and in the operator.

    Example:
        >>> recfuse.nn.columns.Log1p().kind
        'log1p'
    """

    kind: ClassVar[str]


@dataclass(frozen=True)
class Affine(Step):
    """Step on a float: ``value * scale + offset``, rounded after each operation.

    Args:
        scale: a finite number. Default: 1.
        offset: a finite number. Default: 0.

    Raises:
        ValueError: a number that is not finite in float32.

    Example:
        >>> recfuse.nn.columns.Affine(scale=0.1)
        Affine(scale=0.1, offset=0.0)
    """

    scale: float = 1.0
    offset: float = 0.0
    kind: ClassVar[str] = "affine"

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is not finite in float32."""
        for name in ("scale", "offset"):
            value = _float32(f"Affine: {name}", getattr(self, name))
            if not math.isfinite(value):
                raise ArgumentValueError(
                    f"Affine: {name} is {getattr(self, name)}; expected a finite float32"
                )


@dataclass(frozen=True)
class Log1p(Step):
    """Step on a float: ``log(1 + value)``.

    Example:
        >>> recfuse.nn.columns.Log1p()
        Log1p()
    """

    kind: ClassVar[str] = "log1p"


@dataclass(frozen=True)
class Clip(Step):
    """Step on a float: at least ``min``, at most ``max``; a NaN stays NaN, as in ``torch.clamp``.

    Args:
        min: the lower bound. Default: no bound.
        max: the upper bound. Default: no bound.

    Raises:
        ValueError: a NaN.

    Example:
        >>> recfuse.nn.columns.Clip(min=0).bounds()
        (0.0, inf)
    """

    min: float | None = None
    max: float | None = None
    kind: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        """Raise ValueError for a NaN."""
        for name, value in zip(("min", "max"), self.bounds(), strict=True):
            if math.isnan(value):
                raise ArgumentValueError(f"Clip: {name} is NaN; expected a number or None")

    def bounds(self) -> tuple[float, float]:
        """Return both bounds as float32; a missing bound is infinite."""
        least = -math.inf if self.min is None else _float32("Clip: min", self.min)
        return least, math.inf if self.max is None else _float32("Clip: max", self.max)


@dataclass(frozen=True)
class Cast(Step):
    """Step from a float to an integer: toward zero, saturating at int64; a NaN becomes the least int64.

    Example:
        >>> recfuse.nn.columns.Cast()
        Cast()
    """

    kind: ClassVar[str] = "cast"


@dataclass(frozen=True)
class ClipInteger(Step):
    """Step on an integer: at least ``min``, at most ``max``.

    Args:
        min: the lower bound. Default: no bound.
        max: the upper bound. Default: no bound.

    Raises:
        TypeError: a bound that is no integer.
        ValueError: a bound outside of int64.

    Example:
        >>> recfuse.nn.columns.ClipInteger(0, 9).bounds()
        (0, 9)
    """

    min: int | None = None
    max: int | None = None
    kind: ClassVar[str] = "clip_integer"

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a bound that is no int64."""
        self.bounds()

    def bounds(self) -> tuple[int, int]:
        """Return both bounds; a missing bound is the least or the largest int64."""
        least = LEAST if self.min is None else integer("ClipInteger: min", self.min, LEAST, MOST)
        return least, MOST if self.max is None else integer("ClipInteger: max", self.max, LEAST, MOST)


@dataclass(frozen=True)
class Modulo(Step):
    """Step on an integer: the remainder of the division by ``divisor``, in [0, divisor), also of negatives.

    Args:
        divisor: an integer, at least 1.

    Raises:
        TypeError: a divisor that is no integer.
        ValueError: a divisor below 1.

    Example:
        >>> recfuse.nn.columns.Modulo(10)
        Modulo(divisor=10)
    """

    divisor: int
    kind: ClassVar[str] = "modulo"

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the divisor is at least 1."""
        object.__setattr__(self, "divisor", integer("Modulo: divisor", self.divisor, 1, MOST))


@dataclass(frozen=True)
class ToBucket(Step):
    """Step from a float to the number of boundaries that are less than it, as ``torch.bucketize``.

    A NaN gets the last bucket.

    Args:
        boundaries: ascending numbers.
        right: count boundaries that are not greater, instead of less. Default: False.

    Raises:
        TypeError: boundaries that are no sequence of numbers.
        ValueError: boundaries that decrease.

    Example:
        >>> recfuse.nn.columns.ToBucket([18, 25]).boundaries
        (18, 25)
    """

    boundaries: Sequence[float]
    right: bool = False
    kind: ClassVar[str] = "bucketize"
    float32: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the boundaries are numbers that never decrease."""
        array = np.atleast_1d(_array("boundaries", self.boundaries))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
            raise ArgumentTypeError("boundaries has another form; expected a sequence of numbers")
        values = array.astype(np.float32)
        rises = values[1:] >= values[:-1]
        if np.isnan(values).any() or not rises.all():
            at = int(np.isnan(values).argmax() if np.isnan(values).any() else rises.argmin() + 1)
            raise ArgumentValueError(
                f"boundaries[{at}] is {array[at]}; expected a number not less than the number before it"
            )
        _flag("right", self.right)
        object.__setattr__(self, "boundaries", tuple(array.tolist()))
        object.__setattr__(self, "float32", values)


@dataclass(frozen=True)
class ToHash(Step):
    """Step on an integer: ``XXH64(8 bytes, seed) * num_buckets / 2^64``, in [0, num_buckets).

    Args:
        num_buckets: the number of values.
        seed: the seed of the hash. Default: 0.

    Raises:
        TypeError: an argument that is no integer.
        ValueError: a number out of range.

    Example:
        >>> recfuse.nn.columns.ToHash(1000)
        ToHash(num_buckets=1000, seed=0)
    """

    num_buckets: int
    seed: int = 0
    kind: ClassVar[str] = "hash"

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for numbers out of range."""
        object.__setattr__(self, "num_buckets", integer("num_buckets", self.num_buckets, 1, MOST_BUCKETS))
        object.__setattr__(self, "seed", integer("seed", self.seed, 0, MOST_SEED))


@dataclass(frozen=True)
class ToWord(Step):
    """Step from an integer to its position in the vocabulary, or to -1, an invalid index.

    Args:
        vocabulary: different integers.

    Raises:
        TypeError: words that are no integers.
        ValueError: repeated words, or words outside of int64.

    Example:
        >>> recfuse.nn.columns.ToWord([47, 51]).vocabulary
        (47, 51)
    """

    vocabulary: Sequence[int]
    kind: ClassVar[str] = "vocabulary"
    int64: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the words are different int64 numbers."""
        array = np.atleast_1d(_array("vocabulary", self.vocabulary))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ArgumentTypeError(
                "vocabulary has other values; expected a sequence of integers. Hash strings first."
            )
        if array.dtype == np.uint64 and array.size and int(array.max()) > MOST:
            raise ArgumentValueError(f"vocabulary has {int(array.max())}; expected int64")
        values = array.astype(np.int64)
        words, counts = np.unique(values, return_counts=True)
        if len(words) < len(values):
            raise ArgumentValueError(
                f"vocabulary has {int(words[counts.argmax()])} twice; expected different words"
            )
        object.__setattr__(self, "vocabulary", tuple(values.tolist()))
        object.__setattr__(self, "int64", values)


STEPS: dict[str, type[Step]] = {
    kind.kind: kind for kind in (Affine, Log1p, Clip, Cast, ClipInteger, Modulo, ToBucket, ToHash, ToWord)
}
"""The classes of steps, by their names in JSON."""


def _float32(prefix: str, value: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(real(prefix, value)))


def _flag(prefix: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{prefix} is {a_type(value)}; expected a bool")


def _array(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, (str, bytes)):
        raise ArgumentTypeError(f"{name} is {a_type(values)}; expected a sequence of numbers")
    check_storages("recfuse", name, (values,))
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(f"{name} is no sequence of numbers: {error}") from None
