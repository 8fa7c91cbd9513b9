"""Trains a DLRM whose tables TorchRec shards over processes, with recfuse's kernels.

    torchrun --standalone --nproc-per-node 2 examples/distributed/torchrec_dlrm.py

runs on two GPUs, or on CPUs without GPUs. `--kernels fbgemm` trains the same model with TorchRec's own
kernels, from other random rows. Needs torchrec and fbgemm-gpu, or fbgemm-gpu-cpu.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain

from recfuse.torchrec import EmbeddingBagCollectionSharder, planner

DENSE, ROWS, DIM = 13, (100_000, 40_000, 5_000, 300, 20, 3), 32


def make_model(device: torch.device) -> DLRMTrain:
    """Returns a DLRM with a table per feature."""
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n, rows in enumerate(ROWS)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=DENSE,
            dense_arch_layer_sizes=[64, DIM],
            over_arch_layer_sizes=[64, 1],
            dense_device=device,
        )
    )


def make_batch(size: int, generator: torch.Generator, device: torch.device) -> Batch:
    """Returns random samples; the label depends on the first feature, so that the model can learn."""
    lengths = torch.randint(1, 4, (len(ROWS) * size,), generator=generator)
    counts = lengths.view(len(ROWS), size).sum(1).tolist()
    indices = torch.cat(
        [torch.randint(0, rows, (n,), generator=generator) for rows, n in zip(ROWS, counts, strict=True)]
    )
    keys = [f"f{n}" for n in range(len(ROWS))]
    sparse = KeyedJaggedTensor(keys=keys, values=indices, lengths=lengths).to(device)
    dense = torch.rand(size, DENSE, generator=generator)
    labels = (dense[:, 0] + 0.2 * torch.rand(size, generator=generator) > 0.6).float()
    return Batch(dense.to(device), sparse, labels.to(device))


def main() -> None:
    """Trains, and prints losses and the time of a step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", choices=["recfuse", "fbgemm"], default="recfuse")
    parser.add_argument("--batch", type=int, default=512, help="samples of a process and step")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model = make_model(device)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    # The only line that differs from a script without recfuse:
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    if arguments.kernels == "fbgemm":
        sharder = TorchRecSharder(fused_params=fused)
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    if on_gpu and arguments.kernels == "recfuse":  # plans by the times of recfuse's kernels on this GPU
        chosen = planner(topology, arguments.batch, debug=False)
    else:
        chosen = EmbeddingShardingPlanner(topology=topology, batch_size=arguments.batch, debug=False)
    plan = chosen.collective_plan(model, [sharder], dist.group.WORLD)
    parallel = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    dense = [p for name, p in parallel.named_parameters() if ".embedding_bags." not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.05)

    generator = torch.Generator().manual_seed(rank)
    begin = time.perf_counter()
    for step in range(arguments.steps):
        loss, _ = parallel(make_batch(arguments.batch, generator, device))
        optimizer.zero_grad()
        loss.backward()  # also updates the tables
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        used = (time.perf_counter() - begin) / arguments.steps * 1e3
        print(f"{arguments.kernels}: loss {loss.item():.4f}, {used:.1f} ms a step with its batch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
