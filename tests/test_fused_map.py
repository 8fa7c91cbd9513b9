"""Work of a fused call shared out by the host: every bag in one task, heavy tasks first; needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recfuse import _C, workloads

BLOCK, TILE, TURNS, TOGETHER = 64, 32, 12, 8
BUCKET_ENDS = (2, 6, 12, 24, 48, 96, 192)
POOL, COLUMNS = 1, 2
SUM, MEAN, MAX = 0, 1, 2
ADDRESS = 1 << 20  # of a buffer that nothing reads


class Table(NamedTuple):
    """One feature: of float32 (0) or float16 (1)."""

    dim: int
    dtype: int = 0
    pooling: int = SUM
    padding_idx: int = -1


class Task(NamedTuple):
    """A row of a mapping."""

    feature: int
    first_bag: int
    last_bag: int
    schedule: int
    slice: int
    part: int
    group: int
    place: int


class Shape(NamedTuple):
    """What a feature's rows are like, as csrc/cuda/fused_feature.c says."""

    columns: int
    lanes: int
    slices: int
    elements: int


def shape_of(table: Table, element: int) -> Shape:
    """Of the feature whose table, and output columns, begin at this element."""
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
            rows.append([table.dtype, start, 1000, table.dim, table.pooling, table.padding_idx, column])
            self.shapes.append(shape_of(table, start))
            starts[table.dtype] += 1000 * table.dim
            column += table.dim
        buffers = [(ADDRESS, starts[0], 0), (2 * ADDRESS, starts[1], 1)]
        self.call = buffers, np.array(rows, np.int64).reshape(-1, 7), 0, column
        self.offsets = np.concatenate(([0], np.cumsum(lengths.reshape(-1))))
        self.schedules = np.zeros((len(tables), 6), np.int32)
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
        """Whether a feature's vectors are lanes of tiles."""
        if self.schedules[feature, 0]:
            return bool(self.schedules[feature, 0] == COLUMNS)
        return bool(self.mean(feature) <= BUCKET_ENDS[0])

    def mean(self, feature: int) -> float:
        """Lookups of a bag."""
        return float(self.lengths[feature].sum() / self.bags)


def parts(rows: np.ndarray) -> tuple[list[Task], np.ndarray]:
    """Tasks, and lanes [tiles, 32, 2]."""
    tasks, tiles = int(rows[0, 1]), int(rows[0, 2])
    assert len(rows) >= 1 + tasks + tiles * 8
    lanes = rows[1 + tasks : 1 + tasks + tiles * 8].reshape(tiles, TILE, 2)
    return [Task(*(int(field) for field in row)) for row in rows[1 : 1 + tasks]], lanes


def covers(work: Work, tasks: list[Task], lanes: np.ndarray, of_tiles: set[int]) -> bool:
    """Whether each part of each bag is in one task, if these are the schedules of tiles."""
    found: dict[tuple[bool, int, int], Counter[tuple[int, int]]] = {}
    for task in tasks:
        key = task.schedule in of_tiles, task.feature, task.slice
        found.setdefault(key, Counter())[task.first_bag, task.last_bag] += 1
    wanted = {(True, tile, 0): 1 for tile in range(len(lanes))}
    for f, table in enumerate(work.tables):
        if table.dim and not work.is_columns(f):
            split = int(max(work.schedules[f, 4], 1))
            wanted |= {(False, f, s): split for s in range(work.shapes[f].slices)}
    if set(found) != set(wanted):
        return False
    for key, ranges in found.items():
        ends = [0, *itertools.chain.from_iterable(sorted(ranges)), work.bags]
        if ends[0::2] != ends[1::2] or set(ranges.values()) != {wanted[key]}:
            return False
    return True


