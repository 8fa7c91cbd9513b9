"""``CollectiveExchange``: a call of a sharded module by collectives of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from recfuse.distributed.exchanges.adding import DenseTable, looked_up, with_rows
from recfuse.distributed.exchanges.batches import (
    Batch,
    batch_of,
    check_arguments,
    check_contents,
    positions_of,
)
from recfuse.distributed.exchanges.choices import Choice, Chooser, Counts, lookups_to
from recfuse.distributed.exchanges.combining import columns_of
from recfuse.distributed.exchanges.header import (
    GOOD,
    RAISED,
    WEIGHT_DTYPES,
    Header,
    Names,
    check_headers,
    enlarge_headers,
    exchange_headers,
)
from recfuse.distributed.exchanges.reading import read_and_pool
from recfuse.distributed.exchanges.routes import Route
from recfuse.distributed.exchanges.ways import Ways
from recfuse.distributed.exchanges.wires import (
    RowsExchange,
    SendRows,
    SendWeights,
    WeightsExchange,
    all_to_all,
    joined,
)
from recfuse.distributed.local import LocalTables, drop_oldest
from recfuse.errors import ArgumentValueError
from recfuse.nn.packed.layout import TableSpec


class Exchange(Protocol):
    """The way in which a sharded module pools the batches of all ranks."""

    path: str
    reason: str

    def pool(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> list[Tensor]:
        """Return the pooled columns of each feature for this rank's batch; a collective call."""

    def announce(self, error: BaseException) -> None:
        """Make the other ranks raise instead of ``pool``, since this rank has raised before its call."""


