"""Where the tables of a packed module lie: pure data, and the arithmetic that places them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse._codes import MODES

_TABLE_ALIGNMENT = 64  # bytes; a cache line, and the widest vector load


class PackedSpec(NamedTuple):
    """One table: what it is, and which rows of which weight matrix are its own."""

    name: str
    num_embeddings: int
    embedding_dim: int
    mode: str
    padding_idx: int | None
    include_last_offset: bool
    group: int
    first_row: int


def rows_of(spec: PackedSpec, weight: Tensor) -> Tensor:
    """A table's rows of its matrix."""
    return weight.narrow(0, spec.first_row, spec.num_embeddings)


class Layout(NamedTuple):
    """The tables and features of a packed module. Never changes: another layout is another object."""

    tables: tuple[PackedSpec, ...]
    table_of_feature: tuple[int, ...]
    parameter_names: tuple[str, ...]  # one a weight matrix
    features: Tensor  # int64 [features, 7] on the CPU, as fused_embedding_bag takes it
    dims: tuple[int, ...]  # one a feature
    output_dim: int
    sparse: bool
    any_max: bool  # whether a feature pools by max


class Wanted(NamedTuple):
    """A weight that is to be packed."""

    rows: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    tag: Hashable = None  # weights with different tags lie in different matrices


class Group(NamedTuple):
    """Weights that lie in one matrix ``[rows, dim]``."""

    like: Wanted  # the first of them
    rows: int
    members: list[tuple[int, int]]  # number of the weight, its first row
    gaps: list[tuple[int, int]]  # rows that belong to no weight: the first, and the one behind


def group_weights(weights: Sequence[Wanted]) -> list[Group]:
    """Places weights under each other, alike ones in one matrix; gap rows bring each one to a cache line."""
    found: dict[Hashable, Group] = {}
    for number, wanted in enumerate(weights):
        key = wanted[1:]
        group = found.get(key) or Group(wanted, 0, [], [])
        row_bytes = wanted.dim * wanted.dtype.itemsize
        step = _TABLE_ALIGNMENT // math.gcd(_TABLE_ALIGNMENT, row_bytes) if row_bytes else 1
        first_row = -(-group.rows // step) * step
        if first_row > group.rows:
            group.gaps.append((group.rows, first_row))
        group.members.append((number, first_row))
        found[key] = group._replace(rows=first_row + wanted.rows)
    return list(found.values())


def parameter_names(groups: Sequence[Group]) -> tuple[str, ...]:
    """``packed_dim16``, ``packed_dim16_1``, ...; of dtype and device, which may change, they say nothing."""
    names: list[str] = []
    used: dict[int, int] = {}
    for group in groups:
        dim = group.like.dim
        count = used[dim] = used.get(dim, -1) + 1
        names.append(f"packed_dim{dim}_{count}" if count else f"packed_dim{dim}")
    return tuple(names)


def feature_tensor(tables: Sequence[PackedSpec], table_of_feature: Sequence[int]) -> Tensor:
    """int64 ``[features, 7]`` on the CPU, wherever the tables are: the host plans the work by it."""
    rows, column = [], 0
    for number in table_of_feature:
        table = tables[number]
        dim = table.embedding_dim
        padding_idx = -1 if table.padding_idx is None else table.padding_idx
        offset = table.first_row * dim
        rows.append(
            [table.group, offset, table.num_embeddings, dim, MODES.index(table.mode), padding_idx, column]
        )
        column += dim
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 7)
