"""Small random programs of columns, and batches for them: every kind, step, form and odd value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recfuse.nn import columns as c

FLOAT_DTYPES = (torch.float32, torch.float32, torch.float32, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
EXTREME_INTEGERS = (2**63 - 1, -(2**63), 2**62, 2**31 - 1, 2**31, -(2**31), -1, 2**53 + 1, 2**24 + 1)
ODD_FLOATS = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1e-45,
    3.4e38,
    -3.4e38,
    2.0**63,
    -(2.0**63),
    2.0**64,
    0.5,
)
BOUNDARIES = (
    (),
    (0.0,),
    (-1.5, 0.0, 0.0, 2.0, 7.25),
    tuple(5.0 * number for number in range(20)),
    tuple(0.1 * number for number in range(30)),
    (-math.inf, -1e30, 1.0, 1e30, math.inf),
    tuple(2.0**number for number in range(-10, 10)),
)
VOCABULARY = (7, -3, 2**63 - 1, -(2**63), 0, 11, 5)


@dataclass
class Feature:
    """An entry of a batch."""

    name: str
    form: str  # "one", "wide", "jagged"
    width: int
    dtype: torch.dtype
    values: Tensor
    lengths: Tensor  # int64 [batch], of jagged inputs
    weights: Tensor | None = None

    def entry(self, draw: Random | None) -> Any:
        """Returns it in one of the forms that columns accept; always the same without ``draw``."""
        if self.form == "one":
            return self.values
        if self.form == "wide":
            batch = self.lengths.numel()
            wide = self.values.view(batch, self.width)
            if draw is not None and draw.random() < 0.3:
                return torch.stack((wide, wide.flip(0)), dim=-1)[..., 0]
            return wide.t().contiguous().t() if draw is not None and draw.random() < 0.3 else wide
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)))
        way = "tuple" if draw is None else draw.choice(("tuple", "int32", "mapping", "nested"))
        if way == "nested" and self.weights is None and self.lengths.numel():
            return torch.nested.nested_tensor_from_jagged(self.values, offsets)
        if way == "mapping":
            found = {"values": self.values, "lengths": self.lengths}
            return found if self.weights is None else {**found, "weights": self.weights}
        given = self.values, offsets.int() if way == "int32" else offsets
        return given if self.weights is None else (*given, self.weights)


@dataclass
class Case:
    """Columns and a batch."""

    columns: list[c.Column]
    features: list[Feature]
    side_weights: dict[str, Tensor]
    dtype: torch.dtype
    seed: int
    notes: list[str] = field(default_factory=list)

    def batch(self, draw: Random | None = None) -> dict[str, Any]:
        """Returns the argument of ``EmbeddingColumns.forward``."""
        return {**{one.name: one.entry(draw) for one in self.features}, **self.side_weights}

    def absolute(self) -> dict[str, Any]:
        """The batch with absolute weights."""
        found: dict[str, Any] = {name: weights.abs() for name, weights in self.side_weights.items()}
        for one in self.features:
            kept, one.weights = one.weights, None if one.weights is None else one.weights.abs()
            found[one.name] = one.entry(None)
            one.weights = kept
        return found

    @property
    def lookups(self) -> int:
        """At most, of one sample and column."""
        most = [int(one.lengths.max()) if one.lengths.numel() else 0 for one in self.features]
        return max([1, *most]) ** 2

    def module(self) -> c.EmbeddingColumns:
        """With tables drawn by the seed."""
        found = c.EmbeddingColumns(self.columns, dtype=self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for table in found.tables.values():
                table.weight.copy_(torch.randn(table.weight.shape, generator=generator))
        return found


def random_case(draw: Random) -> Case:
    """Any case: some are refused, or have an invalid index."""
    batch = draw.choice((0, 1, 2, 3, 5, 9))
    features = [_feature(draw, f"f{number}", batch) for number in range(draw.randint(1, 4))]
    columns: list[c.Column] = []
    side: dict[str, Tensor] = {}
    shared: dict[str, tuple[int, int]] = {}
    for number in range(draw.randint(1, 5)):
        columns.append(_column(draw, f"c{number}", features, side, shared))
    if any(getattr(one, "pooling", "") in ("mean", "sqrtn") for one in columns):  # no sums that cancel
        side = {name: weights.abs() for name, weights in side.items()}
        for one in features:
            one.weights = None if one.weights is None else one.weights.abs()
    dtype = draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    return Case(columns, features, side, dtype, draw.randrange(2**31))


def _feature(draw: Random, name: str, batch: int) -> Feature:
    form = draw.choice(("one", "one", "wide", "jagged", "jagged"))
    width = draw.randint(1, 4) if form == "wide" else 1
    is_float = draw.random() < 0.5
    dtype = draw.choice(FLOAT_DTYPES if is_float else INTEGER_DTYPES)
    if form == "jagged":
        lengths = torch.tensor([draw.choice((0, 0, 1, 2, 3, 7)) for _ in range(batch)], dtype=torch.int64)
    else:
        lengths = torch.full((batch,), width)
    count = int(lengths.sum())
    values = _floats(draw, count, dtype) if is_float else _integers(draw, count, dtype)
    weights = None
    if form == "jagged" and draw.random() < 0.5:
        weights = _weights(draw, count)
    return Feature(name, form, width, dtype, values, lengths, weights)


def _weights(draw: Random, count: int) -> Tensor:
    return torch.tensor([draw.choice((0.0, 1.0, 0.25, -0.5, 2.0, draw.random())) for _ in range(count)])


def _floats(draw: Random, count: int, dtype: torch.dtype) -> Tensor:
    found = []
    for _ in range(count):
        boundary = draw.choice([one for each in BOUNDARIES for one in each])
        near = float(np.nextafter(np.float32(boundary), np.float32(draw.choice((-math.inf, math.inf)))))
        found.append(
            draw.choice(
                (draw.choice(ODD_FLOATS), boundary, near, draw.uniform(-30, 120), float(draw.randint(-3, 12)))
            )
        )
    return torch.tensor(found, dtype=torch.float64).to(torch.float32).to(dtype)


def _integers(draw: Random, count: int, dtype: torch.dtype) -> Tensor:
    choices = (draw.choice(EXTREME_INTEGERS + VOCABULARY), draw.randint(-3, 12), draw.randint(0, 9))
    found = [draw.choice((*choices, draw.randint(0, 9), draw.randint(-3, 30))) for _ in range(count)]
    return torch.tensor(found, dtype=torch.int64).to(dtype)


def _preprocess(draw: Random, is_float: bool, ends_integer: bool, most: int = 3) -> tuple[c.Step, ...]:
    """Steps; ``ends_integer``: of which integers come out. Now and then of the wrong type."""
    steps: list[c.Step] = []
    for _ in range(draw.choice((0, 0, 1, 1, most))):
        step = _step(draw, is_float)
        steps.append(step)
        is_float = isinstance(step, (c.Affine, c.Log1p, c.Clip))
    if ends_integer and is_float and draw.random() < 0.97:
        steps.append(c.Cast())
    return tuple(steps)


def _number(draw: Random) -> float:
    return draw.choice((0.0, 1.0, -1.0, 0.5, 10.0, 1e10, draw.uniform(-9, 9)))


def _step(draw: Random, is_float: bool) -> c.Step:
    floats = [
        lambda: c.Affine(_number(draw), _number(draw)),
        c.Log1p,
        lambda: c.Clip(draw.choice((None, -1.0, _number(draw))), draw.choice((None, 9.0, _number(draw)))),
        c.Cast,
        lambda: c.ToBucket(draw.choice(BOUNDARIES), draw.random() < 0.5),
    ]
    integers = [
        lambda: c.ClipInteger(draw.choice((None, 0, -5)), draw.choice((None, 9, 2**40))),
        lambda: c.Modulo(draw.choice((1, 3, 10, 2**62))),
        lambda: c.ToHash(draw.choice((1, 7, 2**31 - 1)), draw.choice((0, 5, 2**64 - 1))),
        lambda: c.ToWord(draw.choice((VOCABULARY, (), (4,)))),
    ]
    return draw.choice(floats if is_float and draw.random() < 0.99 else [*floats, *integers, *integers])()


def _table(draw: Random, rows: int, shared: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The fields that columns with a table share."""
    dim = draw.choice((0, 1, 2, 3, 4, 8, 17)) if draw.random() < 0.9 else 64
    found: dict[str, Any] = {"embedding_dim": dim, "num_embeddings": rows}
    if draw.random() < 0.2:
        name = f"shared{rows}"
        found.update(table=name, embedding_dim=shared.setdefault(name, (rows, dim))[1])
        dim = found["embedding_dim"]
    found["pooling"] = draw.choice(("sum", "mean", "max", "sqrtn"))
    row = draw.randrange(rows) if rows else None
    found["invalid"] = draw.choice(("error", "drop", "drop", "error" if row is None else row))
    if draw.random() < 0.4 and row is not None:
        found["empty"] = draw.randrange(rows)
    else:
        found["fill_value"] = draw.choice((0.0, 0.0, 1.5, -2.25))
    if draw.random() < 0.3:
        first = draw.randint(0, dim)
        found["slice"] = (first, draw.randint(first, dim))
    found["scale"] = draw.choice((1.0, 1.0, 0.5, -3.0, 0.0))
    return found


