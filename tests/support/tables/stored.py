"""Tables within one memory, as FBGEMM's inference modules have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import recfuse
from recfuse.nn.quantized.stored import StoredTable, stored_tensor
from support.tables.quantized import FLOATS, Stored, Tables, exact_values


def in_memory(
    tables: Sequence[tuple[int, int, str]], alignment: int, behind: bool = False
) -> tuple[Tensor, Tensor, Tables]:
    """Stores tables (rows, dim, kind) side by side, with rows of a multiple of `alignment` bytes.

    Returns the memory, the argument `stored`, and the tables. Gaps have the byte 0xff.
    """
    generator = torch.Generator().manual_seed(5)
    found, described, end = [], [], 0
    memory = torch.full((1 << 18,), 0xFF, dtype=torch.uint8)
    for rows, dim, kind in tables:
        is_codes = kind not in FLOATS
        width = dim * FLOATS[kind].itemsize if not is_codes else dim if kind == "int8" else dim // 2
        step = alignment if is_codes else max(alignment, FLOATS[kind].itemsize)
        pitch = -(-(width + 4 * is_codes) // step) * step
        first = end + 4 * (is_codes and not behind)
        parameters = (end + width * behind) * is_codes
        described.append(
            StoredTable(0, first, kind, rows, dim, pitch, parameters, "float16" if is_codes else "float32")
        )
        weight = torch.randn(rows, dim, generator=generator)
        described[-1].write(memory, weight)
        found.append(_read(memory, described[-1]))
        end += -(-max(rows * pitch, 1) // 128) * 128
    assert end <= memory.numel()
    return memory, stored_tensor(described), Tables(found)


def _read(memory: Tensor, table: StoredTable) -> Stored:
    """Returns the values from the bytes of the rows."""
    at = torch.arange(table.rows)[:, None] * table.pitch
    row = memory[at + table.first + torch.arange(table.width)]
    if table.kind in FLOATS:
        values = row.contiguous().view(FLOATS[table.kind]).double()
        return Stored(memory, memory, values)
    parameters = memory[at + table.parameters + torch.arange(4)].view(torch.float16)
    return Stored(memory, memory, exact_values(row, parameters, table.dim))


def call(
    memory: Tensor,
    rows: Tensor,
    problem: Tables,
    lookups: tuple[Tensor, Tensor],
    factors: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Runs the operator on the device of the memory."""
    moved = [None if one is None else one.to(memory.device) for one in (*lookups, factors)]
    return recfuse.ops.fused_embedding_bag_quantized(
        [memory], [memory], problem.rows, *moved[:2], problem.output_dim, moved[2], stored=rows, **options
    )
