"""Sharded tables inside models: wrappers, swapped models, moved optimizers, options."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import recfuse
import recfuse.distributed
from recfuse.distributed import shard
from recfuse.nn import FusedEmbeddingBagCollection
from recfuse.perf.placing.plan import FORMAT, VERSION, from_json
from support import dlrm
from support.shards.checkpoints import SAMPLES, samples
from support.shards.models import OPTIMIZERS, SIZES, collection, loss_of, own_and_joined, plans
from support.shards.ranks import DEVICE, raises


class Model(nn.Module):
    """A collection with a dense layer."""

    def __init__(self, device: str = DEVICE) -> None:
        super().__init__()
        self.tables = collection(device=device)
        torch.manual_seed(1)
        self.dense = nn.Linear(self.tables.layout.output_dim, 2, device=DEVICE)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(indices, offsets))


def _ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _train(model: Any, optimizers: list[Any], rank: int, world: int, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model(*samples(step, rank, world)[:2])) / (SAMPLES // world)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _mean(losses: list[float]) -> torch.Tensor:
    found = torch.tensor(losses, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found)
    return found / dist.get_world_size()


def parallel() -> None:
    """DistributedDataParallel averages the rest, and ignores the tables."""
    rank, world = _ranks()
    for name in ("SGD", "deferred Adam", "torch SGD"):
        whole, model = Model(), Model()
        expected = _train(whole, _optimizers(whole, name), 0, 1)
        shard(model, plan=plans(world)["mixed"])
        wrapped = DistributedDataParallel(model)
        losses = _train(wrapped, _optimizers(model, name), rank, world)
        torch.testing.assert_close(_mean(losses).tolist(), expected, rtol=1e-6, atol=1e-6)
        del wrapped
        torch.testing.assert_close(model.dense.weight, whole.dense.weight, rtol=1e-5, atol=1e-6)


def _optimizers(model: Any, name: str) -> list[Any]:
    return [OPTIMIZERS[name][0](model.tables), torch.optim.SGD(model.dense.parameters(), lr=0.1)]


def from_meta() -> None:
    """Tables on meta get the values of one process."""
    _, world = _ranks()
    for plan in plans(world).values():
        whole, model = collection(), collection(device="meta")
        torch.manual_seed(0)
        shard(model, plan=plan)
        after = torch.rand(1)
        recfuse.distributed.unshard(model)
        for key, value in whole.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
        collection()
        assert torch.equal(torch.rand(1), after) or DEVICE == "cuda"


def moved_optimizers() -> None:
    """Optimizers with a state continue."""
    rank, world = _ranks()
    for name in ("Adagrad", "torch Adagrad", "RowWiseAdagrad", "deferred Adam"):
        whole, model = collection(), collection()
        optimizers = [OPTIMIZERS[name][0](tables) for tables in (whole, model)]
        for tables, optimizer in zip((whole, model), optimizers, strict=True):
            _train(tables, [optimizer], 0, 1, 2)
        shard(model, plan=plans(world)["rows"], optimizers=optimizers[1:])
        expected = _train(whole, optimizers[:1], 0, 1)
        losses = _train(model, optimizers[1:], rank, world)
        torch.testing.assert_close(_mean(losses).tolist(), expected, rtol=2e-6, atol=2e-6)
        del optimizers, optimizer


def options() -> None:
    """Gradients that are not averaged, an exchange in bfloat16, the default plan."""
    rank, world = _ranks()
    whole, model = collection(), collection()
    report = shard(model, average=False)
    assert str(report).splitlines()[-1].startswith("exchange: collectives, all_to_all_single of")
    assert all(entry.placement == ("every rank" if world > 1 else "rank 0") for entry in report.entries)
    for tables, at, ranks in ((whole, 0, 1), (model, rank, world)):
        optimizer = recfuse.optim.SGD(tables, lr=0.1)
        loss_of(tables(*samples(0, at, ranks)[:2])).backward()
        optimizer.step()
        del optimizer
    recfuse.distributed.unshard(model)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    rounded = collection()
    shard(rounded, plan=plans(world)["whole"], exchange_dtype=torch.bfloat16)
    own, joined, bags = own_and_joined()
    expected = collection()(*joined[:2])[bags]
    found = rounded(*own[:2])
    assert torch.equal(found, expected.to(torch.bfloat16).float())


def planned() -> None:
    """A plan's file places each table; a plan of another number of ranks raises."""
    _, world = _ranks()
    placements = {"a": {"columns": [0] * world + [8]}, "b": world - 1, "c": "every rank"}
    placements |= {name: {"rows": [0, *[SIZES[name][0]] * world]} for name in "de"}
    tables = [
        {"name": f"embedding_bags.{name}", "rows": rows, "dim": dim, "placement": placements[name]}
        for name, (rows, dim) in SIZES.items()
    ]
    record = {
        "format": FORMAT,
        "version": VERSION,
        "batch": 1,
        "gpu": "H100",
        "optimizer": None,
        "memory": 1e9,
    }
    record |= {"tables": tables, "ranks": world}
    record |= {name: [1] * world for name in ("pooling_us", "exchange_us", "bytes")}
    model = collection()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(record))
        report = shard(model, plan=path)
    expected = [
        f"columns: 8 on {world - 1}",
        f"rank {world - 1}",
        "every rank",
        "rows: 50 on 0",
        "rows: 9 on 0",
    ]
    assert [entry.placement for entry in report.entries] == expected
    (indices, offsets, _), joined, own = own_and_joined()
    torch.testing.assert_close(model(indices, offsets), collection()(*joined[:2])[own])
    more = {name: [1] * (world + 1) for name in ("pooling_us", "exchange_us", "bytes")}
    other = from_json({**record, **more, "ranks": world + 1, "tables": []}, "a plan")
    assert f"the mesh has {world}" in raises(ValueError, lambda: shard(collection(), plan=other))


