"""Random embedding columns, of all kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.raw_columns.problem import (
    AFFINE,
    BUCKETIZE,
    BUCKETIZE_RIGHT,
    CAST,
    CLIP,
    CLIP_INTEGER,
    DROPPED,
    ERROR,
    FLOAT16,
    FLOAT32,
    HASH,
    LOG1P,
    MAX,
    MODULO,
    TYPES,
    VOCABULARY,
    Problem,
    bits,
)

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, 2.0**63, -(2.0**63))
INTEGERS = (-(2**63), 2**63 - 1, -1, 0, 2**31, -(2**31))


def elements(draw: np.random.Generator, count: int, dtype: int, whole: bool) -> NDArray[Any]:
    """Bits of a table, of which a few are not finite."""
    values = draw.integers(-8, 9, count) if whole else draw.standard_normal(count)
    values = values.astype(np.float32)
    values[draw.random(count) < 0.002] = np.nan
    if dtype == FLOAT32:
        return values
    if dtype == FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def values_of(draw: np.random.Generator, shape: Any, dtype: Any) -> NDArray[Any]:
    if dtype == np.float32:
        values = (draw.standard_normal(shape) * 20).astype(np.float32)
        special = draw.random(shape) < 0.1
        values[special] = draw.choice(SPECIAL, int(special.sum())).astype(np.float32)
        return values
    values = draw.integers(-20, 120, shape).astype(dtype)
    if dtype == np.int64:
        special = draw.random(shape) < 0.1
        values[special] = draw.choice(INTEGERS, int(special.sum()))
    return values


class Maker:
    def __init__(self, seed: int, batch: int, **how: Any) -> None:
        self.draw = np.random.default_rng(seed)
        self.problem = Problem(batch)
        self.how = {
            "longest": 9,
            "bad": False,
            "dims": (1, 2, 4, 5, 8, 12, 32, 130, 200),
            "whole": True,
        } | how

    def pick(self, *choices: Any) -> Any:
        return choices[self.draw.integers(len(choices))]

    def lengths(self, bags: int) -> NDArray[Any]:
        lengths = self.draw.integers(0, self.how["longest"] + 1, bags)
        lengths[self.draw.random(bags) < 0.2] = 0
        long = self.draw.random(bags) < self.how.get("long", 0.0)
        lengths[long] = self.draw.integers(129, 1500, int(long.sum()))
        return lengths

    def inputs(self, dense: int = 3, jagged: int = 3) -> None:
        draw, batch = self.draw, self.problem.batch
        for _ in range(dense):
            width, dtype = int(draw.integers(1, 7)), TYPES[draw.integers(3)]
            given = values_of(draw, (batch, width), dtype)
            self.problem.inputs.append(self.pick(given, np.asfortranarray(given), given[::-1]))
        for _ in range(jagged):
            lengths = self.lengths(batch * int(draw.integers(1, 4)))
            offsets = np.concatenate([[0], lengths.cumsum()]).astype(self.pick(np.int32, np.int64))
            values = values_of(draw, int(offsets[-1]), TYPES[draw.integers(3)])
            weights = self.pick(None, draw.integers(-2, 4, values.size).astype(np.float32))
            self.problem.inputs.append((values, offsets, weights))

    def boundaries(self) -> tuple[int, int]:
        first, count = len(self.problem.boundaries), self.pick(0, 1, 2, 7, 31, 100, 700)
        drawn = self.draw.standard_normal(count) * 20
        if self.draw.random() < 0.4:  # evenly
            drawn = np.linspace(-30, 50, count)
        self.problem.boundaries += np.sort(drawn.astype(np.float32)).tolist()
        return first, count

    def steps(self, floats: bool, integers: bool) -> tuple[list[tuple[int, int, int]], int]:
        """Some steps, to integers if that is wanted; and how many values they may give, 0: any."""
        draw, steps, many = self.draw, [], 0
        for _ in range(draw.integers(0, 4)):
            kind = self.pick(AFFINE, LOG1P, CLIP, CLIP_INTEGER, MODULO, HASH, CAST, BUCKETIZE, VOCABULARY)
            if kind in (CLIP_INTEGER, MODULO, HASH, VOCABULARY) and floats:
                kind = CAST
            steps.append(self.step(kind))
            floats = kind in (AFFINE, LOG1P, CLIP)
        if floats and integers:
            steps.append(self.step(self.pick(CAST, BUCKETIZE, BUCKETIZE_RIGHT)))
            floats = False
        if integers and draw.random() < 0.8:
            many = int(draw.integers(1, 60))
            steps.append(self.pick((MODULO, many, 0), (HASH, many, int(draw.integers(-(2**62), 2**62)))))
        return steps, many

    def step(self, kind: int) -> tuple[int, int, int]:
        draw = self.draw
        if kind in (BUCKETIZE, BUCKETIZE_RIGHT):
            return (kind, *self.boundaries())
        if kind == VOCABULARY:
            first, count = len(self.problem.vocabulary), self.pick(0, 1, 30, 300)
            self.problem.vocabulary += draw.permutation(count * 2)[:count].tolist()
            return kind, first, count
        low, high = sorted(draw.integers(-50, 60, 2).tolist())
        return {
            AFFINE: (AFFINE, bits(draw.standard_normal()), bits(draw.standard_normal())),
            LOG1P: (LOG1P, 0, 0),
            CLIP: (CLIP, bits(low), bits(high)),
            CAST: (CAST, 0, 0),
            CLIP_INTEGER: (CLIP_INTEGER, low, high),
            MODULO: (MODULO, int(draw.integers(1, 100)), 0),
            HASH: (HASH, int(draw.integers(1, 2**31)), int(draw.integers(-(2**62), 2**62))),
        }[kind]

    def source(self, number: int, integers: bool, numeric: bool = False) -> tuple[int, int, int]:
        """Number of a new source, its width, and how many values its steps may give."""
        given = self.problem.inputs[number]
        if isinstance(given, tuple):
            slot, width = int(self.draw.integers((given[1].size - 1) // self.problem.batch)), 0
            floats = given[0].dtype == np.float32
        else:
            width = (
                1
                if self.draw.random() < 0.6 and not numeric
                else int(self.draw.integers(1, given.shape[1] + 1))
            )
            slot = int(self.draw.integers(given.shape[1] - width + 1))
            floats = given.dtype == np.float32
        steps, many = self.steps(floats, integers)
        return self.problem.source(number, slot, width, steps), width, many

    def column(self) -> None:
        draw, problem = self.draw, self.problem
        number = int(draw.integers(len(problem.inputs)))
        jagged = isinstance(problem.inputs[number], tuple)
        scale = bits(self.pick(1.0, 2.0, -0.5))
        if not jagged and draw.random() < 0.2:
            left, width, _ = self.source(number, False, True)
            problem.add(left=left, buffer=-1, n_dims=width)
            return
        left, _, many = self.source(number, True)
        column: dict[str, int] = {"left": left, "scale": scale, "fill": bits(self.pick(0.0, 7.0))}
        column["pooling"] = int(draw.integers(4))
        if draw.random() < 0.25:
            right, _, _ = self.source(int(draw.integers(len(problem.inputs))), True)
            many = int(draw.integers(1, 60))
            column |= {"right": right, "cross_buckets": many, "cross_seed": int(draw.integers(2**62))}
        elif jagged and problem.inputs[number][2] is not None and column["pooling"] != MAX:
            column["weighted"] = int(draw.random() < 0.7)
        rows, dim = many or int(draw.integers(0, 60)), int(draw.choice(self.how["dims"]))
        rows = max(rows - int(draw.random() < 0.1), 0)
        allowed = (DROPPED,) if not self.how["bad"] else (DROPPED, ERROR)
        column["invalid"] = int(draw.integers(rows)) if rows and draw.random() < 0.3 else self.pick(*allowed)
        column["empty"] = int(draw.integers(rows)) if rows and draw.random() < 0.3 else -1
        first = int(draw.integers(0, dim)) if draw.random() < 0.3 else 0
        column |= {"rows": rows, "dim": dim, "first_dim": first, "n_dims": dim - first}
        column["buffer"] = int(draw.integers(len(self.sizes)))
        column["weight_offset"] = self.sizes[column["buffer"]] + self.pick(0, 0, 0, 1)
        self.sizes[column["buffer"]] = -(-(column["weight_offset"] + rows * dim) // 4) * 4
        problem.add(**column)

    def make(self, columns: int, dtypes: tuple[int, ...] = (FLOAT32,), output: int = FLOAT32) -> Problem:
        self.inputs()
        self.sizes = [0] * len(dtypes)
        for _ in range(columns):
            self.column()
        whole = self.how["whole"]
        for size, dtype in zip(self.sizes, dtypes, strict=True):
            self.problem.buffers.append((elements(self.draw, size + 4, dtype, whole), dtype))
        self.problem.output_dtype = output
        return self.problem
