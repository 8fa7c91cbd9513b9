"""The sides: each trains the same tables by its own code.

Tables of one dimension are in memory once for any number of sides, and all sides train them. If FBGEMM's
layout of the tables differs, it has a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import recfuse
from common.batches import Batch
from common.checks import left_out
from common.peers import fbgemm_trainer, fbgemm_usable
from training import bench
from training.lookups import Subject

LOOP, PLAIN, RECFUSE, FBGEMM = "torch", "recfuse, torch.optim", "recfuse", "fbgemm"
NAMES = (LOOP, PLAIN, RECFUSE, FBGEMM)
"""A loop of nn.EmbeddingBag(sparse=True) with torch's optimizer; recfuse's collection with that optimizer;
the same with recfuse.optim, which updates in the backward pass; FBGEMM's table-batched embeddings."""
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
    states: Callable[[int], int]  # floats of state of a row with so many columns

    def change(self, sums: Tensor) -> Tensor:
        """Returns the change of the first step for rows whose gradients are `sums`, float64 [rows, dim]."""
        if self.ours == "SGD":
            return -LEARNING_RATE * sums
        if self.ours == "Adam":  # its corrections undo the betas in the first step
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
    """A contestant."""

    forward: Callable[[Batch], Tensor]
    step: Callable[[Batch], object]
    tables: list[Tensor]  # [rows, dim] each: views of the trained tables


def optimized(
    forward: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer, tables: Sequence[Tensor]
) -> Side:
    """A side that is trained like any model of torch."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        forward(batch).backward(batch.grad)
        optimizer.step()

    return Side(forward, step, list(tables))


def bags_side(
    bags: Sequence[torch.nn.EmbeddingBag], make: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> Side:
    """Modules in sequence; `make`: creates the optimizer of a module."""
    modules = torch.nn.ModuleList(bags)

    def forward(batch: Batch) -> Tensor:
        pooled = [bag(*part) for bag, part in zip(modules, batch.parts, strict=True)]
        return torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0]

    return optimized(forward, make(modules), [bag.weight.detach() for bag in modules])


def collection_side(
    collection: recfuse.nn.FusedEmbeddingBagCollection,
    make: Callable[[recfuse.nn.FusedEmbeddingBagCollection], torch.optim.Optimizer],
) -> Side:
    """recfuse's module."""
    tables = [table.weight.detach() for table in collection.tables.values()]
    return optimized(lambda batch: collection(batch.indices, batch.offsets), make(collection), tables)


def sharing(collection: recfuse.nn.FusedEmbeddingBagCollection) -> recfuse.nn.FusedEmbeddingBagCollection:
    """A copy with its own Parameters on the same memory."""
    parameters = {id(each): torch.nn.Parameter(each.data) for each in collection.parameters()}
    return copy.deepcopy(collection, parameters)


@bench.peer(LOOP)
def torch_side(tables: Tables, optimizer: Optimizer) -> Side:
    """A loop of torch's modules."""
    make, options = optimizer.torch, optimizer.options
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
        for table in tables.weights
    ]
    return bags_side(bags, lambda module: make(module.parameters(), lr=LEARNING_RATE, **options))


@bench.peer(PLAIN)
def plain_side(tables: Tables, optimizer: Optimizer) -> Side:
    """recfuse's module with torch's optimizer."""
    make, options = optimizer.torch, optimizer.options
    own = sharing(tables.collection)
    return collection_side(own, lambda module: make(module.parameters(), lr=LEARNING_RATE, **options))


@bench.peer(RECFUSE)
def recfuse_side(tables: Tables, optimizer: Optimizer) -> Side:
    """recfuse's module with its own optimizer."""
    make, options = getattr(recfuse.optim, optimizer.ours), optimizer.options
    own = sharing(tables.collection)
    return collection_side(own, lambda module: make(module, lr=LEARNING_RATE, **options))


@bench.peer(FBGEMM)
def fbgemm_side(tables: Tables, optimizer: Optimizer) -> Side:
    """FBGEMM's module, which updates in its backward pass."""
    module = fbgemm_trainer(tables.weights, tables.index_dtype, optimizer.fbgemm, LEARNING_RATE, EPS)

    def forward(batch: Batch) -> Tensor:
        return module(batch.indices, batch.offsets)

    def step(batch: Batch) -> None:
        forward(batch).backward(batch.grad)

    return Side(forward, step, list(module.split_embedding_weights()))


class Tables:
    """The tables that all sides train."""

    def __init__(self, subject: Subject, device: torch.device, index_dtype: torch.dtype) -> None:
        """Random values."""
        sizes = list(zip(subject.rows, subject.dims, strict=True))
        self.collection = recfuse.nn.FusedEmbeddingBagCollection(sizes, sparse=True, device=device)
        self.weights = [table.weight.detach() for table in self.collection.tables.values()]
        self.index_dtype = index_dtype


def make_sides(
    subject: Subject, kind: str, names: Sequence[str], device: torch.device, index_dtype: torch.dtype
) -> tuple[dict[str, Side], list[str]]:
    """Returns sides by name, in the order of `NAMES`, and notes on those that are left out, with reasons."""
    optimizer, tables = OPTIMIZERS[kind], Tables(subject, device, index_dtype)
    has = {LOOP: optimizer.torch, PLAIN: optimizer.torch, RECFUSE: True, FBGEMM: optimizer.fbgemm}
    selected, notes = fbgemm_usable([name for name in NAMES if name in names and has[name]], "fbgemm-gpu")
    sides = {}
    for name in selected:
        try:
            sides[name] = bench.peers[name](tables, optimizer)
        except Exception as error:
            notes.append(left_out(f"{subject.name}, {kind}", name, error))
    return sides, notes
