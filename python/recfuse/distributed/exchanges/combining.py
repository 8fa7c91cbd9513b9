"""The columns of each feature from the columns that arrived from the holders of its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recfuse.distributed.exchanges.batches import Batch
from recfuse.distributed.exchanges.routes import Route


def columns_of(
    route: Route, batch: Batch, arrived: Sequence[Tensor], given: Mapping[int, Tensor], modes: Sequence[str]
) -> list[Tensor]:
    """Return the columns of each feature; ``arrived`` are the columns of each rank, ``[bags, columns]``.

    ``given`` has the columns of features that no exchange of pooled rows has served.

    Parts of a cut by columns are side by side. Parts of a cut by rows are added in the order of ranks, and
    divided once by the lookups of the bag for a mean; a maximum is that of the parts with lookups.
    """
    cuts = {cut.feature: cut for cut in route.row_cuts}
    found = []
    for feature, sources in enumerate(route.sources):
        if feature in given:
            found.append(given[feature])
            continue
        parts = [
            arrived[source.rank][:, source.column : source.column + source.columns] for source in sources
        ]
        if feature not in cuts:
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        elif modes[feature] == "max":
            found.append(_maximum(parts, batch.counts[feature]))
        else:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            if modes[feature] == "mean":
                lookups = batch.counts[feature].sum(0).clamp(min=1)
                total = total / lookups[:, None].to(total.dtype)
            found.append(total)
    return found


def _maximum(parts: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return the maximum over parts with lookups, 0 without; the first of equal values has the gradient."""
    best, has_any = parts[0], counts[0] > 0
    for part, count in zip(parts[1:], counts[1:], strict=True):
        has_own = (count > 0)[:, None]
        wins = has_own & (~has_any[:, None] | (part > best) | (part.isnan() & ~best.isnan()))
        best = torch.where(wins, part, best)
        has_any = has_any | (count > 0)
    return best
