"""Random collections under TorchRec's default plan and under the plan of recfuse's planner."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from common.table import Table, times
from distributed.clocks import KernelCalls, compare, kernel_samples, medians, plain
from distributed.models import Pooled, UniformSubject, batches_of, collection_of, mean, model_of, sharder_of
from distributed.setting import Part, Ranks

PLANNERS = ("torchrec", "recfuse")
OPTIMIZER = "rowwise_adagrad"
RATE = 0.01
MEMORY = 60 << 30  # bytes of a rank's tables
DIMS, TABLES, POOLING = (8, 16, 32, 64, 128), (4, 10, 30), (1, 3, 20, 100)
LEAST_ROWS = 100


def random_subject(seed: int, rows_cap: int, sizes: list[int]) -> UniformSubject:
    """Tables of random sizes and pooling factors."""
    rng = random.Random(seed)
    count, size = rng.choice(TABLES), rng.choice(sizes)
    rows = [round(LEAST_ROWS * (rows_cap / LEAST_ROWS) ** rng.random()) for _ in range(count)]
    dims = [rng.choice(DIMS) for _ in rows]
    return UniformSubject(f"{seed}", rows, dims, [rng.choice(POOLING) for _ in rows], size)


def plan_by(kind: str, subject: UniformSubject, setting: Ranks) -> tuple[Any, nn.Module, Any, list[float]]:
    """Returns a plan with its collection and sharder, and the estimated µs of each rank's kernels."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    from recfuse.torchrec import planner

    world = dist.get_world_size()
    # The calibration is of GPUs: on a CPU, its plan is made as for GPUs.
    topology = Topology(world_size=world, local_world_size=world, compute_device="cuda", hbm_cap=MEMORY)
    constraints = {
        f"t{n}": ParameterConstraints(pooling_factors=[float(factor)])
        for n, factor in enumerate(subject.pooling)
    }
    make = planner if kind == "recfuse" else EmbeddingShardingPlanner
    found = make(topology=topology, batch_size=subject.size, constraints=constraints, debug=False)
    sharder, collection = sharder_of("recfuse", OPTIMIZER, RATE), collection_of(subject)
    plan = found.collective_plan(Pooled(collection, mean), [sharder], dist.group.WORLD)
    estimates: list[Any] = [[0.0] * world]
    if dist.get_rank() == 0:
        estimates = [estimates_us(found, world)]
    dist.broadcast_object_list(estimates, device=setting.device)
    return plan, collection, sharder, estimates[0]


def estimates_us(planner: Any, world: int) -> list[float]:
    """Returns a planner's estimate of each rank's kernels in its plan."""
    if hasattr(planner._perf_model, "kernels_ms"):
        return [1e3 * ms for ms in planner._perf_model.kernels_ms(planner._best_plan)]
    ranks = [0.0] * world
    for option in planner._best_plan:
        for shard in option.shards:
            ranks[shard.rank] += (shard.perf.fwd_compute + shard.perf.bwd_compute) * 1e3
    return ranks


def on_device(plan: Any, device: Any) -> None:
    """Moves the shards of a plan to CPUs for a trial run without GPUs."""
    if device.type == "cuda":
        return
    for tables in plan.plan.values():
        for table in tables.values():
            for shard in getattr(table.sharding_spec, "shards", ()):
                shard.placement = dist._remote_device(f"rank:{shard.placement.rank()}/{device}")


def kinds_of(plan: Any) -> str:
    """Returns how many tables are sharded in each way."""
    counts = Counter(table.sharding_type for tables in plan.plan.values() for table in tables.values())
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def plans(setting: Ranks) -> Iterator[Part]:
    """A row for each collection."""
    arguments, device = setting.arguments, setting.device
    columns = ["collection", "torchrec's plan", "recfuse's plan", "faster", "kernels, torchrec's plan"]
    columns += ["kernels, recfuse's plan", "estimate", "estimate over measured"]
    table = Table(f"plans: µs a step, slowest of {dist.get_world_size()} ranks", columns)
    table.notes = [setting.clock_of_kernels]
    record: dict[str, Any] = {}
    for seed in range(arguments.collections):
        if setting.is_late():
            return
        subject = random_subject(seed, arguments.rows_cap, [int(size) for size in arguments.plan_sizes])
        batches, _ = batches_of(subject, 1000 * (dist.get_rank() + 1) + 10 * seed, device)
        models, about = {}, {}
        for kind in PLANNERS:
            begin = time.monotonic()
            plan, collection, sharder, estimates = plan_by(kind, subject, setting)
            about[kind] = {
                "estimates_us": estimates,
                "planning_s": time.monotonic() - begin,
                "shardings": kinds_of(plan),
                "tables": {
                    name: [each.sharding_type, each.compute_kernel, each.ranks]
                    for of in plan.plan.values()
                    for name, each in of.items()
                },
            }
            on_device(plan, device)
            models[kind] = model_of(collection, plan, sharder, device)
        samples = compare({k: plain(model, batches) for k, model in models.items()}, arguments.rounds, device)
        kernels = kernel_samples({k: KernelCalls(model, batches) for k, model in models.items()}, device)
        theirs, own = medians(samples)
        kernels_of_theirs, kernels_of_own = medians(kernels["lookup and update"])
        estimate = max(about["recfuse"]["estimates_us"])
        cells = [theirs, own, kernels_of_theirs, kernels_of_own, estimate]
        texts = [f"{cell:.0f}" for cell in cells]
        row = [*texts[:2], times(theirs / own), *texts[2:], f"{estimate / kernels_of_own:.2f}"]
        table.rows.append([f"{seed}: {len(subject.rows)} tables, {subject.size} samples", *row])
        sizes = {"rows": subject.rows, "dims": subject.dims, "pooling": subject.pooling, "size": subject.size}
        record[str(seed)] = {"subject": sizes, "plans": about, "samples_us": samples, "kernels_us": kernels}
        yield Part("plans", table, record)
        models.clear()
        setting.release()