def _column(
    draw: Random,
    name: str,
    features: list[Feature],
    side: dict[str, Tensor],
    shared: dict[str, tuple[int, int]],
) -> c.Column:
    feature = draw.choice(features)
    is_float = feature.dtype.is_floating_point
    kind = draw.choice(("bucketize", "hash", "identity", "vocabulary", "cross", "numeric"))
    if kind == "numeric" and feature.form != "jagged":
        steps = _preprocess(draw, is_float, False)
        return c.Numeric(name, feature.width, feature=feature.name, preprocess=steps)
    if kind == "cross":
        keys = []
        for one in (feature, draw.choice(features)):
            keys.append(c.Key(one.name, _preprocess(draw, one.dtype.is_floating_point, True)))
        rows = draw.choice((1, 5, 100))
        return c.Cross(name, keys, **_table(draw, rows, shared), seed=draw.choice((0, 3, 2**64 - 1)))
    own: dict[str, Any] = {"feature": feature.name}
    if feature.weights is not None and draw.random() < 0.5:
        own["weighted"] = True
    elif draw.random() < 0.15:
        weights = f"w_{feature.name}"
        side.setdefault(weights, _weights(draw, feature.values.numel()))
        own["weights"] = weights
    if kind == "bucketize":
        boundaries = draw.choice(BOUNDARIES)
        own.update(_table(draw, len(boundaries) + 1, shared), boundaries=boundaries)
        own.update(right=draw.random() < 0.5, preprocess=_preprocess(draw, is_float, False))
        made: Any = c.Bucketize
    elif kind == "vocabulary":
        own.update(_table(draw, len(VOCABULARY), shared), vocabulary=VOCABULARY)
        own["preprocess"] = _preprocess(draw, is_float, True)
        if own["invalid"] == "error" and draw.random() < 0.8:
            own["invalid"] = "drop"
        made = c.Vocabulary
    elif kind == "hash":
        own.update(_table(draw, draw.choice((1, 5, 100)), shared), seed=draw.choice((0, 9)))
        own["preprocess"] = _preprocess(draw, is_float, True)
        made = c.Hash
    else:
        rows = draw.choice((0, 1, 10, 100)) if draw.random() < 0.3 else 10
        own.update(_table(draw, rows, shared))
        steps = _preprocess(draw, is_float, True)
        if own["invalid"] == "error" and rows and draw.random() < 0.9:
            steps = (*steps, c.Modulo(rows))
        own["preprocess"], made = steps, c.Identity
    if own["pooling"] == "max":
        own.update(weighted=False, weights=None)
    return made(name, **own)
