"""Models for graph passes, and the ways to capture them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse

WAYS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long), "exported", "decomposed")


def passed(model, batch, way, **options):
    """Returns a model's twin after the passes, and the report; ``way``: how it became a graph."""
    if way in ("exported", "decomposed"):
        program = torch.export.export(model, batch, dynamic_shapes=options.pop("dynamic_shapes", None))
        if way == "decomposed":
            program = program.run_decompositions()
        report = recfuse.swap(program, **options)
        return program.module(), report
    torch.compiler.reset()
    backend = recfuse.backend(way, **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(*batch)
    return compiled, backend.reports[-1]


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


def gradients(model, run, batch):
    """Gradients of the model's Parameters by a run of it, dense."""
    twin = list(model.parameters())
    for parameter in twin:
        parameter.grad = None
    outputs = run(*copy.deepcopy(batch))
    leaves = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    sum(leaf.square().sum() for leaf in leaves).backward()
    found = [parameter.grad for parameter in twin]
    return [None if grad is None else grad.to_dense() for grad in found]


def jagged(bags, rows, last=False, trailing=0, dtype=torch.int64):
    """Indices and offsets of one table."""
    lengths = torch.randint(0, 4, (bags,))
    ends = lengths.cumsum(0)
    count = int(ends[-1]) if bags else 0
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(dtype)
    return torch.randint(0, rows, (count + trailing,), dtype=dtype), offsets if last else offsets[:-1]


class Bags(nn.Module):
    """Bags of every form before one cat, as plain modules; each pooling has one of the three tables."""

    def __init__(self, tables=3, dim=4, sparse=False):
        super().__init__()
        modes = ("sum", "mean", "max")
        self.fixed = nn.ModuleList(
            nn.EmbeddingBag(20 + k, dim + k, mode="sum" if sparse else modes[k % 3], sparse=sparse)
            for k in range(tables)
        )
        self.jagged = nn.ModuleList(
            nn.EmbeddingBag(20 + k, dim, mode=modes[k % 2], padding_idx=3, sparse=sparse)
            for k in range(tables)
        )
        self.summed = nn.Embedding(30, dim, sparse=sparse)
        self.averaged = nn.Embedding(30, dim, sparse=sparse)
        self.single = nn.Embedding(30, dim, sparse=sparse)
        self.top = nn.Linear(sum(table.embedding_dim for table in self.fixed) + dim * (tables + 3), 3)
        self.bags = 2 * tables + 3

    def forward(self, fixed, indices, offsets, short, long, single):
        pooled = [table(given) for table, given in zip(self.fixed, fixed, strict=True)]
        calls = zip(self.jagged, indices, offsets, strict=True)
        pooled += [table(own, where) for table, own, where in calls]
        pooled += [self.summed(short).sum(1), self.averaged(long).mean(dim=-2), self.single(single)]
        return self.top(torch.cat(pooled, 1)).relu()

    def batch(self, bags):
        lookups = [jagged(bags, table.num_embeddings) for table in self.jagged]
        return (
            [torch.randint(0, 20, (bags, 3)) for _ in self.fixed],
            [indices for indices, _ in lookups],
            [offsets for _, offsets in lookups],
            torch.randint(0, 30, (bags, 2)),
            torch.randint(0, 30, (bags, 7)),
            torch.randint(0, 30, (bags,)),
        )

    def dynamic(self):
        """Dynamic shapes for torch.export."""
        batch, tables = torch.export.Dim("batch", min=2, max=1 << 16), len(self.fixed)
        auto = torch.export.Dim.AUTO
        return [{0: batch}] * tables, [{0: auto}] * tables, [{0: batch}] * tables, *[{0: batch}] * 3
