"""``recfuse.torchrec.planner``: TorchRec's plans with estimates of recfuse's kernels. No GPU is needed."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints

from recfuse.perf.calibration import Calibration
from recfuse.perf.choosing import choose
from recfuse.perf.models.bags import BACKWARD, FORWARD, Bags, States
from recfuse.torchrec import EmbeddingBagCollectionSharder, planner
from recfuse.torchrec.calibrated_planner import bytes_per_ms

WORLD, BATCH = 4, 512
COLLECTIONS = 20
STATES = {
    EmbOptimType.EXACT_SGD: States(),
    EmbOptimType.EXACT_ADAGRAD: States(of_element=1),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: States(of_row=1),
    EmbOptimType.ADAM: States(of_element=2),
}
PARTS = {"table_wise": (1, 1), "column_wise": (1, 2), "row_wise": (WORLD, 1), "table_row_wise": (2, 1)}
# of a shard: parts of the rows, parts of the columns


@pytest.fixture(scope="module")
def h100() -> Calibration:
    return choose("H100").calibration


def topology(memory: int = 70 << 30, hosts: int = 1, **options) -> Topology:
    return Topology(
        world_size=WORLD,
        local_world_size=WORLD // hosts,
        compute_device="cuda",
        hbm_cap=memory,
        **options,
    )


def collection(tables: dict[str, tuple[int, int]], **options) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"feature of {name}"]
        )
        for name, (rows, dim) in tables.items()
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"), **options)


def options_of(
    rows=100_000, dim=64, batch=BATCH, pooling=5.0, optimizer=EmbOptimType.EXACT_SGD, weighted=False, hosts=1,
    **options,
):  # fmt: skip
    """The options of one table, by sharding type."""
    constraints = {"t": ParameterConstraints(pooling_factors=[pooling], min_partition=dim // 2)}
    ours = planner(topology(hosts=hosts), batch, constraints=constraints, **options)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})
    module = collection({"t": (rows, dim)}, is_weighted=weighted)
    found = ours._enumerator.enumerate(module, [sharder])
    return {option.sharding_type: option for option in found}


def random_collection(seed: int):
    rng = random.Random(seed)
    tables = {
        f"t{n}": (round(10 ** rng.uniform(2, 7)), rng.choice((8, 16, 32, 64, 128)))
        for n in range(rng.choice((2, 9, 30)))
    }
    constraints = {
        name: ParameterConstraints(pooling_factors=[rng.choice((1.0, 3.0, 20.0, 100.0))]) for name in tables
    }
    return tables, constraints


@pytest.mark.parametrize("seed", range(COLLECTIONS))
def test_plans_cover_each_table_once_within_memory(seed):
    tables, constraints = random_collection(seed)
    size = sum(rows * dim * 4 for rows, dim in tables.values())
    memory = 4 * size // WORLD + (1 << 30)
    ours = planner(topology(memory), BATCH, constraints=constraints, debug=False)
    module = collection(tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    plan = ours.plan(module, [EmbeddingBagCollectionSharder()]).plan
    estimated = [0] * WORLD  # with states of the optimizer, inputs and outputs
    for option in ours._best_plan:
        for shard in option.shards:
            estimated[shard.rank] += shard.storage.hbm
    assert max(estimated) <= memory
    assert list(plan) == [""] and set(plan[""]) == set(tables)
    used = [0] * WORLD
    for name, parameter in plan[""].items():
        assert parameter.compute_kernel in ("fused", "dense")
        if parameter.sharding_type == "data_parallel":
            used = [bytes + tables[name][0] * tables[name][1] * 4 for bytes in used]
            continue
        covered = torch.zeros(tables[name], dtype=torch.uint8)
        for shard in parameter.sharding_spec.shards:
            row, column = shard.shard_offsets
            rows, columns = shard.shard_sizes
            covered[row : row + rows, column : column + columns] += 1
            used[shard.placement.rank()] += rows * columns * 4
        assert covered.min() == covered.max() == 1
    assert max(used) <= memory
    for rows, storage in zip(used, estimated, strict=True):
        assert 2 * rows <= storage  # Adagrad has a state for each element


@pytest.mark.parametrize("seed", range(COLLECTIONS))
def test_estimates_of_a_collection_grow_with_the_batch(seed):
    tables, constraints = random_collection(seed)
    found = []
    for batch in (64, 512, 4096):
        ours = planner(topology(), batch, constraints=constraints)
        options = ours._enumerator.enumerate(collection(tables), [EmbeddingBagCollectionSharder()])
        found.append({(o.name, o.sharding_type): [shard.perf for shard in o.shards] for o in options})
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for key, smallest in found[0].items():
        for shards in zip(smallest, *(each[key] for each in found[1:]), strict=True):
            for part in ("fwd_compute", "bwd_compute"):
                times = [getattr(perf, part) for perf in shards]
                assert 0 < times[0] < times[1] < times[2], (key, part)


@pytest.mark.parametrize("optimizer", STATES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("weighted", [False, True])
def test_estimates_equal_the_model_of_bags(h100, optimizer, weighted):
    rows, dim, pooling = 100_000, 64, 5
    found = options_of(rows, dim, BATCH, pooling, optimizer, weighted, hosts=2)
    for sharding, (row_parts, column_parts) in PARTS.items():
        bags = Bags(
            BATCH * WORLD,
            BATCH * WORLD * pooling / row_parts,
            rows / row_parts,
            dim / column_parts,
            weighted=weighted,
        )
        assert len(found[sharding].shards) == row_parts * column_parts
        for shard in found[sharding].shards:
            assert shard.perf.fwd_compute * 1e3 == pytest.approx(h100.bags.forward(bags))
            assert shard.perf.bwd_compute * 1e3 == pytest.approx(h100.bags.backward(bags, STATES[optimizer]))
    shard = found["data_parallel"].shards[0]
    own = Bags(BATCH, BATCH * pooling, rows, dim, weighted=weighted)
    assert shard.perf.fwd_compute * 1e3 == pytest.approx(h100.bags.forward(own))
    assert shard.perf.bwd_compute * 1e3 == pytest.approx(h100.bags.backward(own, None))


def test_a_rank_is_the_sum_of_its_shards(h100):
    tables, constraints = random_collection(7)
    only = {
        name: dataclasses.replace(each, sharding_types=["table_wise"]) for name, each in constraints.items()
    }
    ours = planner(topology(), BATCH, constraints=only, debug=False)
    plan = ours.plan(collection(tables), [EmbeddingBagCollectionSharder()]).plan[""]
    estimated, expected = [0.0] * WORLD, [0.0] * WORLD
    for option in ours._best_plan:
        shard = option.shards[0]
        estimated[shard.rank] += (shard.perf.fwd_compute + shard.perf.bwd_compute) * 1e3
    for name, parameter in plan.items():
        bags = Bags(BATCH * WORLD, BATCH * WORLD * constraints[name].pooling_factors[0], *tables[name])
        expected[parameter.ranks[0]] += h100.bags.forward(bags) + h100.bags.backward(bags, States())
    assert estimated == pytest.approx(expected) and min(estimated) > 0


@pytest.mark.parametrize("name", ["rows", "batch", "pooling", "dim"])
def test_estimates_grow(name):
    sizes = {
        "rows": (100, 1000, 30_000, 10**6, 10**8),
        "batch": (64, 512, 4096),
        "pooling": (1.0, 2.0, 7.0, 100.0),
        "dim": (8, 16, 64, 256),
    }
    found = [options_of(**{name: size}) for size in sizes[name]]
    for sharding in (*PARTS, "data_parallel"):
        for part in ("fwd_compute", "bwd_compute"):
            times = [getattr(options[sharding].shards[0].perf, part) for options in found]
            assert times == sorted(times) and times[-1] > times[0], (sharding, part)


def test_forward_and_backward_have_rates_of_their_own(h100):
    def changed(kind: str) -> Calibration:
        points = {**h100.points, kind: [[*row[:-2], 2 * row[-2], row[-1]] for row in h100.points[kind]]}
        return dataclasses.replace(h100, points=points)

    usual = options_of(calibration=h100)["table_wise"].shards[0].perf
    forward = options_of(calibration=changed(FORWARD))["table_wise"].shards[0].perf
    backward = options_of(calibration=changed(BACKWARD))["table_wise"].shards[0].perf
    assert forward.fwd_compute == pytest.approx(2 * usual.fwd_compute)
    assert forward.bwd_compute == usual.bwd_compute
    assert backward.bwd_compute == pytest.approx(2 * usual.bwd_compute)
    assert backward.fwd_compute == usual.fwd_compute
    assert forward.fwd_comms == usual.fwd_comms and backward.bwd_comms == usual.bwd_comms


def test_constants_of_torchrec_do_not_count(h100):
    usual = options_of()["table_wise"].shards[0].perf
    other = topology(hbm_mem_bw=1.0, bwd_compute_multiplier=100.0)
    constraints = {"t": ParameterConstraints(pooling_factors=[5.0], min_partition=32)}
    module, sharder = collection({"t": (100_000, 64)}), EmbeddingBagCollectionSharder()
    found = planner(other, BATCH, constraints=constraints)._enumerator.enumerate(module, [sharder])
    own = next(option for option in found if option.sharding_type == "table_wise").shards[0].perf
    assert own == usual
    theirs = EmbeddingShardingPlanner(topology=topology(), batch_size=BATCH, constraints=constraints)
    found = theirs._enumerator.enumerate(module, [sharder])
    default = next(option for option in found if option.sharding_type == "table_wise").shards[0].perf
    assert default.fwd_comms == own.fwd_comms
    assert default.fwd_compute > 2 * own.fwd_compute  # 897 GB/s, and 1.15 for 64 columns
    assert bytes_per_ms(h100) * 1e3 > 2.5e12


def test_sequences_keep_the_estimates_of_torchrec():
    table = EmbeddingConfig(name="t", num_embeddings=1000, embedding_dim=64, feature_names=["f"])
    module = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder()
    found = [
        kind._enumerator.enumerate(module, [sharder])
        for kind in (
            planner(topology(), BATCH),
            EmbeddingShardingPlanner(topology=topology(), batch_size=BATCH),
        )
    ]
    for own, theirs in zip(*found, strict=True):
        assert [shard.perf for shard in own.shards] == [shard.perf for shard in theirs.shards]


def test_an_optimizer_of_the_parameter_counts(h100):
    module = collection({"t": (100_000, 64)})
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    constraints = {"t": ParameterConstraints(pooling_factors=[5.0], sharding_types=["table_wise"])}
    ours = planner(topology(), BATCH, constraints=constraints)
    (option,) = ours._enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    bags = Bags(BATCH * WORLD, BATCH * WORLD * 5, 100_000, 64)
    expected = h100.bags.backward(bags, States(of_element=1))
    assert option.shards[0].perf.bwd_compute * 1e3 == pytest.approx(expected)


def test_without_a_calibration_of_the_device(h100, tmp_path, monkeypatch):
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    cpu = Topology(world_size=2, compute_device="cpu")
    with pytest.raises(
        ValueError, match=r"planner: .*cpu, which has no calibration; expected H100 .*--calibrate"
    ):
        planner(cpu, BATCH)
    with pytest.raises(ValueError, match=r"planner: .*of H100, gpu is cpu"):
        planner(cpu, BATCH, h100)
    with pytest.raises(ValueError, match=r"planner: .*of the CPU.*expected a calibration of a GPU"):
        planner(topology(), BATCH, dataclasses.replace(h100, gpu="cpu"))
    with pytest.raises(ValueError, match=r"planner: .*0 points of recfuse_fused.*backward.*Calibrate again"):
        planner(topology(), BATCH, dataclasses.replace(h100, points={**h100.points, BACKWARD: []}))
    with pytest.raises(ValueError, match=r"planner: .*no points of pointwise_2.*--calibrate"):
        planner(topology(), BATCH, dataclasses.replace(h100, points={**h100.points, "pointwise_2": []}))
    with pytest.raises(ValueError, match=r"compute_device is mtia.*cuda"):
        planner(Topology(world_size=2, compute_device="mtia"), BATCH)


def test_a_calibration_from_a_file(h100, tmp_path):
    path = tmp_path / "H100-torch2.11.json"
    h100.save(path)
    perfs = [options_of(calibration=each)["row_wise"].shards[0].perf for each in (None, path, h100)]
    assert perfs[1].fwd_compute == pytest.approx(perfs[0].fwd_compute, rel=1e-3)
    assert perfs[2] == perfs[0]
