"""The small path of the backward pass, without a GPU: lists.cu and small_rows.cu against a model.

They run on the host as blocks of threads, in random order.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.backward.lookups import spoil
from support.backward.simulated import CPP_COMPILER, simulated

SUM, MEAN = range(2)
GRADIENT, SGD, ADAGRAD, ROWWISE, ADAM = range(5)  # RF_EPILOGUE
FLOAT32, FLOAT16, BFLOAT16 = range(3)
MOST_LIST_ROWS, LEAST_SHARED, NUMBERS = 8192, 48 << 10, 8
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

LIST = np.dtype(
    [("start", "i8"), ("factors", "i8")]
    + [(name, "i4") for name in ("number", "rows", "padding", "first", "last", "unused")]
)

pytestmark = [pytest.mark.long, pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")]


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 2),
        ("first_row", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("dim", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class ListsArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "offsets", "tasks", "list")),
        *((name, ctypes.c_void_p) for name in ("starts", "factors")),
        ("lookups", ctypes.c_int64),
        ("bags", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
    )


class RowsArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad", "tasks", "list", "starts")),
        ("factors", ctypes.c_void_p),
        ("output_dim", ctypes.c_int64),
        ("bags", ctypes.c_int32),
        ("by_frequency", ctypes.c_int32),
        ("numbers", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("matrices", Matrix * 16),
    )


@dataclass(frozen=True)
class Problem:
    """Features of a call; all are small."""

    rows: tuple[int, ...] = (5, 70, 300)
    dims: tuple[int, ...] = (4, 8, 32)
    bags: int = 40
    longest: int = 9
    wide: bool = False  # 64 bits
    bad: str = ""  # kind of invalid lookups
    hot: float = 0.0  # share of the lookups of row 1
    few: int = 10**9  # rows that are looked up
    run: int = 0  # leading lookups, which are the only lookups of row 0
    shared: int = LEAST_SHARED
    seed: int = 0

    def lookups(self) -> tuple[NDArray[Any], NDArray[Any]]:
        draw = np.random.default_rng(self.seed)
        integer = np.int64 if self.wide else np.int32
        lengths = draw.integers(0, self.longest + 1, (len(self.rows), self.bags))
        lengths[draw.random(lengths.shape) < 0.2] = 0
        offsets = np.concatenate([[0], lengths.reshape(-1).cumsum()]).astype(integer)
        parts = [
            draw.integers(0, min(rows, self.few), own)
            for rows, own in zip(self.rows, lengths.sum(1), strict=True)
        ]
        indices = np.concatenate(parts).astype(integer)
        indices[draw.random(indices.size) < self.hot] = 1
        if self.run > 0:
            indices[indices == 0] = 1
            indices[: self.run] = 0
        spoil(draw, self.bad, indices, offsets)
        return indices, offsets


def features_of(problem: Problem, pooling: int, padded: bool) -> NDArray[Any]:
    features = np.zeros(len(problem.rows), FEATURE)
    start = column = row = 0
    for number, (rows, dim) in enumerate(zip(problem.rows, problem.dims, strict=True)):
        factors = number * problem.bags if pooling == MEAN else -1
        padding = rows // 2 if padded and number % 2 == 0 else -1
        features[number] = (row, start, factors, number, rows, padding, column, number, dim)
        start, column = start + rows + 1, column + dim
    return features


def tasks_of(features: NDArray[Any], most: int, columns: int) -> NDArray[Any]:
    tasks = [
        (
            *(feature[name] for name in ("row", "start", "factors")),
            number,
            first,
            min(first + most, feature["rows"]),
            column,
            min(columns, feature["dim"] - column),
            feature["column"],
            feature["matrix"],
            0,
        )
        for number, feature in enumerate(features)
        for first in range(0, feature["rows"], most)
        for column in range(0, feature["dim"], columns)
    ]
    return np.array(tasks, TASK)


def aligned(shape: Any, dtype: Any) -> NDArray[Any]:
    """Zeros at a multiple of 16 bytes."""
    count = int(np.prod(shape))
    memory = np.zeros(count * np.dtype(dtype).itemsize + 16, np.uint8)
    lead = -memory.ctypes.data % 16
    return memory[lead : lead + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


@dataclass
class Listed:
    lists: list[list[list[int]]]  # by feature and row
    factors: NDArray[np.float32]
    memory: dict[str, NDArray[Any]]


def lists_of(features: NDArray[Any], tasks: NDArray[Any]) -> NDArray[Any]:
    """Returns the output of lists.cu for tasks with all columns."""
    lists = np.zeros(tasks.size, LIST)
    for name in ("start", "factors", "first", "last"):
        lists[name] = tasks[name]
    for name in ("number", "rows", "padding"):
        lists[name] = features[name][tasks["feature"]]
    return lists


def run_lists(problem: Problem, features: NDArray[Any], list_rows: int, seed: int) -> Listed:
    """Lookups are written by the kernel before, which ends when it is waited for."""
    indices, offsets = problem.lookups()
    tasks = tasks_of(features, list_rows, 10**9)
    short = lists_of(features, tasks)
    memory = {
        "list": aligned(indices.size + 8, np.uint16),
        "starts": np.full(int((features["rows"] + 1).sum()) + 1, 77, np.uint32),
        "factors": np.full(features.size * problem.bags + 1, 5, np.float32),
    }
    args = ListsArgs(lookups=indices.size, bags=problem.bags, shared_bytes=problem.shared)
    late = {"indices": np.zeros_like(indices), "offsets": np.zeros_like(offsets)}
    given = {**late, "tasks": short, **memory}
    for name, values in given.items():
        setattr(args, name, values.ctypes.data)
    integer = "rf_i64" if problem.wide else "int"
    lib = simulated("backward_small.cu", RF_INDEX=integer, RF_OFFSET=integer)
    lookups = [ctypes.c_void_p(indices.ctypes.data), ctypes.c_void_p(offsets.ctypes.data)]
    size = ctypes.c_size_t(offsets.size)
    assert lib.small_lists(ctypes.byref(args), len(short), ctypes.c_uint64(seed), *lookups, size) == 0
    lists = []
    for feature in features:
        starts = memory["starts"][feature["start"] : feature["start"] + feature["rows"] + 1].astype(np.int64)
        found = memory["list"][starts[0] : starts[-1]].tolist()
        lists.append([found[a - starts[0] : b - starts[0]] for a, b in itertools.pairwise(starts)])
    assert memory["starts"][-1] == 77 and memory["factors"][-1] == 5
    return Listed(lists, memory["factors"], memory)


def expected_lists(problem: Problem, features: NDArray[Any]) -> tuple[list[list[list[int]]], NDArray[Any]]:
    indices, offsets = problem.lookups()
    lists = [[[] for _ in range(feature["rows"])] for feature in features]
    factors = np.full(features.size * problem.bags + 1, 5, np.float32)
    for number, feature in enumerate(features):
        for bag in range(problem.bags):
            first, end = offsets[number * problem.bags + bag : number * problem.bags + bag + 2].tolist()
            count = 0
            for row in indices[first:end].tolist() if 0 <= first <= end <= indices.size else ():
                if 0 <= row < feature["rows"] and row != feature["padding"]:
                    lists[number][row].append(bag)
                    count += 1
            if feature["factors"] >= 0:
                factors[feature["factors"] + bag] = 1 / max(count, 1)
    return lists, factors


PROBLEMS = {
    "few": Problem(),
    "wide integers, bad indices": Problem(wide=True, bad="index", seed=1),
    "one lookup a bag": Problem(bags=600, longest=1, rows=(3, 140, 1000), seed=2),
    "long bags": Problem(bags=5, longest=900, rows=(3, 200, 1500), seed=3),
    "one row": Problem(bags=70, longest=60, hot=1.0, rows=(2, 200, 4000), seed=4),
    "a hot row": Problem(bags=300, longest=40, hot=0.3, rows=(9, 150, 5000), seed=5),
    "many bags": Problem(bags=5000, longest=2, rows=(4, 1200), dims=(8, 4), seed=6),
    "one bag": Problem(bags=1, longest=4000, rows=(4, 1200), dims=(8, 4), seed=7),
    "empty": Problem(bags=3, longest=0, seed=8),
    "counters of 32 bits": Problem(bags=200, longest=900, rows=(300,), dims=(4,), hot=0.6, seed=9),
    "many hot rows": Problem(bags=120, longest=50, rows=(5000, 2500), dims=(4, 8), few=30, seed=12),
    "some hot rows": Problem(bags=120, longest=50, rows=(5000, 2500), dims=(4, 8), few=6, seed=13),
    "rows of 1 to 60 lookups": Problem(
        bags=700, longest=60, rows=(4000, 1500, 600), dims=(4, 4, 4), wide=True, seed=14
    ),
    "no room for bits": Problem(bags=4000, longest=38, rows=(6400,), dims=(4,), shared=40 << 10, seed=15),
    "a row with more lookups than a list has room for": Problem(
        bags=500, longest=140, rows=(400,), dims=(4,), hot=0.95, seed=0
    ),
    "a list that goes to memory in part": Problem(
        bags=200, longest=215, rows=(1500,), dims=(4,), wide=True, bad="index", seed=16
    ),
    "rows of 1,000 lookups": Problem(bags=1, longest=60000, rows=(999,), dims=(4,), hot=0.02, seed=17),
    "a row of 256 lookups side by side": Problem(
        bags=16, longest=800, rows=(999,), dims=(4,), run=256, seed=19
    ),
    "short bags and a long one": Problem(bags=900, longest=9, rows=(3000, 150), dims=(4, 4), seed=18),
    "a list in parts": Problem(bags=60, longest=600, rows=(6000,), dims=(4,), hot=0.1, seed=10),
}


@pytest.mark.parametrize("pooling", (SUM, MEAN))
@pytest.mark.parametrize("name", PROBLEMS)
def test_lists(name: str, pooling: int) -> None:
    problem = PROBLEMS[name]
    features = features_of(problem, pooling, padded=pooling == MEAN)
    for turn, list_rows in enumerate((MOST_LIST_ROWS, 137)):
        found = run_lists(problem, features, list_rows, 11 * turn + 5)
        want, factors = expected_lists(problem, features)
        assert found.lists == want
        np.testing.assert_allclose(found.factors, factors, rtol=1e-6)
        if sum(problem.rows) > 5000:
            break


@pytest.mark.parametrize("seed", range(6))
def test_bad_offsets_do_no_harm(seed: int) -> None:
    """Every listed lookup is in its bag; features with valid offsets are complete."""
    problem = replace(PROBLEMS["few"], bad="offset, index", wide=seed % 2 == 1, seed=20 + seed, bags=90)
    features = features_of(problem, MEAN, padded=True)
    want, _ = expected_lists(problem, features)
    found = run_lists(problem, features, MOST_LIST_ROWS, seed)
    offsets = problem.lookups()[1].tolist()
    if all(a <= b for a, b in itertools.pairwise(offsets)):
        assert found.lists == want
    assert np.isfinite(found.factors).all()
    begins = [int(found.memory["starts"][feature["start"]]) for feature in features]
    overlap = sorted(begins) != begins
    for own, good in zip(found.lists, want, strict=True):
        for row, bags in enumerate(own):
            assert all(0 <= bag < problem.bags for bag in bags)
            assert overlap or len(bags) <= len(good[row])


def rounded(values: NDArray[Any], dtype: int) -> NDArray[Any]:
    """Returns values in the memory of a dtype."""
    if dtype == FLOAT32:
        return values.astype(np.float32)
    if dtype == FLOAT16:
        return values.astype(np.float16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(values: NDArray[Any], dtype: int) -> NDArray[Any]:
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def updated(
    epilogue: int,
    weight: NDArray[Any],
    states: list[NDArray[Any]],
    total: NDArray[Any],
    numbers: NDArray[Any],
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """One row, by the header's formulas."""
    lr, decay, eps, beta1, beta2, step, scale, _ = numbers.tolist()
    if epilogue == GRADIENT:
        return total, []
    g = total * scale + decay * weight
    if epilogue == SGD:
        return weight - lr * g, []
    if epilogue == ADAGRAD:
        state = states[0] + g * g
        return weight - lr * g / (np.sqrt(state) + eps), [state]
    if epilogue == ROWWISE:
        state = states[0] + (g * g).mean()
        return weight - lr * g / (np.sqrt(state) + eps), [state]
    m, v = states[0] + (1 - beta1) * (g - states[0]), states[1] + (1 - beta2) * (g * g - states[1])
    size = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
    return weight - size * m / (np.sqrt(v) + eps), [m, v]


