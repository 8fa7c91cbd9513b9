"""The positions of the tables of a packed module: pure data, and the arithmetic that places tables.

A matrix ``[rows, dim]`` is a Parameter. It has the tables of one dtype, dim and device; a table is a range of
its rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recfuse._codes import DTYPES, FEATURE, MODES, row_bytes
from recfuse._storage import check_storages
from recfuse.ops import fused_dtype

_TABLE_ALIGNMENT = 64  # bytes; a cache line, and the widest vector load

NativeCall: TypeAlias = tuple[list[tuple[int, int, int]], NDArray[np.int64], int, int]
"""The first argument of `_C.fused_embedding_bag_*`: address, elements and dtype code of each matrix; the
features `[features, 7]`; dtype code and columns of the output.
"""


class TableSpec(NamedTuple):
    """The properties of a table, and its rows in a matrix."""

    name: str
    num_embeddings: int
    embedding_dim: int
    mode: str
    padding_idx: int | None
    include_last_offset: bool = True
    matrix: int = 0
    first_row: int = 0


def table_rows(spec: TableSpec, matrix: Tensor) -> Tensor:
    """Return a table's rows of its matrix, a view."""
    return matrix.narrow(0, spec.first_row, spec.num_embeddings)


def is_sharded(matrix: Tensor) -> bool:
    """Return whether ``fully_shard`` has sharded a matrix; its rows are then copies, not views."""
    return hasattr(matrix, "device_mesh")


class Layout(NamedTuple):
    """The tables and features of a packed module. Never changes: another layout is another object."""

    tables: tuple[TableSpec, ...]
    table_of_feature: tuple[int, ...]
    parameter_names: tuple[str, ...]  # a name per matrix
    features: Tensor  # int64 [features, 7] on the CPU, an argument of fused_embedding_bag
    dims: tuple[int, ...]  # a dim per feature
    output_dim: int
    sparse: bool
    any_max: bool  # True if a feature pools by max


class WeightForm(NamedTuple):
    """The properties of a weight ``[rows, dim]`` that determine its matrix."""

    rows: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    tag: Hashable = None  # weights with different tags are in different matrices


class Matrix(NamedTuple):
    """Weights in consecutive rows of a matrix."""

    form: WeightForm  # of the first weight
    rows: int
    members: list[tuple[int, int]]  # number of the weight, its first row
    gaps: list[tuple[int, int]]  # rows that belong to no weight: begin, end


def aligned(row: int, dim: int, dtype: torch.dtype) -> int:
    """Return the first row, at or after ``row``, that begins on a cache line."""
    size = row_bytes(dim, dtype)
    step = _TABLE_ALIGNMENT // math.gcd(_TABLE_ALIGNMENT, size) if size else 1
    return -(-row // step) * step


def arrange(weights: Sequence[WeightForm]) -> list[Matrix]:
    """Place weights of the same form in one matrix; gap rows align each weight to a cache line."""
    matrices: dict[Hashable, Matrix] = {}
    for number, form in enumerate(weights):
        key = form[1:]
        matrix = matrices.get(key) or Matrix(form, 0, [], [])
        first_row = aligned(matrix.rows, form.dim, form.dtype)
        if first_row > matrix.rows:
            matrix.gaps.append((matrix.rows, first_row))
        matrix.members.append((number, first_row))
        matrices[key] = matrix._replace(rows=first_row + form.rows)
    return list(matrices.values())


def parameter_names(matrices: Sequence[Matrix]) -> tuple[str, ...]:
    """Return ``packed_dim16``, ``packed_dim16_1``, ...; without dtype and device, which may change."""
    names: list[str] = []
    used: dict[int, int] = {}
    for matrix in matrices:
        dim = matrix.form.dim
        count = used[dim] = used.get(dim, -1) + 1
        names.append(f"packed_dim{dim}_{count}" if count else f"packed_dim{dim}")
    return tuple(names)


def feature_tensor(tables: Sequence[TableSpec]) -> Tensor:
    """Return int64 ``[features, 7]`` of the features' tables, on the CPU, where the partition is computed."""
    rows, column = [], 0
    for table in tables:
        dim = table.embedding_dim
        padding_idx = -1 if table.padding_idx is None else table.padding_idx
        offset, mode = table.first_row * dim, MODES.index(table.mode)
        rows.append(
            FEATURE.row(
                buffer=table.matrix,
                weight_offset=offset,
                rows=table.num_embeddings,
                dim=dim,
                pooling=mode,
                padding_idx=padding_idx,
                output_column=column,
            )
        )
        column += dim
    with torch.inference_mode(False):  # backward passes keep it
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, len(FEATURE))


def layout_of(
    specs: Sequence[TableSpec],
    weight_of_table: Iterable[int],
    table_of_feature: Sequence[int],
    matrices: Sequence[Matrix],
    sparse: bool = False,
) -> Layout:
    """Return the layout of tables; each table has the rows of a weight in a matrix."""
    rows = {number: (at, first) for at, matrix in enumerate(matrices) for number, first in matrix.members}
    places = (rows[number] for number in weight_of_table)
    tables = tuple(
        spec._replace(matrix=matrix, first_row=first)
        for spec, (matrix, first) in zip(specs, places, strict=True)
    )
    used = [tables[number] for number in table_of_feature]
    dims = tuple(table.embedding_dim for table in used)
    return Layout(
        tables,
        tuple(table_of_feature),
        parameter_names(matrices),
        feature_tensor(used),
        dims,
        sum(dims),
        sparse,
        any(table.mode == "max" for table in used),
    )


def native_call(matrices: Sequence[Tensor], features: NDArray[np.int64], output_dim: int) -> NativeCall:
    """Return the description of tables for the C library. The matrices must outlive its use."""
    check_storages("recfuse", "weights", matrices)
    buffers = [(matrix.data_ptr(), matrix.numel(), DTYPES.index(matrix.dtype)) for matrix in matrices]
    return buffers, features, DTYPES.index(fused_dtype([matrix.dtype for matrix in matrices])), output_dim
