"""What is compared: sides that train the same tables, each by its own code.

Tables of one dimension lie once in memory, whatever the number of sides: all of them train these. Where
FBGEMM lays tables out in another order it has a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import recfuse
from common.checks import left_out
from common.peers import fbgemm_missing, fbgemm_trainer
from training.lookups import Batch, Subject

LOOP, PLAIN, RECFUSE, FBGEMM = "torch", "recfuse, torch.optim", "recfuse", "fbgemm"
NAMES = (LOOP, PLAIN, RECFUSE, FBGEMM)
"""A loop of nn.EmbeddingBag(sparse=True) with torch's optimizer; recfuse's collection with that optimizer;
the same with recfuse.optim, whose updates happen in the backward pass; FBGEMM's table-batched embeddings."""
SLOW = (LOOP, PLAIN)
"""These wait for the device in each step, and so have no CUDA graph."""
LEARNING_RATE, EPS = 0.01, 1e-8
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Optimizer:
    """One optimizer on each side."""

    ours: str  # of recfuse.optim
    torch: type[torch.optim.Optimizer] | None  # of sparse gradients; None: torch has none
    fbgemm: str | None  # FBGEMM's OptimType; None: not compared
    options: dict[str, object]
    states: Callable[[int], int]  # floats that a row of so many columns has

    def change(self, sums: Tensor) -> Tensor:
        """What the first step adds to rows whose gradients are `sums`, float64 [rows, dim]."""
        if self.ours == "SGD":
            return -LEARNING_RATE * sums
        if self.ours == "Adam":  # whose corrections undo the betas in the first step
            return -LEARNING_RATE * sums / (sums.abs() + EPS / (1 - BETAS[1]) ** 0.5)
        squares = sums**2
        if self.ours == "RowWiseAdagrad":
            squares = squares.mean(1, keepdim=True)
        return -LEARNING_RATE * sums / (squares.sqrt() + EPS)


OPTIMIZERS = {
    "sgd": Optimizer("SGD", torch.optim.SGD, "EXACT_SGD", {}, lambda dim: 0),
    "rowwise_adagrad": Optimizer(
        "RowWiseAdagrad", None, "EXACT_ROWWISE_ADAGRAD", {"eps": EPS}, lambda dim: 1
    ),
    "adagrad": Optimizer("Adagrad", torch.optim.Adagrad, None, {"eps": EPS}, lambda dim: dim),
    "adam": Optimizer(
        "Adam", torch.optim.SparseAdam, None, {"eps": EPS, "betas": BETAS}, lambda dim: 2 * dim
    ),
}


@dataclass
class Side:
    """One of those that are compared."""

    forward: Callable[[Batch], Tensor]
    step: Callable[[Batch], object]
    tables: list[Tensor]  # [rows, dim] each: views of what it trains


def optimized(
    forward: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer, tables: Sequence[Tensor]
) -> Side:
    """A side that is trained as any model of torch."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        forward(batch).backward(batch.grad)
        optimizer.step()

    return Side(forward, step, list(tables))


def loop_side(tables: Sequence[Tensor], optimizer: Optimizer) -> Side:
    """torch's modules, one after another."""
    assert optimizer.torch is not None
    bags = [torch.nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum", sparse=True) for t in tables]

    def forward(batch: Batch) -> Tensor:
        return torch.cat([bag(*part) for bag, part in zip(bags, batch.parts, strict=True)], 1)

    weights = [bag.weight for bag in bags]
    return optimized(forward, optimizer.torch(weights, lr=LEARNING_RATE, **optimizer.options), tables)


def collection_side(
    collection: recfuse.nn.FusedEmbeddingBagCollection,
    make: Callable[[recfuse.nn.FusedEmbeddingBagCollection], torch.optim.Optimizer],
) -> Side:
    """recfuse's module: a copy that has its own Parameters, on the same memory."""
    parameters = {id(each): torch.nn.Parameter(each.data) for each in collection.parameters()}
    own = copy.deepcopy(collection, parameters)
    tables = [table.weight.detach() for table in own.tables.values()]
    return optimized(lambda batch: own(batch.indices, batch.offsets), make(own), tables)


def fbgemm_side(tables: Sequence[Tensor], optimizer: Optimizer, index_dtype: torch.dtype) -> Side:
    """FBGEMM's module, which updates in its backward pass."""
    assert optimizer.fbgemm is not None
    module = fbgemm_trainer(tables, index_dtype, optimizer.fbgemm, LEARNING_RATE, EPS)

    def forward(batch: Batch) -> Tensor:
        return module(batch.indices, batch.offsets)

    def step(batch: Batch) -> None:
        forward(batch).backward(batch.grad)

    return Side(forward, step, list(module.split_embedding_weights()))


def make_sides(
    subject: Subject, kind: str, names: Sequence[str], device: torch.device, index_dtype: torch.dtype
) -> tuple[dict[str, Side], list[str]]:
    """Sides by name, in the order of `NAMES`, and notes on those that are left out, and why."""
    optimizer, label = OPTIMIZERS[kind], f"{subject.name}, {kind}"
    sizes = list(zip(subject.rows, subject.dims, strict=True))
    collection = recfuse.nn.FusedEmbeddingBagCollection(sizes, sparse=True, device=device)
    tables = [table.weight.detach() for table in collection.tables.values()]
    options = {"lr": LEARNING_RATE, **optimizer.options}
    makers: dict[str, Callable[[], Side]] = {}
    if optimizer.torch is not None:
        makers[LOOP] = lambda: loop_side(tables, optimizer)
        makers[PLAIN] = lambda: collection_side(
            collection, lambda own: optimizer.torch(own.parameters(), **options)
        )
    makers[RECFUSE] = lambda: collection_side(
        collection, lambda own: getattr(recfuse.optim, optimizer.ours)(own, **options)
    )
    notes = []
    if FBGEMM in names and optimizer.fbgemm is not None:
        missing = fbgemm_missing("fbgemm-gpu")
        if missing is None:
            makers[FBGEMM] = lambda: fbgemm_side(tables, optimizer, index_dtype)
        else:
            notes.append(missing)
    sides = {}
    for name, make in makers.items():
        if name in names:
            try:
                sides[name] = make()
            except Exception as error:
                notes.append(left_out(label, name, error))
    return sides, notes
