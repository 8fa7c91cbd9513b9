"""A collection with every mode of pooling, its batches by rank, and its comparison with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import recfuse
import recfuse.distributed
from recfuse.distributed import Cuts
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.shards.ranks import DEVICE

SIZES = {"a": (40, 8), "b": (30, 8), "c": (20, 4), "d": (50, 8), "e": (9, 3)}
MODES = {"a": "sum", "b": "sum", "c": "mean", "d": "max", "e": "mean"}
PADDING = {"b": 3, "c": 2}
FEATURES = {"a": ("x", "y")}
BAGS = (3, 0, 5, 2)  # by rank
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def collection(dtype: str = "fp32", modes: Any = MODES, sparse: bool = False, device: str = DEVICE) -> Any:
    torch.manual_seed(0)
    dtypes = {name: DTYPES[dtype] if dtype != "mixed" else (torch.float32 if name in "ab" else torch.float16)
              for name in SIZES}  # fmt: skip
    tables = [
        Table(*SIZES[name], name, modes[name], PADDING.get(name), dtypes[name], FEATURES.get(name, ()))
        for name in SIZES
    ]
    return FusedEmbeddingBagCollection(tables, sparse=sparse, device=device)


def plans(world: int) -> dict[str, dict[str, Any]]:
    last = world - 1
    return {
        "whole": {"a": 0, "b": last, "c": 0, "d": last, "e": 0},
        "rows": dict.fromkeys(SIZES, Shard(0)),
        "columns": dict.fromkeys(SIZES, Shard(1)),
        "copies": dict.fromkeys(SIZES, Replicate()),
        "mixed": {
            "a": Shard(1),
            "b": Shard(0),
            "c": Cuts(0, (0, *([2] if last else []), *[20] * max(last, 1))),
            "d": Replicate(),
            "e": Cuts(1, (0, *[0] * last, 3)),
        },
    }


def is_cut_by_rows(plan: str) -> bool:
    return plan in ("rows", "mixed")


def lookups(rank: int, step: int = 0, features: Sequence[str] = (), bags: int | None = None) -> list[Tensor]:
    """The indices and lengths of a rank's samples, feature by feature."""
    names = [name for name in SIZES for _ in FEATURES.get(name, (name,))]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    bags = BAGS[rank] if bags is None else bags
    lengths = torch.randint(0, 6, (len(names), bags), generator=generator)
    indices = [
        torch.randint(SIZES[name][0], (int(own.sum()),), generator=generator)
        for name, own in zip(names, lengths, strict=True)
    ]
    return [*indices, lengths]


def flat(parts: Sequence[list[Tensor]], weighted: bool = False, step: int = 0) -> list[Any]:
    """Indices, offsets and weights of the samples of several ranks joined."""
    lengths = torch.cat([part[-1] for part in parts], dim=1)
    indices = torch.cat([part[feature] for feature in range(len(lengths)) for part in parts])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)))
    weights = None
    if weighted:  # a weight by its index and feature: the same in a joined batch
        feature = torch.arange(len(lengths)).repeat_interleave(lengths.sum(1))
        weights = ((indices * 7 + feature * 3 + step) % 11).to(torch.float32) / 7 - 0.5
    return [None if value is None else value.to(DEVICE) for value in (indices, offsets, weights)]


def own_and_joined(step: int = 0, weighted: bool = False) -> tuple[list[Any], list[Any], slice]:
    """This rank's batch, the batch of all ranks, and this rank's bags in it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [lookups(other, step) for other in range(world)]
    first = sum(BAGS[:rank])
    own = slice(first, first + BAGS[rank])
    return flat([parts[rank]], weighted, step), flat(parts, weighted, step), own


def loss_of(pooled: Tensor) -> Tensor:
    scale = torch.arange(1, pooled.shape[1] + 1, device=pooled.device) / pooled.shape[1]
    return (pooled.float().sin() * scale).sum()


Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Optimizers, bool]] = {  # with: sparse gradients
    "torch SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), False),
    "torch Adagrad": (lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1), False),
    "torch sparse SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), True),
    "SGD": (lambda model: recfuse.optim.SGD(model, lr=0.1), False),
    "deferred SGD": (lambda model: recfuse.optim.SGD(model, lr=0.1, deferred=True), False),
    "Adagrad": (lambda model: recfuse.optim.Adagrad(model, lr=0.1), False),
    "RowWiseAdagrad": (lambda model: recfuse.optim.RowWiseAdagrad(model, lr=0.1), False),
    "deferred Adam": (lambda model: recfuse.optim.Adam(model, lr=0.1, deferred=True), False),
    "Adam": (lambda model: recfuse.optim.Adam(model, lr=0.1), False),
}


def compare(plan: str, dtype: str, optimizer: str, steps: int = 3, weighted: bool = False) -> list[float]:
    """Trains sharded tables and whole tables with the batches of all ranks; returns the sharded losses.

    Results are bit-identical unless a table is cut by rows.
    """
    world = dist.get_world_size()
    create, sparse = OPTIMIZERS[optimizer]
    modes = dict.fromkeys(SIZES, "sum") if sparse or weighted else MODES
    whole, tables = (collection(dtype, modes, sparse) for _ in range(2))
    recfuse.distributed.shard(tables, plan=plans(world)[plan])
    steppers = create(whole), create(tables)
    tolerance = dict(rtol=2e-5, atol=2e-6) if dtype == "fp32" else dict(rtol=2e-2, atol=2e-2)
    exact = not is_cut_by_rows(plan) and DEVICE == "cpu"  # a GPU splits other bags in a larger batch
    if dtype != "fp32" and optimizer.startswith(
        "torch"
    ):  # its step rounds the end of a matrix in another way
        exact = False
    losses = []
    for step in range(steps):
        own, joined, bags = own_and_joined(step, weighted)
        weights = [own[2], joined[2]]
        if weighted:
            weights = [weight.requires_grad_() for weight in weights]
        expected, found = whole(*joined[:2], weights[1]), tables(*own[:2], weights[0])
        same(found, expected[bags], exact, tolerance)
        (gradient,) = torch.autograd.grad(loss_of(expected), expected, retain_graph=True)
        expected.backward(gradient * (1 / world))
        loss = loss_of(found)
        loss.backward()
        if weighted:
            same(weights[0].grad, _own_weights(weights[1].grad * world, step), False, tolerance)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        own, joined, bags = own_and_joined(steps, weighted)
        same(tables(*own), whole(*joined)[bags], exact, tolerance)
    del steppers, stepper
    recfuse.distributed.unshard(tables)
    assert type(tables) is FusedEmbeddingBagCollection
    for key, value in whole.state_dict().items():
        same(tables.state_dict()[key], value, exact, tolerance)
    return losses


def _own_weights(gradient: Tensor, step: int) -> Tensor:
    """This rank's part of a gradient of the weights of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [lookups(other, step) for other in range(world)]
    found, first = [], 0
    for feature in range(len(parts[0][-1])):
        for other in range(world):
            size = len(parts[other][feature])
            if other == rank:
                found.append(gradient[first : first + size])
            first += size
    return torch.cat(found)


def same(found: Tensor, expected: Tensor, exact: bool, tolerance: dict[str, float]) -> None:
    if exact:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        torch.testing.assert_close(found, expected, **tolerance)
