"""Trains a DLRM whose tables are on several ranks, saves it, and resumes on another number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/distributed/train.py --save /tmp/dlrm
    torchrun --standalone --nproc-per-node 3 examples/distributed/train.py --load /tmp/dlrm

runs on GPUs, or on CPUs without GPUs. recfuse.swap pools the tables in one call, recfuse.distributed.shard
places them, and DistributedDataParallel averages the other Parameters.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import recfuse
import recfuse.distributed
from recfuse.nn import FusedEmbeddingBagCollection, Table

DENSE, ROWS, DIM = 13, (100_000, 40_000, 5_000, 300, 20, 3), 32


class DLRM(nn.Module):
    """A DLRM with a table per feature."""

    def __init__(self, device: torch.device) -> None:
        """Creates the dense layers on a device, and the tables without memory."""
        super().__init__()
        self.tables = FusedEmbeddingBagCollection([Table(rows, DIM) for rows in ROWS], device="meta")
        self.bottom = nn.Sequential(nn.Linear(DENSE, DIM), nn.ReLU()).to(device)
        self.top = nn.Sequential(nn.Linear(DIM * (len(ROWS) + 1), 64), nn.ReLU(), nn.Linear(64, 1)).to(device)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Returns a logit per sample."""
        pooled = self.tables(indices, offsets)
        return self.top(torch.cat((self.bottom(dense), pooled), dim=1)).squeeze(1)


def make_batch(samples: int, generator: torch.Generator, device: torch.device) -> list[Tensor]:
    """Returns random samples; the label depends on a dense feature, so that the model can learn."""
    lengths = torch.randint(1, 4, (len(ROWS), samples), generator=generator)
    counts = lengths.sum(1).tolist()
    indices = torch.cat(
        [torch.randint(rows, (n,), generator=generator) for rows, n in zip(ROWS, counts, strict=True)]
    )
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)))
    dense = torch.rand(samples, DENSE, generator=generator)
    labels = (dense[:, 0] > 0.5).float()
    return [value.to(device) for value in (dense, indices, offsets, labels)]


def main() -> None:
    """Trains, loads and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=256, help="samples a rank")
    parser.add_argument("--save", help="folder of a checkpoint to write")
    parser.add_argument("--load", help="folder of a checkpoint to begin with")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same on all ranks
    model = DLRM(device)
    report = recfuse.distributed.shard(model)
    if rank == 0:
        print(report)
    parallel = DistributedDataParallel(model)
    sparse = recfuse.optim.RowWiseAdagrad(model.tables, lr=0.05)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3)

    def state() -> dict[str, Any]:
        optimizers = {"sparse": sparse, "dense": dense}
        found = {name: get_optimizer_state_dict(model, one) for name, one in optimizers.items()}
        return {"model": model.state_dict(), **found}

    if options.load:
        loaded = state()
        dcp.load(loaded, checkpoint_id=options.load)
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, sparse, loaded["sparse"])
        set_optimizer_state_dict(model, dense, loaded["dense"])

    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(options.steps):
        dense_input, indices, offsets, labels = make_batch(options.samples, generator, device)
        logits = parallel(dense_input, indices, offsets)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()  # updates the tables
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and step % max(options.steps // 5, 1) == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"last loss {mean.item() / dist.get_world_size():.4f}")
    if options.save:
        dcp.save(state(), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
