"""The values of a rank's parts: copied from existing tables, or drawn as one process draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse.distributed.local import LocalPart
from recfuse.distributed.placements import Placed
from recfuse.nn.packed.layout import TableSpec, WeightForm, table_rows


@torch.no_grad()
def copy_parts(
    specs: Sequence[TableSpec], whole: Sequence[Tensor], parts: Sequence[LocalPart], own: Sequence[Tensor]
) -> None:
    """Copy the parts of existing tables; ``whole`` are their matrices, ``own`` the values of each part."""
    for part, values in zip(parts, own, strict=True):
        rectangle = part.part
        rows = table_rows(specs[part.table], whole[specs[part.table].matrix])
        rows = rows.narrow(0, rectangle.row, rectangle.rows)
        values.copy_(rows.narrow(1, rectangle.column, rectangle.columns))


@torch.no_grad()
def draw_parts(
    specs: Sequence[TableSpec],
    forms: Sequence[WeightForm],
    parts: Sequence[LocalPart],
    own: Sequence[Tensor],
    device: torch.device,
    inits: Mapping[int, Callable[[Tensor], Any]],
) -> None:
    """Draw all tables in order, as one process does, and keep the parts of this rank.

    Every rank draws every table, one at a time, so that its generator stays that of one process. ``inits``
    are functions of tables that set other values after all tables were drawn.
    """
    of_table = {part.table: (part.part, values) for part, values in zip(parts, own, strict=True)}
    for functions in (dict.fromkeys(range(len(specs)), torch.nn.init.normal_), inits):
        for number, init in functions.items():
            spec, form = specs[number], forms[number]
            rows = torch.empty((spec.num_embeddings, spec.embedding_dim), dtype=form.dtype, device=device)
            init(rows)
            if init is torch.nn.init.normal_ and spec.padding_idx is not None:
                rows[spec.padding_idx] = 0
            if number in of_table:
                part, values = of_table[number]
                kept = rows.narrow(0, part.row, part.rows).narrow(1, part.column, part.columns)
                values.copy_(kept)


@torch.no_grad()
def broadcast_copies(
    placed: Sequence[Placed], parts: Sequence[LocalPart], own: Sequence[Tensor], group: Any
) -> None:
    """Send the values of copied tables from the first rank to all; a collective call."""
    for part, values in zip(parts, own, strict=True):
        if placed[part.table].kind == "copies":
            dist.broadcast(values, group=group, group_src=0)
