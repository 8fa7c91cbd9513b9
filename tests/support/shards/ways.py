"""The ways of a call: dense gradients of copied tables, and rows of tables cut by rows in inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import recfuse
from recfuse.distributed import Cuts, shard
from recfuse.distributed.exchanges import choices
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.shards.models import OPTIMIZERS, flat, loss_of, same
from support.shards.ranks import DEVICE

BAGS = (30, 41, 25, 33)  # by rank
TABLES = [
    Table(40, 8, "a", "sum", None, torch.float32, ("a0", "a1")),
    Table(30, 8, "b", "mean", 3),
    Table(20, 4, "c", "max"),
    Table(50, 8, "d", "sum"),
    Table(25, 5, "e", "sum", 4),
]
PLAN = {"a": Replicate(), "b": Replicate(), "c": Replicate(), "d": 0, "e": Replicate()}


def batches(tables: list[Table], step: int, most: int, used: float = 1.0) -> list[list[Tensor]]:
    """The batches of all ranks, with lookups of the first rows of each table."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for rank in range(dist.get_world_size()):
        rows = [table.num_embeddings for table in tables for _ in table.feature_names or ("",)]
        lengths = torch.randint(0, most + 1, (len(rows), BAGS[rank]), generator=generator)
        indices = [
            torch.randint(max(int(count * used), 1), (int(own.sum()),), generator=generator)
            for count, own in zip(rows, lengths, strict=True)
        ]
        found.append([*indices, lengths])
    return found


def _models(tables: list[Table], plan: dict[str, Any], **options: Any) -> list[Any]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(FusedEmbeddingBagCollection(tables, device=DEVICE, **options))
    shard(found[1], plan=plan)
    return found


def _choices(model: Any) -> list[choices.Choice]:
    return list(model._sharding.exchange._ways)


def _without_bound(call: Callable[[], None]) -> None:
    """Calls with dense gradients where they save any byte."""
    before, choices.LEAST_SAVED = choices.LEAST_SAVED, 0
    try:
        call()
    finally:
        choices.LEAST_SAVED = before


def dense(name: str, weighted: bool = False) -> None:
    """Gradients of copied tables are added densely: one process's results, and equal copies on all ranks."""
    _without_bound(lambda: _dense(name, weighted))


def _dense(name: str, weighted: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    create, sparse = OPTIMIZERS[name]
    tables = [dataclasses.replace(table, mode="sum") for table in TABLES] if weighted or sparse else TABLES
    whole, model = _models(tables, PLAN, sparse=sparse)
    begin = {key: value.clone() for key, value in whole.state_dict().items()}
    steppers = [create(whole), create(model)]
    tolerance = dict(rtol=2e-5, atol=2e-6)
    for step in range(3):
        parts = batches(tables, step, 6, 0.8)
        own, joined = flat([parts[rank]], weighted, step), flat(parts, weighted, step)
        weights = [own[2], joined[2]]
        if weighted:
            weights = [weight.requires_grad_() for weight in weights]
        first = sum(BAGS[:rank])
        expected, found = whole(*joined[:2], weights[1]), model(*own[:2], weights[0])
        same(found, expected[first : first + BAGS[rank]], step == 0 and DEVICE == "cpu", tolerance)
        (gradient,) = torch.autograd.grad(loss_of(expected), expected, retain_graph=True)
        expected.backward(gradient * (1 / world))
        loss_of(found).backward()
        if weighted:
            begins = [sum(len(part[feature]) for part in parts[:rank]) for feature in range(6)]
            ends = [begins[feature] + len(parts[rank][feature]) for feature in range(6)]
            by_feature = weights[1].grad.split([sum(len(part[at]) for part in parts) for at in range(6)])
            cut = [values[begins[at] : ends[at]] for at, values in enumerate(by_feature)]
            same(weights[0].grad, torch.cat(cut) * world, False, tolerance)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    features = (0, 1, 2, 3, 5) if weighted or sparse else (0, 1, 2, 5)
    assert features in {choice.dense for choice in _choices(model)}, _choices(model)
    for key, value in model.state_dict().items():
        own = value.as_subclass(Tensor) if PLAN[key.split(".")[1]] != 0 else None
        if own is None:
            continue
        copies = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(copies, own.contiguous())
        assert all(torch.equal(copy, own) for copy in copies), key
    del steppers, stepper
    recfuse.distributed.unshard(model)
    for key, value in whole.state_dict().items():
        same(model.state_dict()[key], value, False, tolerance)
        rows = int(0.8 * len(value))
        assert torch.equal(model.state_dict()[key][rows:], begin[key][rows:]), key


def small_batches() -> None:
    """Small batches gather lookups: dense gradients would not save enough bytes."""
    rank = dist.get_rank()
    whole, model = _models(TABLES, PLAN)
    parts = batches(TABLES, 0, 6)
    first = sum(BAGS[:rank])
    found, expected = model(*flat([parts[rank]])[:2]), whole(*flat(parts)[:2])
    same(found, expected[first : first + BAGS[rank]], DEVICE == "cpu", dict(rtol=2e-5, atol=2e-6))
    assert {choice.dense for choice in _choices(model)} == {()}
    loss_of(found).backward()


def read(dtype: torch.dtype) -> None:
    """Few lookups a bag read rows, with the bits of one process; many get partial sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = [dataclasses.replace(table, dtype=dtype) for table in TABLES]
    plan = {
        "a": Shard(0),
        "b": Shard(0),
        "c": Cuts(0, (0, *[7] * (world - 1), 20)),
        "d": world - 1,
        "e": Shard(0),
    }
    whole, model = _models(tables, plan)
    first = sum(BAGS[:rank])
    tolerance = dict(rtol=2e-5, atol=2e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        for most, features in ((1, (0, 1, 2, 3, 5)), (40, ())):
            parts = batches(tables, most, most)
            found, expected = model(*flat([parts[rank]])[:2]), whole(*flat(parts)[:2])
            expected = expected[first : first + BAGS[rank]]
            same(found, expected, bool(features) and DEVICE == "cpu", tolerance)
            assert _choices(model)[-1].read == features, _choices(model)
        empty = batches(tables, 1, 0)
        assert not model(*flat([empty[rank]])[:2]).any()
    parts = batches(tables, 1, 1)
    same(
        model(*flat([parts[rank]])[:2]), whole(*flat(parts)[:2])[first : first + BAGS[rank]], False, tolerance
    )
    assert not _choices(model)[-1].read


def read_weighted() -> None:
    """Rows are read with per-sample weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = [dataclasses.replace(table, mode="sum") for table in TABLES]
    whole, model = _models(tables, {**dict.fromkeys("abce", Shard(0)), "d": world - 1})
    first = sum(BAGS[:rank])
    parts = batches(tables, 1, 1)
    with torch.no_grad():
        found, expected = model(*flat([parts[rank]], True)), whole(*flat(parts, True))
    same(found, expected[first : first + BAGS[rank]], DEVICE == "cpu", dict(rtol=2e-5, atol=2e-6))
    assert _choices(model)[-1].read
