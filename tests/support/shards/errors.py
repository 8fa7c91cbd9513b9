"""Bad input of sharded modules: every rank raises, and later calls work."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import recfuse
import recfuse.distributed
from recfuse.distributed import Cuts, shard, unshard
from recfuse.distributed.plans import placements_of
from recfuse.distributed.preparing import check_memory, facts_of, prepare
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.shards.models import SIZES, collection, own_and_joined, plans
from support.shards.ranks import DEVICE, raises


def _sharded(plan: str = "mixed") -> Any:
    tables = collection()
    shard(tables, plan=plans(dist.get_world_size())[plan])
    return tables


def ranks_disagree() -> None:
    """Each difference between ranks is named, with the rank, and nothing has changed."""
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    odd = rank == last

    def differs(expected: str, tables: Any, **options: Any) -> None:
        text = raises(ValueError, lambda: shard(tables, **options))
        assert f"rank {last} has" in text and expected in text, text
        assert type(tables) is FusedEmbeddingBagCollection

    sizes = [(40, 8), (50 + odd, 8)]
    differs("51 x 8", FusedEmbeddingBagCollection(sizes, device=DEVICE))
    differs("b1", FusedEmbeddingBagCollection([Table(40, 8, "b1" if odd else "b")], device=DEVICE))
    differs(
        "rank 1" if odd else "rank",
        FusedEmbeddingBagCollection([(40, 8)], device=DEVICE),
        plan={"t0": int(odd)},
    )
    dtype = torch.float16 if odd else torch.float32
    differs("torch.float16", FusedEmbeddingBagCollection([Table(4, 8, dtype=dtype)], device=DEVICE))
    differs("average", FusedEmbeddingBagCollection([(40, 8)], device=DEVICE), average=odd)
    torch.manual_seed(int(odd))
    differs("generator", FusedEmbeddingBagCollection([(40, 8)], device="meta"), plan={"t0": 0})
    bad = FusedEmbeddingBagCollection([(40, 8)], device=DEVICE)
    text = raises(ValueError, lambda: shard(bad, plan={"t0": 99} if odd else {"t0": 0}))
    assert "99" in text and (odd or f"rank {last} has raised" in text), text


def bad_batches() -> None:
    """A bad batch of one rank raises on every rank, and the next call works."""
    tables = _sharded()
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last
    good, _, _ = own_and_joined()
    before = tables(*good).detach().clone()

    def fails(kind: type[Exception], expected: str, call: Callable[[], Any], others: Any = None) -> None:
        text = raises(kind if odd or others is None else others, call)
        assert expected in text, text
        assert torch.equal(tables(*good), before)

    indices, offsets, _ = good
    own = torch.tensor([1, 2, 77, 3], device=DEVICE)
    of_bag = torch.zeros(len(offsets), dtype=torch.int64, device=DEVICE)
    bags = (len(offsets) - 1) // 6
    of_bag[2 * bags + 2 :] = 4  # all lookups in bag 1 of feature b
    bad_index = (own, of_bag) if odd else (indices, offsets)
    text = f"rank {last}: feature 'b': bag 1: place 2: index is 77; expected [0, 30)"
    fails(IndexError, text, lambda: tables(*bad_index))
    negative = (own.clone().sub_(own + 1), of_bag) if odd else (indices, offsets)
    fails(IndexError, "index is -1", lambda: tables(*negative))
    falling = offsets.clone()
    falling[1:2] = 9999
    fails(IndexError, f"rank {last}: offset", lambda: tables(indices, falling if odd else offsets))
    short = offsets[:-1] if odd else offsets
    fails(ValueError, "expected features * bags + 1", lambda: tables(indices, short))
    wrong = indices.float() if odd else indices
    fails(TypeError, "expected int32 or int64", lambda: tables(wrong, offsets), ValueError)
    missing = None if odd else offsets
    fails(ValueError, "offsets is None", lambda: tables(indices, missing))
    with torch.set_grad_enabled(not odd):
        text = raises(ValueError, lambda: tables(*good))
    assert f"rank {last} has gradients disabled" in text, text
    weighted = collection(modes=dict.fromkeys(SIZES, "sum"))
    shard(weighted)
    weights = torch.ones(len(indices), device=DEVICE) if odd else None
    text = raises(ValueError, lambda: weighted(indices, offsets, weights))
    assert f"rank {last} has per_sample_weights torch.float32" in text, text
    text = raises(ValueError, lambda: (weighted if odd else tables)(indices, offsets))
    assert f"rank {last} is in a call of sharded module" in text, text


def bad_arguments() -> None:
    """Errors that all ranks share."""
    world = dist.get_world_size()

    def fails(expected: str, kind: type[Exception] = ValueError, module: Any = None, **options: Any) -> None:
        text = raises(kind, lambda: shard(module or collection(), **options))
        assert expected in text, text

    whole = dict.fromkeys(SIZES, 0)
    fails("no placement of table 'embedding_bags.e'", plan={name: 0 for name in "abcd"})
    fails("named twice", plan={**whole, "embedding_bags.a": 0})
    fails("is no table of the module", plan={**whole, "z": 0})
    fails(f"[0, {world - 1}]", plan={**whole, "a": world})
    fails("Make a plan for this number of ranks", plan={**whole, "a": Cuts(0, (0, *range(1, world + 1), 40))})
    fails("ascend from 0 to 40", plan={**whole, "a": Cuts(0, (0,) * world + (41,))})
    fails("expected 0 (rows) or 1 (columns)", plan={**whole, "a": Shard(2)})
    fails("expected a rank, Shard(0)", TypeError, plan={**whole, "a": "rank 1"})
    fails("plan is a list", TypeError, plan=[0])
    fails("mesh is a str", TypeError, mesh="cpu")
    fails("expected 1", mesh=init_device_mesh(DEVICE, (1, world), mesh_dim_names=("x", "y")))
    fails("recfuse.swap(model)", module=torch.nn.EmbeddingBag(4, 4))
    fails("exchange_dtype", TypeError, exchange_dtype=torch.float64)
    fails("module is a list", TypeError, module=[1])
    double = FusedEmbeddingBagCollection([Table(4, 4, dtype=torch.float64)], device=DEVICE)
    fails("expected float32, float16 or bfloat16", module=double)
    held = collection()
    optimizer = recfuse.optim.SGD(held, lr=0.1)
    fails("an optimizer, SGD, holds", module=held)
    adagrad = recfuse.optim.Adagrad(other := collection(), lr=0.1)
    fails(
        "Create the optimizer afterwards", module=other, optimizers=[adagrad], plan={**whole, "a": Shard(1)}
    )
    del optimizer, adagrad


def too_large() -> None:
    """Parts that exceed a GPU's memory raise before they are allocated."""
    world = dist.get_world_size()
    mesh, device = init_device_mesh(DEVICE, (world,)), torch.device(DEVICE)
    for kind, drawn in ((DEVICE, 0), ("meta", 50 * 8 * 4)):
        tables = collection(device=kind)
        placed = placements_of(dict.fromkeys(SIZES, 0), facts_of("", tables), world)
        prepared = prepare("", tables, list(placed.values()), list(placed), mesh, device, ())
        own = sum(rows * dim * 4 for rows, dim in SIZES.values()) if dist.get_rank() == 0 else 0
        check_memory([prepared], own + drawn)
        if own + drawn:
            text = raises(ValueError, partial(check_memory, [prepared], own + drawn - 1))
            assert f"tables of {own:,} bytes" in text and ("is drawn" in text) == (drawn > 0), text


def bad_uses() -> None:
    """Uses that a sharded module refuses."""
    tables = _sharded()
    remedy = "recfuse.distributed.unshard(model)"
    for use in (
        lambda: shard(tables),
        lambda: copy.deepcopy(torch.nn.Sequential(tables)),
        lambda: torch.save(tables, io.BytesIO()),
        lambda: tables.map(torch.zeros(7, dtype=torch.int64)),
        lambda: tables.reset_parameters(),
        lambda: recfuse.tune(tables, [own_and_joined()[0][:2]]),
    ):
        assert remedy in raises(ValueError, use)
    indices = own_and_joined()[0][0]
    assert "Move the model before" in raises(ValueError, lambda: torch.nn.Sequential(tables).half())
    tables.float()
    for name, table in tables.tables.items():
        assert "Call its module" in raises(ValueError, lambda table=table: table(indices))
        assert "cannot be set" in raises(ValueError, lambda table=table: setattr(table, "weight", 1))
        assert (table.num_embeddings, table.embedding_dim) == SIZES[name]
    text = raises(ValueError, lambda: recfuse.optim.RowWiseAdagrad(tables, lr=0.1))
    assert "is cut by columns" in text
    assert unshard(tables) == [""] and unshard(tables) == []
