"""Lookups grouped by row, without a GPU: keys.cu, sort.cu and backward_group.cu beside a model.

They run on the host as blocks of threads, in random order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.backward.lookups import factor_of, spoil
from support.backward.simulated import CPP_COMPILER, simulated

MOST_SEGMENTS = 32
SUM, ABSENT = 0, -1  # pooling
FEATURE = np.dtype(
    [("first_row", "i8"), ("rows", "i8"), ("padding", "i8"), ("column", "i4"), ("pooling", "i4")]
)

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")


class Segments(ctypes.Structure):
    _fields_ = (
        ("bases", ctypes.c_int64 * MOST_SEGMENTS),
        ("slots", ctypes.c_uint32 * MOST_SEGMENTS),
        ("factors", ctypes.c_uint32 * MOST_SEGMENTS),
        ("count", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Counts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lengths", "totals", "digits", "places")),
        ("shift", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "offsets", "sample_weights", "features")),
        *((name, ctypes.c_void_p) for name in ("entries", "sources", "factors", "bag_factors")),
        *((name, ctypes.c_int64) for name in ("lookups", "output_dim", "trash", "span")),
        ("slots", ctypes.c_uint32),
        ("bags", ctypes.c_uint32),
        ("segments", Segments),
        ("counts", Counts),
        ("zeros", ctypes.c_void_p),
        ("n_zeros", ctypes.c_int64),
        ("tile", ctypes.c_int32),
        ("part_blocks", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Problem:
    """Features that follow each other, each with a table of its own."""

    rows: tuple[int, ...] = (90_000,)
    bags: int = 50
    lengths: tuple[int, int] = (0, 200)  # of bags, from and to
    hot: float = 0.0  # of the lookups that are of a few rows
    n_hot: int = 1
    alike: int = 0  # bits of places, the first, which all rows that are looked up have in common
    absent: tuple[int, ...] = ()  # features of another launch
    joined: bool = False  # all of one segment
    wide: bool = False  # 64 bits
    wide_values: bool = False
    bad: str = ""  # what is wrong with the lookups
    padding: int = -1
    items: int = 4
    tile: int = 1792
    part_blocks: int = 3
    seed: int = 0

    def features(self) -> NDArray[Any]:
        features = np.zeros(len(self.rows), FEATURE)
        first = 0
        for number, rows in enumerate(self.rows):
            pooling = ABSENT if number in self.absent else SUM
            features[number] = (first, rows, self.padding, 8 * number, pooling)
            first += rows if pooling == SUM else 0
        return features

    def segments(self) -> list[tuple[int, int, int]]:
        """First row, rows and first feature of each."""
        there = [number for number in range(len(self.rows)) if number not in self.absent]
        if self.joined:
            return [(0, sum(self.rows[number] for number in there), there[0])]
        firsts = self.features()["first_row"]
        return [(int(firsts[number]), self.rows[number], number) for number in there]

    def lookups(self) -> tuple[NDArray[Any], NDArray[Any]]:
        draw = np.random.default_rng(self.seed)
        integer = np.int64 if self.wide else np.int32
        lengths = draw.integers(self.lengths[0], self.lengths[1] + 1, (len(self.rows), self.bags))
        offsets = np.concatenate([[0], lengths.reshape(-1).cumsum()]).astype(integer)
        parts = []
        for rows, own in zip(self.rows, lengths.sum(1), strict=True):
            choice = np.arange(rows, dtype=np.int64)
            if self.alike > 0:
                choice = choice[choice * factor_of(rows) % 2**32 >> (32 - self.alike) == 1]
            found = draw.choice(choice, own)
            is_hot = draw.random(own) < self.hot
            found[is_hot] = draw.choice(choice[: self.n_hot], int(is_hot.sum()))
            parts.append(found)
        indices = np.concatenate(parts).astype(integer)
        spoil(draw, self.bad, indices, offsets)
        return indices, offsets


def group(problem: Problem) -> NDArray[Any]:
    """Keys and values, in the order that they have at last."""
    indices, offsets = problem.lookups()
    features = problem.features()
    segments = problem.segments()
    call = Call(lookups=indices.size, output_dim=8 * features.size, bags=problem.bags)
    call.trash = max(first + rows for first, rows, _ in segments)
    call.slots, call.tile, call.part_blocks = offsets.size - 1, problem.tile, problem.part_blocks
    call.segments.count = len(segments)
    for number, (first, rows, feature) in enumerate(segments):
        call.segments.bases[number] = first
        call.segments.slots[number] = feature * problem.bags
        call.segments.factors[number] = factor_of(rows)
    for name, values in {"indices": indices, "offsets": offsets, "features": features}.items():
        setattr(call, name, values.ctypes.data)
    entry = np.dtype([("key", "u4"), ("unused", "u4"), ("value", "u8")] if problem.wide_values else
                     [("key", "u4"), ("value", "u4")])  # fmt: skip
    memory = np.zeros(entry.itemsize * (indices.size + 2), np.uint8)
    lead = -memory.ctypes.data % 16
    grouped = memory[lead : lead + entry.itemsize * indices.size].view(entry)
    integer = "rf_i64" if problem.wide else "int"
    lib = simulated(
        "backward_group.cu",
        RF_INDEX=integer,
        RF_OFFSET=integer,
        RF_VALUE="rf_u64" if problem.wide_values else "rf_u32",
        RF_ITEMS=problem.items,
    )
    lib.group_lookups.restype = ctypes.c_int64
    count = lib.group_lookups(
        ctypes.byref(call), ctypes.c_void_p(grouped.ctypes.data), ctypes.c_uint64(problem.seed)
    )
    assert count >= 0
    return grouped[:count]


def expected(problem: Problem) -> dict[int, list[int]]:
    """Of each row that is looked up the values of its lookups, in their order."""
    indices, offsets = problem.lookups()
    found: dict[int, list[int]] = {}
    for number, feature in enumerate(problem.features()):
        for bag in range(problem.bags if feature["pooling"] == SUM else 0):
            slot = number * problem.bags + bag
            first, end = offsets[slot : slot + 2].tolist()
            if not 0 <= first <= end <= indices.size or (slot == 0 and first != 0):
                continue
            for row in indices[first:end].tolist():
                if 0 <= row < feature["rows"] and row != feature["padding"]:
                    value = bag * 8 * len(problem.rows) + int(feature["column"])
                    found.setdefault(int(feature["first_row"]) + row, []).append(value)
    return found


def runs(grouped: NDArray[Any]) -> tuple[list[int], list[list[int]]]:
    """Keys of runs of equal ones, and their values."""
    begins = np.flatnonzero(np.diff(grouped["key"].astype(np.int64), prepend=-1))
    return grouped["key"][begins].tolist(), [own.tolist() for own in np.split(grouped["value"], begins[1:])]


def check(problem: Problem) -> None:
    grouped = group(problem)
    keys, values = runs(grouped) if grouped.size > 0 else ([], [])
    want = expected(problem)
    assert len(set(keys)) == len(keys)  # those of a row are side by side
    assert dict(zip(keys, values, strict=True)) == want
    firsts = np.array([first for first, _, _ in problem.segments()])
    of_keys = np.searchsorted(firsts, np.array(keys, np.int64), side="right")
    assert (np.diff(of_keys) >= 0).all()  # and those of a matrix


PROBLEMS = {
    "one table": Problem(),
    "bags of one length": Problem(lengths=(100, 100), items=8, seed=1),
    "a hot row": Problem(hot=0.6, bags=150, seed=2),
    "some hot rows": Problem(hot=0.7, n_hot=5, bags=150, wide_values=True, seed=3),
    "all of one row": Problem(hot=1.0, bags=100, padding=7, seed=4),
    "a digit of many rows": Problem(alike=11, rows=(3_000_000,), bags=120, seed=5),
    "a digit of many rows, wide": Problem(
        alike=11, rows=(3_000_000,), bags=100, wide=True, wide_values=True, items=8, seed=6
    ),
    "several tables": Problem(
        rows=(3000, 1, 2, 90_000, 70), bags=70, absent=(2,), bad="index", tile=512, hot=0.3, seed=7
    ),
    "the first is absent": Problem(rows=(50, 5000, 900), absent=(0,), bags=40, seed=8),
    "of one segment": Problem(rows=(3000, 17, 90_000), joined=True, bags=90, wide=True, seed=9),
    "two rows": Problem(rows=(2, 1), bags=80, part_blocks=1, seed=10),
    "one lookup": Problem(bags=1, lengths=(1, 1), seed=12),
    "nothing counts": Problem(rows=(1, 1), padding=0, bags=30, seed=13),
    "cut digits between others": Problem(
        rows=(3_000_000, 60_000), hot=0.8, n_hot=9, bags=200, part_blocks=5, seed=15
    ),
    "many digits of few entries": Problem(rows=(3_000_000,), hot=0.98, n_hot=1, padding=0, bags=200, seed=16),
    "as many tables as segments": Problem(rows=(700,) * MOST_SEGMENTS, bags=9, lengths=(0, 40), seed=14),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_groups(name: str) -> None:
    check(PROBLEMS[name])


@pytest.mark.parametrize("seed", range(4))
def test_bad_offsets_do_no_harm(seed: int) -> None:
    """Every lookup that counts is of a bag that holds it."""
    problem = Problem(rows=(900, 40_000), bags=90, lengths=(0, 60), bad="offset, index", seed=20 + seed)
    grouped = group(problem)
    keys, values = runs(grouped)
    want = expected(problem)
    assert len(set(keys)) == len(keys)
    for key, own in zip(keys, values, strict=True):
        assert set(own) <= set(want[key])
