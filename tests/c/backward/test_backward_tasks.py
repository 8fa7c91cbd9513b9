"""The distribution of the rows of small tables over blocks, without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recfuse.data import workloads
from support.c_program import COMPILER, FLAGS, ROOT, make_once

SGD, ROWWISE, ADAM = 1, 3, 4  # RF_EPILOGUE
FLOAT32 = 0  # rf_dtype
FEATURE = np.dtype(
    [("row", "i8"), ("start", "i8"), ("factors", "i8"), ("number", "i4"), ("rows", "i4"), ("padding", "i4"),
     ("column", "i4"), ("matrix", "i4"), ("dim", "i4")]
)  # fmt: skip
TASK = np.dtype(
    [(name, "i8") for name in ("row", "start", "factors")]
    + [
        (name, "i4")
        for name in ("feature", "first", "last", "column", "columns", "output", "matrix", "unused")
    ]
)


class Sizes(ctypes.Structure):
    _fields_ = (
        ("bags", ctypes.c_int64),
        ("sms", ctypes.c_int64),
        ("lookups", ctypes.c_double),
        ("staged_bytes", ctypes.c_int64),
        ("epilogue", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


def host_library() -> ctypes.CDLL:
    """The host's part that shares out tasks."""

    def build(path: Path) -> None:
        folder = ROOT / "csrc"
        sources = [folder / "families/fused_backward/small/small_tasks.c", folder / "core/status.c"]
        command = [COMPILER, *FLAGS, "-O1", "-fPIC", "-shared", *sources, "-o", path]
        subprocess.run([str(part) for part in command], check=True)

    return ctypes.CDLL(str(make_once(["tasks of small tables"], ".so", build)))


def shared_out(features: NDArray[Any], bags: int, epilogue: int, lookups: float) -> tuple[NDArray[Any], int]:
    """Tasks as a call has them on a GPU of 132 SMs; how many are staged."""
    core = host_library()
    sizes = Sizes(bags, 132, lookups, 108 << 10, epilogue, FLOAT32)
    tasks, staged, gathered = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
    given = ctypes.byref(sizes), features.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(features.size)
    made = ctypes.byref(tasks), ctypes.byref(staged), ctypes.byref(gathered)
    assert core.rf__backward_small_tasks(*given, *made) == 0
    count = staged.value + gathered.value
    found = np.frombuffer(ctypes.string_at(tasks, count * TASK.itemsize), TASK)
    ctypes.CDLL(None).free(tasks)
    return found, staged.value


@pytest.mark.parametrize("epilogue", (SGD, ROWWISE, ADAM))
@pytest.mark.parametrize(("model", "bags"), (("A", 512), ("D", 512), ("A", 1000), ("B", 20_000), ("C", 1)))
def test_tasks(model: str, bags: int, epilogue: int) -> None:
    """Every column of every row is in one task, and tasks are about equally long."""
    given = workloads.model(model)
    rows, dims = np.asarray(given.rows), np.asarray(given.dims)
    features = np.zeros(rows.size, FEATURE)
    features["rows"], features["dim"], features["factors"] = rows, dims, -1
    for step, name in enumerate(("row", "start", "column", "matrix"), start=1):
        features[name] = np.arange(rows.size) * step
    tasks, staged = shared_out(features, bags, epilogue, lookups=20 * bags)
    for name in ("row", "start", "factors", "matrix"):
        assert (tasks[name] == features[name][tasks["feature"]]).all()
    assert (tasks["output"] == features["column"][tasks["feature"]]).all()
    for number in range(rows.size):
        own = tasks[tasks["feature"] == number]
        seen = np.zeros((rows[number], dims[number] // 4), np.int32)
        for task in own:
            first, columns = task["column"] // 4, task["columns"] // 4
            assert task["columns"] % 4 == 0 and columns > 0
            seen[task["first"] : task["last"], first : first + columns] += 1
        assert (seen == 1).all(), (number, own)
    width = tasks["columns"]
    assert (width[:staged] <= 32).all() and (width * bags * 4 <= 108 << 10)[:staged].all()
    assert (width[staged:] <= 128).all()
    if epilogue == ROWWISE:
        assert (width == dims[tasks["feature"]]).all()
    size = (tasks["last"] - tasks["first"]) * width
    if (model, bags, epilogue) == ("A", 512, SGD):
        assert staged == tasks.size and 1500 < tasks.size < 8000, tasks.size
        assert size.max() < 24 * size.mean() and size[: tasks.size // 4].mean() > size.mean()
