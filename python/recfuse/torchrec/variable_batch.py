"""Pools batches whose size differs between features (TorchRec's variable batch per feature)."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from recfuse.torchrec.collection import PooledTables


def pool_batch(
    tables: PooledTables,
    lookups: tuple[Tensor, Tensor, Tensor | None],
    sizes: list[list[int]] | None,
    into: Tensor | None = None,
    into_offsets: Tensor | None = None,
) -> Tensor:
    """Pool features of equal or different batch sizes; each feature is padded with empty bags to
    the largest size.

    Args:
        tables: the tables.
        lookups: indices, offsets ``[sum(sizes) + 1]``, per_sample_weights.
        sizes: bags of each feature from each rank. None: all features have the same number.
        into: flat output to write into; None: a new tensor.
        into_offsets: int64 ``[ranks, features]``, the start of each piece of ``into``.

    Returns:
        ``[bags, columns]``; with sizes flat: rank by rank, feature by feature, ``[bags, dim]`` each.
    """
    if sizes is None:
        return tables.pooled(*lookups)
    indices, offsets, weights = lookups
    bags = [sum(ranks) for ranks in sizes]
    most = max(bags, default=0)
    begins = [0, *accumulate(bags)]
    take = [
        begin + min(bag, count) for begin, count in zip(begins, bags, strict=False) for bag in range(most)
    ]
    padded = offsets[
        torch.tensor([*take, begins[-1]], dtype=torch.int64).to(offsets.device, non_blocking=True)
    ]
    pooled = tables.pooled(indices, padded, weights)
    columns = pooled.split(list(tables.layout.dims), dim=1)
    pieces = [
        piece.reshape(-1)
        for rank in zip(
            *(column[:count].split(ranks) for column, count, ranks in zip(columns, bags, sizes, strict=True)),
            strict=True,
        )
        for piece in rank
    ]
    flat = torch.cat(pieces) if pieces else pooled.reshape(-1)
    if into is None or into_offsets is None:
        return flat
    lengths = [piece.numel() for piece in pieces]
    within = torch.cat([torch.arange(length) for length in lengths]).to(flat.device, non_blocking=True)
    counts = torch.tensor(lengths).to(flat.device, non_blocking=True)
    begin = torch.repeat_interleave(into_offsets.reshape(-1), counts, output_size=sum(lengths))
    return into.index_copy(0, begin + within, flat.to(into.dtype))
