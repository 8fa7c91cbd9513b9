"""Random calls of ``fused_embedding``, and their result by torch's own embedding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("jagged", "joined", "padded")
DIMS = (0, 1, 2, 3, 4, 8, 12, 16, 20, 32, 50, 128, 260)

Lookup = Callable[[Tensor, Tensor, "int | None"], Tensor]


@dataclass(frozen=True)
class Histories:
    """A call."""

    weights: list[Tensor]
    features: Tensor  # [features, 7]
    indices: Tensor
    offsets: Tensor
    layout: str
    length: int = 0
    sizes: tuple[int, ...] = ()
    fill: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def bags(self) -> int:
        """The histories of a feature."""
        return (len(self.offsets) - 1) // len(self.features)

    @property
    def output_dim(self) -> int:
        """The argument of the operator."""
        dims = self.features[:, 3].tolist()
        if self.sizes:
            return sum(size * dim for size, dim in zip(self.sizes, dims, strict=True))
        return dims[0] if self.layout == "jagged" else sum(dims)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of recfuse.fused_embedding."""
        options = {"layout": self.layout, "length": self.length, "fill": self.fill, "dtype": self.dtype}
        call = self.weights, self.features, self.indices, self.offsets, self.output_dim
        return call, {**options, "sizes": self.sizes or None}

    def to(self, device: str) -> Histories:
        """The same call on a device."""
        return replace(
            self,
            weights=[
                weight.detach().to(device).requires_grad_(weight.requires_grad) for weight in self.weights
            ],
            indices=self.indices.to(device),
            offsets=self.offsets.to(device),
            fill=None if self.fill is None else self.fill.to(device),
        )


def output_dtype(call: Histories) -> torch.dtype:
    """The dtype of the output."""
    dtypes = {weight.dtype for weight in call.weights}
    return call.dtype or (dtypes.pop() if len(dtypes) == 1 else torch.float32)


def by_torch(call: Histories) -> Tensor:
    """The output, by an embedding a feature, ``cat`` and a copy of each history into its place."""
    ends, bags, dtype = call.offsets.tolist(), call.bags, output_dtype(call)
    rows = []
    for f, (weight, at, count, dim, _, padding, _) in enumerate(call.features.tolist()):
        table = call.weights[weight][at // dim if dim else 0 :][:count]
        own = call.indices[ends[f * bags] : ends[(f + 1) * bags]]
        found = functional.embedding(own.long(), table, padding if padding >= 0 else None)
        rows.append(found.to(dtype))
    if call.sizes:
        return torch.cat([part.reshape(-1) for part in rows])
    if call.layout == "jagged":
        return torch.cat(rows)
    if call.layout == "joined":
        return torch.cat(rows, dim=1)
    fill = torch.zeros(call.output_dim) if call.fill is None else call.fill
    padded = fill.to(rows[0].device, dtype).repeat(bags, call.length, 1)
    parts, column = [], 0
    for f, part in enumerate(rows):
        own = padded[..., column : column + part.shape[1]].clone()
        column += part.shape[1]
        first = ends[f * bags]
        for bag in range(bags):
            begin, end = (ends[f * bags + bag + k] - first for k in (0, 1))
            kept = part[begin:end][: call.length]
            own[bag, : len(kept)] = kept
        parts.append(own)
    return torch.cat(parts, dim=-1)


def draw_lengths(draw: random.Random, layout: str, features: int, bags: int) -> list[int]:
    """Lengths of histories, feature by feature: some empty, some features empty, or all in one feature."""
    kind = draw.choice(("few", "empty", "one feature", "long", "even"))
    lengths = [draw.choice((0, 1, 2, 3, 7)) for _ in range(features * bags)]
    if kind == "empty":
        lengths = [0] * len(lengths)
    elif kind == "long":
        lengths = [draw.choice((0, 0, 1, 40)) for _ in lengths]
    elif kind == "even":
        lengths = [draw.randrange(4)] * len(lengths)
    elif kind == "one feature":
        full = draw.randrange(features)
        lengths = [length if at // bags == full else 0 for at, length in enumerate(lengths)]
    if layout == "joined":
        lengths = lengths[:bags] * features
    return lengths


def draw_histories(draw: random.Random, layout: str | None = None, floating: Any = None) -> Histories:
    """A random call; values come from torch's generator."""
    layout = layout or draw.choice(LAYOUTS)
    n_features, bags = draw.randrange(1, 6), draw.randrange(1, 9)
    mixed = layout != "jagged" or draw.random() < 0.5
    common = draw.choice(DIMS)
    # Tables of a dim and dtype share a weight, with rows of no table between them. Some have no table.
    of_form: dict[tuple[int, torch.dtype], int] = {}
    rows_of: list[int] = []
    tables: list[tuple[int, int, int, int, int]] = []
    for _ in range(n_features):
        if draw.random() < 0.15:
            alone = draw.choice(DIMS), floating or draw.choice(DTYPES)
            if of_form.setdefault(alone, len(rows_of)) == len(rows_of):
                rows_of.append(draw.randrange(9))
        if tables and draw.random() < 0.3:
            tables.append(draw.choice(tables))
            continue
        dim = draw.choice(DIMS) if mixed else common
        dtype = floating or draw.choice(DTYPES[: draw.choice((1, 3))])
        number = of_form.setdefault((dim, dtype), len(rows_of))
        if number == len(rows_of):
            rows_of.append(draw.randrange(3))
        count = draw.choice((1, 2, 9, 60))
        padding = draw.randrange(count) if draw.random() < 0.3 else -1
        tables.append((number, rows_of[number] * dim, count, dim, padding))
        rows_of[number] += count + draw.randrange(3)
    column, features = 0, []
    for number, at, count, dim, padding in tables:
        features.append([number, at, count, dim, 0, padding, column])
        column += dim
    forms = sorted(of_form, key=of_form.__getitem__)
    weights = [torch.randn(rows, dim).to(dtype) for rows, (dim, dtype) in zip(rows_of, forms, strict=True)]
    lengths = draw_lengths(draw, layout, n_features, bags)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    indices = [
        draw.randrange(tables[at // bags][2]) for at, length in enumerate(lengths) for _ in range(length)
    ]
    sizes = tuple(ends[(f + 1) * bags] - ends[f * bags] for f in range(n_features))
    is_flat = layout == "jagged" and (len({table[3] for table in tables}) > 1 or draw.random() < 0.2)
    return Histories(
        weights,
        torch.tensor(features),
        torch.tensor(indices, dtype=draw.choice((torch.int32, torch.int64))),
        torch.tensor(ends, dtype=draw.choice((torch.int32, torch.int64))),
        layout,
        draw.choice((1, 2, 5, 9)) if layout == "padded" else 0,
        sizes if is_flat else (),
        torch.randn(column) if layout == "padded" and draw.random() < 0.3 else None,
        draw.choice(DTYPES) if draw.random() < 0.2 else None,
    )
