"""The ways in which a call serves copied tables and tables cut by rows: those that move the fewest bytes.

Each rank counts its lookups. Headers exchange the counts, from which every rank makes the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from recfuse.distributed.exchanges.adding import DenseTable
from recfuse.distributed.exchanges.routes import Route
from recfuse.distributed.placements import Placed
from recfuse.nn.packed.layout import TableSpec, WeightForm
from recfuse.perf.models.exchanges import dense_bytes, gathered_bytes

LEAST_SAVED = 1 << 20
"""Dense gradients are added only if they save this many bytes of all ranks: they take three exchanges."""


class Counts(NamedTuple):
    """Lookups of a rank's batch."""

    by_rank: tuple[int, ...]  # of features that are neither copied nor cut by rows
    cuts: tuple[tuple[int, ...], ...]  # of each feature of `Route.row_cuts`, by part
    copies: tuple[int, ...]  # of each feature of `Route.copies`

    @staticmethod
    def size(route: Route) -> int:
        """Return the number of numbers."""
        return len(route.widths) + sum(len(cut.begins) for cut in route.row_cuts) + len(route.copies)

    @staticmethod
    def of(route: Route, numbers: Sequence[int]) -> Counts:
        """Return the counts with these numbers."""
        ranks = len(route.widths)
        found, at = [], ranks
        for cut in route.row_cuts:
            found.append(tuple(numbers[at : at + len(cut.begins)]))
            at += len(cut.begins)
        return Counts(tuple(numbers[:ranks]), tuple(found), tuple(numbers[at:]))

    @staticmethod
    def of_batch(route: Route, sizes: Sequence[int]) -> Counts:
        """Return the counts of a batch; ``sizes`` are the lookups of its segments."""
        cut = {cut.feature for cut in route.row_cuts}
        by_rank = tuple(
            sum(sizes[local.segment] for local in own if local.feature not in cut) for own in route.exchanged
        )
        cuts = tuple(
            tuple(sizes[cut.first_segment : cut.first_segment + len(cut.begins)]) for cut in route.row_cuts
        )
        return Counts(by_rank, cuts, tuple(sizes[local.segment] for local in route.copies))

    def flat(self) -> tuple[int, ...]:
        """Return the numbers."""
        return (*self.by_rank, *(size for sizes in self.cuts for size in sizes), *self.copies)


class Choice(NamedTuple):
    """The features of each way, in ascending order; the others are pooled by the holders of their tables."""

    local: tuple[int, ...] = ()  # copied: each rank pools its own samples
    gathered: tuple[int, ...] = ()  # copied: each rank pools all samples and makes the whole step
    dense: tuple[int, ...] = ()  # copied: each rank pools its own samples, and gradients are added
    read: tuple[int, ...] = ()  # cut by rows: the holders send rows, and each rank pools its own samples


class Chooser:
    """Chooses the ways of a module's features."""

    def __init__(
        self,
        route: Route,
        table_of_feature: Sequence[int],
        specs: Sequence[TableSpec],
        forms: Sequence[WeightForm],
        placed: Sequence[Placed],
        can_add: bool,
    ) -> None:
        """Store the facts; ``can_add`` says that gradients are float32, whose sums round little."""
        self._route, self._table_of_feature = route, tuple(table_of_feature)
        self._specs, self._forms, self._placed, self._can_add = specs, forms, placed, can_add
        self._ranks = len(route.widths)

    def choose(
        self, bags: Sequence[int], counts: Sequence[Counts], with_gradients: bool, index: int, element: int
    ) -> Choice:
        """Return the choice for the bags and counts of all ranks.

        ``index`` and ``element`` are the bytes of an index and of a pooled value that are sent.
        """
        copies = tuple(local.feature for local in self._route.copies)
        if not with_gradients:
            return Choice(local=copies, read=self._read(bags, counts, element))
        dense = self._dense(bags, counts, index, element)
        return Choice(gathered=tuple(one for one in copies if one not in dense), dense=dense)

    def tables_of(self, features: Sequence[int]) -> list[DenseTable]:
        """Return the tables of features whose gradients are added."""
        found: dict[int, list[int]] = {}
        for feature in features:
            found.setdefault(self._table_of_feature[feature], []).append(feature)
        return [DenseTable(tuple(own), self._specs[table]) for table, own in found.items()]

    def dtype_of(self, features: Sequence[int], otherwise: torch.dtype) -> torch.dtype:
        """Return the dtype of the tables of features, if they have one in common."""
        dtypes = {self._forms[self._table_of_feature[feature]].dtype for feature in features}
        return dtypes.pop() if len(dtypes) == 1 else otherwise

    def _dense(
        self, bags: Sequence[int], counts: Sequence[Counts], index: int, element: int
    ) -> tuple[int, ...]:
        """Return the copied features whose gradients are added densely.

        Not those of maxima, whose step is of the winners alone. Their rows are pooled in the call of all
        samples, so that a table has at most as many rows as there are samples.
        """
        if not self._can_add or self._ranks == 1:
            return ()
        samples, saved = sum(bags), 0.0
        by_table: dict[int, list[int]] = {}
        lookups: dict[int, int] = {}
        for number, local in enumerate(self._route.copies):
            table = self._table_of_feature[local.feature]
            by_table.setdefault(table, []).append(local.feature)
            lookups[table] = lookups.get(table, 0) + sum(own.copies[number] for own in counts)
        found: list[int] = []
        for table, features in by_table.items():
            spec = self._specs[table]
            rows, dim = spec.num_embeddings, spec.embedding_dim
            if spec.mode == "max" or rows > samples or not self._forms[table].requires_grad:
                continue
            all_bags = samples * len(features)
            gain = gathered_bytes(lookups[table], all_bags, dim, index, element, self._ranks)
            gain -= dense_bytes(rows, dim, self._ranks)
            if gain > 0:
                found += features
                saved += gain
        return tuple(sorted(found)) if saved >= LEAST_SAVED else ()

    def _read(self, bags: Sequence[int], counts: Sequence[Counts], element: int) -> tuple[int, ...]:
        """Return the features of tables cut by rows whose rows take fewer bytes than their partial sums.

        A partial sum comes from each other rank with a part, a row for each lookup of another rank's part.
        """
        found = []
        for number, cut in enumerate(self._route.row_cuts):
            table = self._table_of_feature[cut.feature]
            parts = self._placed[table].parts
            rows = sums = 0
            for rank, (own, of_rank) in enumerate(zip(counts, bags, strict=True)):
                for part, size in zip(parts, own.cuts[number], strict=True):
                    if part.rank != rank:
                        rows, sums = rows + size, sums + of_rank
            if rows * self._forms[table].dtype.itemsize <= sums * element:
                found.append(cut.feature)
        return tuple(found)


def lookups_to(route: Route, counts: Counts, rank: int, choice: Choice) -> int:
    """Return the number of lookups that go to a rank in the exchange of pooled rows."""
    found = counts.by_rank[rank]
    for cut, sizes in zip(route.row_cuts, counts.cuts, strict=True):
        if cut.feature not in choice.read:
            found += sum(size for holder, size in zip(cut.ranks, sizes, strict=True) if holder == rank)
    copies = zip(route.copies, counts.copies, strict=True)
    return found + sum(size for local, size in copies if local.feature in choice.gathered)