def check_rows(
    problem: Problem, pooling: int, epilogue: int, grad_dtype: int, dtype: int, staged: bool, **options: Any
) -> None:
    draw = np.random.default_rng(problem.seed + 100)
    features = features_of(problem, pooling, padded=True)
    listed = run_lists(problem, features, MOST_LIST_ROWS, 3)
    want_lists, _ = expected_lists(problem, features)
    integer = "rf_i64" if problem.wide else "int"
    lib_options = {
        "RF_INDEX": integer,
        "RF_OFFSET": integer,
        "RF_EPILOGUE": epilogue,
        "RF_GRAD_DTYPE": grad_dtype,
    }
    lib_options["RF_WEIGHT_DTYPE"] = dtype
    output_dim = sum(problem.dims)
    grad = rounded(draw.standard_normal((problem.bags, output_dim)), grad_dtype)
    memory = aligned(grad.shape, grad.dtype)
    memory[...] = grad
    numbers = np.array([0.1, 0.01, 1e-3, 0.9, 0.99, 3, 2.0, options.get("skip", 0)], np.float32)
    columns = options.get("columns", 32 if staged else 128)
    tasks = tasks_of(features, options.get("range", 130), columns)
    args = RowsArgs(output_dim=output_dim, bags=problem.bags, by_frequency=options.get("by_frequency", 0))
    given = {"grad": memory, "tasks": tasks, "numbers": numbers, **listed.memory}
    for name, values in given.items():
        setattr(args, name, values.ctypes.data)
    weights, states = [], []
    n_states = {ADAGRAD: 1, ROWWISE: 1, ADAM: 2}.get(epilogue, 0)
    for number, (rows, dim) in enumerate(zip(problem.rows, problem.dims, strict=True)):
        values = rounded(draw.standard_normal((rows, dim)), dtype)
        weight = aligned(values.shape, values.dtype)
        weight[...] = 0 if epilogue == GRADIENT else values
        own = [aligned((rows,) if epilogue == ROWWISE else (rows, dim), np.float32) for _ in range(n_states)]
        for state in own:
            state[...] = draw.random(state.shape)
        weights.append(weight)
        states.append(own)
        pointers = [state.ctypes.data for state in own] + [None] * (2 - n_states)
        args.matrices[number] = Matrix(weight.ctypes.data, tuple(pointers), 0, rows, dim)
    before = [floats(weight, dtype) for weight in weights]
    before_states = [[state.astype(np.float64) for state in own] for own in states]
    lib = simulated("backward_small.cu", RF_STAGED=int(staged), **lib_options)
    lib.small_rows(ctypes.byref(args), len(tasks), ctypes.c_uint64(problem.seed))

    wide = floats(grad, grad_dtype)
    for number, feature in enumerate(features):
        slice_of = wide[:, feature["column"] : feature["column"] + feature["dim"]]
        for row, bags in enumerate(want_lists[number]):
            old, old_states = before[number][row], [state[row] for state in before_states[number]]
            if bags and not options.get("skip"):
                factors = listed.factors[feature["factors"] + np.array(bags)] if pooling == MEAN else 1.0
                total = (slice_of[bags] * np.reshape(factors, (-1, 1))).sum(0)
                if options.get("by_frequency"):
                    total = total / len(bags)
                old, old_states = updated(epilogue, old, old_states, total, numbers.astype(np.float64))
            loose = {FLOAT32: 2e-5, FLOAT16: 2e-3, BFLOAT16: 1e-2}[dtype] * (1 + len(bags) ** 0.5)
            np.testing.assert_allclose(floats(weights[number][row], dtype), old, rtol=loose, atol=loose)
            for state, wanted in zip(states[number], old_states, strict=True):
                np.testing.assert_allclose(state[row], wanted, rtol=1e-4, atol=1e-4)


