"""The types of the public names; read by mypy and pyright, never run."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import assert_type

import recfuse
from recfuse import (
    _C,
    CollectionPlan,
    PinnedRows,
    Plan,
    QuantizeReport,
    SwapReport,
    distributed,
    info,
    nn,
    optim,
    timing,
    traces,
    workloads,
)
from recfuse.data import hash_string_lists, hash_strings


def operators(weight: Tensor, indices: Tensor, offsets: Tensor, features: Tensor) -> None:
    assert_type(recfuse.embedding_bag(indices, weight, offsets, mode="sum"), Tensor)
    assert_type(recfuse.fused_embedding([weight], features, indices, offsets, 4, layout="joined"), Tensor)
    assert_type(recfuse.fused_embedding_bag([weight], features, indices, offsets, 4), Tensor)
    assert_type(recfuse.history_mask(offsets, 4), Tensor)
    assert_type(recfuse.ikbo_linear(weight, weight, weight, weight, indices, activation="gelu"), Tensor)
    assert_type(recfuse.ikbo_linear_chain([weight, weight], [weight, weight], [indices]), Tensor)
    assert_type(recfuse.ikbo_attention(weight, weight, weight, indices, kv_offsets=offsets), Tensor)
    assert_type(recfuse.ikbo_attention_path(weight, weight, weight, indices), Literal["packed", "fused"])
    assert_type(recfuse.check(), None)
    assert_type(recfuse.library_path(), str)
    assert_type(recfuse.include_dir(), str)
    assert_type(recfuse.__version__, str)


def strings(texts: list[str]) -> None:
    assert_type(hash_strings(texts, seed=1, threads=2), Tensor)
    assert_type(hash_string_lists(texts).offsets, Tensor)


def modules(indices: Tensor, offsets: Tensor) -> None:
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    assert_type(bag.schedule, str)
    tables = [nn.Table(10, 4), nn.Table(20, 8, mode="mean")]
    collection = nn.FusedEmbeddingBagCollection(tables)
    assert_type(collection.feature_names, list[str])
    assert_type(nn.FusedEmbeddingBagCollection.from_embedding_bags([bag]), nn.FusedEmbeddingBagCollection)
    assert_type(nn.FusedEmbeddingCollection(tables).feature_names, list[str])
    assert_type(nn.FusedEmbeddingCollection.from_embeddings([]), nn.FusedEmbeddingCollection)
    assert_type(collection.forward(indices, offsets), Tensor)
    linear = nn.IKBOLinear.from_linear(torch.nn.Linear(6, 4), in_features=(4, 2))
    assert_type(linear, nn.IKBOLinear)
    assert_type(nn.TargetAttention(8, 2, kv_heads=1).q_proj, torch.nn.Linear)
    assert_type(nn.LinearCompression((3, 2), 4).forward(bag.weight, bag.weight, indices), Tensor)


def columns(batch: dict[str, Tensor]) -> None:
    specs = [
        nn.columns.Bucketize("age", [18, 35, 65], 8, preprocess=[nn.columns.Clip(0, 99)], pooling="sum"),
        nn.columns.Hash("city", 100, 8, invalid="drop", empty=0),
        nn.columns.Vocabulary("word", [5, -7], 4, fill_value=0.5),
        nn.columns.Cross("both", ("city", nn.columns.Key("age", [nn.columns.Cast()])), 50, 4),
        nn.columns.Identity("tags", 10, 4, weights="tag_weights", slice=(0, 2)),
        nn.columns.Numeric("price", preprocess=[nn.columns.Log1p()]),
    ]
    module = nn.EmbeddingColumns(specs, host_tables="1GiB")
    assert_type(module.forward(batch), Tensor)
    assert_type(module.pack(batch).to("cpu", non_blocking=True), nn.columns.PackedColumns)
    assert_type(module.columns["age"], slice)
    assert_type(module.to_torch(), nn.columns.ReferenceColumns)
    assert_type(nn.EmbeddingColumns.from_json(module.to_json()), nn.EmbeddingColumns)
    assert_type(module.memory_report().saved, float)


def plans(bag: nn.EmbeddingBag, collection: nn.FusedEmbeddingBagCollection, calls: list[Any]) -> None:
    found = recfuse.tune(bag, calls, 1.0, progress=False)
    assert_type(found, Plan | CollectionPlan)
    assert_type(Plan.load("plan.json"), Plan | CollectionPlan)
    assert_type(CollectionPlan.load("plan.json"), CollectionPlan)
    assert_type(found.speedup, float)
    assert_type(found.report(), str)
    if isinstance(found, Plan):
        assert_type(found.schedule, str)
        assert_type(found.distance, int | None)
        assert_type(found.drift(calls).moved, bool)
        found.apply(bag)
    else:
        assert_type(found.rows(), NDArray[np.int32])
        assert_type(found.drift(calls, collection).work_moved, float)
        found.apply(collection)
    assert_type(found.matches(bag).reasons, list[str])
    found.save("plan.json")


def passes(model: torch.nn.Module, bag: nn.EmbeddingBag) -> None:
    report = recfuse.swap(model)
    assert_type(report, SwapReport)
    assert_type(recfuse.backend("eager").reports, list[SwapReport])
    recfuse.unswap(model)
    quantized = recfuse.quantize(model, {"t0": "int8"}, output_dtype=torch.float16)
    assert_type(quantized, QuantizeReport)
    assert_type(quantized.bytes_after, int)
    recfuse.dequantize(model)
    assert_type(nn.QuantizedEmbeddingBagCollection([(3, 4)], "int4").output_dtype, torch.dtype)
    assert_type(nn.QuantizedEmbeddingBag(3, 4, dtype="int4").weight, Tensor)
    recfuse.pin_rows(bag.weight, torch.tensor([1]))
    assert_type(PinnedRows(bag.weight, rows=torch.tensor([1]), l2_fraction=0.5).rows, Tensor)


def optimizers(collection: nn.FusedEmbeddingBagCollection) -> None:
    assert_type(optim.SGD(collection, lr=0.1), optim.SGD)
    assert_type(optim.RowWiseAdagrad(collection, deferred=True).deferred, bool)
    assert_type(optim.embedding_parameters(collection), list[torch.nn.Parameter])
    assert_type(optim.clip_grad_norm_(collection.parameters(), 1.0), Tensor)
    torch.optim.lr_scheduler.ExponentialLR(optim.Adam(collection, betas=(0.9, 0.99)), 0.5)
    assert_type(optim.Adagrad(collection).state_dict(), dict[str, Any])


def sharding(model: torch.nn.Module) -> None:
    assert_type(distributed.shard(model, plan={"t0": 0}, average=False), distributed.ShardReport)
    plan = distributed.plan(model, 2, [(torch.tensor([1]), torch.tensor([0, 1]))], optimizer="SGD")
    assert_type(plan, distributed.ShardPlan)
    assert_type(plan.report(), str)
    assert_type(plan.rank_us, tuple[float, ...])
    distributed.shard(model, plan=distributed.ShardPlan.load("plan.json"))
    assert_type(distributed.unshard(model), list[str])
    assert_type(distributed.clip_grad_norm_(model, 1.0), Tensor)
    assert_type(distributed.Cuts(0, (0, 4)).points, tuple[int, ...])


def tools() -> None:
    model = workloads.model("A")
    assert_type(model, workloads.Model)
    assert_type(model.rows, tuple[int, ...])
    assert_type(traces.generate("medium", rows=100), NDArray[np.int64])
    compared = timing.compare({"a": lambda: None})
    assert_type(compared, timing.Comparison)
    assert_type(compared["a"].median, float)
    assert_type(info.collect(), dict[str, Any])
    assert_type(_C.permutation(3, 0), NDArray[np.int64])
    assert_type(_C.jit_status()["entries"], int)
    assert_type(recfuse.cli.main(["info"]), int)
