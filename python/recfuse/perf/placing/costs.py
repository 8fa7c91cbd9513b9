"""``Costs``: the microseconds and the bytes that a table, or a part of it, adds to its rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recfuse.perf.models.bags import BagModel, Bags, States
from recfuse.perf.models.exchanges import dense_bytes, gathered_bytes
from recfuse.perf.placing.tables import Table

_EXCHANGE_US, _EXCHANGE_BYTES_PER_US = 45.0, 277e3  # of an all-to-all by NCCL over NVLink, measured on H100s
_FLOAT, _INDEX, _PLACE = 4, 4, 8  # bytes of a pooled value, of an index that is sent, of its place


class RankTimes:
    """The times of ranks, by their pooling and their exchanges."""

    pooling_us: tuple[float, ...]
    exchange_us: tuple[float, ...]

    @property
    def rank_us(self) -> tuple[float, ...]:
        """Microseconds of each rank."""
        return tuple(map(sum, zip(self.pooling_us, self.exchange_us, strict=True)))

    @property
    def us(self) -> float:
        """Microseconds of the slowest rank."""
        return max(self.rank_us)


class Costs:
    """Predicts the cost of tables on their ranks, without the launches.

    ``samples`` are those of all ranks in a step. ``states`` are those of the optimizer, for memory.
    """

    def __init__(
        self, model: BagModel, samples: int, gpus: int, training: bool, states: States | None = None
    ) -> None:
        """Takes the rates of kernels and the step."""
        self.model, self.samples, self.gpus, self.training = model, samples, gpus, training
        self.states = states or States()
        self._passes = 2 if training else 1
        rates = (model.forward_rates, model.backward_rates)[: self._passes]
        self.launches = sum(each.launches for each in rates)

    def lookups(self, table: Table) -> float:
        """Returns the lookups of a step."""
        return self.samples * table.features * table.pooling

    def pooling(self, table: Table) -> float:
        """Returns the microseconds of pooling, and in training of the backward pass with the update."""
        return self._pooling(table, self.samples)

    def _pooling(self, table: Table, samples: float) -> float:
        bags = samples * table.features
        lookups = max(bags * table.pooling, 1.0)
        work = Bags(bags, lookups, table.rows, table.dim, table.unique, table.itemsize)
        return self.model.forward(work) + (self.model.backward(work, self.states) if self.training else 0.0)

    def exchange(self, columns: float, lookups: float = 0.0) -> float:
        """Returns the microseconds of a rank's exchanges: lookups, pooled rows and gradients."""
        if self.gpus == 1:
            return 0.0
        others = (self.gpus - 1) / self.gpus
        rows = _EXCHANGE_US + self.samples * others * columns * _FLOAT / _EXCHANGE_BYTES_PER_US
        return self._passes * rows + lookups * others * _INDEX / _EXCHANGE_BYTES_PER_US

    def load(self, table: Table, is_cut_by_rows: bool = False) -> float:
        """Returns the microseconds that a table adds to its rank.

        In inference a part of rows sends partial sums, or the rows of lookups where these are fewer.
        """
        rows = min(table.pooling, 1.0) if is_cut_by_rows and not self.training else 1.0
        added = self.exchange(rows * table.dim * table.features, self.lookups(table)) - self.exchange(0)
        return self.pooling(table) + added

    def copy(self, table: Table) -> float:
        """Returns the microseconds that a copied table adds to each rank."""
        samples = self.samples / self.gpus
        unique = None if table.unique is None else min(table.unique, samples * table.features * table.pooling)
        own = replace(table, unique=unique)
        if not self.training:
            return self._pooling(own, samples)
        bags = self.samples * table.features
        gathered = gathered_bytes(self.lookups(table), bags, table.dim, _INDEX, _FLOAT, self.gpus)
        dense = dense_bytes(table.rows, table.dim, self.gpus)
        sent = min(gathered, dense) / self.gpus / _EXCHANGE_BYTES_PER_US
        if gathered <= dense:
            return self._pooling(table, self.samples) + sent
        rows = Bags(table.rows, table.rows, table.rows, table.dim, None, table.itemsize)
        step = self.model.forward(rows) + self.model.backward(rows, self.states)
        work = Bags(bags / self.gpus, bags * table.pooling / self.gpus, table.rows, table.dim, unique, _FLOAT)
        return self.model.forward(work) + self.model.backward(work, None) + step + sent

    def memory(self, table: Table) -> float:
        """Returns the bytes of a table on its rank, with states of the optimizer and buffers of exchanges.

        An index arrives, is put in order, and has a place; a bag has a length and an offset. Pooled rows are
        pooled and sent; so are their gradients.
        """
        bags = self.samples * table.features
        lookups = self.lookups(table) * (2 * _INDEX + _PLACE) + bags * 2 * _PLACE
        return self.weights(table) + lookups + 2 * self._passes * bags * table.dim * _FLOAT

    def weights(self, table: Table) -> float:
        """Returns the bytes of a table with the states of the optimizer."""
        states = self.states.of_element * table.dim + self.states.of_row
        return table.bytes + table.rows * states * _FLOAT

    def own_memory(self, tables: Iterable[Table]) -> float:
        """Returns the bytes of a rank's own samples: lookups that it sends, rows that it joins."""
        found = 0.0
        for table in tables:
            bags = self.samples / self.gpus * table.features
            found += bags * table.pooling * (2 * _INDEX + _PLACE)
            found += 2 * self._passes * bags * table.dim * _FLOAT
        return found
