"""The rows of quantised tables: their forms, and copies between floats and codes on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recfuse._arguments import wrong_type
from recfuse._codes import DTYPE_NAMES, row_bytes
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn.memory import advise_huge_pages
from recfuse.ops import dequantize_rows, quantize_rows
from recfuse.ops.quantized.fused_embedding_bag_quantized import code_bytes

CODE_BITS = {"int8": 8, "int4": 4}
CODES = tuple(CODE_BITS)
_PIECE_BYTES = 1 << 26  # of a table on a GPU, which is quantised on the host


class Rows(NamedTuple):
    """Rows of codes with their parameters, or rows of floats with empty parameters."""

    kind: str  # "int8" or "int4", or the name of a dtype of floats
    dim: int
    data: Tensor
    parameters: Tensor  # float16 [rows, 2]; of floats [0, 2]

    @property
    def bytes(self) -> int:
        """The bytes of the rows."""
        return self.data.numel() * self.data.itemsize + self.parameters.numel() * self.parameters.itemsize


def new_rows(kind: str, rows: int, dim: int, device: torch.device, where: str = "recfuse.quantize") -> Rows:
    """Return rows of zeros; errors name ``where``."""
    if kind not in CODES:
        data = _zeros(rows, dim, getattr(torch, kind), device)
        return Rows(kind, dim, data, torch.zeros(0, 2, dtype=torch.float16, device=device))
    width = code_bytes(dim, kind, where)
    data = _zeros(rows, width, torch.uint8, device)
    return Rows(kind, dim, data, _zeros(rows, 2, torch.float16, device))


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    data = torch.empty(rows, columns, dtype=dtype, device=device)
    advise_huge_pages(data)
    return data.zero_()


def part_of(rows: Rows, first: int, count: int) -> Rows:
    """Return some rows, as views."""
    parameters = rows.parameters.narrow(0, first, count) if rows.kind in CODES else rows.parameters
    return rows._replace(data=rows.data.narrow(0, first, count), parameters=parameters)


def write_floats(weight: Tensor, to: Rows) -> float:
    """Write the rows of a table of floats, and return the largest error of a value.

    A table on a GPU passes through the host in pieces.
    """
    weight = weight.detach()
    if to.kind not in CODES:
        to.data.copy_(weight)
        if weight.dtype == to.data.dtype or weight.numel() == 0:
            return 0.0
        return float((to.data.float() - weight.float()).abs().max())
    if weight.dtype == torch.float64:
        raise ArgumentTypeError(
            "recfuse.quantize_rows: weight is float64; expected float32, float16 or bfloat16"
        )
    if weight.is_cpu and to.data.is_cpu:
        return float(torch.ops.recfuse.quantize_rows(weight, to.data, to.parameters))
    step, error = _piece_rows(weight), 0.0
    for first in range(0, weight.shape[0], step):
        piece = weight[first : first + step].cpu()
        codes, parameters = quantize_rows(piece, to.kind)
        values = dequantize_rows(codes, parameters, to.dim)
        error = max(error, float((values - piece.float()).abs().max())) if piece.numel() else error
        to.data[first : first + step].copy_(codes)
        to.parameters[first : first + step].copy_(parameters)
    return error


def floats_of(rows: Rows, dtype: torch.dtype) -> Tensor:
    """Return the values of rows as floats, a new tensor on the device of the rows."""
    if rows.kind not in CODES:
        return rows.data.detach().to(dtype, copy=True)
    if rows.data.is_cpu:
        return dequantize_rows(rows.data, rows.parameters, rows.dim, dtype)
    values = torch.empty(rows.data.shape[0], rows.dim, dtype=dtype, device=rows.data.device)
    step = _piece_rows(values)
    for first in range(0, values.shape[0], step):
        end = first + step
        piece = dequantize_rows(rows.data[first:end].cpu(), rows.parameters[first:end].cpu(), rows.dim, dtype)
        values[first:end].copy_(piece)
    return values


def _piece_rows(weight: Tensor) -> int:
    return max(_PIECE_BYTES // max(row_bytes(weight.shape[1], weight.dtype), 1), 1)


def kinds_of(
    dtype: Any, names: list[str], dtypes: list[torch.dtype], dims: list[int], where: str
) -> list[str]:
    """Return the kind of each table from the argument ``dtype``; raise for tables that cannot have it."""
    if isinstance(dtype, str):
        wanted: Mapping[str, Any] = dict.fromkeys(names, dtype)
    elif isinstance(dtype, Mapping):
        wanted = dtype
    else:
        raise wrong_type(f"{where}: dtype", dtype, '"int8", "int4" or a dict of them by table')
    if unknown := [name for name in wanted if name not in names]:
        raise ArgumentValueError(f"{where}: dtype has {unknown[0]!r}; expected names of tables: {names[:8]}")
    kinds = []
    for name, floats, dim in zip(names, dtypes, dims, strict=True):
        kind = wanted.get(name)
        if kind is None:
            kind = str(floats).removeprefix("torch.")
            if kind not in DTYPE_NAMES:
                raise ArgumentTypeError(
                    f"{where}: table {name!r}: dtype is {kind}; expected float32, float16 or bfloat16"
                )
        else:
            code_bytes(dim, kind, f"{where}: table {name!r}")
        kinds.append(kind)
    return kinds
