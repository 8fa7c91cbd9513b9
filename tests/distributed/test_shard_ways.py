"""Copied tables and tables cut by rows are served in the way that moves the fewest bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from recfuse.distributed.exchanges.choices import Choice, Chooser, Counts, lookups_to
from recfuse.distributed.exchanges.routes import route_of
from recfuse.distributed.local import drop_oldest
from recfuse.distributed.placements import placed
from recfuse.nn.packed.layout import TableSpec, WeightForm
from support.processes.ranks import check, run_cases
from support.shards import ways
from support.shards.ranks import MANY


def _few() -> dict[str, Any]:
    return {
        "dense Adam": functools.partial(ways.dense, "Adam"),
        "dense weighted": functools.partial(ways.dense, "SGD", weighted=True),
        "small_batches": ways.small_batches,
        "read": functools.partial(ways.read, torch.float32),
        "read halves": functools.partial(ways.read, torch.float16),
        "read_weighted": ways.read_weighted,
    }


def test_ways():
    results = run_cases(MANY, _few)
    for name in _few():
        check(results, name)


def _more() -> dict[str, Any]:
    return {name: functools.partial(ways.dense, name) for name in ways.OPTIMIZERS}


@pytest.mark.long
def test_more_optimizers():
    results = run_cases(2, _more)
    for name in _more():
        check(results, name)


def chooser(ranks: int, rows: int = 1000, dim: int = 16) -> tuple[Any, Chooser]:
    specs = [TableSpec("a", rows, dim, "sum", None), TableSpec("b", rows, dim, "mean", None)]
    parts = [placed("a", Replicate(), (rows, dim), ranks), placed("b", Shard(0), (rows, dim), ranks)]
    forms = [WeightForm(rows, dim, torch.float32, torch.device("cpu"), True)] * 2
    route = route_of((0, 1), parts, ["sum", "mean"], [None, None], ranks)
    return route, Chooser(route, (0, 1), specs, forms, parts, True)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_choice_moves_the_fewest_bytes(ranks):
    route, own = chooser(ranks)
    for samples in (10, 100, 1000, 10_000):
        for pooling in (1, 2, ranks - 1, ranks + 1, 50):
            size = samples * pooling
            sizes = [size, size, *[size // ranks] * (ranks - 1), size - size // ranks * (ranks - 1)]
            counts = [Counts.of_batch(route, sizes)] * ranks
            assert [Counts.of(route, each.flat()) for each in counts] == counts
            assert len(counts[0].flat()) == Counts.size(route)
            bags = [samples] * ranks
            training = own.choose(bags, counts, True, 4, 4)
            gathered = (ranks - 1) * ranks * (size * 4 + samples * (4 + 16 * 4))
            dense = 2 * (ranks - 1) * 1000 * (16 * 4 + 1)
            is_dense = gathered - dense >= 1 << 20 and samples * ranks >= 1000
            assert training == (Choice(dense=(0,)) if is_dense else Choice(gathered=(0,)))
            inference = own.choose(bags, counts, False, 4, 4)
            elsewhere = sum(sum(sizes[2:]) - sizes[2 + rank] for rank in range(ranks))
            is_read = elsewhere <= ranks * samples * (ranks - 1)
            assert inference == Choice(local=(0,), read=(1,) if is_read else ())
            to_first = lookups_to(route, counts[0], 0, training)
            assert to_first == sizes[2] + (0 if is_dense else size)
            assert lookups_to(route, counts[0], 0, inference) == (0 if is_read else sizes[2])


def test_few_choices_are_kept():
    cache = dict.fromkeys(range(3))
    for number in range(3, 200):
        drop_oldest(cache)
        cache[number] = None
    assert list(cache) == list(range(136, 200))
