"""Embedding columns in the form of C: structs of a call, and random ones."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recfuse import _C

FLOAT32, FLOAT16, BFLOAT16 = range(3)
SUM, MEAN, MAX, SQRTN = range(4)
AFFINE, LOG1P, CLIP, CAST, CLIP_INTEGER, MODULO, BUCKETIZE, BUCKETIZE_RIGHT, HASH, VOCABULARY = range(10)
ERROR, DROPPED = -2, -1
COLUMN = (
    "left", "right", "cross_buckets", "cross_seed", "buffer", "weight_offset", "rows", "dim", "pooling",
    "weighted", "invalid", "empty", "fill", "first_dim", "n_dims", "scale", "output_column",
)  # fmt: skip
TYPES = (np.dtype("f4"), np.dtype("i4"), np.dtype("i8"))
BYTES = (4, 2, 2)
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None)


class Buffer(ctypes.Structure):
    """rf_buffer."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("parameters_dtype", ctypes.c_int32),
        ("parameters", ctypes.c_void_p),
        ("pitch", ctypes.c_int64),
        ("parameters_pitch", ctypes.c_int64),
    )


class Input(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        *(
            (name, ctypes.c_int64)
            for name in ("width", "sample_stride", "value_stride", "features", "lookups")
        ),
        ("offsets", ctypes.c_void_p),
        ("offset_type", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
    )


class Params(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.c_void_p),
        ("program_words", ctypes.c_int64),
        ("buffers", ctypes.POINTER(Buffer)),
        ("n_buffers", ctypes.c_int64),
        ("inputs", ctypes.POINTER(Input)),
        ("n_inputs", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("check_bounds", ctypes.c_bool),
        ("output_dtype", ctypes.c_int32),
        ("output", ctypes.c_void_p),
        ("output_dim", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
    )


class Lookups(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("offsets", "indices", "factors")),
        ("capacity", ctypes.c_int64),
    )


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def guarded(values: NDArray[Any]) -> NDArray[Any]:
    """Returns a copy that ends at an inaccessible page."""
    values = np.ascontiguousarray(values)
    pages = -(-values.nbytes // PAGE) + 1
    memory = mmap.mmap(-1, pages * PAGE)
    whole = np.frombuffer(memory, np.uint8)
    assert _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + (pages - 1) * PAGE), PAGE, 0) == 0
    end = (pages - 1) * PAGE
    copy = whole[end - values.nbytes : end].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@dataclass
class Problem:
    """Columns, tables and a batch. Inputs: dense [batch, width], or jagged (values, offsets, weights or
    None)."""

    batch: int
    columns: list[dict[str, int]] = field(default_factory=list)
    sources: list[tuple[int, ...]] = field(default_factory=list)  # input, slot, width, first_step, n_steps
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    boundaries: list[float] = field(default_factory=list)
    vocabulary: list[int] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    buffers: list[tuple[NDArray[Any], int]] = field(default_factory=list)  # elements' bits, dtype
    output_dtype: int = FLOAT32
    check: bool = True

    @property
    def output_dim(self) -> int:
        return sum(column["n_dims"] for column in self.columns)

    def add(self, **column: int) -> None:
        plain = dict.fromkeys(COLUMN, 0) | {
            "right": -1, "invalid": ERROR, "empty": -1, "scale": bits(1), "output_column": self.output_dim,
        }  # fmt: skip
        self.columns.append(plain | column)

    def source(self, number: int, slot: int, width: int, steps: list[tuple[int, int, int]]) -> int:
        self.sources.append((number, slot, width, len(self.steps), len(steps)))
        self.steps += steps
        return len(self.sources) - 1

    def program(self) -> NDArray[np.int64]:
        rows = [[column[name] for name in COLUMN] for column in self.columns]
        return _C.embedding_columns_program(
            np.array(rows, np.int64).reshape(-1, len(COLUMN)),
            np.array(self.sources, np.int64).reshape(-1, 5),
            np.array(self.steps, np.int64).reshape(-1, 3),
            np.array(self.boundaries, np.float32),
            np.array(self.vocabulary, np.int64),
        )


class Call:
    """The structs of a problem, whose arrays all end at inaccessible pages. `apart`: elements between rows
    of the output beyond its width, poisoned like the output; `shift`: elements between an aligned
    address and its begin."""

    def __init__(self, problem: Problem, apart: int = 0, shift: int = 0) -> None:
        self.problem = problem
        self.kept: list[Any] = []
        self.program = self.keep(problem.program())
        words = self.program.size + self.program.size % 2
        self.on_device = self.keep(np.resize(self.program, words))  # aligned to 16 bytes
        self.buffers = (Buffer * max(len(problem.buffers), 1))()
        for at, (elements, dtype) in enumerate(problem.buffers):
            self.buffers[at] = Buffer(self.keep(elements).ctypes.data, elements.size, dtype)
        self.inputs = (Input * max(len(problem.inputs), 1))()
        for at, given in enumerate(problem.inputs):
            self.inputs[at] = self._input(given)
        self.stride = problem.output_dim + apart
        dtype = np.float32 if problem.output_dtype == FLOAT32 else np.uint16
        elements = max(problem.batch * self.stride, 1)
        self.memory = self.keep(np.full(elements + 64, 0x7E7E, np.uint16).astype(dtype))
        itemsize = self.memory.itemsize
        lead = (-self.memory.ctypes.data % 16) // itemsize + shift
        self.output = self.memory[lead : lead + elements][: problem.batch * self.stride]
        self.output = self.output.reshape(problem.batch, self.stride)

    def keep(self, values: NDArray[Any]) -> NDArray[Any]:
        self.kept.append(guarded(values))
        return self.kept[-1]

    def _input(self, given: Any) -> Input:
        if not isinstance(given, tuple):
            strides = [stride // given.itemsize for stride in given.strides]
            self.kept.append(given)
            return Input(
                given.ctypes.data, TYPES.index(given.dtype), given.shape[1], *strides, 0, 0, None, 0, None
            )
        values, offsets, weights = given
        features = (offsets.size - 1) // max(self.problem.batch, 1)
        return Input(
            self.keep(values).ctypes.data, TYPES.index(values.dtype), 0, 0, 0, features, values.size,
            self.keep(offsets).ctypes.data, int(offsets.itemsize == 8),
            None if weights is None else self.keep(weights).ctypes.data,
        )  # fmt: skip

    def params(self) -> Params:
        problem = self.problem
        return Params(
            self.program.ctypes.data, self.program.size, self.buffers, len(problem.buffers), self.inputs,
            len(problem.inputs), problem.batch, problem.check, problem.output_dtype, self.output.ctypes.data,
            problem.output_dim, self.stride,
        )  # fmt: skip

    def result(self) -> NDArray[np.float32]:
        """Returns the output as float32; fails if other memory was written."""
        width = self.problem.output_dim
        poison = np.uint16(0x7E7E).astype(self.output.dtype)
        outside = self.memory.copy()
        start = (self.output.ctypes.data - self.memory.ctypes.data) // self.memory.itemsize
        inside = np.zeros(outside.size, bool)
        for sample in range(self.problem.batch):
            inside[start + sample * self.stride :][:width] = True
        assert (outside[~inside] == poison).all(), "written outside of the output"
        found = self.output[:, :width].copy()
        if self.problem.output_dtype == FLOAT32:
            return found
        if self.problem.output_dtype == FLOAT16:
            return found.view(np.float16).astype(np.float32)
        return (found.astype(np.uint32) << 16).view(np.float32)
