"""Inference of tables cut by rows: the holders send the rows of lookups, and each rank pools its own samples.

Rows return in the order of the lookups, so that a result is bit-identical to that of the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from recfuse.distributed.exchanges.batches import Batch, positions_of
from recfuse.distributed.exchanges.choices import Counts
from recfuse.distributed.exchanges.routes import Route, RowCut
from recfuse.distributed.exchanges.wires import all_to_all
from recfuse.distributed.local import LocalTables
from recfuse.nn.packed.layout import TableSpec


def read_and_pool(
    route: Route,
    features: Sequence[int],
    specs: Sequence[TableSpec],
    tables: LocalTables,
    batch: Batch,
    counts: Sequence[Counts],
    weights: Tensor | None,
    dtype: torch.dtype,
    rank: int,
    group: Any,
) -> dict[int, Tensor]:
    """Return the pooled columns of features for this rank's bags; a collective call.

    ``specs`` are those of the features' whole tables, ``counts`` those of all ranks, ``dtype`` that of
    the rows that are sent.
    """
    cuts = [cut for cut in route.row_cuts if cut.feature in features]
    numbers = [number for number, cut in enumerate(route.row_cuts) if cut.feature in features]
    ranks = len(counts)
    asked = [_sizes(cuts, numbers, counts[rank], other) for other in range(ranks)]  # by holder and cut
    served = [_sizes(cuts, numbers, own, rank) for own in counts]  # by the rank that asks, and cut
    segments = [cut.first_segment + cut.ranks.index(other) for other in range(ranks)
                for cut in cuts if other in cut.ranks]  # fmt: skip
    order = torch.tensor(segments, dtype=torch.int64, device=batch.values.device)
    places = positions_of(batch.begins[order], batch.sizes[order], sum(map(sum, asked)))
    is_narrow = max(spec.num_embeddings for spec in specs) < 2**31
    values = batch.values[places].to(torch.int32 if is_narrow else torch.int64)
    indices = all_to_all(values, [*map(sum, asked)], [*map(sum, served)], group)
    rows = _rows_of(cuts, tables, indices, served, dtype)
    dims = [spec.embedding_dim for spec in specs]
    received = all_to_all(rows, _elements(served, dims), _elements(asked, dims), group)
    return _pooled(cuts, specs, tables, batch, received, asked, places, weights)


def _sizes(cuts: Sequence[RowCut], numbers: Sequence[int], counts: Counts, holder: int) -> list[int]:
    """Return the lookups of each cut that go to a holder."""
    found = []
    for cut, number in zip(cuts, numbers, strict=True):
        sizes = zip(cut.ranks, counts.cuts[number], strict=True)
        found.append(sum(size for rank, size in sizes if rank == holder))
    return found


def _elements(sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> list[int]:
    return [sum(size * dim for size, dim in zip(own, dims, strict=True)) for own in sizes]


def _rows_of(
    cuts: Sequence[RowCut], tables: LocalTables, indices: Tensor, served: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the rows of lookups, flat, in the order of the lookups: by rank, then by cut."""
    parts = indices.to(torch.int64).split([size for own in served for size in own])
    found = []
    for number, part in enumerate(parts):
        if len(part):
            rows = tables.rows(cuts[number % len(cuts)].feature)
            found.append(rows.index_select(0, part).to(dtype).flatten())
    return torch.cat(found) if found else torch.empty(0, dtype=dtype, device=indices.device)


def _pooled(
    cuts: Sequence[RowCut], specs: Sequence[TableSpec], tables: LocalTables, batch: Batch, received: Tensor,
    asked: Sequence[Sequence[int]], places: Tensor, weights: Tensor | None,
) -> dict[int, Tensor]:  # fmt: skip
    """Put received rows into the order of this rank's lookups, and pool them."""
    assert batch.origins is not None
    device = received.device
    origins = batch.origins[places].split([size for own in asked for size in own])
    flat = received.split([size * spec.embedding_dim for own in asked
                           for size, spec in zip(own, specs, strict=True)])  # fmt: skip
    matrices, own_specs, indices, own_weights = [], [], [], []
    for number, (cut, spec) in enumerate(zip(cuts, specs, strict=True)):
        begin = batch.first_lookup(cut.feature)
        total = batch.host_sizes[cut.feature]
        rows = torch.zeros((total + 1, spec.embedding_dim), dtype=received.dtype, device=device)
        for at in range(number, len(flat), len(cuts)):
            rows[origins[at] - begin] = flat[at].view(-1, spec.embedding_dim)
        order = torch.arange(total, dtype=torch.int64, device=device)
        if cut.padding_idx is not None:
            order[batch.of_feature(cut.feature) == cut.padding_idx] = total
        padding = None if cut.padding_idx is None else total
        own = TableSpec(spec.name, total + 1, spec.embedding_dim, spec.mode, padding, matrix=number)
        matrices.append(rows)
        own_specs.append(own)
        indices.append(order)
        if weights is not None:
            own_weights.append(weights[begin : begin + total])
    lengths = batch.lengths[torch.tensor([cut.feature for cut in cuts], device=device)].flatten()
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    joined = torch.cat(own_weights) if own_weights else None
    pooled = tables.pool_rows(matrices, own_specs, torch.cat(indices), offsets, joined)
    ends = accumulate((spec.embedding_dim for spec in specs), initial=0)
    return {cut.feature: pooled[:, begin:end] for cut, (begin, end) in zip(cuts, pairwise(ends), strict=True)}
