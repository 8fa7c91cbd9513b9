"""Random small collections, placements and batches, against one process."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import recfuse
from recfuse.distributed import Cuts, shard
from recfuse.distributed.exchanges import choices
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.shards.models import flat, loss_of, same
from support.shards.ranks import DEVICE


def _table(draw: random.Random, name: str) -> Table:
    rows, dim = draw.randint(1, 20), draw.randint(1, 9)
    return Table(
        rows,
        dim,
        name,
        draw.choice(("sum", "mean", "max")),
        draw.choice((None, None, draw.randrange(rows))),
        draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
        tuple(f"{name}{number}" for number in range(draw.randint(1, 3))),
    )


def _placement(draw: random.Random, table: Table, world: int) -> Any:
    kind = draw.randrange(6)
    if kind < 3:
        return (draw.randrange(world), Replicate(), Shard(draw.randrange(2)))[kind]
    dim = draw.randrange(2)
    size = (table.num_embeddings, table.embedding_dim)[dim]
    points = sorted(draw.randint(0, size) for _ in range(world - 1))
    return Cuts(dim, (0, *points, size))


def _batch(draw: random.Random, tables: list[Table]) -> list[torch.Tensor]:
    bags = draw.choice((0, 1, 2, 5))
    indices, lengths = [], []
    for table in tables:
        for _ in table.feature_names:
            own = [draw.choice((0, 0, 1, 3, 7)) for _ in range(bags)]
            lengths.append(own)
            rows = [draw.randrange(table.num_embeddings) for _ in range(sum(own))]
            indices.append(torch.tensor(rows, dtype=torch.int64))
    return [*indices, torch.tensor(lengths, dtype=torch.int64).view(len(lengths), bags)]


def compare(seed: int) -> None:
    """Compares two training steps and an inference call of a random case.

    Results are exact if no table is cut by rows, and no gradients of copied tables are added. Odd seeds add
    them where that saves any byte.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)  # the same on all ranks
    tables = [_table(draw, f"t{number}") for number in range(draw.randint(1, 4))]
    plan = {str(table.name): _placement(draw, table, world) for table in tables}
    torch.manual_seed(seed)
    whole = FusedEmbeddingBagCollection(tables, device=DEVICE)
    torch.manual_seed(seed)
    model = FusedEmbeddingBagCollection(tables, device=draw.choice((DEVICE, "meta")))
    torch.manual_seed(seed)
    shard(model, plan=plan)
    exact = DEVICE == "cpu" and not any(
        isinstance(placement, (Shard, Cuts)) and placement.dim == 0 for placement in plan.values()
    )
    choices.LEAST_SAVED = 0 if seed % 2 else 1 << 20
    exact = exact and not (seed % 2 and any(isinstance(each, Replicate) for each in plan.values()))
    halves = any(table.dtype != torch.float32 for table in tables)
    tolerance = dict(rtol=3e-2, atol=3e-2) if halves else dict(rtol=2e-5, atol=2e-6)
    create = draw.choice((recfuse.optim.SGD, recfuse.optim.Adagrad))
    steppers = [create(each, lr=0.05) for each in (whole, model)]
    for _ in range(2):
        parts = [_batch(draw, tables) for _ in range(world)]
        first = sum(part[-1].shape[1] for part in parts[:rank])
        expected = whole(*flat(parts)[:2])
        found = model(*flat([parts[rank]])[:2])
        same(found, expected[first : first + len(found)], exact, tolerance)
        (gradient,) = torch.autograd.grad(loss_of(expected), expected, retain_graph=True)
        expected.backward(gradient * (1 / world))
        loss_of(found).backward()
        for stepper in steppers:
            stepper.step()
    with torch.no_grad():
        parts = [_batch(draw, tables) for _ in range(world)]
        first = sum(part[-1].shape[1] for part in parts[:rank])
        found, expected = model(*flat([parts[rank]])[:2]), whole(*flat(parts)[:2])
        same(found, expected[first : first + len(found)], exact, tolerance)
    del steppers, stepper
    recfuse.distributed.unshard(model)
    for key, value in whole.state_dict().items():
        same(model.state_dict()[key], value, exact, tolerance)


def compare_all(first: int, count: int) -> None:
    """Compares cases with consecutive seeds."""
    before = choices.LEAST_SAVED
    for seed in range(first, first + count):
        try:
            compare(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    choices.LEAST_SAVED = before
