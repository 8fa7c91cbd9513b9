"""Embedding columns by the GPU's code, simulated on the host, against the CPU's.

The host's code runs with a driver whose kernels are blocks of threads on the host, in random order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import recfuse
from support.backward.simulated import CPP_COMPILER
from support.c_program import ROOT
from support.raw_columns.problem import BFLOAT16, FLOAT16, FLOAT32, Call, Lookups, Problem
from support.raw_columns.random import Maker
from support.simulated_gpu import build_simulator

pytestmark = [pytest.mark.long, pytest.mark.skipif(CPP_COMPILER is None, reason="no C++ compiler")]


class Stream(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int32), ("stream", ctypes.c_void_p))


class Record(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("ready", "argument", "operator")),
        ("feature", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("position", "bag", "value", "limit", "lookups")),
        ("raised", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


@pytest.fixture(scope="module")
def gpu() -> ctypes.CDLL:
    """The host's code of the columns and the driver of tests/c/warps/gpu.c."""
    family = ROOT / "csrc/families/embedding_columns"
    sources = [*family.glob("*.c"), *family.glob("program/*.c"), ROOT / "csrc/core/validate.c"]
    return build_simulator("the columns' host code on the host", sources)


@pytest.fixture(scope="module")
def cpu() -> ctypes.CDLL:
    loaded = ctypes.CDLL(recfuse.library_path())
    loaded.rf_last_error.restype = ctypes.c_char_p
    return loaded


def error_of(gpu: ctypes.CDLL) -> Record | None:
    record = Record()
    return record if gpu.gpu_error(ctypes.byref(record)) else None


def on_gpu(gpu: ctypes.CDLL, problem: Problem, **how: int) -> np.ndarray:
    call = Call(problem, **how)
    params, stream = call.params(), Stream()
    device = ctypes.c_void_p(call.on_device.ctypes.data)
    status = gpu.rf_embedding_columns_cuda(ctypes.byref(params), device, ctypes.byref(stream))
    assert status == 0, gpu.rf_last_error().decode()
    return call.result()


def on_cpu(cpu: ctypes.CDLL, problem: Problem) -> np.ndarray:
    call = Call(problem)
    params = call.params()
    status = cpu.rf_embedding_columns_cpu(ctypes.byref(params), None)
    assert status == 0, cpu.rf_last_error().decode()
    return call.result()


def compare(found: np.ndarray, wanted: np.ndarray, problem: Problem) -> None:
    tolerance = {FLOAT32: 1e-5, FLOAT16: 2e-3, BFLOAT16: 2e-2}[problem.output_dtype]
    same = np.isclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if same.all():
        return
    sample, place = np.argwhere(~same)[0]
    column = next(c for c in reversed(problem.columns) if c["output_column"] <= place)
    source = problem.sources[column["left"]]
    steps = problem.steps[source[3] : source[3] + source[4]]
    raise AssertionError(
        f"{(~same).sum()} of {same.size} differ; sample {sample}, place {place}: {found[sample, place]} "
        f"for {wanted[sample, place]}; {column}, {source}, {steps}"
    )


@pytest.mark.parametrize("seed", range(12))
def test_columns_of_all_kinds(gpu: Any, cpu: Any, seed: int) -> None:
    problem = Maker(seed, batch=(1, 7, 33, 100)[seed % 4]).make(40)
    compare(on_gpu(gpu, problem, apart=seed % 3, shift=seed % 5), on_cpu(cpu, problem), problem)
    assert error_of(gpu) is None


TYPES = {
    "float16": ((FLOAT16,), FLOAT16),
    "bfloat16": ((BFLOAT16,), BFLOAT16),
    "mixed": ((FLOAT32, FLOAT16, BFLOAT16), FLOAT32),
    "float16 of float32": ((FLOAT32,), FLOAT16),
}


