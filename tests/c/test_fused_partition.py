"""Work of a fused call shared out by the host: every bag in one task, heavy tasks first; needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recfuse import _C
from support.partition import ADDRESS, BLOCK, MAX, MEAN, SUM, TILE, TOGETHER, TURNS, Task, parts

LEAST_TURNS, LEAST_WORK, LEAST_WORK_OF_ALL, SECTOR, BYTES_A_STEP = 3, 8, 4, 32, 3000
COLUMN_STEPS, LONGER_STEPS = 2, 6
LONG, LAST, FEW_BAGS = 2, 0.15, 256
ROWS = 1000  # of a table by default
BUCKET_ENDS = (2, 6, 12, 24, 48, 96, 192)
POOL, COLUMNS = 1, 2


class Table(NamedTuple):
    """One feature: of float32 (0) or float16 (1)."""

    dim: int
    dtype: int = 0
    pooling: int = SUM
    padding_idx: int = -1
    rows: int = ROWS


class Shape(NamedTuple):
    """The layout of a feature's rows, as in geometry.c."""

    columns: int
    lanes: int
    slices: int
    elements: int


def shape_of(table: Table, element: int) -> Shape:
    """Returns the shape of a feature whose table and output columns begin at this element."""
    size = 2 if table.dtype else 4
    address = ADDRESS * (table.dtype + 1) + element * size
    bits = address | table.dim * size | (8 if table.dtype else 16)
    align = bits & -bits
    columns = table.dim * size // align
    lanes = min(TILE, 1 << max(columns - 1, 0).bit_length())
    wide = lanes * (2 if columns > lanes else 1)
    return Shape(columns, lanes, -(-columns // wide), align // size)


class Work:
    """Features with their lengths and schedules, and the mapping that the host makes."""

    def __init__(
        self, tables: list[Table], lengths: np.ndarray, schedules: Any = None, sms: int = 132
    ) -> None:
        rows, column, starts = [], 0, [0, 0]
        self.tables, self.lengths, self.shapes = tables, lengths, []
        for table in tables:
            start = starts[table.dtype]
            rows.append([table.dtype, start, table.rows, table.dim, *table[2:4], column])
            self.shapes.append(shape_of(table, start))
            starts[table.dtype] += table.rows * table.dim
            column += table.dim
        buffers = [(ADDRESS, starts[0], 0), (2 * ADDRESS, starts[1], 1)]
        self.call = buffers, np.array(rows, np.int64).reshape(-1, 7), 0, column
        self.offsets = np.concatenate(([0], np.cumsum(lengths.reshape(-1))))
        self.schedules = np.zeros((len(tables), 5), np.int32)
        if schedules is not None:
            self.schedules[:] = schedules
        self.bags = lengths.shape[1]
        self.sms = sms

    def map(self, offsets: np.ndarray | None = None) -> np.ndarray:
        """The mapping, with no table staged."""
        offsets = self.offsets if offsets is None else offsets
        described = _C.fused_embedding_bag_describe(self.call, self.schedules, 0)
        return _C.fused_embedding_bag_map(described, offsets, self.sms, False)

    def is_columns(self, feature: int) -> bool:
        """Returns true if a feature's vectors are lanes of tiles."""
        if self.schedules[feature, 0]:
            return bool(self.schedules[feature, 0] == COLUMNS)
        return bool(self.mean(feature) <= BUCKET_ENDS[0])

    def mean(self, feature: int) -> float:
        """Lookups of a bag."""
        return float(self.lengths[feature].sum() / self.bags)


def mean_of_tile(work: Work, tile: np.ndarray) -> float:
    """Returns the mean length of its longest bags."""
    return max(work.mean(int(f)) for f, _ in tile if f >= 0)


def covers(work: Work, tasks: list[Task], lanes: np.ndarray, of_tiles: set[int]) -> bool:
    """Returns true if each part of each bag is in one task, for these schedules of tiles."""
    found: dict[tuple[bool, int, int], Counter[tuple[int, int]]] = {}
    for task in tasks:
        tiled = task.schedule in of_tiles
        if tiled and task.feature >= len(lanes):
            return False
        if tiled and task.slice != (mean_of_tile(work, lanes[task.feature]) > 1):
            return False
        key = tiled, task.feature, 0 if tiled else task.slice
        found.setdefault(key, Counter())[task.first_bag, task.last_bag] += 1
    wanted = {(True, tile, 0): 1 for tile in range(len(lanes))}
    for f, table in enumerate(work.tables):
        if table.dim and not work.is_columns(f):
            split = int(max(work.schedules[f, 3], 1))
            wanted |= {(False, f, s): split for s in range(work.shapes[f].slices)}
    if set(found) != set(wanted):
        return False
    for key, ranges in found.items():
        ends = [0, *itertools.chain.from_iterable(sorted(ranges)), work.bags]
        if ends[0::2] != ends[1::2] or set(ranges.values()) != {wanted[key]}:
            return False
    return True


def tile_schedules(work: Work, tasks: list[Task], lanes: np.ndarray) -> set[int]:
    """Returns the schedules of tiles that cover everything once; fails without any."""
    used = sorted({task.schedule for task in tasks})
    for count in range(len(used) + 1):
        for chosen in itertools.combinations(used, count):
            if covers(work, tasks, lanes, set(chosen)):
                return set(chosen)
    raise AssertionError(f"not every bag is in one task: {tasks[:20]}")


def check_lanes(work: Work, lanes: np.ndarray) -> None:
    """Every vector of the features with short bags is a lane, side by side in the order of features."""
    filled = [(int(f), int(c)) for f, c in lanes.reshape(-1, 2) if f >= 0]
    tiled = [f for f, table in enumerate(work.tables) if table.dim and work.is_columns(f)]
    assert sorted(filled) == [(f, c) for f in tiled for c in range(work.shapes[f].columns)]
    for tile in lanes:
        features = [int(f) for f, _ in tile if f >= 0]
        assert features and features == sorted(features)
        assert [f < 0 for f, _ in tile] == sorted(f < 0 for f, _ in tile)


def check_parts(work: Work, tasks: list[Task]) -> None:
    """Tasks that share bags are neighbours, with a group and a place of their own."""
    groups: dict[int, list[Task]] = {}
    for task in tasks:
        assert 0 <= task.first_bag < task.last_bag <= work.bags
        if task.part >> 16 > 1:
            groups.setdefault(task.group, []).append(task)
    places = set()
    for group in groups.values():
        first = group[0]
        assert [task.part for task in group] == [k | len(group) << 16 for k in range(len(group))]
        assert {task[:5] + task[6:] for task in group} == {first[:5] + first[6:]}
        places.add(first.place)
    assert len(places) == len(groups)


def steps(work: Work, task: Task, lanes: np.ndarray, of_tiles: set[int]) -> float:
    """Returns the time of a task by partition/cost.c's estimate for default schedules and narrow rows."""
    bags = task.last_bag - task.first_bag
    if task.schedule in of_tiles:
        mean = mean_of_tile(work, lanes[task.feature])
        return (LONGER_STEPS * mean if mean > 1 else COLUMN_STEPS) * -(-bags // TOGETHER)
    table, mean, lanes_of_row = (
        work.tables[task.feature],
        work.mean(task.feature),
        work.shapes[task.feature].lanes,
    )
    slots = (1, 1, 2, 4, 8, 16, 32, 32)[sum(mean > end for end in BUCKET_ENDS)]
    threads = min(TILE, lanes_of_row * slots)
    in_flight = threads // lanes_of_row * 8
    lookups = mean * work.bags
    missed = (
        max(table.dim * (2 if table.dtype else 4), SECTOR) * table.rows * lookups / (table.rows + lookups)
    )
    return (1 + max(1.0, mean / in_flight)) * -(-bags // (BLOCK // threads)) + (
        missed / BYTES_A_STEP * bags / work.bags
    )


def target_of(taken: list[float], places: int = 132 * 14) -> float:
    """Returns the target steps of a task, from the steps of all."""
    least = min(max(sum(taken) / (places * LEAST_TURNS), LEAST_WORK_OF_ALL), LEAST_WORK)
    return max(sum(taken) / (places * TURNS), least)


def check(work: Work) -> tuple[list[Task], np.ndarray, set[int]]:
    """All that holds for every mapping."""
    rows = work.map()
    tasks, lanes = parts(rows)
    assert rows[0, 5] == work.bags and rows[0, 6] == len(work.tables)
    check_parts(work, tasks)
    check_lanes(work, lanes)
    again = work.map(work.offsets.astype(np.int32))
    assert (again == rows).all()
    return tasks, lanes, tile_schedules(work, tasks, lanes)


def lengths_of(features: int, bags: int, mean: float, seed: int = 0) -> np.ndarray:
    """Poisson lengths [features, bags]."""
    return np.random.default_rng(seed).poisson(mean, (features, bags))


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Any features, lengths and schedules."""
    dims = st.sampled_from((0, 1, 3, 4, 16, 17, 64, 128, 300, 700, 2048))
    tables = draw(
        st.lists(
            st.builds(
                Table,
                dims,
                st.sampled_from((0, 1)),
                st.sampled_from((SUM, MEAN, MAX)),
                st.sampled_from((-1, 0)),
                st.just(ROWS),
            ),
            min_size=1,
            max_size=6,
        )
    )
    bags = draw(st.sampled_from((1, 2, 7, 64, 500)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    means = [draw(st.sampled_from((0.0, 0.3, 1.0, 5.0, 40.0, 300.0))) for _ in tables]
    lengths = np.stack([rng.poisson(mean, bags) for mean in means])
    schedules = np.zeros((len(tables), 5), np.int32)
    for f, table in enumerate(tables):
        kind = draw(st.sampled_from((0, 0, POOL, COLUMNS)))
        schedules[f, 0] = kind
        if kind == POOL:
            schedules[f, 2] = draw(st.sampled_from((0, 1, 8, 16)))
            if table.pooling != MAX:
                schedules[f, 1] = draw(st.sampled_from((0, BLOCK)))
                schedules[f, 3] = draw(st.sampled_from((0, 1, 3)))
    return Work(tables, lengths, schedules, draw(st.sampled_from((1, 132))))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(works())
def test_every_bag_is_in_one_task(work: Work) -> None:
    check(work)


@pytest.mark.parametrize("bags", (1, 2, 63, 512, 4096))
@pytest.mark.parametrize("mean", (0.0, 1.0, 8.0, 100.0))
def test_many_features_of_one_kind(bags: int, mean: float) -> None:
    check(Work([Table(16)] * 40, lengths_of(40, bags, mean)))


def test_long_tasks_come_first() -> None:
    tables = [Table(16)] * 30 + [Table(128)] * 10
    lengths = lengths_of(40, 256, 3.0)
    lengths[5] = 2000
    lengths[33] = 700
    work = Work(tables, lengths)
    tasks, lanes, of_tiles = check(work)
    taken = [steps(work, task, lanes, of_tiles) for task in tasks]
    assert max(taken) > 10 * min(taken)
    long = LONG * target_of(taken)
    first = [task.feature for task in tasks if task.feature in (5, 33)]
    assert first == [task.feature for task in tasks[: len(first)]]
    for one, other in itertools.pairwise(taken):
        assert other <= max(one * 1.25, long * 1.1)


@pytest.mark.parametrize(
    ("mean", "schedule", "apart"),
    [
        (100, {}, True),
        (100, {"kind": POOL, "threads": 32}, True),
        (100, {"kind": POOL, "threads": 64}, False),
        (100, {"kind": POOL, "threads": 32, "split": 2}, False),
        (20, {}, False),
        (1, {}, False),
    ],
)
def test_two_warps_share_long_bags_where_there_are_few(
    mean: int, schedule: dict[str, int], apart: bool
) -> None:
    """By default, or if a schedule requests one warp: the number of the schedule differs."""
    fields = ("kind", "threads", "distance", "split", "expected")
    given = {"expected": mean * 16, **schedule}
    row = [given.get(name, 0) for name in fields]
    used = []
    for bags in (FEW_BAGS, FEW_BAGS + 1):
        tasks, _, _ = check(Work([Table(128)] * 3, np.full((3, bags), mean), row))
        used.append({task.schedule for task in tasks})
    assert (used[0] != used[1]) == apart and all(len(each) == 1 for each in used)


def test_rows_from_memory_come_before_those_in_l2() -> None:
    """Features in the order of how many rows there are for a lookup, those that are alike in their own."""
    rows = [100, 100_000, 1000, 30_000, 100, 1000]
    work = Work([Table(16, rows=count) for count in rows], lengths_of(6, 2048, 20.0))
    tasks, _, _ = check(work)
    seen = [feature for feature, _ in itertools.groupby(task.feature for task in tasks)]
    assert seen == [1, 3, 2, 5, 0, 4]


def test_the_last_tasks_are_short() -> None:
    work = Work([Table(16)] * 100, lengths_of(100, 2048, 20.0))
    tasks, lanes, of_tiles = check(work)
    taken = [steps(work, task, lanes, of_tiles) for task in tasks]
    done = np.cumsum(taken) / sum(taken)
    early = np.mean([one for one, at in zip(taken, done, strict=True) if at < 1 - LAST - 0.01])
    late = np.mean([one for one, at in zip(taken, done, strict=True) if at > 1 - LAST + 0.01])
    assert 0.4 < late / early < 0.6


@pytest.mark.parametrize("pooled", (0, 5, 100))
def test_tile_tasks_are_spread_over_other_tasks(pooled: int) -> None:
    """Over nine tenths of all, in their order; adjacent if there is little other work."""
    lengths = np.ones((pooled + 200, 512), np.int64)
    lengths[:pooled] = 20
    tasks, _, of_tiles = check(Work([Table(16)] * (pooled + 200), lengths))
    at = [place for place, task in enumerate(tasks) if task.schedule in of_tiles]
    assert [tasks[place][:2] for place in at] == sorted(tasks[place][:2] for place in at)
    apart = max(0.9 * len(tasks) / len(at), 1.0)
    assert at == [int(place) for place in itertools.accumulate([0.0] + [apart] * (len(at) - 1))]
    assert pooled < 100 or apart > 1.5


@pytest.mark.parametrize("sms", (1, 16, 132))
def test_a_task_is_a_fraction_of_a_wave(sms: int) -> None:
    features, bags = 100, 2048
    tasks, _, _ = check(Work([Table(64)] * features, lengths_of(features, bags, 30.0), sms=sms))
    turns = sms * 14 * TURNS
    assert len(tasks) <= turns * (1 + LAST) * 1.05 + features
    assert len(tasks) >= turns / 2
    sizes = {task.last_bag - task.first_bag for task in tasks}
    assert len(sizes) <= 8  # two lengths: the same for all, but for the last of a feature


def test_small_batches_have_few_tasks() -> None:
    tasks, _, _ = check(Work([Table(16)] * 26, lengths_of(26, 1, 1.0)))
    assert len(tasks) <= 26


@pytest.mark.parametrize(
    ("dim", "lookups", "bags", "each"), ((16, 1, 512, 8), (16, 1, 2048, 16), (64, 4, 64, 4), (64, 4, 1024, 8))
)
def test_tasks_are_short_where_all_run_at_once(dim: int, lookups: int, bags: int, each: int) -> None:
    """The shortest possible, of tiles and of a feature; with more tasks they are twice as long."""
    tasks, _, _ = check(Work([Table(dim)] * 26, np.full((26, bags), lookups)))
    assert max(task.last_bag - task.first_bag for task in tasks) == each


def test_features_without_lookups_are_written_all_the_same() -> None:
    tasks, lanes, of_tiles = check(Work([Table(16), Table(128), Table(0)], np.zeros((3, 100), np.int64)))
    assert {task.schedule for task in tasks} == of_tiles
    assert {int(f) for f, _ in lanes.reshape(-1, 2)} == {-1, 0, 1}


def test_nothing_to_write() -> None:
    rows = Work([Table(0), Table(0)], np.ones((2, 5), np.int64)).map()
    assert rows.shape == (1, 8) and rows[0, 1] == rows[0, 2] == 0


def test_wide_rows_are_cut_into_slices() -> None:
    work = Work([Table(2048)], lengths_of(1, 50, 20.0))
    tasks, _, _ = check(work)
    assert {task.slice for task in tasks} == set(range(work.shapes[0].slices)) and work.shapes[0].slices > 1


@pytest.mark.parametrize("end", BUCKET_ENDS)
def test_lengths_choose_the_schedule(end: int) -> None:
    """A feature's schedule changes only where its mean length passes the end of a bucket."""
    seen = []
    for length in (end - 0.5, end, end + 0.01):
        lengths = np.full((1, 100), int(length))
        lengths[0, : round((length - int(length)) * 100)] += 1
        tasks, _, _ = check(Work([Table(4)], lengths))
        seen.append(tasks[0].schedule)
    assert seen[0] == seen[1]
    assert (seen[1] != seen[2]) or end >= BUCKET_ENDS[-2]  # the longest share one


def test_memory_for_a_mapping_is_the_callers() -> None:
    work = Work([Table(16)] * 3, lengths_of(3, 50, 5.0))
    described = _C.fused_embedding_bag_describe(work.call, work.schedules, 0)
    kept: list[np.ndarray] = []

    def memory(rows: int) -> np.ndarray:
        kept.append(np.full((rows, 8), -7, np.int32))
        return kept[0]

    got = _C.fused_embedding_bag_map(described, work.offsets, 132, True, memory)
    assert got is kept[0] and (got == work.map()).all()
    for wrong in (
        lambda rows: np.zeros((rows - 1, 8), np.int32),
        lambda rows: np.zeros((rows, 8), np.int64),
        lambda rows: np.zeros((8, rows), np.int32).T,
        lambda rows: bytearray(rows * 32),
    ):
        with pytest.raises(
            TypeError, match=r"memory returns another object; expected a writable int32 array \[\d+, 8\]"
        ):
            _C.fused_embedding_bag_map(described, work.offsets, 132, True, wrong)
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.fused_embedding_bag_map(work.call, work.offsets)


def test_a_mapping_needs_bags_and_sms() -> None:
    work = Work([Table(16)] * 2, np.ones((2, 4), np.int64))
    with pytest.raises(ValueError, match="4 bags and 0 SMs"):
        Work(work.tables, work.lengths, sms=0).map()
    with pytest.raises(ValueError, match="0 bags and 132 SMs"):
        work.map(np.zeros(1, np.int64))


def test_offsets_that_decrease_are_refused() -> None:
    work = Work([Table(16)] * 2, np.ones((2, 4), np.int64))
    work.offsets[4] = 9
    with pytest.raises(ValueError, match="less than 9 where feature 1 begins"):
        work.map()
