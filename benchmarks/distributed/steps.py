"""Steps of TorchRec's models with FBGEMM's and with recfuse's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from common.table import Table, times
from distributed.clocks import KernelCalls, Samples, compare, kernel_samples, medians, pipelined, plain
from distributed.models import (
    KERNELS,
    UniformSubject,
    batches_of,
    collection_of,
    least_loaded,
    model_of,
    plan_of,
    sharder_of,
)
from distributed.setting import Part, Ranks
from training.lookups import make_subject

RATE = 0.01
LOSS_STEPS = 50
LOSSES = UniformSubject("losses", (1000, 300, 20_000, 50), (64, 32, 128, 16), (3, 1, 5, 2), 256)
LOSS_RATES = {"sgd": 1.0, "rowwise_adagrad": 0.01}
ALLOWED = 1e-3  # relative difference of losses


def steps(setting: Ranks) -> Iterator[Part]:
    """A figure for each subject and optimizer."""
    arguments, device = setting.arguments, setting.device
    for name in arguments.subjects:
        subject = make_subject(name, arguments.seed, arguments.rows_cap, arguments.rows_cap)
        batches, costs = batches_of(subject, arguments.seed + 1000 * dist.get_rank(), device)
        total = torch.tensor(costs, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        for optimizer in arguments.optimizers:
            if setting.is_late():
                return
            models = {}
            for kernels in KERNELS:
                sharder, collection = sharder_of(kernels, optimizer, RATE), collection_of(subject)
                plan = plan_of(collection, least_loaded(total.tolist()), sharder, device)
                models[kernels] = model_of(collection, plan, sharder, device)
            yield measure(f"{name}, {optimizer}", models, batches, setting)
            models.clear()
            setting.release()


def measure(name: str, models: dict[str, Any], batches: list[Any], setting: Ranks) -> Part:
    """Compares the kernels on one subject."""
    from recfuse.torchrec import uses_recfuse

    device, rounds = setting.device, setting.arguments.rounds
    if [uses_recfuse(models[kernels]) for kernels in KERNELS] != [False, True]:
        raise AssertionError(f"{name}: a model has the kernels of another model, or a rank has no table")
    outputs = [model(batches[0])[1] for model in models.values()]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    del outputs
    table = Table(
        f"{name}: µs a step, slowest of {dist.get_world_size()} ranks",
        ["mode", *KERNELS, "recfuse over fbgemm"],
        notes=[setting.clock_of_kernels],
    )
    record: dict[str, Any] = {}

    def add(mode: str, samples: Samples) -> None:
        record[mode] = samples
        middle = medians(samples)
        table.rows.append([mode, *(f"{each:.0f}" for each in middle), times(middle[0] / middle[1])])

    add(
        "plain",
        compare({kernels: plain(model, batches) for kernels, model in models.items()}, rounds, device),
    )
    calls = {kernels: KernelCalls(model, batches) for kernels, model in models.items()}
    parts = kernel_samples(calls, device)
    calls.clear()
    setting.release()
    runs = {kernels: pipelined(model, batches, device) for kernels, model in models.items()}
    add("pipeline", compare(runs, rounds, device))
    for mode, samples in parts.items():
        add(mode, samples)
    return Part(f"steps {name}", table, record)


def losses(setting: Ranks) -> Iterator[Part]:
    """Losses of a training with each way to shard."""
    from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

    device, world = setting.device, dist.get_world_size()
    ways = {
        "table-wise": lambda number: table_wise(rank=number % world, compute_kernel="fused"),
        "row-wise": lambda number: row_wise(compute_kernel="fused"),
        "column-wise": lambda number: column_wise(
            ranks=[(number + rank) % world for rank in range(2)], compute_kernel="fused"
        ),
    }
    batches, _ = batches_of(LOSSES, 1000 * dist.get_rank(), device)
    table = Table(
        f"losses of {LOSS_STEPS} steps on {world} ranks",
        ["sharding, optimizer", "first", "last, fbgemm", "last, recfuse", "largest relative difference"],
    )
    record: dict[str, Any] = {}
    for way, of_table in ways.items():
        for optimizer in setting.arguments.optimizers:
            if setting.is_late():
                return
            found = {}
            for kernels in KERNELS:
                sharder, collection = (
                    sharder_of(kernels, optimizer, LOSS_RATES[optimizer]),
                    collection_of(LOSSES),
                )
                tables = [of_table(number) for number in range(len(LOSSES.rows))]
                plan = plan_of(collection, tables, sharder, device)
                model = model_of(collection, plan, sharder, device, distance_to_one)
                found[kernels] = train(model, batches)
            theirs, own = (torch.tensor(each, dtype=torch.float64) for each in found.values())
            largest = ((own - theirs).abs() / theirs).max().item()
            if not largest <= ALLOWED:
                raise AssertionError(
                    f"{way} {optimizer}: losses differ by {largest}; expected at most {ALLOWED} ({found})"
                )
            row = [f"{theirs[0]:.5f}", f"{theirs[-1]:.5f}", f"{own[-1]:.5f}", f"{largest:.1e}"]
            table.rows.append([f"{way}, {optimizer}", *row])
            record[f"{way}, {optimizer}"] = found
            yield Part("losses", table, record)


def distance_to_one(pooled: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient depends on the rows."""
    return (pooled - 1).square().sum(1).mean()


def train(model: Any, batches: list[Any]) -> list[float]:
    """Returns the losses of this rank."""
    found = []
    for step in range(LOSS_STEPS):
        loss, _ = model(batches[step % len(batches)])
        loss.backward()
        found.append(loss.detach())
    return torch.stack(found).tolist()
