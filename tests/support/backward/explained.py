"""Random calls of the operators of training, for `recfuse.explain`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from support.reference import DTYPES

_ops = torch.ops.recfuse
STATES = (0, 1, 1, 2)  # of each optimizer


def _lookups(chance: random.Random) -> tuple[Tensor, int, int, int, Tensor, Tensor]:
    """Features of one matrix, its rows and columns, the bags of a feature, indices and offsets."""
    tables, bags, each = chance.choice((1, 3, 70)), chance.choice((1, 40, 500)), chance.choice((1, 7))
    dim = chance.choice((4, 8, 16) if tables > 3 else (4, 16, 64, 128, 260))
    sizes = chance.choice(((40,), (1000, 17_000), (1000, 17_000) if tables > 3 else (100_000,)))
    integer = chance.choice((torch.int32, torch.int64))
    rows = [chance.choice(sizes) for _ in range(tables)]
    first = [sum(rows[:table]) for table in range(tables)]
    features = torch.tensor(
        [
            (0, first[table] * dim, rows[table], dim, chance.choice((0, 0, 1)), -1, table * dim)
            for table in range(tables)
        ]
    )
    indices = torch.cat([torch.randint(size, (bags * each,), dtype=integer) for size in rows])
    offsets = (torch.arange(tables * bags + 1) * each).to(integer)
    return features, sum(rows), dim, bags, indices, offsets


def gradient(chance: random.Random) -> tuple[Any, ...]:
    """A dense or a sparse gradient."""
    features, rows, dim, bags, indices, offsets = _lookups(chance)
    dtype = chance.choice(DTYPES)
    operator = chance.choice((_ops.fused_embedding_bag_backward, _ops.fused_embedding_bag_sparse_backward))

    def call(grad: Tensor, indices: Tensor, offsets: Tensor) -> Any:
        form = 0, rows, dim, DTYPES.index(dtype)
        return operator(grad, features, indices, offsets, *form, None, None)

    return call, torch.randn(bags, len(features) * dim, dtype=dtype), indices, offsets


def update(chance: random.Random) -> tuple[Any, ...]:
    """An update by one of the optimizers."""
    features, rows, dim, bags, indices, offsets = _lookups(chance)
    dtype, kind = chance.choice(DTYPES), chance.randrange(4)
    rounding = chance.random() < 0.5
    shape = (rows,) if kind == 2 else (rows, dim)
    states = [torch.ones(shape) for _ in range(STATES[kind])]
    numbers = torch.tensor([0.1, 0.0, 1e-8, 0.9, 0.999, 1.0, 1.0, 0.0])

    def call(grad: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        *states, indices, offsets, numbers = rest
        lookups = features, indices, offsets
        return _ops.fused_embedding_bag_update(
            grad, [weight], states, *lookups, None, None, numbers, [], kind, rounding, 3
        )

    grad = torch.randn(bags, len(features) * dim, dtype=dtype)
    return call, grad, torch.randn(rows, dim, dtype=dtype), *states, indices, offsets, numbers