@pytest.mark.parametrize("name", TYPES)
def test_types(gpu: Any, cpu: Any, name: str) -> None:
    for seed in range(3):
        problem = Maker(seed, batch=20).make(25, *TYPES[name])
        compare(on_gpu(gpu, problem, apart=seed, shift=2 * seed), on_cpu(cpu, problem), problem)


@pytest.mark.parametrize("seed", range(4))
def test_long_bags(gpu: Any, cpu: Any, seed: int) -> None:
    """Thousands of lookups and empty bags together; also pairs."""
    problem = Maker(seed, batch=12, longest=150, long=0.2, dims=(1, 4, 8, 70)).make(14)
    compare(on_gpu(gpu, problem), on_cpu(cpu, problem), problem)


def test_many_samples_of_a_block(gpu: Any, cpu: Any) -> None:
    for batch in (64, 500):
        problem = Maker(batch, batch=batch, longest=3, dims=(1, 2, 4, 8)).make(12)
        compare(on_gpu(gpu, problem), on_cpu(cpu, problem), problem)


def test_sums_are_the_same_each_time(gpu: Any) -> None:
    problem = Maker(3, batch=9, longest=100, long=0.3, whole=False).make(20)
    first = on_gpu(gpu, problem)
    for _ in range(3):
        np.testing.assert_array_equal(on_gpu(gpu, problem), first)


@pytest.mark.parametrize("seed", range(6))
def test_bad_indices_are_dropped_and_the_first_is_reported(gpu: Any, cpu: Any, seed: int) -> None:
    problem = Maker(seed, batch=30, bad=True).make(20)
    found = on_gpu(gpu, problem)
    record = error_of(gpu)
    errors = [number for number, column in enumerate(problem.columns) if column["invalid"] == -2]
    for column in problem.columns:
        column["invalid"] = max(column["invalid"], -1)
    compare(found, on_cpu(cpu, problem), problem)
    if record is None:
        return
    column = problem.columns[record.feature]
    assert record.feature in errors and record.limit == column["rows"]
    assert not 0 <= record.value < column["rows"] and 0 <= record.bag < problem.batch


def test_indices_that_are_not_checked_are_dropped_without_a_word(gpu: Any, cpu: Any) -> None:
    problem = Maker(1, batch=30, bad=True).make(20)
    problem.check = False
    compare(on_gpu(gpu, problem), on_cpu(cpu, problem), problem)
    assert error_of(gpu) is None


BAD_OFFSETS = {"negative": -3, "beyond": 10**6, "decreasing": 1, "first": None}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bags_with_bad_offsets_are_empty(gpu: Any, cpu: Any, name: str) -> None:
    problem = Problem(6)
    lengths = np.array([3, 2, 4, 1, 0, 2])
    offsets = np.concatenate([[0], lengths.cumsum()])
    problem.inputs.append((np.arange(12) % 5, offsets.copy(), None))
    problem.buffers.append((np.arange(40, dtype=np.float32), FLOAT32))
    problem.add(left=problem.source(0, 0, 0, []), rows=5, dim=8, n_dims=8, fill=0x40E00000)
    wanted = on_cpu(cpu, problem)
    at = 0 if name == "first" else 3
    problem.inputs[0][1][at] = 1 if name == "first" else BAD_OFFSETS[name]
    found = on_gpu(gpu, problem)
    record = error_of(gpu)
    assert record is not None and record.position == at and record.value == problem.inputs[0][1][at]
    touched = [0] if name == "first" else [2, 3]
    empty = [0] if name == "first" else [3] if name == "negative" else [2]
    keep = [sample for sample in range(6) if sample not in touched]
    np.testing.assert_array_equal(found[keep], wanted[keep])
    assert all((found[sample] == 7).all() or name == "negative" for sample in empty)


