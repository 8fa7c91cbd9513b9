"""Small models that TorchRec shards, their batches, and one run of training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType

from recfuse.torchrec import EmbeddingBagCollectionSharder
from support.processes.ranks import ON_GPUS

SHARDERS = {"fbgemm": TorchRecSharder, "recfuse": EmbeddingBagCollectionSharder}
ROWS, DIMS = (20, 11, 33), (8, 16, 8)
FEATURES = (("f0",), ("f1", "f2"), ("f3",))
SHARDINGS = ("table", "row", "column", "table_row", "table_column", "grid", "data_parallel", "mixed")
BATCH = 4


def device() -> torch.device:
    """Returns this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPUS else torch.device("cpu")


class Model(nn.Module):
    """A collection, and one linear layer over it."""

    def __init__(
        self,
        weighted: bool = False,
        data_type: DataType = DataType.FP32,
        pooling: PoolingType = PoolingType.SUM,
        dims: tuple[int, ...] = DIMS,
    ) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{n}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=list(features),
                data_type=data_type,
                pooling=pooling,
            )
            for n, (rows, dim, features) in enumerate(zip(ROWS, dims, FEATURES, strict=True))
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
        columns = sum(dim * len(names) for dim, names in zip(dims, FEATURES, strict=True))
        self.over = nn.Linear(columns, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features)  # a sharded collection has its keys in another order
        return self.over(torch.cat([pooled[key] for key in ("f0", "f1", "f2", "f3")], dim=1).float())


def plan_of(model: Model, sharding: str, sharder: Any, world: int) -> ShardingPlan:
    """Each table by one sharding type; "mixed": table-wise, row-wise and data-parallel tables."""

    def generator(number: int) -> Any:
        if sharding == "mixed":
            return [table_wise(rank=0), row_wise(), data_parallel()][number]
        return {
            "table": lambda: table_wise(rank=number % world),
            "row": row_wise,
            "column": lambda: column_wise(ranks=[(number + rank) % world for rank in range(2)]),
            "table_row": lambda: table_row_wise(host_index=0),
            "table_column": lambda: column_wise(ranks=[number % world] * 2),
            "grid": lambda: grid_shard(host_indexes=[0]),
            "data_parallel": data_parallel,
        }[sharding]()

    tables = model.ebc.embedding_bag_configs()
    plan = construct_module_sharding_plan(
        model.ebc,
        {table.name: generator(number) for number, table in enumerate(tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=device().type,
    )
    for parameter in plan.values():
        if parameter.sharding_type != "data_parallel":
            parameter.compute_kernel = "fused"
    return ShardingPlan({"ebc": plan})


def sharded(
    kernels: str, sharding: str, optimizer: EmbOptimType, model: Model | None = None, **options: Any
) -> DistributedModelParallel:
    """A model whose tables are FBGEMM's or recfuse's, all values drawn from one seed."""
    model = Model() if model is None else model
    fused = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-3, "stochastic_rounding": False}
    sharder = SHARDERS[kernels](fused_params={**fused, **options})
    world = dist.get_world_size()
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device(),
        plan=plan_of(model, sharding, sharder, world),
        sharders=[sharder],
    )
    set_values(parallel)
    return parallel


def set_values(parallel: DistributedModelParallel) -> None:
    """Sets each weight from the seed of its name, whichever part of it this rank has."""
    for name, value in parallel.state_dict().items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.rand(tuple(value.size()), generator=generator) - 0.5
        for tensor, (rows, columns) in parts_of(value):
            tensor.copy_(whole[rows, columns] if whole.dim() == 2 else whole)


def parts_of(value: Any) -> list[tuple[Tensor, tuple[slice, slice]]]:
    """Returns the parts of a value of a state_dict that are on this rank, and their positions in it."""
    if not hasattr(value, "local_shards"):
        return [(value, (slice(None), slice(None)))]
    found = []
    for shard in value.local_shards():
        ranges = [
            slice(begin, begin + size)
            for begin, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        ]
        found.append((shard.tensor, (ranges[0], ranges[1] if len(ranges) > 1 else slice(None))))
    return found


def batch(step: int, rank: int, weighted: bool = False, empty: bool = False) -> KeyedJaggedTensor:
    """One rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = [ROWS[n] for n, names in enumerate(FEATURES) for _ in names]
    lengths = torch.randint(0, 1 if empty else 4, (len(rows) * BATCH,), generator=generator)
    values = [
        torch.randint(0, most, (int(lengths[n * BATCH : (n + 1) * BATCH].sum()),), generator=generator)
        for n, most in enumerate(rows)
    ]
    indices = torch.cat(values)
    weights = torch.rand(len(indices), generator=generator) if weighted else None
    keys = ["f0", "f1", "f2", "f3"]
    found = KeyedJaggedTensor(keys=keys, values=indices, lengths=lengths, weights=weights)
    return found.to(device())


def loss_of(model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    return (model(features) - 1).square().mean()


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD of all Parameters that no kernel updates: the linear layer, and data-parallel tables."""
    tables, others = [], []
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "_in_backward_optimizers"):
            (tables if ".embedding_bags." in name else others).append(parameter)
    return torch.optim.SGD([{"params": tables, "lr": 0.1}, {"params": others, "lr": 0.01}])


def train(parallel: DistributedModelParallel, steps: range, weighted: bool = False) -> list[float]:
    """Losses of this rank."""
    dense, losses = dense_optimizer(parallel), []
    for step in steps:
        loss = loss_of(parallel, batch(step, dist.get_rank(), weighted))
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def local_state(parallel: DistributedModelParallel) -> dict[str, Tensor]:
    """Weights and states of the fused optimizer on this rank, flat."""
    found = {}
    for name, value in parallel.state_dict().items():
        for number, (tensor, _) in enumerate(parts_of(value)):
            found[f"{name} {number}"] = tensor.detach().to("cpu", copy=True)
    for table, states in parallel.fused_optimizer.state_dict()["state"].items():
        for name, value in states.items():
            for number, (tensor, _) in enumerate(parts_of(value)):
                found[f"{table} {name} {number}"] = tensor.detach().to("cpu", copy=True)
    return found
