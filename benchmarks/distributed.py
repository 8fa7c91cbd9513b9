"""A training step of sharded tables on several GPUs: TorchRec with FBGEMM's and with recfuse's kernels.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --device cuda --json FILE

Both models have the same tables, plan (table-wise, longest first) and batches, which are on the GPU. A step
is the forward pass of the collection, a loss over its output, and the backward pass with the update. Rounds
alternate between the kernels; a figure is the median over rounds of the slowest rank's time of a step.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.registry import Benchmark
from common.report import write_results
from common.settings import comma_list, positive
from common.table import Table
from training.lookups import Subject, make_subject

KERNELS = ("fbgemm", "recfuse")
OPTIMIZERS = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
MODES = ("plain", "pipeline")
SUBJECTS = "mlperf-2048,mlperf-16384,A-2048,A-16384"
BATCHES = 4
STEPS = 10  # per sample

bench = Benchmark("distributed", __doc__, [], rounds=11)
bench.flag("--subjects", comma_list, comma_list(SUBJECTS), "NAME-SIZE, size of a rank's batch")
bench.flag("--optimizers", comma_list, list(OPTIMIZERS), "optimizers", allowed=OPTIMIZERS)
bench.flag("--rows-cap", positive, 4_000_000, "most rows of a table")


class Pooled(nn.Module):
    """A collection, and a loss over its output."""

    def __init__(self, collection: nn.Module) -> None:
        """Around TorchRec's collection."""
        super().__init__()
        self.collection = collection
        self.factor = nn.Parameter(torch.ones(()))  # a dense part, which the pipelines expect

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the loss and the pooled output."""
        pooled = self.collection(batch).values()
        return pooled.float().mean() * self.factor, pooled.detach()


def collection_of(subject: Subject) -> nn.Module:
    """TorchRec's collection of a subject's tables, a feature a table, without memory yet."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{n}"])
        for n, (rows, dim) in enumerate(zip(subject.rows, subject.dims, strict=True))
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def plan_of(collection: nn.Module, costs: list[float], sharder: Any, device: torch.device) -> Any:
    """Assigns whole tables, the most expensive first, each to the rank with the least cost."""
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan

    world = dist.get_world_size()
    loads, rank_of = [0.0] * world, {}
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        rank = min(range(world), key=loads.__getitem__)
        rank_of[f"t{number}"] = table_wise(rank=rank, compute_kernel="fused")
        loads[rank] += costs[number]
    plan = construct_module_sharding_plan(
        collection, rank_of, sharder=sharder, local_size=world, world_size=world, device_type=device.type
    )
    return ShardingPlan({"collection": plan})


def model_of(kernels: str, subject: Subject, costs: list[float], optimizer: str, device: torch.device) -> Any:
    """Creates a sharded model; both kernels start with the same rows."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder

    from recfuse.torchrec import EmbeddingBagCollectionSharder

    kind = EmbeddingBagCollectionSharder if kernels == "recfuse" else TorchRecSharder
    options = {"optimizer": EmbOptimType[OPTIMIZERS[optimizer]], "learning_rate": 0.01, "eps": 1e-8}
    sharder = kind(fused_params=options)
    collection = collection_of(subject)
    plan = plan_of(collection, costs, sharder, device)
    model = DistributedModelParallel(Pooled(collection), device=device, plan=plan, sharders=[sharder])
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.startswith("collection."):
                for shard in value.local_shards():
                    shard.tensor.uniform_(-0.01, 0.01)
    return model


def batches_of(subject: Subject, seed: int, device: torch.device) -> tuple[list[Any], list[float]]:
    """Creates keyed batches of this rank; returns them and the cost of each table: lookups times dim."""
    from torchrec import KeyedJaggedTensor

    keys = [f"f{n}" for n in range(len(subject.rows))]
    found, lookups = [], [0] * len(keys)
    for batch in subject.make(range(seed, seed + BATCHES), device):
        sizes = batch.offsets.diff().int()
        found.append(KeyedJaggedTensor(keys=keys, values=batch.indices.long(), lengths=sizes))
        lookups = [total + int(count) for total, count in zip(lookups, batch.lengths, strict=True)]
    return found, [count * dim for count, dim in zip(lookups, subject.dims, strict=True)]


def stepper(model: Any, batches: list[Any], mode: str, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that makes STEPS steps and returns the last output."""
    dense = torch.optim.SGD([p for p in model.parameters() if p.dim() == 0], lr=0.0)
    if mode == "plain":

        def plain() -> Tensor:
            for step in range(STEPS):
                loss, pooled = model(batches[step % len(batches)])
                loss.backward()
            return pooled

        return plain
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    pipeline = TrainPipelineSparseDist(model, dense, device)

    def endless() -> Iterator[Any]:
        while True:
            yield from batches

    source = endless()

    def pipelined() -> Tensor:
        for _ in range(STEPS):
            pooled = pipeline.progress(source)
        return pooled

    return pipelined


def seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Returns the slowest rank's time of a step."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    used = torch.tensor((time.perf_counter() - begin) / STEPS, device=device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return used.item()


def measure(
    name: str, optimizer: str, arguments: argparse.Namespace, device: torch.device
) -> tuple[Table, dict[str, Any]]:
    """Compares the kernels on one subject."""
    subject = make_subject(name, arguments.seed, arguments.rows_cap, arguments.rows_cap)
    batches, costs = batches_of(subject, arguments.seed + 1000 * dist.get_rank(), device)
    total = torch.tensor(costs, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    models = {kernels: model_of(kernels, subject, total.tolist(), optimizer, device) for kernels in KERNELS}
    outputs = [model(batches[0])[1] for model in models.values()]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    title = f"{name}, {optimizer}: µs a step, slowest of {dist.get_world_size()} ranks"
    table = Table(title, ["mode", *KERNELS, "recfuse over fbgemm"])
    record: dict[str, Any] = {}
    for mode in MODES:
        calls = {kernels: stepper(model, batches, mode, device) for kernels, model in models.items()}
        for call in calls.values():
            call()
        samples: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
        for _ in range(arguments.rounds):
            for kernels, call in calls.items():
                samples[kernels].append(seconds(call, device) * 1e6)
        middle = [statistics.median(samples[kernels]) for kernels in KERNELS]
        table.rows.append([mode, *(f"{each:.0f}" for each in middle), f"{middle[0] / middle[1]:.2f}x"])
        record[mode] = samples
    return table, record


def main() -> None:
    """Runs the command line; see the module's docstring."""
    parser, arguments = bench.parse()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as in --help")
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tables, records = [], {}
    for name in arguments.subjects:
        for optimizer in arguments.optimizers:
            table, records[f"{name}, {optimizer}"] = measure(name, optimizer, arguments, device)
            tables.append(table)
            if dist.get_rank() == 0:
                table.show(arguments.markdown)
                results = {"ranks": dist.get_world_size(), "samples_us": records}
                write_results(arguments.json, tables, results, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
