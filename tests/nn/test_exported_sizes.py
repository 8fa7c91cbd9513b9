"""Exported programs serve batches of any size, from no sample on (docs/serving.md, "Batches of any size")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental import _config

import recfuse

Batch = tuple[Tensor, ...]
SIZES = (0, 1, 2, 7)


def lookups(features: int, bags: int, ends: bool = True) -> Batch:
    count = features * bags * 3
    return torch.randint(0, 9, (count,)), torch.arange(0, count + 1, 3)[: None if ends else -1]


class Joined(torch.nn.Module):
    """Dense features concatenated with pooled rows, as in a DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8), (9, 4)])
        self.dense = torch.nn.Linear(5, 16)
        self.top = torch.nn.Linear(32, 1)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        x = self.dense(dense)
        pooled = self.bags(indices, offsets)
        return self.top(torch.cat((x + pooled, pooled), dim=1)).sigmoid()


class Tables(torch.nn.Module):
    """A list of tables, with the offsets of each."""

    def __init__(self) -> None:
        super().__init__()
        bags = [torch.nn.EmbeddingBag(9, 4, mode="sum") for _ in range(3)]
        self.bags = recfuse.nn.FusedEmbeddingBagList(bags)

    def forward(self, offsets: Tensor, indices: Tensor) -> Tensor:
        return torch.stack(self.bags.pool(offsets, indices), dim=1)


def table(ends: bool) -> torch.nn.Module:
    return recfuse.nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=ends)


def of_tables(bags: int) -> Batch:
    return torch.arange(0, 3 * bags, 3).expand(3, -1).contiguous(), torch.randint(0, 9, (3, 3 * bags))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], Batch], Any]] = {
    "a collection": (
        lambda: recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 8), (9, 4)]),
        lambda bags: lookups(3, bags),
        ({0: Dim.AUTO}, {0: Dim.AUTO}),
    ),
    "a table with its last offset": (
        lambda: table(True),
        lambda bags: lookups(1, bags),
        ({0: Dim.AUTO}, {0: Dim.AUTO}),
    ),
    "a table": (lambda: table(False), lambda bags: lookups(1, bags, False), ({0: Dim.AUTO}, {0: Dim.AUTO})),
    "a table, rows of lookups": (
        lambda: table(False),
        lambda bags: (torch.randint(0, 9, (bags, 3)),),
        ({0: Dim.AUTO, 1: Dim.AUTO},),
    ),
    "a list of tables": (Tables, of_tables, ({1: Dim.AUTO}, {1: Dim.AUTO})),
    "a model": (
        Joined,
        lambda bags: (torch.randn(bags, 5), *lookups(3, bags)),
        ({0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}),
    ),
}


@pytest.mark.parametrize(
    "strict", (False, pytest.param(True, marks=pytest.mark.long)), ids=("traced", "strict")
)
@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_exported_programs(name: str, strict: bool) -> None:
    make, batch, shapes = MODELS[name]
    model = make().eval()
    with _config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, batch(5), dynamic_shapes=shapes, strict=strict)
        decomposed = program.run_decompositions({})
    for served in (program.module(), decomposed.module()):
        for bags in SIZES:
            given = batch(bags)
            torch.testing.assert_close(served(*given), model(*given))
