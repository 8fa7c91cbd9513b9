"""Mappings as the host writes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK, TILE, TURNS, TOGETHER = 64, 32, 14, 8
SUM, MEAN, MAX = 0, 1, 2
ADDRESS = 1 << 20  # of a buffer that is never read


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


def parts(rows: np.ndarray) -> tuple[list[Task], np.ndarray]:
    """Tasks, and lanes [tiles, 32, 2]."""
    tasks, tiles = int(rows[0, 1]), int(rows[0, 2])
    assert len(rows) >= 1 + tasks + tiles * 8
    lanes = rows[1 + tasks : 1 + tasks + tiles * 8].reshape(tiles, TILE, 2)
    return [Task(*(int(field) for field in row)) for row in rows[1 : 1 + tasks]], lanes


def features_of(model: Any) -> np.ndarray:
    """Returns a model's features, int64 [features, 7]: sums without padding, consecutive tables in one
    buffer."""
    rows = np.zeros((model.features, 7), np.int64)
    sizes = [-(-count * dim // 64) * 64 for count, dim in zip(model.rows, model.dims, strict=True)]
    rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 5] = np.cumsum(sizes) - sizes, model.rows, model.dims, -1
    rows[:, 6] = np.cumsum(model.dims) - model.dims
    return rows
