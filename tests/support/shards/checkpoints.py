"""Training with checkpoints on several ranks, against one process that never stops."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import recfuse
from recfuse.distributed import shard
from support.shards.models import OPTIMIZERS, SIZES, collection, flat, lookups, loss_of, plans

SAMPLES, BEFORE, AFTER = 6, 3, 3
KINDS = {"Adagrad": "mixed", "deferred Adam": "rows", "torch Adagrad": "columns", "RowWiseAdagrad": "rows"}
OTHER_PLANS = {
    "Adagrad": "rows",
    "deferred Adam": "mixed",
    "torch Adagrad": "whole",
    "RowWiseAdagrad": "whole",
}


def samples(step: int, rank: int, world: int) -> list[Any]:
    """The rank's share of the samples of a step."""
    part = lookups(0, step, bags=SAMPLES)
    lengths = part[-1]
    share = SAMPLES // world
    own = slice(rank * share, (rank + 1) * share)
    cut = []
    for indices, of_feature in zip(part, lengths, strict=False):
        begin = int(of_feature[: own.start].sum())
        cut.append(indices[begin : begin + int(of_feature[own].sum())])
    return flat([[*cut, lengths[:, own]]])


def train(tables: Any, optimizer: Any, steps: range, rank: int = 0, world: int = 1) -> list[float]:
    """Losses of this rank's samples, whose mean over ranks is that of all samples."""
    losses = []
    for step in steps:
        loss = loss_of(tables(*samples(step, rank, world)[:2])) / (SAMPLES // world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(tables: Any, optimizer: Any, is_flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    return {
        "model": tables.state_dict(),
        "optimizer": get_optimizer_state_dict(tables, optimizer, options=options),
    }


def save(folder: str, name: str, is_flat: bool) -> list[float]:
    """Trains and saves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tables = collection()
    shard(tables, plan=plans(world)[KINDS[name]])
    optimizer = OPTIMIZERS[name][0](tables)
    losses = train(tables, optimizer, range(BEFORE), rank, world)
    state = _state(tables, optimizer, is_flat)
    assert not [key for key in state["model"] if "packed" in key]
    assert "packed" not in str(state["optimizer"].keys() if is_flat else state["optimizer"]["state"].keys())
    dcp.save(state, checkpoint_id=f"{folder}/{name}-{is_flat}")
    return losses


def resume(folder: str, name: str, is_flat: bool) -> list[float]:
    """Loads on another number of ranks under another plan, and goes on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    tables = collection()
    with torch.no_grad():
        for weight in tables.packed_weights():
            weight.zero_()
    shard(tables, plan=plans(world)[OTHER_PLANS[name]])
    optimizer = OPTIMIZERS[name][0](tables)
    state = _state(tables, optimizer, is_flat)
    dcp.load(state, checkpoint_id=f"{folder}/{name}-{is_flat}")
    assert not tables.load_state_dict(state["model"]).missing_keys
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    set_optimizer_state_dict(tables, optimizer, state["optimizer"], options=options)
    return train(tables, optimizer, range(BEFORE, BEFORE + AFTER), rank, world)


def entries() -> list[str]:
    """The forms of entries, and a whole state_dict loaded into parts."""
    world = dist.get_world_size()
    tables = collection()
    shard(tables, plan=plans(world)["mixed"])
    forms = [
        f"{key} {type(value).__name__} {tuple(value.shape)}" for key, value in tables.state_dict().items()
    ]
    torch.manual_seed(5)
    whole = {f"embedding_bags.{name}.weight": torch.randn(size) for name, size in SIZES.items()}
    tables.load_state_dict(whole)
    for key, value in tables.state_dict().items():
        assert tables.tables[key.split(".")[1]].weight.shape == whole[key].shape
        if isinstance(value, DTensor):
            own = value.to_local()
            value = own.local_shards()[0] if hasattr(own, "local_shards") else own
        assert _is_part(value, whole[key]), key
    wrong = {**whole, "embedding_bags.a.weight": torch.randn(3, 3)}
    try:
        tables.load_state_dict(wrong)
    except RuntimeError as error:
        assert "expected [40, 8]" in str(error)
    else:
        raise AssertionError("no error")
    recfuse.distributed.unshard(tables)
    for key, value in tables.state_dict().items():
        assert torch.equal(value, whole[key]), key
    return forms


def _is_part(part: Tensor, whole: Tensor) -> bool:
    rows, columns = part.shape
    return any(
        torch.equal(part, whole[row : row + rows, column : column + columns])
        for row in range(whole.shape[0] - rows + 1)
        for column in range(whole.shape[1] - columns + 1)
    )