def scaled() -> None:
    """Gradients that are infinite on a rank make all ranks skip the step and lower the scale."""
    rank, world = _ranks()
    for name in ("torch SGD", "deferred Adam"):
        whole, model = collection(), collection()
        shard(model, plan=plans(world)["mixed"])
        optimizers = [OPTIMIZERS[name][0](tables) for tables in (whole, model)]
        scaler = ShardedGradScaler(DEVICE, init_scale=1024.0, process_group=dist.group.WORLD)
        for step in range(3):
            loss = loss_of(model(*samples(step, rank, world)[:2])) / (SAMPLES // world)
            scaler.scale(loss * (torch.inf if step == 1 and rank == 0 else 1)).backward()
            scaler.unscale_(optimizers[1])
            scaler.step(optimizers[1])
            scaler.update()
            assert scaler.get_scale() == (512.0 if step else 1024.0)
            optimizers[1].zero_grad()
        for step in (0, 2):
            (loss_of(whole(*samples(step, 0, 1)[:2])) / SAMPLES).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        if name == "deferred Adam":
            scaler.scale(loss_of(model(*samples(3, rank, world)[:2]))).backward()
            text = raises(ValueError, partial(scaler.step, optimizers[1]))
            assert "Call scaler.unscale_(optimizer)" in text
        del optimizers, scaler
        recfuse.distributed.unshard(model)
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=2e-5, atol=2e-6)


def raw_states() -> None:
    """state_dict() of an optimizer raises once it has states; a dictionary by table has no packed names."""
    rank, world = _ranks()
    for name in ("torch Adagrad", "deferred Adam", "Adagrad"):
        model = collection()
        shard(model, plan=plans(world)["rows"])
        optimizer = OPTIMIZERS[name][0](model)
        _train(model, [optimizer], rank, world, 1)
        assert "Call torch.distributed.checkpoint.state_dict.get_optimizer_state_dict" in raises(
            ValueError, optimizer.state_dict
        )
        found = get_optimizer_state_dict(model, optimizer)
        names = {f"embedding_bags.{table}.weight" for table in SIZES}
        assert names >= set(found["state"]) and found["param_groups"][0]["params"] == sorted(names)
        fresh = collection()
        shard(fresh, plan=plans(world)["rows"])
        resumed = OPTIMIZERS[name][0](fresh)
        set_optimizer_state_dict(fresh, resumed, found)
        assert "get_optimizer_state_dict" in raises(ValueError, resumed.state_dict)
        del optimizer, resumed


