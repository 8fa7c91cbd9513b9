"""Grouping of candidates and cutting into tiles for the one-launch attention, without a GPU.

The kernel that groups runs on the host as a block of threads in random order, against a model in Python.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.c_program import ROOT, make_once

CPP_COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
BLOCK, TILE_ROWS, BUCKETS, NOBODY = 64, 128, 32, -(2**31)
NEAR = 4096  # users that are counted in shared memory
CAND_TO_USER, KV_LENGTHS, KV_OFFSETS = 6, 7, 8  # rf_argument
NONE, LENGTHS, OFFSETS = range(3)
KEYS, GRID, GROUPS, MOST_PARTS, SPLIT_TIMES = 128, 132, 2, 8, 2

pytestmark = pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")


class Integers(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("is_long", ctypes.c_int64))


class Users(ctypes.Structure):
    _fields_ = (
        ("lengths", Integers),
        ("offsets", Integers),
        *((name, ctypes.c_int64) for name in ("count", "positions", "pitch")),
    )


class Args(ctypes.Structure):
    """rf_attention_group_args."""

    _fields_ = (
        ("map", Integers),
        ("keys", Users),
        *((name, ctypes.c_void_p) for name in ("plan", "work", "counts", "order", "ranks", "members")),
        *(
            (name, ctypes.c_int32)
            for name in ("candidates", "user_rows", "candidate_rows", "kv_heads", "report", "block_keys")
        ),
        ("ended", ctypes.c_void_p),
        ("grid", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("errors", ctypes.c_void_p * 2),
    )


class Case(NamedTuple):
    """A call; contents may be bad."""

    n_users: int
    positions: int  # per user, or of all
    form: int
    contents: list[int]  # lengths or offsets
    map: list[int]
    queries: int
    own_queries: int
    kv_heads: int
    share: int
    wide: bool  # integers of 64 bits

    def keys_of(self, user: int) -> tuple[int, int]:
        """The first, and their number."""
        if user == self.n_users:
            return 0, 0
        if self.form == OFFSETS:
            first, end = self.contents[user : user + 2]
            return (first, end - first) if 0 <= first <= end <= self.positions else (0, 0)
        if self.form == LENGTHS:
            return 0, max(0, min(self.contents[user], self.positions))
        return 0, self.positions

    def offenders(self) -> set[tuple[int, int, int]]:
        found = {(CAND_TO_USER, at, user) for at, user in enumerate(self.map) if not 0 <= user < self.n_users}
        if self.form == LENGTHS:
            found |= {
                (KV_LENGTHS, at, length)
                for at, length in enumerate(self.contents)
                if not 0 <= length <= self.positions
            }
        before = 0
        for at, offset in enumerate(self.contents if self.form == OFFSETS else ()):
            if not before <= offset <= self.positions:
                found.add((KV_OFFSETS, at, offset))
            before = offset if 0 <= offset <= self.positions else 0
        return found


def random_case(draw: random.Random, users: int | None = None, candidates: int | None = None) -> Case:
    n_users = draw.choice((1, 2, 3, 7, 40, BLOCK - 1, BLOCK, 150)) if users is None else users
    n_items = draw.choice((0, 1, 5, 33, 64, 150, 600)) if candidates is None else candidates
    wide, form = draw.random() < 0.5, draw.randrange(3)
    most = 2**62 if wide else 2**31 - 1
    bad = draw.choice((0, 0, 0.02, 0.3))
    positions = draw.choice((1, 2, 100, 1024, 5000, 2**30 - 1))
    wrong = (-1, -most, most, n_users, n_users + 1, positions + 1)
    contents: list[int] = []
    if form == LENGTHS:
        contents = [draw.randint(0, positions) for _ in range(n_users)]
    elif form == OFFSETS:
        contents = sorted(draw.randint(0, positions) for _ in range(n_users + 1))
    some = draw.sample(range(n_users), draw.randint(1, min(n_users, 9))) if draw.random() < 0.5 else None
    users_of = [draw.choice(some) if some else draw.randrange(n_users) for _ in range(n_items)]
    if draw.random() < 0.5:
        users_of.sort()
    contents, users_of = (
        [draw.choice(wrong) if draw.random() < bad else one for one in given]
        for given in (contents, users_of)
    )
    queries, own_queries = draw.choice((1, 1, 2, 9, 64, 128)), draw.choice((0, 0, 1, 3, 128, 130))
    if own_queries and draw.random() < 0.1:
        queries = 0
    kv_heads, share = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 5))
    small = n_users * own_queries + n_items * queries < 4000 // (kv_heads * share)
    if not small:
        queries, own_queries, kv_heads, share = min(queries, 2), min(own_queries, 1), 1, 1
    return Case(n_users, positions, form, contents, users_of, queries, own_queries, kv_heads, share, wide)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    def build(path: Path) -> None:
        command = [CPP_COMPILER, "-x", "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC"]
        command += ["-Wno-unknown-pragmas", "-fvisibility=hidden", "-shared", f"-DRF_BLOCK={BLOCK}"]
        command += [f"-I{ROOT / room}" for room in ("tests/c/warps", "tests/c/torch/host", "csrc", "include")]
        command += ["tests/c/warps/attention_plan.cu", "-o", path]
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True)

    return ctypes.CDLL(str(make_once(["attention's plan on the host"], ".so", build)))


def integers(values: list[int], wide: bool, keep: list[Any]) -> Integers:
    keep.append(((ctypes.c_int64 if wide else ctypes.c_int32) * max(len(values), 1))(*values))
    return Integers(ctypes.addressof(keep[-1]), wide)


def aligned(count: int) -> Any:
    """Returns an array of int32_t, aligned to 16 bytes."""
    memory = (ctypes.c_int8 * (4 * count + 16))()
    return (ctypes.c_int32 * count).from_buffer(memory, -ctypes.addressof(memory) % 16)


def check(library: ctypes.CDLL, case: Case, seed: int) -> None:
    keep: list[Any] = []
    users, items = case.n_users, len(case.map)
    plan, work = aligned(4), aligned(8 * (users + 1))
    counts, order = ((ctypes.c_int32 * (users + 1))(*[-5] * (users + 1)) for _ in range(2))
    ranks, members = ((ctypes.c_int32 * (items + 1))(*[-5] * (items + 1)) for _ in range(2))
    args = Args(integers(case.map, case.wide, keep))
    args.keys = Users(count=users, positions=case.positions, pitch=0)
    if case.form != NONE:
        setattr(args.keys, ("lengths", "offsets")[case.form - 1], integers(case.contents, case.wide, keep))
    for name, place in zip(
        ("plan", "work", "counts", "order", "ranks", "members"),
        (plan, work, counts, order, ranks, members),
        strict=True,
    ):
        setattr(args, name, ctypes.addressof(place))
    args.candidates, args.kv_heads, args.report = items, case.kv_heads, seed % 2
    ended = (ctypes.c_int32 * (SPLIT_TIMES * GRID * GROUPS + 1))(*[7] * (SPLIT_TIMES * GRID * GROUPS + 1))
    args.block_keys, args.grid = KEYS, GRID
    args.ended = ctypes.addressof(ended) if seed % 3 else None
    args.user_rows, args.candidate_rows = case.own_queries * case.share, case.queries * case.share
    offender = (ctypes.c_int64 * 3)()
    library.plan_group(ctypes.byref(args), offender, ctypes.c_uint64(seed))

    bad = case.offenders() if args.report else set()
    assert tuple(offender) in bad if bad else offender[0] == 0
    of_user: dict[int, list[int]] = {user: [] for user in range(users + 1)}
    for item, user in enumerate(case.map):
        of_user[user if 0 <= user < users else users].append(item)
    most = max(case.keys_of(user)[1] for user in range(users)) or 1
    candidates = tiles = 0
    last = (-BUCKETS, 0)
    seen = set()
    for at in range(users + 1):
        user, first, count, key, keys, tile, rows, _ = work[8 * at : 8 * at + 8]
        seen.add(user)
        assert (count, first, tile) == (len(of_user[user]), candidates, tiles)
        assert (key, keys) == case.keys_of(user)
        assert sorted(members[first : first + count]) == of_user[user]
        bucket = keys >> max(most.bit_length() - 5, 0)
        assert (-bucket, user) > last
        last = (-bucket, user)
        assert rows == case.share * (count * case.queries + (case.own_queries if user < users else 0))
        candidates += count
        tiles += -(-rows // TILE_ROWS) * case.kv_heads
    assert seen == set(range(users + 1)) and plan[:2] == [tiles, 0] and members[items] == -5
    whole, parts = plan[2:]
    if parts == 1:
        assert whole == tiles
    else:
        firsts = [work[8 * at + 5] for at in range(users + 1)]
        assert args.ended and not any(ended[:-1]) and ended[-1] == 7
        assert whole == max(first for first in firsts if first <= tiles - tiles % GRID)
        assert 1 < parts <= MOST_PARTS and 0 < (tiles - whole) * parts <= SPLIT_TIMES * GRID
        durations = [1.0] * whole + [1 / parts] * (tiles - whole) * parts
        assert makespan(durations) < -(-tiles // GRID)
    check_tiles(library, case, args, (tiles, whole, parts), of_user)


def makespan(durations: list[float]) -> float:
    """Returns the end of the last of GRID workers; each takes the next piece when it is free."""
    free = [0.0] * GRID
    for taken in durations:
        heapq.heapreplace(free, free[0] + taken)
    return max(free)


def check_tiles(
    library: ctypes.CDLL, case: Case, args: Args, plan: tuple[int, int, int], of_user: dict[int, list[int]]
) -> None:
    """Every row of every user and head is in one tile, together with its keys; each key is in one part."""
    heads = case.kv_heads * case.share
    tiles, whole, parts = plan
    pieces = whole + (tiles - whole) * parts
    of_tiles, of_rows = (ctypes.c_int32 * (8 * pieces + 8))(), (ctypes.c_int32 * (TILE_ROWS * pieces + 1))()
    library.plan_tiles(ctypes.byref(args), heads, case.queries, case.own_queries, of_tiles, of_rows)
    assert of_tiles[8 * pieces + 1] == -1
    owner = {item: user for user, owned in of_user.items() for item in owned}
    seen: set[int] = set()
    end, before = 0, [0]  # of the previous work item: its last key, and its rows
    for number in range(pieces):
        rows, keys, user, head, key, _, _, split = of_tiles[8 * number : 8 * number + 8]
        found = of_rows[TILE_ROWS * number : TILE_ROWS * (number + 1)]
        item = number - whole
        if item >= 0 and item % parts > 0:
            if rows == 0:  # a tile of fewer parts
                assert keys == split == 0 and all(row == NOBODY for row in found)
                continue
            assert split >> 8 == item and split >> 4 & 15 == item % parts and key == end
            end += keys
            assert end <= sum(case.keys_of(user)) and found == before
            assert (split & 15 == item % parts + 1) == (end == sum(case.keys_of(user)))
            continue
        assert 0 < rows <= TILE_ROWS and key == case.keys_of(user)[0]
        assert split or keys == case.keys_of(user)[1]
        assert not split or (split >> 8, split >> 4 & 15) == (item, 0)
        end, before = key + keys, found
        assert all(row == NOBODY for row in found[rows:])
        for row in found[:rows]:
            place, queries = (row, case.queries) if row >= 0 else (~row, case.own_queries)
            item, own_head = place // heads // queries, place % heads
            assert own_head // case.share == head
            assert owner[item] == user if row >= 0 else item == user < case.n_users
        assert len(set(found[:rows])) == rows and seen.isdisjoint(found[:rows])
        seen.update(found[:rows])
        check_segments(case, found[:rows], heads)
    everything = len(case.map) * case.queries + case.n_users * case.own_queries
    assert len(seen) == everything * heads


def check_segments(case: Case, rows: list[int], heads: int) -> None:
    """Rows that one copy moves are queries of one item and head, side by side."""
    segment = 64
    while case.queries % segment or case.own_queries % segment:
        segment //= 2
    if segment >= 8:
        for first in range(0, len(rows), segment):
            places = [row if row >= 0 else ~row for row in rows[first : first + segment]]
            assert places == [places[0] + i * heads for i in range(segment)]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(30):
        case = random_case(draw)
        try:
            check(library, case, seed * 1000 + number)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_many_users(library: ctypes.CDLL) -> None:
    check(library, random_case(random.Random(1), NEAR, 300), 1)
