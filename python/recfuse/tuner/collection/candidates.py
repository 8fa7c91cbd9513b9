"""The candidate schedules of each feature, and the mixtures in which they are timed together.

A class is a set of features that can run the same schedules in the same code: features of one dim, dtype,
pooling and alignment. Rules remove, before any compilation, the candidates that cannot win at the mean bag
length of a feature:

- pool: so many threads that the rows read at once exceed the lookups of a bag, or so few that a slot reads
  more than 24 of them (if more threads are possible); more rows in flight than a slot's share of a bag, or
  than registers hold at an occupancy; blocks that share a bag with fewer than 32 rows each;
- columns: bags of more than 4 lookups, which a single lane would sum;
- staged: features with fewer lookups per batch than rows in their table, because most staged rows
  would not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recfuse._codes import FUSED_SCHEDULE
from recfuse.ops.schedules import ALWAYS_EMPTY, CHOSEN, EXPECTED, FIELDS, KIND, KINDS, SIXTEENTHS
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from recfuse.tuner.native import power_of_two

_THREADS, _DISTANCE = FUSED_SCHEDULE.at("threads"), FUSED_SCHEDULE.at("distance")
_POOL, _COLUMNS = 1 + KINDS.index("pool"), 1 + KINDS.index("columns")
_STAGED = 1 + KINDS.index("staged")
_LONGEST_SLOT = 24  # rows of a bag per slot; with more, single blocks outlast the others
_LONGEST_COLUMN = 4  # lookups of a bag per lane
_LEAST_PART = 32  # rows of a bag for each of the blocks that share it
_REGISTERS = 65536  # of an SM
# Besides rows in flight; below the need of any kernel, so that no good candidate is removed.
_REGISTERS_OF_A_KERNEL = 16
_TILED_AT_ONCE = 8  # neighbours that take columns at once


@dataclass(frozen=True, eq=False)
class FeatureClass:
    """Features that can run the same schedules in the same code."""

    name: str
    features: list[int]
    candidates: NDArray[np.int32]  # [candidates, 5]; the default is the first
    allowed: list[list[int]]  # [features]: numbers of the candidates to try, the default first
    align: int  # bytes of the widest load of a lane

    def at(self, warps: int) -> list[list[int]]:
        """Return `allowed` without the candidates whose registers do not fit at this number
        of warps an SM.
        """
        fits = [_fits(row, self.align, warps) for row in self.candidates]
        return [[choice for choice in feature_class if fits[choice]] for feature_class in self.allowed]


@dataclass(frozen=True, eq=False)
class Unit:
    """Candidates of a class that share a kernel, for an occupancy."""

    own: FeatureClass
    choices: list[list[int]]  # [features of the class]: candidates in their order

    @property
    def variants(self) -> int:
        """The number of distinct candidates."""
        return len({choice for choices in self.choices for choice in choices})


def classes_of(problem: FusedProblem, bench: FusedBench) -> list[FeatureClass]:
    """Return the classes of the features that have lookups, by bytes to gather, the most first."""
    runnable: dict[Any, NDArray[np.int32]] = {}
    members: dict[Any, list[int]] = {}
    for feature, table in enumerate(problem.tables):
        if problem.expected_sixteenths[feature] == ALWAYS_EMPTY or not table.rows * table.dim:
            continue
        key = (table.dim, table.dtype, table.mode, table.padded, *problem.alignment(feature))
        if (key, table.rows) not in runnable:  # the number of rows may decide whether a table can be staged
            runnable[key, table.rows] = bench.candidates(feature)
        members.setdefault((*key, runnable[key, table.rows].tobytes()), []).append(feature)
    classes, names = [], set[str]()
    for key, features in members.items():
        name = _class_name(key)
        while name in names:
            name += "'"
        names.add(name)
        classes.append(_class(problem, name, features, np.frombuffer(key[-1], np.int32), key[4]))
    work = problem.expected_sixteenths * [table.row_bytes for table in problem.tables]
    return sorted(classes, key=lambda feature_class: -float(work[feature_class.features].sum()))


def _class_name(key: tuple[object, ...]) -> str:
    dim, dtype, mode, padded, align, store, _ = key
    extras = (f"align {align}", align != 16), (f"store {store}", store != 16), ("padded", padded)
    return " ".join([f"{dim} {dtype} {mode}", *(text for text, there in extras if there)])


def _class(
    problem: FusedProblem, name: str, features: list[int], runnable: NDArray[np.int32], align: int
) -> FeatureClass:
    rows = runnable.reshape(-1, FIELDS).copy()
    rows[:, EXPECTED] = 0
    rows = np.concatenate((np.zeros((1, FIELDS), np.int32), rows[rows.any(axis=1)]))
    lanes = min(32, power_of_two(problem.tables[features[0]].row_bytes // align))
    kept: dict[tuple[float, bool], list[int]] = {}
    allowed = []
    for feature in features:
        length = int(problem.expected_sixteenths[feature]) / SIXTEENTHS
        reused = length * problem.bags >= problem.tables[feature].rows
        if (length, reused) not in kept:
            kept[length, reused] = [0, *_worth_a_try(rows, length, lanes, reused)]
        allowed.append(kept[length, reused])
    return FeatureClass(name, features, rows, allowed, align)


def _worth_a_try(rows: NDArray[np.int32], length: float, lanes: int, reused: bool) -> list[int]:
    """Return the numbers of the candidates to try for a bag of `length` lookups, of rows that
    `lanes` threads read.
    """
    longest = max(int(np.ceil(length)), 1)
    widest = max(_slots(row, lanes) for row in rows)
    schedules = []
    for choice, row in enumerate(rows):
        kind, threads, distance, split = (int(value) for value in row[CHOSEN])
        if kind == _POOL:
            slots, blocks = _slots(row, lanes), max(split, 1)
            share = longest / (slots * blocks)
            fits = threads == 0 or slots <= max(power_of_two(longest), 1)
            fits = fits and (share <= _LONGEST_SLOT or slots >= widest)
            fits = fits and distance <= max(power_of_two(int(np.ceil(share))), 1)
            fits = fits and (blocks == 1 or longest / blocks >= _LEAST_PART)
        elif kind == _COLUMNS:
            fits = length <= _LONGEST_COLUMN
        else:
            fits = kind == _STAGED and reused
        if fits:
            schedules.append(choice)
    return schedules


def _slots(row: NDArray[np.int32], lanes: int) -> int:
    """Return the number of rows that the threads of a bag read at once."""
    return max(int(row[_THREADS]) // lanes, 1)


def _fits(row: NDArray[np.int32], align: int, warps: int) -> bool:
    """Return whether registers may hold the rows in flight of a candidate."""
    if int(row[_DISTANCE]) <= 2:
        return True
    return _REGISTERS_OF_A_KERNEL + int(row[_DISTANCE]) * max(align // 4, 1) <= _REGISTERS // (32 * warps)


def units_of(classes: Sequence[FeatureClass], warps: int, most: int) -> list[list[Unit]]:
    """Return kernels for an occupancy, each of at most `most` candidates. Every part of a class
    has the default.
    """
    kernels: list[list[Unit]] = []
    for feature_class in classes:
        allowed = feature_class.at(warps)
        used = sorted({choice for choices in allowed for choice in choices} - {0})
        step = max(most - 1, 1)
        for start in range(0, len(used), step):
            chosen = {0, *used[start : start + step]}
            unit = Unit(
                feature_class, [[choice for choice in choices if choice in chosen] for choices in allowed]
            )
            for kernel in kernels:
                fits = sum(other.variants for other in kernel) + unit.variants <= most
                if fits and all(other.own is not feature_class for other in kernel):
                    kernel.append(unit)
                    break
            else:
                kernels.append([unit])
    return kernels


def mixtures(
    units: Sequence[Unit], defaults: NDArray[np.int32], seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Build sets of schedules as a Latin square, so that all candidates of a feature run amid
    the same traffic.

    Returns:
        The sets, int32 ``[sets, features, 5]``, and the candidate of each feature, ``[sets, features]``.
        Features of other classes have -1 and the default.
    """
    number = max(len(choices) for unit in units for choices in unit.choices)
    sets = np.repeat(defaults[None], number, axis=0)
    taken = np.full(sets.shape[:2], -1, np.int64)
    for unit in units:
        firsts = _first_choices(unit, seed)
        for feature, choices, first in zip(unit.own.features, unit.choices, firsts, strict=True):
            taken[:, feature] = np.array(choices)[(np.arange(number) + first) % len(choices)]
            sets[:, feature, CHOSEN] = unit.own.candidates[taken[:, feature], CHOSEN]
    return sets, taken


def _first_choices(unit: Unit, seed: int) -> NDArray[np.int64]:
    """Return the first candidate of each feature. It differs from the previous feature's, except
    in a tile of columns.
    """
    kinds = unit.own.candidates[:, KIND]
    firsts, tile = [-1], 0  # tile: features of the tile so far
    for choices in unit.choices:
        tiled = bool((kinds[choices] == _COLUMNS).any())
        tile = tile + 1 if tiled and 0 < tile < _TILED_AT_ONCE else int(tiled)
        firsts.append(firsts[-1] + (tile <= 1))
    return np.random.default_rng(seed).permutation(firsts[-1] + 1)[firsts[1:]]
