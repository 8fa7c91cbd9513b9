"""Dense gradients of copied tables: ranks pool their own samples, and the gradients of all ranks are added.

The rows of a table that any rank looks up join the call of all samples, a bag a row. Its pooled result is the
table, from which each rank pools its own samples. The gradient of that result is the sum over ranks, and the
call's backward pass steps the rows with it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse.distributed.exchanges.batches import Batch
from recfuse.distributed.exchanges.wires import Joined
from recfuse.nn.packed.layout import TableSpec


class DenseTable(NamedTuple):
    """A copied table whose gradients are added. The first feature stands for it in calls."""

    features: tuple[int, ...]
    spec: TableSpec


def looked_up(tables: Sequence[DenseTable], batch: Batch, group: Any) -> list[Tensor]:
    """Return which rows of each table some rank looks up, bool ``[rows]``; a collective call."""
    marks = []
    for table in tables:
        mark = torch.zeros(table.spec.num_embeddings, dtype=torch.uint8, device=batch.values.device)
        for feature in table.features:
            mark[batch.of_feature(feature).to(torch.int64)] = 1
        marks.append(mark)
    joined = torch.cat(marks)
    dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=group)
    return [mark.bool() for mark in joined.split([len(mark) for mark in marks])]


def with_rows(whole: Joined, marks: Sequence[Tensor], bags: int) -> tuple[Tensor, Tensor]:
    """Return the indices and offsets of joined lookups, followed by the marked rows of tables, a bag a row.

    ``bags`` are those of all ranks, at least the rows of each table.
    """
    indices, lengths = [whole.indices], []
    for mark in marks:
        rows = mark.nonzero().flatten()
        indices.append(rows.to(whole.indices.dtype))
        length = torch.zeros(bags, dtype=torch.int64, device=mark.device)
        length[rows] = 1
        lengths.append(length)
    ends = torch.cat(lengths).cumsum(0) + whole.offsets[-1]
    return torch.cat(indices), torch.cat((whole.offsets, ends))
