"""Entries of a ``state_dict`` for tables of which ranks hold parts.

An entry is a Tensor where the rank holds the whole table, a DTensor where ``torch.distributed.tensor`` cuts
it in the same way, else a DTensor over torch's LocalShardsWrapper. ``torch.distributed.checkpoint`` reads all
of them into any other placement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recfuse.distributed.placements import Part, Placed
from recfuse.errors import ArgumentValueError


def entry_of(local: Tensor, table: Placed, part: Part, shape: tuple[int, int], mesh: Any) -> Tensor:
    """Return the entry for ``local``, the values of a part of a table of ``shape``.

    ``local`` has the shape of the part, or a value a row: ``[rows]`` or ``[rows, 1]``.
    """
    if table.kind in ("whole", "copies"):
        return local
    by_element = local.dim() == 2 and local.shape[1] == part.columns
    if not by_element and table.kind == "columns":
        raise ArgumentValueError(
            f"recfuse.distributed: a state of shape {list(local.shape)} has a value for each row of a table "
            "that is cut by columns; expected a value for each element. Cut the table by rows."
        )
    dim = 1 if table.kind == "columns" else 0
    whole = (shape[0], *local.shape[1:]) if dim == 0 else shape
    stride = torch.empty(whole, device="meta").stride()
    values: Any = local
    if not table.even:
        offsets = (part.row, part.column) if local.dim() == 2 else (part.row,)
        values = LocalShardsWrapper([local], [offsets])
    return DTensor.from_local(
        values, mesh, [Shard(dim)], run_check=False, shape=torch.Size(whole), stride=stride
    )


def part_of_entry(key: str, value: Any, part: Part, shape: tuple[int, ...], local: tuple[int, ...]) -> Tensor:
    """Return the values of a part from a loaded entry, a Tensor or a DTensor.

    ``shape`` is that of the whole entry, ``local`` that of the part.

    Raises:
        ValueError: an entry of another shape, or a DTensor whose local values are those of another part.
    """
    if not isinstance(value, Tensor):
        raise ArgumentValueError(f"recfuse.distributed: {key} is {type(value).__name__}; expected a tensor")
    offsets = (part.row, part.column)[: len(local)] if len(local) == 2 and local[1] > 1 else (part.row, 0)
    offsets = offsets[: len(local)]
    if isinstance(value, DTensor):
        return _local_of(key, value, offsets, local, shape)
    if tuple(value.shape) != tuple(shape):
        raise ArgumentValueError(
            f"recfuse.distributed: {key} has shape {list(value.shape)}; expected {list(shape)}"
        )
    for dim, (begin, size) in enumerate(zip(offsets, local, strict=True)):
        value = value.narrow(dim, begin, size)
    return value


def _local_of(
    key: str, value: DTensor, offsets: tuple[int, ...], local: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    if tuple(value.shape) != tuple(shape):
        raise ArgumentValueError(
            f"recfuse.distributed: {key} has shape {list(value.shape)}; expected {list(shape)}"
        )
    own: Any = value.to_local()
    if isinstance(own, LocalShardsWrapper):
        for shard, begin in zip(own.local_shards(), own.local_offsets(), strict=False):
            if tuple(begin) == offsets and tuple(shard.shape) == local:
                return shard
    else:
        sizes, begin = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        if all(isinstance(placement, Replicate) for placement in value.placements) or (
            tuple(begin) == offsets and tuple(sizes) == local
        ):
            for dim, (at, size) in enumerate(zip(offsets, local, strict=True)):
                own = own.narrow(dim, at - begin[dim], size)
            found: Tensor = own
            return found
    raise ArgumentValueError(
        f"recfuse.distributed: {key} is a DTensor with another cut than the table's; expected the rows from "
        f"{offsets[0]} on. Load it with torch.distributed.checkpoint, which moves rows between ranks."
    )