def tile_schedules(work: Work, tasks: list[Task], lanes: np.ndarray) -> set[int]:
    """The schedules of tiles, which make everything covered once; fails where none do."""
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
    """How long a task takes, as csrc/cuda/fused_map.c estimates it for default schedules, narrow rows."""
    bags = task.last_bag - task.first_bag
    if task.schedule in of_tiles:
        return max(1.0, *(work.mean(int(f)) for f, _ in lanes[task.feature] if f >= 0)) * -(-bags // TOGETHER)
    mean, lanes_of_row = work.mean(task.feature), work.shapes[task.feature].lanes
    slots = (1, 1, 2, 4, 8, 16, 32, 32)[sum(mean > end for end in BUCKET_ENDS)]
    threads = min(TILE, lanes_of_row * slots)
    in_flight = threads // lanes_of_row * 8
    return (1 + max(1.0, mean / in_flight)) * -(-bags // (BLOCK // threads))


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
            ),
            min_size=1,
            max_size=6,
        )
    )
    bags = draw(st.sampled_from((1, 2, 7, 64, 500)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    means = [draw(st.sampled_from((0.0, 0.3, 1.0, 5.0, 40.0, 300.0))) for _ in tables]
    lengths = np.stack([rng.poisson(mean, bags) for mean in means])
    schedules = np.zeros((len(tables), 6), np.int32)
    for f, table in enumerate(tables):
        kind = draw(st.sampled_from((0, 0, POOL, COLUMNS)))
        schedules[f, 0] = kind
        if kind == POOL:
            schedules[f, 2] = draw(st.sampled_from((0, 1, 8, 16)))
            if table.pooling != MAX:
                schedules[f, 1] = draw(st.sampled_from((0, BLOCK)))
                schedules[f, 4] = draw(st.sampled_from((0, 1, 3)))
    return Work(tables, lengths, schedules, draw(st.sampled_from((1, 132))))


@settings(max_examples=150, deadline=None)
@given(works())
def test_every_bag_is_in_one_task(work: Work) -> None:
    check(work)


@pytest.mark.parametrize("bags", (1, 2, 63, 512, 4096))
@pytest.mark.parametrize("mean", (0.0, 1.0, 8.0, 100.0))
def test_many_features_of_one_kind(bags: int, mean: float) -> None:
    check(Work([Table(16)] * 40, lengths_of(40, bags, mean)))


def test_heavy_tasks_come_first() -> None:
    tables = [Table(16)] * 30 + [Table(128)] * 10
    lengths = lengths_of(40, 256, 3.0)
    lengths[5] = 2000
    lengths[33] = 700
    work = Work(tables, lengths)
    tasks, lanes, of_tiles = check(work)
    taken = [steps(work, task, lanes, of_tiles) for task in tasks]
    assert max(taken) > 10 * min(taken)
    last = {task.feature for task in tasks if task.last_bag == work.bags}  # shorter than the others of a run
    for (one, task), (other, _) in itertools.pairwise(zip(taken, tasks, strict=True)):
        assert other <= one * 1.1 or (task.feature in last and task.last_bag == work.bags)


@pytest.mark.parametrize("sms", (1, 16, 132))
def test_a_task_is_a_fraction_of_what_a_gpu_does_at_once(sms: int) -> None:
    features, bags = 100, 2048
    tasks, _, _ = check(Work([Table(64)] * features, lengths_of(features, bags, 30.0), sms=sms))
    turns = sms * 14 * TURNS
    assert len(tasks) <= turns + features
    assert len(tasks) >= turns / 2
    sizes = {task.last_bag - task.first_bag for task in tasks}
    assert len(sizes) <= 4  # of one length: the same for all, but for the last of a feature


def test_small_batches_have_few_tasks() -> None:
    tasks, _, _ = check(Work([Table(16)] * 26, lengths_of(26, 1, 1.0)))
    assert len(tasks) <= 26


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
    """A feature's schedule changes where its mean length passes the end of a bucket, and only there."""
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
        with pytest.raises(TypeError, match=r"memory must give an int32 array \[\d+, 8\]"):
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


def lists_of(rows: np.ndarray) -> list[list[Task]]:
    """The tasks of staged tables, by list."""
    behind = 1 + int(rows[0, 1]) + int(rows[0, 2]) * 8
    if len(rows) == behind:
        return []
    depth, lists = (int(field) for field in rows[behind, :2])
    tasks = rows[behind + 1 :].reshape(depth, lists, 8)
    assert (tasks[-1, :, 0] == -1).all()
    return [
        [Task(*(int(field) for field in row)) for row in tasks[:, one] if row[0] >= 0] for one in range(lists)
    ]


def features_of(model: Any) -> np.ndarray:
    """A model's, int64 [features, 7]: sums without padding, tables one behind the other in one buffer."""
    rows = np.zeros((model.features, 7), np.int64)
    sizes = [-(-count * dim // 64) * 64 for count, dim in zip(model.rows, model.dims, strict=True)]
    rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 5] = np.cumsum(sizes) - sizes, model.rows, model.dims, -1
    rows[:, 6] = np.cumsum(model.dims) - model.dims
    return rows


def model_map(name: str, bags: int, stage: bool = True, kind: int = 0, sms: int = 132) -> Any:
    """A mapping for a batch of a model, with what each feature has to be expected."""
    model = workloads.model(name)
    batch = model.batch(bags, seed=2)
    rows = features_of(model)
    elements = int(rows[-1, 1] + rows[-1, 2] * rows[-1, 3])
    call = [(ADDRESS, elements, 0)], rows, 0, int(rows[:, 3].sum())
    schedules = np.zeros((model.features, 6), np.int32)
    schedules[::250, 0] = kind
    described = _C.fused_embedding_bag_describe(call, schedules, 0)
    mapping = _C.fused_embedding_bag_map(described, batch.offsets.astype(np.int64), sms, stage)
    return mapping, np.diff(batch.offsets[::bags]), np.array(model.rows)


@pytest.mark.parametrize("bags", (512, 2560))
def test_tables_are_staged_where_a_batch_reads_their_rows_often(bags: int) -> None:
    mapping, lookups, rows = model_map("D", bags)
    lists = lists_of(mapping)
    found = Counter((task.feature, bag) for own in lists for task in own for bag in range(*task[1:3]))
    often = np.flatnonzero(lookups >= rows)
    assert len(lists) == 132 and len(often) >= 350
    assert found == Counter((int(f), bag) for f in often for bag in range(bags))
    assert max(task.last_bag - task.first_bag for own in lists for task in own) <= 512
    tasks, lanes = parts(mapping)
    tiled = set(lanes[:, :, 0].reshape(-1).tolist())
    others = set(np.flatnonzero(lookups).tolist()) - set(often.tolist())
    assert others - tiled <= {task.feature for task in tasks} and not tiled & set(often.tolist())
    work = [sum(int(lookups[task.feature]) for task in own) for own in lists]
    assert max(work) < 1.5 * sum(work) / len(work)


@pytest.mark.parametrize(
    ("name", "bags", "stage", "sms"),
    (
        ("D", 512, False, 132),
        ("D", 64, True, 132),
        ("A", 512, True, 132),
        ("E", 512, True, 132),
        ("D", 512, True, 400),
    ),
)
def test_tables_are_not_staged_where_it_does_not_pay(name: str, bags: int, stage: bool, sms: int) -> None:
    """The GPU cannot; few lookups; wide rows have much of the work; fewer tables than SMs twice."""
    assert lists_of(model_map(name, bags, stage, sms=sms)[0]) == []


@pytest.mark.parametrize(
    "row", ([0, 64, 0, 0, 0], [0, 0, 0, 0, 4], [0, 32, 8, 0, 2], [0, 1, 0, 0, 0]), ids=str
)
def test_a_schedule_of_ones_own_is_not_staged_by_default(row: list[int]) -> None:
    """Threads and splits that no staged table has, for one that would be."""
    features = np.array([[0, 512 * 4 * f, 512, 4, SUM, -1, 4 * f] for f in range(300)], np.int64)
    call = [(ADDRESS, 512 * 4 * 300, 0)], features, 0, 4 * 300
    offsets = np.arange(300 * 512 + 1) * 10
    for own, found in ((row, []), ([0, 0, 0, 0, 0], list(range(300)))):
        described = _C.fused_embedding_bag_describe(call, np.array([[*own, 160]] * 300, np.int32), 0)
        lists = lists_of(_C.fused_embedding_bag_map(described, offsets))
        assert sorted(task.feature for tasks in lists for task in tasks) == found


def test_what_must_be_staged_has_its_kernel_before_what_may_be() -> None:
    """Features of so many kinds that there is no room for all; in either order."""
    kinds = [
        (buffer, dim, pooling, padding)
        for buffer, dims in ((0, (8, 4, 2, 1)), (1, (16, 8, 4, 2)), (2, (16, 8, 4, 2)))
        for dim in dims
        for pooling in (SUM, MEAN)
        for padding in (-1, 3)
    ]
    rows, column = [], 0
    for buffer, dim, pooling, padding in kinds:
        rows.append([buffer, 0, 64, dim, pooling, padding, column])
        column += dim
    buffers = [(ADDRESS * (one + 1), 64 * 16, one) for one in range(3)]
    for last in (0, len(kinds) - 1):
        schedules = np.zeros((len(kinds), 6), np.int32)
        schedules[last, 0] = 3
        call = buffers, np.array(rows, np.int64), 0, column
        described = _C.fused_embedding_bag_describe(call, schedules, 0)
        offsets = np.arange(len(kinds) * 10 + 1)
        lists = lists_of(_C.fused_embedding_bag_map(described, offsets))
        assert [task.feature for tasks in lists for task in tasks] == [last]


def test_a_schedule_stages_whatever_the_batch() -> None:
    lists = lists_of(model_map("D", 64, kind=3)[0])
    assert sorted(task.feature for own in lists for task in own) == [0, 250, 500, 750]