class CollectiveExchange:
    """Three exchanges a call: headers, lookups and pooled rows; a fourth for per-sample weights.

    1. Headers, fixed in size: state, bags, lookups for each rank. The host waits for them.
    2. Lookups, to the holders of their tables: lengths and indices in one buffer, int32 where rows allow.
    3. The holder pools the bags of all ranks in one fused call, and sends the rows back.

    Copied tables and tables cut by rows go other ways where those move fewer bytes; see :class:`Choice`.

    A backward pass exchanges gradients as the forward pass exchanged rows, in the other direction. Order and
    sums do not depend on timing.
    """

    path = "collectives"

    def __init__(
        self,
        number: int,
        route: Route,
        tables: LocalTables,
        chooser: Chooser,
        specs: Sequence[TableSpec],
        names: Names,
        group: Any,
        average: bool,
        exchange_dtype: torch.dtype | None,
    ) -> None:
        """Create the exchange of a module.

        ``number`` is the module's number, the same on all ranks; ``specs`` are those of each feature's table.
        """
        self._number, self._route, self._tables, self._names = number, route, tables, names
        self._chooser, self._specs = chooser, tuple(specs)
        self._group, self._exchange_dtype = group, exchange_dtype
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._scale = 1.0 / self._ranks if average else 1.0
        device = tables.device
        self.reason = f"all_to_all_single of {dist.get_backend(group)} on {device.type}"
        self._rows = torch.tensor(names.rows, dtype=torch.int64, device=device)
        narrow = max(names.rows, default=0) < 2**31
        self._wire = torch.int32 if narrow else torch.int64
        self._counts = Counts.size(route)
        enlarge_headers(self._counts, group)
        self._ways: dict[Choice, Ways] = {}

    def pool(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> list[Tensor]:
        """Return the pooled columns of each feature; see :class:`Exchange`."""
        with_gradients = torch.is_grad_enabled()
        header, batch, error = self._prepare(indices, offsets, weights, with_gradients)
        headers = exchange_headers(header, self._group, self._tables.device)
        check_headers(headers, self._rank, self._names, error, self._group)
        assert batch is not None
        bags = [other.bags for other in headers]
        counts = [Counts.of(self._route, other.counts[: self._counts]) for other in headers]
        return self._exchanged(batch, weights, with_gradients, bags, counts)

    def announce(self, error: BaseException) -> None:
        """Exchange a header that says that this rank has raised."""
        header = Header(self._number, RAISED)
        headers = exchange_headers(header, self._group, self._tables.device)
        own = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
        check_headers(headers, self._rank, self._names, own, self._group)

    def _prepare(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, with_gradients: bool
    ) -> tuple[Header, Batch | None, Exception | None]:
        """Check the batch and return its header; an error of its arguments goes into the header."""
        try:
            bags = check_arguments(indices, offsets, weights, self._route.features, self._tables.device)
            if weights is not None and self._tables.modes != {"sum"}:
                raise ArgumentValueError(
                    f"recfuse.distributed: module {self._names.module!r}: per_sample_weights is given and a "
                    'table pools by mean or max; expected None, or only tables of mode "sum"'
                )
            state, bad, bounds = check_contents(indices.detach(), offsets, self._rows, bags)
            if state != GOOD:
                return Header(self._number, state, bad=bad), None, None
            batch = batch_of(self._route, indices.detach(), offsets, bags, bounds)
        except Exception as error:
            return Header(self._number, RAISED), None, error
        counts = Counts.of_batch(self._route, batch.host_sizes).flat()
        code = WEIGHT_DTYPES.index(None if weights is None else weights.dtype)
        trains_weights = int(with_gradients and weights is not None and weights.requires_grad)
        header = Header(self._number, GOOD, bags, int(with_gradients), code, trains_weights, counts=counts)
        return header, batch, None

    def _exchanged(
        self, batch: Batch, weights: Tensor | None, with_gradients: bool,
        bags: Sequence[int], counts: Sequence[Counts],
    ) -> list[Tensor]:  # fmt: skip
        """Exchange a batch that all ranks accept."""
        element = (self._exchange_dtype or self._tables.pooled_dtype).itemsize
        choice = self._chooser.choose(bags, counts, with_gradients, self._wire.itemsize, element)
        ways = self._ways_of(choice)
        by_rank, copied, tables = self._exchange_rows(batch, weights, ways, bags, counts)
        given = dict(zip(choice.gathered, copied, strict=True))
        if choice.local:
            given |= self._pool_own(choice.local, batch, weights, None, ())
        if choice.dense:
            given |= self._pool_own(choice.dense, batch, weights, tables, ways.dense)
        if choice.read:
            specs = [self._specs[feature] for feature in choice.read]
            dtype = self._chooser.dtype_of(choice.read, self._tables.pooled_dtype)
            given |= read_and_pool(
                self._route, choice.read, specs, self._tables, batch, counts, weights, dtype, self._rank,
                self._group,
            )  # fmt: skip
        return columns_of(ways.route, batch, by_rank, given, self._tables.modes_of_features)

    def _ways_of(self, choice: Choice) -> Ways:
        if choice not in self._ways:
            drop_oldest(self._ways)
            self._ways[choice] = Ways.of(
                self._route, choice, self._chooser.tables_of(choice.dense), self._rows.device
            )
        return self._ways[choice]

    def _exchange_rows(
        self, batch: Batch, weights: Tensor | None, ways: Ways, bags: Sequence[int], counts: Sequence[Counts]
    ) -> tuple[list[Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Exchange lookups and pooled rows.

        Returns the columns of each rank, those of gathered features, and the dense tables.
        """
        own, route = self._rank, ways.route
        sent = [lookups_to(self._route, counts[own], rank, ways.choice) for rank in range(self._ranks)]
        received = [lookups_to(self._route, other, own, ways.choice) for other in counts]
        order = torch.cat(ways.orders)
        places = positions_of(batch.begins[order], batch.sizes[order], sum(sent))
        payload = self._payload(batch, ways.orders, sent, places)
        features = len(ways.orders[own])
        payload_sizes = [features * of_rank + count for of_rank, count in zip(bags, received, strict=True)]
        sent_sizes = [
            len(segments) * batch.bags + count for segments, count in zip(ways.orders, sent, strict=True)
        ]
        arrived = all_to_all(payload, sent_sizes, payload_sizes, self._group)
        whole = joined(arrived.split(payload_sizes), bags, features, self._wire)
        own_weights = None
        if weights is not None:
            origins = places if batch.origins is None else batch.origins[places]
            foreign = self._foreign_copies(len(route.copies), whole.offsets, whole.positions, bags)
            sizes = WeightsExchange(
                self._group, sent, received, origins, whole.positions, foreign, 1.0 / self._scale
            )
            own_weights = SendWeights.apply(weights, sizes)
        indices, offsets = whole.indices, whole.offsets
        if ways.dense:
            marks = looked_up(ways.dense, batch, self._group)
            indices, offsets = with_rows(whole, marks, sum(bags))
            if own_weights is not None:
                own_weights = torch.cat((own_weights, own_weights.new_ones(len(indices) - len(own_weights))))
        pooled = self._tables.pool(ways.pooled_by(own), indices, offsets, own_weights, sum(bags))
        shapes = [(table.spec.num_embeddings, table.spec.embedding_dim) for table in ways.dense]
        wire = self._exchange_dtype or pooled.dtype
        rows = RowsExchange(
            self._group, own, bags, route.widths, wire, self._scale, route.copied_width, shapes
        )
        flat, copied, *tables = SendRows.apply(pooled, self._tables.anchor(), rows)
        parts = flat.split([batch.bags * width for width in route.widths])
        columns = [part.view(batch.bags, width) for part, width in zip(parts, route.widths, strict=True)]
        return columns, copied.split([local.part.columns for local in route.copies], dim=1), tuple(tables)

    def _payload(self, batch: Batch, orders: Sequence[Tensor], sent: Sequence[int], places: Tensor) -> Tensor:
        """Return for each rank the lengths of its segments, then their indices."""
        values = batch.values[places].to(self._wire).split(list(sent))
        parts: list[Tensor] = []
        for segments, own in zip(orders, values, strict=True):
            parts += (batch.lengths[segments].to(self._wire).flatten(), own)
        return torch.cat(parts)

    def _foreign_copies(
        self, copies: int, offsets: Tensor, positions: Tensor, bags: Sequence[int]
    ) -> Tensor | None:
        """Return the lookups, in the order of arrival, of copied tables that came from other ranks."""
        if not copies:
            return None
        all_bags = sum(bags)
        ends = list(accumulate(bags, initial=0))
        mask = torch.zeros(len(positions), dtype=torch.bool, device=offsets.device)
        bag = torch.arange(len(offsets) - 1, device=offsets.device)
        of_rank = (bag % max(all_bags, 1) >= ends[self._rank]) & (
            bag % max(all_bags, 1) < ends[self._rank + 1]
        )
        is_foreign = (bag >= len(offsets) - 1 - copies * all_bags) & ~of_rank
        mask[positions] = is_foreign.repeat_interleave(offsets.diff(), output_size=len(positions))
        return mask

    def _pool_own(
        self, features: tuple[int, ...], batch: Batch, weights: Tensor | None, tables: Any,
        dense: Sequence[DenseTable],
    ) -> dict[int, Tensor]:  # fmt: skip
        """Pool features of copied tables for this rank's bags, from its rows or from dense ``tables``."""
        order = torch.tensor(features, device=batch.lengths.device)
        total = sum(batch.host_sizes[feature] for feature in features)
        places = positions_of(batch.begins[order], batch.sizes[order], total)
        origins = places if batch.origins is None else batch.origins[places]
        ends = batch.lengths[order].flatten().cumsum(0)
        offsets = torch.cat((ends.new_zeros(1), ends))
        own = None if weights is None else weights[origins]
        indices = batch.values[places]
        if tables is None:
            pooled = self._tables.pool(features, indices, offsets, own, batch.bags)
        else:
            number = {feature: at for at, table in enumerate(dense) for feature in table.features}
            specs = [
                self._specs[feature]._replace(matrix=number[feature], first_row=0) for feature in features
            ]
            pooled = self._tables.pool_rows(tables, specs, indices, offsets, own)
        dims = [self._specs[feature].embedding_dim for feature in features]
        return dict(zip(features, pooled.split(dims, dim=1), strict=True))