def test_a_first_nan_stays_the_maximum(gpu: Any, cpu: Any) -> None:
    """Also in a long bag, whose rows many threads share."""
    for length in (5, 700):
        problem = Problem(3)
        values = np.concatenate([np.zeros(length, int), np.full(length, 1), np.arange(length) % 4])
        values[length] = 0
        values[0] = 9  # dropped: the first row is the next one
        problem.inputs.append((values, np.arange(4) * length, None))
        table = np.array([[1, np.nan], [2, 3], [np.nan, 4], [-1, 0]], np.float32)
        problem.buffers.append((table.reshape(-1), FLOAT32))
        problem.add(left=problem.source(0, 0, 0, []), rows=4, dim=2, n_dims=2, pooling=2, invalid=-1)
        found = on_gpu(gpu, problem)
        np.testing.assert_array_equal(found, on_cpu(cpu, problem))
        np.testing.assert_array_equal(found, [[1, np.nan], [2, np.nan], [2, np.nan]])


def test_a_table_of_many_rows_and_nothing_at_all(gpu: Any, cpu: Any) -> None:
    for batch, columns in ((0, 3), (4, 0)):
        problem = Problem(batch)
        problem.inputs.append(np.zeros((batch, 1), np.int64))
        problem.buffers.append((np.ones(8, np.float32), FLOAT32))
        for _ in range(columns):
            problem.add(left=problem.source(0, 0, 1, []), rows=2, dim=4, n_dims=4)
        assert on_gpu(gpu, problem).shape == (batch, 4 * columns)


def test_many_tensors(gpu: Any, cpu: Any) -> None:
    """Kernels with more parameters: dense inputs first, jagged inputs, a dense input last."""
    for count in (30, 200, 1000):
        problem = Problem(11)
        draw = np.random.default_rng(count)
        for number in range(count):
            jagged = number > count * 9 // 10 and number < count - 1
            values = draw.integers(0, 6, 11 if jagged else (11, 1))
            problem.inputs.append((values, np.arange(12), None) if jagged else values)
            problem.buffers.append((draw.standard_normal(24).astype(np.float32), FLOAT32))
            left = problem.source(number, 0, 1 - jagged, [])
            problem.add(left=left, rows=6, dim=4, n_dims=4, buffer=number)
        np.testing.assert_array_equal(on_gpu(gpu, problem), on_cpu(cpu, problem))


def lookups_of(library: Any, call: Call, on_device: bool, capacity: int) -> tuple[np.ndarray, ...]:
    """Offsets, and indices and factors as far as these go."""
    problem = call.problem
    tables = sum(column["buffer"] >= 0 for column in problem.columns)
    offsets = call.keep(np.full(tables * problem.batch + 1, -5))
    indices, factors = call.keep(np.full(capacity, -5)), call.keep(np.full(capacity, -5, np.float32))
    given = Lookups(
        *(array.ctypes.data if array.size else None for array in (offsets, indices, factors)), capacity
    )
    params = call.params()
    if on_device:
        device, stream = ctypes.c_void_p(call.on_device.ctypes.data), Stream()
        more = (device, ctypes.byref(given), None, ctypes.byref(stream))
        status = library.rf_embedding_columns_lookups_cuda(ctypes.byref(params), *more)
    else:
        status = library.rf_embedding_columns_lookups_cpu(ctypes.byref(params), ctypes.byref(given), None)
    assert status == 0, library.rf_last_error().decode()
    return offsets, indices[: offsets[-1]], factors[: offsets[-1]]


@pytest.mark.parametrize("seed", range(8))
def test_lookups(gpu: Any, cpu: Any, seed: int) -> None:
    problem = Maker(seed, batch=(1, 30, 90)[seed % 3], longest=40, dims=(1, 4, 200)).make(30)
    counted = lookups_of(cpu, Call(problem), False, 0)[0]
    np.testing.assert_array_equal(lookups_of(gpu, Call(problem), True, 0)[0], counted)
    capacity = int(counted[-1])
    found = lookups_of(gpu, Call(problem), True, capacity)
    wanted = lookups_of(cpu, Call(problem), False, capacity)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5)
    assert (
        lookups_of(gpu, Call(problem), True, capacity // 2)[0][-1] == capacity
    )  # no more than fits is written