HOT = Problem(bags=50, longest=30, hot=0.5, rows=(3, 7, 40), dims=(4, 16, 64), seed=30)


@pytest.mark.parametrize("staged", (True, False))
@pytest.mark.parametrize("epilogue", (GRADIENT, SGD, ADAGRAD, ROWWISE, ADAM))
def test_rows(epilogue: int, staged: bool) -> None:
    wide = epilogue != ROWWISE or not staged
    few = replace(PROBLEMS["few"], dims=(4, 20, 48 if wide else 32), rows=(5, 70, 150))
    check_rows(few, SUM, epilogue, FLOAT32, FLOAT32, staged)
    check_rows(replace(HOT, dims=HOT.dims if wide else (4, 16, 28)), MEAN, epilogue, FLOAT32, FLOAT32, staged)


@pytest.mark.parametrize(("dtype", "epilogue"), ((FLOAT16, GRADIENT), (FLOAT16, ADAM), (BFLOAT16, SGD)))
def test_rows_of_halves(dtype: int, epilogue: int) -> None:
    check_rows(PROBLEMS["few"], MEAN, epilogue, dtype, dtype, staged=epilogue != SGD)
    check_rows(HOT, SUM, epilogue, FLOAT32, dtype, staged=True, columns=16)


@pytest.mark.parametrize("staged", (True, False))
def test_long_rows(staged: bool) -> None:
    problem = Problem(bags=120, longest=40, hot=0.9, rows=(3, 9, 40), dims=(4, 8, 40), seed=31)
    check_rows(problem, MEAN, GRADIENT, FLOAT32, FLOAT32, staged, by_frequency=1)
    check_rows(replace(problem, hot=0.0, seed=32), SUM, SGD, FLOAT32, FLOAT32, staged)


def test_a_step_that_is_skipped() -> None:
    check_rows(PROBLEMS["few"], SUM, SGD, FLOAT32, FLOAT32, True, skip=1)
