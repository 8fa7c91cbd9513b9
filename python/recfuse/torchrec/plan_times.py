"""Times of a plan that belong to no single table: launches, and the host's work for each sharding type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PerfModel, ShardingOption
from torchrec.distributed.types import ShardingType

from recfuse.perf.models.bags import BagModel
from recfuse.torchrec.options import KERNELS

_KERNELS = tuple(kernel.value for kernel in KERNELS)
_US_PER_MS = 1e3
# Milliseconds of a step on the host, measured by the benchmark of sharded tables (part "plans") on two H200s.
_TYPE_MS = 3.0  # of each further sharding type that exchanges indices and pooled rows
_REPLICATED_MS = 1.5  # of data-parallel tables beside others


class PlanTimes(PerfModel):
    """Rates a plan by the time of its slowest rank and of the host.

    TorchRec's rating is the sum of a rank's shards. But a collection makes calls for each of its sharding
    types: a launch of each kernel on each rank, and on the host exchanges of indices and of pooled rows. For
    small batches the calls exceed the time of the tables, so that a plan of one sharding type is faster than
    a plan that shards each table best.
    """

    def __init__(self, topology: Topology, model: BagModel) -> None:
        """Create the rating of plans for a topology; ``model`` has the rates of launches."""
        self._ranks, self._model = topology.world_size, model

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return milliseconds of a step; the planner takes the plan with the least."""
        ranks = self._launches_ms(plan)
        for option in plan:
            for shard in option.shards:
                ranks[shard.rank] += shard.perf.total  # type: ignore[index, union-attr]
        return max(ranks) + host_ms(plan)

    def kernels_ms(self, plan: Sequence[ShardingOption]) -> list[float]:
        """Return the milliseconds of each rank's lookups and updates in a step, with their launches."""
        ranks = self._launches_ms(plan)
        for option in plan:
            for shard in option.shards:
                perf = shard.perf
                ranks[shard.rank] += perf.fwd_compute + perf.bwd_compute  # type: ignore[index, union-attr]
        return ranks

    def _launches_ms(self, plan: Iterable[ShardingOption]) -> list[float]:
        groups = {
            (option.path, option.sharding_type, shard.rank)
            for option in plan
            if option.is_pooled and option.compute_kernel in _KERNELS
            for shard in option.shards
        }
        launches = (self._model.forward_rates.launches + self._model.backward_rates.launches) / _US_PER_MS
        ranks = [0.0] * self._ranks
        for *_, rank in groups:
            ranks[rank] += launches  # type: ignore[index]
        return ranks


def host_ms(plan: Iterable[ShardingOption]) -> float:
    """Return the milliseconds of a step that the host needs for sharding types beyond the first of each
    collection.
    """
    types: dict[str, set[str]] = {}
    for option in plan:
        types.setdefault(option.path, set()).add(option.sharding_type)
    total = 0.0
    for of_collection in types.values():
        exchanging = of_collection - {ShardingType.DATA_PARALLEL.value}
        if exchanging:
            total += _TYPE_MS * (len(exchanging) - 1) + _REPLICATED_MS * (exchanging != of_collection)
    return total
