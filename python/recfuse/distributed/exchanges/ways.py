"""``Ways``: the route of pooled rows that a choice leaves, with what its exchanges need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfuse.distributed.exchanges.adding import DenseTable
from recfuse.distributed.exchanges.choices import Choice
from recfuse.distributed.exchanges.routes import Route


class Ways(NamedTuple):
    """The ways of all batches with the same choice."""

    choice: Choice
    route: Route  # of the features whose pooled rows are exchanged, and of gathered copies
    orders: tuple[Tensor, ...]  # by rank, int64: the segments that the rank pools
    dense: tuple[DenseTable, ...]

    @staticmethod
    def of(route: Route, choice: Choice, dense: Sequence[DenseTable], device: torch.device) -> Ways:
        """Return the ways of a choice."""
        kept = route.without({*choice.local, *choice.dense, *choice.read})
        with torch.inference_mode(False):  # calls with gradients use them too
            orders = tuple(
                torch.tensor(kept.segments_to(rank), dtype=torch.int64, device=device)
                for rank in range(len(route.widths))
            )
        return Ways(choice, kept, orders, tuple(dense))

    def pooled_by(self, rank: int) -> tuple[int, ...]:
        """Return the features of a rank's call; a feature stands for each dense table."""
        exchanged = (local.feature for local in (*self.route.exchanged[rank], *self.route.copies))
        return (*exchanged, *(table.features[0] for table in self.dense))
