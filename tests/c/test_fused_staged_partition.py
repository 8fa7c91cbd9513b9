"""The tables that the host stages, and their SMs; needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recfuse import _C
from recfuse.data import workloads
from recfuse.nn.mapping import rows_before_lists
from support.partition import ADDRESS, MEAN, SUM, Task, features_of, parts


def lists_of(rows: np.ndarray) -> list[list[Task]]:
    """The tasks of staged tables, by list."""
    behind = rows_before_lists(rows)
    if len(rows) == behind:
        return []
    depth, lists = (int(field) for field in rows[behind, :2])
    tasks = rows[behind + 1 :].reshape(depth, lists, 8)
    assert (tasks[-1, :, 0] == -1).all()
    return [
        [Task(*(int(field) for field in row)) for row in tasks[:, one] if row[0] >= 0] for one in range(lists)
    ]


def model_map(name: str, bags: int, stage: bool = True, kind: int = 0, sms: int = 132) -> Any:
    """Returns a mapping for a batch of a model, with the expected lookups of each feature."""
    model = workloads.model(name)
    batch = model.batch(bags, seed=2)
    rows = features_of(model)
    elements = int(rows[-1, 1] + rows[-1, 2] * rows[-1, 3])
    call = [(ADDRESS, elements, 0)], rows, 0, int(rows[:, 3].sum())
    schedules = np.zeros((model.features, 5), np.int32)
    schedules[::250, 0] = kind
    described = _C.fused_embedding_bag_describe(call, schedules, 0)
    mapping = _C.fused_embedding_bag_map(described, batch.offsets.astype(np.int64), sms, stage)
    return mapping, np.diff(batch.offsets[::bags]), np.array(model.rows)


@pytest.mark.parametrize("bags", (512, 2560))
def test_tables_are_staged_where_a_batch_reads_their_rows_often(bags: int) -> None:
    mapping, lookups, rows = model_map("D", bags)
    lists = lists_of(mapping)
    found = np.zeros((len(rows), bags), np.int64)  # tasks of each feature's bags
    for task in (task for own in lists for task in own):
        found[task.feature, range(*task[1:3])] += 1
    often = np.flatnonzero(lookups >= rows)
    assert len(lists) == 132 and len(often) >= 350
    assert (found[often] == 1).all() and found.sum() == len(often) * bags
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


@pytest.mark.parametrize("row", ([0, 64, 0, 0], [0, 0, 0, 4], [0, 32, 8, 2], [0, 1, 0, 0]), ids=str)
def test_explicit_schedules_are_not_staged_by_default(row: list[int]) -> None:
    """Threads and splits that no staged table has, for a table that would be staged."""
    features = np.array([[0, 512 * 4 * f, 512, 4, SUM, -1, 4 * f] for f in range(300)], np.int64)
    call = [(ADDRESS, 512 * 4 * 300, 0)], features, 0, 4 * 300
    offsets = np.arange(300 * 512 + 1) * 10
    for own, found in ((row, []), ([0, 0, 0, 0], list(range(300)))):
        described = _C.fused_embedding_bag_describe(call, np.array([[*own, 160]] * 300, np.int32), 0)
        lists = lists_of(_C.fused_embedding_bag_map(described, offsets))
        assert sorted(task.feature for tasks in lists for task in tasks) == found


def test_required_staging_comes_before_optional_staging() -> None:
    """Features of so many kinds that not all fit; in either order."""
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
        schedules = np.zeros((len(kinds), 5), np.int32)
        schedules[last, 0] = 3
        call = buffers, np.array(rows, np.int64), 0, column
        described = _C.fused_embedding_bag_describe(call, schedules, 0)
        offsets = np.arange(len(kinds) * 10 + 1)
        lists = lists_of(_C.fused_embedding_bag_map(described, offsets))
        assert [task.feature for tasks in lists for task in tasks] == [last]


def test_a_staging_schedule_stages_every_batch() -> None:
    lists = lists_of(model_map("D", 64, kind=3)[0])
    assert sorted(task.feature for own in lists for task in own) == [0, 250, 500, 750]
