"""Tables, plans, batches and sharded models of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import OPTIMIZERS
from training.lookups import RankedSubject, Subject

KERNELS = ("fbgemm", "recfuse")
BATCHES = 4


class UniformSubject(RankedSubject):
    """Tables of any dims whose rows are equally hot."""

    def __init__(
        self, name: str, rows: Sequence[int], dims: Sequence[int], pooling: Sequence[int], size: int
    ) -> None:
        """`pooling`: lookups a sample, of each table."""
        super().__init__(name, rows, pooling, size)
        self.dims, self.pooling = list(dims), list(pooling)

    def ranks(self, uniform: Tensor, rows: int) -> Tensor:
        """Uniform."""
        return uniform * rows


class Pooled(nn.Module):
    """A collection, and a loss over its output."""

    def __init__(self, collection: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        """Around TorchRec's collection."""
        super().__init__()
        self.collection, self.loss = collection, loss
        self.factor = nn.Parameter(torch.ones(()))  # a dense part, which the pipelines expect

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the loss and the pooled output."""
        pooled = self.collection(batch).values()
        return self.loss(pooled.float()) * self.factor, pooled.detach()


def collection_of(subject: Subject) -> nn.Module:
    """TorchRec's collection of a subject's tables, a feature a table, without memory yet."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{n}"])
        for n, (rows, dim) in enumerate(zip(subject.rows, subject.dims, strict=True))
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def sharder_of(kernels: str, optimizer: str, rate: float) -> Any:
    """TorchRec's sharder with its own or with recfuse's kernels."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder

    from recfuse.torchrec import EmbeddingBagCollectionSharder

    kind = EmbeddingBagCollectionSharder if kernels == "recfuse" else TorchRecSharder
    return kind(
        fused_params={"optimizer": EmbOptimType[OPTIMIZERS[optimizer]], "learning_rate": rate, "eps": 1e-8}
    )


def least_loaded(costs: Sequence[float]) -> list[Any]:
    """Assigns whole tables, the most expensive first, each to the rank with the least cost."""
    from torchrec.distributed.sharding_plan import table_wise

    loads, rank_of = [0.0] * dist.get_world_size(), [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        rank_of[number] = min(range(len(loads)), key=loads.__getitem__)
        loads[rank_of[number]] += costs[number]
    return [table_wise(rank=rank, compute_kernel="fused") for rank in rank_of]


def plan_of(collection: nn.Module, tables: Sequence[Any], sharder: Any, device: torch.device) -> Any:
    """A plan in which each table is sharded by a function of TorchRec's."""
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan

    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection,
        {f"t{number}": table for number, table in enumerate(tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=device.type,
    )
    return ShardingPlan({"collection": plan})


def mean(pooled: Tensor) -> Tensor:
    """The loss of models that are timed."""
    return pooled.mean()


def model_of(
    collection: nn.Module,
    plan: Any,
    sharder: Any,
    device: torch.device,
    loss: Callable[[Tensor], Tensor] = mean,
) -> Any:
    """Creates a sharded model; models with one plan start with the same rows."""
    from torchrec.distributed import DistributedModelParallel

    model = DistributedModelParallel(Pooled(collection, loss), device=device, plan=plan, sharders=[sharder])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.startswith("collection."):
                shards = value.local_shards() if hasattr(value, "local_shards") else None
                for tensor in [value] if shards is None else [shard.tensor for shard in shards]:
                    tensor.uniform_(-0.01, 0.01)
    return model


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD of all Parameters that no kernel updates."""
    others = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    return torch.optim.SGD(others, lr=0.01)


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
