"""How ``recfuse.torchrec.planner`` rates plans. No GPU is needed."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ParameterConstraints

from recfuse.perf.choosing import choose
from recfuse.torchrec import EmbeddingBagCollectionSharder, planner
from recfuse.torchrec.plan_times import PlanTimes, host_ms

WORLD = 2


def planned(seed: int, batch: int, most_pooling: float = 100.0, make=planner, **options):
    """The best plan of a random collection."""
    rng = random.Random(seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}",
            num_embeddings=round(10 ** rng.uniform(2, 6)),
            embedding_dim=rng.choice((8, 32, 128)),
            feature_names=[f"f{n}"],
        )
        for n in range(rng.choice((4, 10, 20)))
    ]
    constraints = {
        table.name: ParameterConstraints(pooling_factors=[rng.choice((1.0, 20.0, most_pooling))])
        for table in tables
    }
    topology = Topology(world_size=WORLD, compute_device="cuda", hbm_cap=2000 << 30)
    found = make(topology=topology, batch_size=batch, constraints=constraints, debug=False, **options)
    found.plan(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")), [EmbeddingBagCollectionSharder()]
    )
    return topology, found._best_plan


def types_of(plan) -> set[str]:
    return {option.sharding_type for option in plan}


def test_plans_of_small_batches_have_one_sharding_type():
    mixed = 0
    for seed in range(6):
        _, plan = planned(seed, 2048)
        assert len(types_of(plan)) == 1 and host_ms(plan) == 0
        topology, others = planned(seed, 2048, make=EmbeddingShardingPlanner)
        mixed += len(types_of(others)) > 1
        rating = PlanTimes(topology, choose("H100").calibration.bags)
        assert rating.rate(plan) <= rating.rate(others)
    assert mixed > 0


def test_a_plan_of_several_sharding_types_is_chosen_if_its_tables_gain_more_than_the_host_loses():
    noop, model = NoopPerfModel, choose("H100").calibration.bags
    gains = 0
    for seed in range(6):
        topology, ours = planned(seed, 1 << 20)
        _, best = planned(seed, 1 << 20, performance_model=noop(topology))
        rating = PlanTimes(topology, model)
        assert rating.rate(ours) <= rating.rate(best)
        gains += len(types_of(ours)) > 1
    assert gains > 0


def test_a_rating_is_the_slowest_rank_with_launches_and_the_host():
    model = choose("H100").calibration.bags
    launches = (model.forward_rates.launches + model.backward_rates.launches) / 1e3
    topology, plan = planned(0, 2048, performance_model=NoopPerfModel(Topology(WORLD, "cuda")))
    assert len(types_of(plan)) > 1
    rating = PlanTimes(topology, model)
    ranks, kernels, groups = [0.0] * WORLD, [0.0] * WORLD, [set() for _ in range(WORLD)]
    for option in plan:
        for shard in option.shards:
            ranks[shard.rank] += shard.perf.total
            kernels[shard.rank] += shard.perf.fwd_compute + shard.perf.bwd_compute
            groups[shard.rank].add(option.sharding_type)
    counts = [len(each) for each in groups]
    assert max(counts) > 1
    expected = [each + count * launches for each, count in zip(kernels, counts, strict=True)]
    assert rating.kernels_ms(plan) == pytest.approx(expected)
    slowest = max(each + count * launches for each, count in zip(ranks, counts, strict=True))
    assert rating.rate(plan) == pytest.approx(slowest + host_ms(plan))


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (["table_wise"], 0.0),
        (["data_parallel"], 0.0),
        (["table_wise", "row_wise"], 3.0),
        (["table_wise", "data_parallel"], 1.5),
        (["table_wise", "row_wise", "data_parallel"], 4.5),
    ],
)
def test_the_time_of_the_host(types, expected):
    class Option:
        def __init__(self, path, kind):
            self.path, self.sharding_type = path, kind

    plan = [Option("a", kind) for kind in types]
    assert host_ms(plan) == expected
    assert host_ms([*plan, *(Option("b", kind) for kind in types)]) == 2 * expected
