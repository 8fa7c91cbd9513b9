"""Columns, tables and batches: models E and F of RECom (Pan et al., ASPLOS'23) and equal bucketize columns.

| kind | E | F | table | values of a sample |
| --- | --- | --- | --- | --- |
| bucketize, boundaries 0, 5, ... 495 | 880 | 1,000 | 101 x 8, mean | one float32 in [0, 100) | | integer | 50
| 90 | 100 x 8, mean | one integer in [0, 100) |
| string | 50 | 100 | 10,000 x 8, mean | one number in [0, 100,000) as a string | | strings | 15 | 7 | 10,000
x 8, sum | 1 to 10 of them |
| large | 5 | 3 | 2^23 x 32, sum | 1 to 10 integers in [0, 2^23) |

RECom's synthesized models draw all values uniformly, and so does this. Strings are integers from
`recfuse.data.hash_strings`, because torch has no strings. Rows of all kinds except the first are the value
modulo the number of rows, the cheapest choice for torch; so all candidates do the same work on the same
values.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.settings import Setting
from recfuse.data import hash_strings

BOUNDARIES = [5.0 * number for number in range(100)]
MOST = 10  # values of a sample that has several
DENSE = 32  # dense features of the models
TOP = {"E": (1024, 1024, 128), "F": (2048, 1024, 1024, 512)}
_NUMBERS = 100_000  # different strings
Jagged = tuple[Tensor, Tensor]  # values [lookups], offsets [size + 1]


@dataclass(frozen=True)
class Kind:
    """Columns that are alike."""

    name: str
    count: int
    rows: int
    dim: int
    pooling: str
    several: bool = False  # values a sample

    @property
    def buckets(self) -> bool:
        """The values are floats that become rows."""
        return self.name == "bucketize"

    @property
    def numeric(self) -> bool:
        """The values are floats that are written unchanged."""
        return self.name == "numeric"

    @property
    def output_dim(self) -> int:
        """Columns of the output over all columns."""
        return self.count * self.dim


def bucketize(count: int) -> Kind:
    """Columns of floats."""
    return Kind("bucketize", count, len(BOUNDARIES) + 1, 8, "mean")


def mixed(count: int) -> list[Kind]:
    """Columns of many kinds: thirds of buckets and of hashed strings, a fifth of tags, and numbers."""
    third, fifth = -(-count // 3), -(-count // 5)
    return [
        bucketize(third),
        Kind("string", third, 10_000, 8, "mean"),
        Kind("strings", fifth, 10_000, 16, "sum", several=True),
        Kind("numeric", max(count - 2 * third - fifth, 1), 0, 1, "sum"),
    ]


def model_kinds(name: str, large_rows: int, part: int = 1) -> list[Kind]:
    """Returns the kinds of E or F, or every `part`-th of their columns; with tables of `large_rows`
    instead of 2^23."""
    counts = {"E": (880, 50, 50, 15, 5), "F": (1000, 90, 100, 7, 3)}[name]
    first, integer, string, strings, large = (-(-count // part) for count in counts)
    return [
        bucketize(first),
        Kind("integer", integer, 100, 8, "mean"),
        Kind("string", string, 10_000, 8, "mean"),
        Kind("strings", strings, 10_000, 8, "sum", several=True),
        Kind("large", large, large_rows, 32, "sum", several=True),
    ]


@dataclass
class Batch:
    """A batch: a tensor or (values, offsets) for each column, in the columns' order."""

    size: int
    features: list[Tensor | Jagged]  # on the device
    dense: Tensor  # [size, DENSE]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Returns all of its tensors."""
        return [
            one for feature in self.features for one in (feature if isinstance(feature, tuple) else [feature])
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns' values and offsets."""
        return sum(one.nbytes for one in self.tensors)

    def to(self, device: torch.device | str) -> Batch:
        """Copies it to a device, a copy per tensor."""
        moved = [
            tuple(one.to(device) for one in feature) if isinstance(feature, tuple) else feature.to(device)
            for feature in self.features
        ]
        return Batch(self.size, moved, self.dense.to(device))  # type: ignore[arg-type]


class Subject:
    """Tables, and batches for them."""

    def __init__(self, name: str, kinds: list[Kind], setting: Setting) -> None:
        """`kinds`: in the columns' order."""
        arguments: argparse.Namespace = setting.arguments
        self.name, self.kinds, self.setting, self.device = name, kinds, setting, setting.device
        self.seed, self.count = arguments.seed, arguments.num_batches
        generator = torch.Generator(self.device).manual_seed(self.seed)
        # A matrix for each kind, [count * rows, dim]; the columns' tables are parts of it.
        self.stacked = [
            torch.randn(kind.count * kind.rows, kind.dim, device=self.device, generator=generator)
            for kind in kinds
        ]
        self.boundaries = torch.tensor(BOUNDARIES, device=self.device)
        self._batches: dict[int, list[Batch]] = {}
        self.kept: dict[str, Any] = {}  # objects that candidates share

    @cached_property
    def columns(self) -> list[Kind]:
        """Returns the kind of each column."""
        return [kind for kind in self.kinds for _ in range(kind.count)]

    @cached_property
    def tables(self) -> list[Tensor]:
        """[rows, dim] of each column."""
        return [
            whole[number * kind.rows : (number + 1) * kind.rows]
            for kind, whole in zip(self.kinds, self.stacked, strict=True)
            for number in range(kind.count)
        ]

    @property
    def output_dim(self) -> int:
        """Columns of the output."""
        return sum(kind.output_dim for kind in self.kinds)

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(whole.nbytes for whole in self.stacked)

    def batches(self, size: int) -> list[Batch]:
        """Creates `--num-batches` batches of one size on the device."""
        if size not in self._batches:
            new = [make_batch(self.kinds, size, self.seed + 1 + number) for number in range(self.count)]
            self._batches[size] = [batch.to(self.device) for batch in new]
        return self._batches[size]

    def least_bytes(self, batch: Batch) -> int:
        """Returns the least bytes to move: values and offsets once, each row in use once, the output once."""
        rows = 0
        for kind, feature in zip(self.columns, batch.features, strict=True):
            if kind.numeric:
                continue
            values = feature[0] if isinstance(feature, tuple) else feature
            rows += rows_of(kind, values, self.boundaries).unique().numel() * kind.dim * 4
        return rows + batch.nbytes + 4 * batch.size * self.output_dim


def rows_of(kind: Kind, values: Tensor, boundaries: Tensor) -> Tensor:
    """Returns the rows of a column's values; for a numeric column the values."""
    if kind.numeric:
        return values
    return torch.bucketize(values, boundaries) if kind.buckets else torch.remainder(values, kind.rows)


def make_batch(kinds: list[Kind], size: int, seed: int) -> Batch:
    """Creates a uniform batch on the host."""
    random = np.random.default_rng(seed)
    features: list[Tensor | Jagged] = []
    for kind in kinds:
        for _ in range(kind.count):
            lengths = random.integers(1, MOST + 1, size) if kind.several else np.ones(size, np.int64)
            offsets = np.concatenate(([0], lengths.cumsum()))
            values = torch.from_numpy(_values(kind, int(offsets[-1]), random))
            if kind.name.startswith("string"):
                values = hash_strings(values.numpy().astype(str), threads=1)
            features.append((values, torch.from_numpy(offsets)) if kind.several else values)
    return Batch(size, features, torch.from_numpy(random.random((size, DENSE), np.float32)))


def _values(kind: Kind, count: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    if kind.buckets or kind.numeric:
        return random.random(count, np.float32) * 100
    return random.integers(0, _NUMBERS if kind.name.startswith("string") else kind.rows, count)


class Model(torch.nn.Module):
    """The model after the columns: the dense part, and the layers on top."""

    def __init__(self, name: str, columns_dim: int, device: torch.device, seed: int) -> None:
        """`name`: E or F."""
        super().__init__()
        torch.manual_seed(seed)
        self.bottom = torch.nn.Linear(DENSE, DENSE, device=device)
        layers: list[torch.nn.Module] = []
        width = columns_dim + DENSE
        for units in TOP[name]:
            layers += [torch.nn.Linear(width, units, device=device), torch.nn.ReLU()]
            width = units
        self.top = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1, device=device), torch.nn.Sigmoid())
        self.requires_grad_(False)

    def forward(self, columns: Tensor, dense: Tensor) -> Tensor:
        """[size, 1]."""
        return self.top(torch.cat((columns, self.bottom(dense).relu()), dim=1))