def clipped() -> None:
    """The norm over all ranks, of sparse and dense gradients."""
    rank, world = _ranks()
    for name, plan in (("torch SGD", "mixed"), ("deferred SGD", "copies"), ("deferred Adam", "rows")):
        whole, model = Model(), Model()
        shard(model, plan=plans(world)[plan])
        wrapped = DistributedDataParallel(model)
        both = []
        for each, at, ranks in ((whole, 0, 1), (wrapped, rank, world)):
            own = whole if each is whole else model
            optimizers = _optimizers(own, name)
            (loss_of(each(*samples(0, at, ranks)[:2])) / (SAMPLES // ranks)).backward()
            if own is whole:
                norm = recfuse.optim.clip_grad_norm_(whole.parameters(), 0.3)
            else:
                norm = recfuse.distributed.clip_grad_norm_(model, 0.3)
                text = raises(ValueError, partial(recfuse.optim.clip_grad_norm_, model.parameters(), 0.3))
                assert "recfuse.distributed.clip_grad_norm_" in text
            for optimizer in optimizers:
                optimizer.step()
            both.append(norm)
            del optimizers, optimizer
        torch.testing.assert_close(both[1], both[0], rtol=1e-5, atol=1e-6)
        del wrapped, each
        recfuse.distributed.unshard(model)
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    fused = Model()
    shard(fused)
    optimizer = recfuse.optim.SGD(fused.tables, lr=0.1)
    text = raises(ValueError, lambda: recfuse.distributed.clip_grad_norm_(fused, 1.0))
    assert "deferred=True" in text
    del optimizer
    assert "no sharded tables" in raises(
        ValueError, lambda: recfuse.distributed.clip_grad_norm_(torch.nn.Linear(1, 1), 1.0)
    )


def parts_of_wrapped() -> None:
    """DistributedDataParallel of a parent of a sharded module ignores its tables; after unshard() no more."""
    rank, world = _ranks()
    whole, model = Model(), Model()
    expected = _train(whole, _optimizers(whole, "SGD"), 0, 1)
    shard(model.tables, plan={**dict.fromkeys("abcd", Shard(0)), "e": world - 1})
    outer = nn.Sequential()
    outer.append(model)
    outer._ddp_params_and_buffers_to_ignore = {"another"}
    wrapped = DistributedDataParallel(module=nn.ModuleDict({"model": outer}))
    assert wrapped.parameters_to_ignore and not hasattr(wrapped.module, "_ddp_params_and_buffers_to_ignore")
    wrapped = DistributedDataParallel(outer[0])
    losses = _train(wrapped, _optimizers(model, "SGD"), rank, world)
    torch.testing.assert_close(_mean(losses).tolist(), expected, rtol=1e-6, atol=1e-6)
    del wrapped
    recfuse.distributed.unshard(model)
    assert not DistributedDataParallel(model).parameters_to_ignore
    assert DistributedDataParallel(outer).parameters_to_ignore == {"another"}


def compiled() -> None:
    """torch.compile runs the exchange outside of its graph; export raises."""
    _, world = _ranks()
    tables = collection()
    shard(tables, plan=plans(world)["mixed"])
    indices, offsets, _ = own_and_joined()[0]
    found = torch.compile(tables, backend="eager")(indices, offsets)
    assert torch.equal(found, tables(indices, offsets))
    text = raises(TypeError, lambda: torch.export.export(tables, (indices, offsets)))
    assert "recfuse.distributed.unshard(model)" in text


def accumulated() -> None:
    """Two backward passes and one step of a deferred optimizer."""
    rank, world = _ranks()
    whole, model = collection(), collection()
    shard(model, plan=plans(world)["mixed"])
    for tables, at, ranks in ((whole, 0, 1), (model, rank, world)):
        optimizer = recfuse.optim.SGD(tables, lr=0.1, deferred=True)
        for step in range(2):
            (loss_of(tables(*samples(step, at, ranks)[:2])) / (SAMPLES // ranks)).backward()
        optimizer.step()
        del optimizer
    recfuse.distributed.unshard(model)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def swapped_dlrm() -> None:
    """The model of facebookresearch/dlrm, swapped and sharded."""
    rank, world = _ranks()
    for weighted in (None, "fixed"):
        torch.manual_seed(0)
        whole = dlrm.DLRM_Net(sparse=False, weighted=weighted).to(DEVICE)
        torch.manual_seed(0)
        model = dlrm.DLRM_Net(sparse=False, weighted=weighted).to(DEVICE)
        recfuse.swap(model)
        plan = {"emb_l.0": 0, "1": Replicate(), "2": Shard(0), "3": Shard(1)}
        report = shard(model, plan=plan)
        assert [entry.name for entry in report.entries] == [f"emb_l.{number}" for number in range(4)]
        assert len(model.emb_l) == 4 and model.emb_l[2].num_embeddings == 300
        torch.manual_seed(7)
        batches = [_on_device(dlrm.batch_of(whole)) for _ in range(world)]
        for each in (whole, model):
            each.v_W_l = [None if weights is None else weights.to(DEVICE) for weights in each.v_W_l]
        expected = whole(*batches[rank])
        found = model(*batches[rank])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        names = {f"emb_l.{number}.weight" for number in range(4)}
        assert {name for name in model.state_dict() if "emb_l" in name} <= names
        recfuse.distributed.unshard(model)
        torch.testing.assert_close(model(*batches[rank]), expected, rtol=1e-5, atol=1e-6)


def _on_device(batch: Any) -> list[Any]:
    return [
        value.to(DEVICE) if isinstance(value, torch.Tensor) else [each.to(DEVICE) for each in value]
        for value in batch
    ]


def swapped_torchrec() -> None:
    """TorchRec's EmbeddingBagCollection, swapped and sharded."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    rank, world = _ranks()
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features)
        for name, rows, features in (("a", 40, ["x", "y"]), ("b", 30, ["z"]))
    ]
    whole = EmbeddingBagCollection(tables=configs, device=torch.device(DEVICE))
    model = EmbeddingBagCollection(tables=configs, device=torch.device(DEVICE))
    model.load_state_dict(whole.state_dict())
    recfuse.swap(model)
    torch.manual_seed(rank)
    lengths = torch.randint(0, 4, (3 * 4,))
    batch = KeyedJaggedTensor(["z", "x", "y"], torch.randint(30, (int(lengths.sum()),)), lengths=lengths)
    tables = [each.table for each in recfuse.distributed.plan(model, world, [batch], gpu="H100").tables]
    assert [(table.name, table.features) for table in tables] == [
        ("embedding_bags.a", 2),
        ("embedding_bags.b", 1),
    ]
    assert tables[1].pooling == lengths[:4].sum() / 4
    shard(model, plan={"a": Shard(0), "b": world - 1})
    batch = batch.to(torch.device(DEVICE))
    found, expected = model(batch), whole(batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-6)
    recfuse.distributed.unshard(model)
    torch.testing.assert_close(model(batch).values(), expected.values(), rtol=1e-5, atol=1e-6)
    assert set(model.state_dict()) == set(whole.state_dict())


def several_modules() -> None:
    """Two collections of one model; one without tables on some ranks."""
    rank, world = _ranks()
    torch.manual_seed(0)
    model = nn.ModuleDict({name: FusedEmbeddingBagCollection([(20, 4)], device=DEVICE) for name in "pq"})
    first = {name: model[name].tables["t0"].weight.detach().clone() for name in "pq"}
    shard(model, plan={"p.embedding_bags.t0": 0, "q.embedding_bags.t0": world - 1})
    assert bool([*model["p"].state_dict()]) == (rank == 0)
    optimizer = recfuse.optim.SGD(model, lr=0.1)
    indices = torch.arange(6, device=DEVICE)
    offsets = torch.arange(7, device=DEVICE)
    (model["p"](indices, offsets) * model["q"](indices, offsets)).sum().backward()
    optimizer.step()
    del optimizer
    recfuse.distributed.unshard(model)
    for name, other in (("p", "q"), ("q", "p")):
        expected = first[name].clone()
        expected[:6] -= 0.1 * first[other][:6]
        torch.testing.assert_close(
            model[name].tables["t0"].weight.detach().as_subclass(torch.Tensor), expected
        )
