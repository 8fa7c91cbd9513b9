"""The kernels that `recfuse compile` compiles are those that the same calls launch, of any batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from recfuse import _C, cli
from recfuse.nn import EmbeddingBag, EmbeddingColumns, FusedEmbeddingBagCollection, Table
from recfuse.nn.columns import Bucketize, Hash, Identity
from recfuse.perf.explain import known_gpus
from recfuse.perf.reserved import Reserving
from recfuse.plan.features import FeatureTable
from support import bag_plan, collection_plan

ARCH = "sm_90a"
GPUS = [gpu["name"] for gpu in known_gpus() if gpu["arch"] == ARCH]
MOST_BAGS, MOST_LOOKUPS = 1 << 17, 1 << 21
FIGURES = {"registers": 1, "spill_bytes": 0, "cubin_bytes": 1, "cached": False, "seconds": 0.0}

Kernels = set[tuple[str, ...]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """The kernels of a command line, which are not compiled."""

    def run(*options: str) -> Kernels:
        found: Kernels = set()

        def compile(arch: str, file: str, kernel: str, defines: str, cached_only: bool = False) -> Any:
            found.add((arch, file, kernel, defines))
            return FIGURES

        with monkeypatch.context() as patch:
            patch.setattr(_C, "kernel_compile", compile)
            assert cli.main(["compile", "--arch", ARCH, *options]) == 0
        return found

    return run


def lowered(call: Callable[..., Any], *batch: Any, training: bool = False) -> Kernels:
    found: Kernels = set()
    for gpu in GPUS:
        found |= set(recfuse.explain(call, *batch, gpu=gpu, training=training).kernels())
    return found


def any_size(generator: random.Random) -> tuple[int, int]:
    """Bags of a feature, and lookups of all, from few to many."""
    bags, lookups = (generator.uniform(0, most.bit_length() - 1) for most in (MOST_BAGS, MOST_LOOKUPS))
    return round(2**bags), round(2**lookups)


def jagged(features: int, bags: int, lookups: int, integer: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.arange(features * bags + 1, dtype=torch.float64) / (features * bags) * lookups
    return torch.zeros(lookups, dtype=integer), offsets.round().to(integer)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("schedule", ["", "station=register distance=4 threads=16"])
def test_tables_of_given_batches(compiled, schedule: str, weighted: bool) -> None:
    given = ["--dim", "32", "--rows", "70000", "--dtype", "float16", "--index", "int32", "--batch", "64"]
    given += ["2048", "--pooling", "5", "60", "--schedule", schedule, *["--weighted"] * weighted]
    found: Kernels = set()
    table = EmbeddingBag(70000, 32, mode="sum", dtype=torch.float16)
    table.schedule = schedule
    for bags in 64, 2048:
        for pooling in 5, 60:
            indices = torch.zeros(bags * pooling, dtype=torch.int32)
            offsets = torch.arange(bags, dtype=torch.int32) * pooling
            weights = [torch.ones(bags * pooling, dtype=torch.float16)] * weighted
            found |= lowered(table, indices, offsets, *weights)
    own = {kernel for kernel in compiled(*given) if kernel[2] != "rf_pin_rows"}
    assert own == found and found


def modules(kind: str, new: Callable[[bool], torch.nn.Module]) -> list[tuple[Callable[..., Any], bool]]:
    """Steps of training as users make them, and whether `explain` adds their backward pass."""
    if kind == "gradients":
        return [(new(False), True), (new(True), True)]
    steps = []
    for deferred in (False, True):
        module = new(False)
        optimizer = getattr(recfuse.optim, kind)(module, lr=0.1, deferred=deferred)

        def step(*batch: Any, module: Any = module, optimizer: Any = optimizer) -> None:
            with torch.enable_grad():
                module(*batch).sum().backward()
            optimizer.step()

        steps.append((step, False))
    return steps


KINDS = {"gradients": "gradients", "sgd": "SGD", "adagrad": "Adagrad", "rowwise_adagrad": "RowWiseAdagrad",
         "adam": "Adam"}  # fmt: skip


def is_forward(kernel: tuple[str, ...]) -> bool:
    return kernel[2] in ("rf_embedding_bag", "rf_short_bags", "rf_fused_embedding_bag", "rf_fused_map")


@pytest.mark.parametrize("rows", [3000, pytest.param(400_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_of_a_table_by_any_batch(compiled, kind: str, rows: int) -> None:
    given = ["--dim", "16", "--rows", str(rows), "--index", "int32", "--mode", "mean", "--training", kind]
    own, generator = compiled(*given), random.Random(rows)
    used: Kernels = set()

    def new(sparse: bool) -> EmbeddingBag:
        return EmbeddingBag(rows, 16, mode="mean", sparse=sparse)

    for call, training in modules(KINDS[kind], new):
        for _ in range(8):
            bags, lookups = any_size(generator)
            indices, offsets = jagged(1, bags, lookups, torch.int32)
            used |= lowered(call, indices, offsets[:-1], training=training)
    used = {kernel for kernel in used if not is_forward(kernel)}
    assert used and used <= own


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    plan = collection_plan.plan_for(collection_plan.collection_of())
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("kind", [None, "gradients", "adagrad"])
def test_a_collections_plan_by_any_batch(compiled, plan_file: Path, kind: str | None) -> None:
    own = compiled("--plan", str(plan_file), *(["--training", kind] if kind else []))
    generator = random.Random(1)
    used: Kernels = set()

    def mapped(collection: Any, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return collection(indices, offsets, mapping=collection.map(offsets))

    def new(sparse: bool) -> FusedEmbeddingBagCollection:
        collection = FusedEmbeddingBagCollection(tables, sparse=sparse)
        recfuse.Plan.load(plan_file).apply(collection)
        return collection

    tables = [Table(50, 4)] * 2 + [Table(100, 8, mode="mean", padding_idx=0)] * 3
    tables = [dataclasses.replace(table, name=f"n{n}") for n, table in enumerate(tables)]
    with pytest.warns(UserWarning):  # the plan is for a GPU
        calls = modules(KINDS[kind], new) if kind else [(new(False), False)]
    for call, training in calls:
        for _ in range(8):
            bags, lookups = any_size(generator)
            batch = jagged(5, bags, lookups, torch.int64)
            used |= lowered(call, *batch, training=training)
            if kind is None and bags < 1 << 14:
                used |= lowered(partial(mapped, call), *batch)
    assert used and used <= own
    if kind is None:
        rest = {kernel[2] for kernel in own - used}
        assert rest <= {"rf_pin_rows", "rf_fused_staged", "rf_fused_embedding_bag"}


def test_staged_tables_of_a_plan(compiled, tmp_path: Path) -> None:
    """Tables that only large batches stage, with a mapping and without."""
    plan = dataclasses.replace(
        collection_plan.plan_for(collection_plan.collection_of()),
        schedules=[""], schedule_of=[0] * 20, expected=[160] * 20, warps=0,
        tables=[FeatureTable(2000, 4, "float32", "sum", False)], table_of=[0] * 20,
    )  # fmt: skip
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    names = [kernel[2] for kernel in compiled("--plan", str(tmp_path / "plan.json"))]
    assert names.count("rf_fused_staged") == 2


@pytest.mark.parametrize("huge", [False, True])
def test_huge_batches(compiled, plan_file: Path, huge: bool) -> None:
    own = compiled("--plan", str(plan_file), *["--huge-batches"] * huge)
    wide = [kernel for kernel in own if "-DRF_POSITION=rf_i64" in kernel[3]]
    assert len(wide) == 2 * huge


def test_a_tables_plan(compiled, tmp_path: Path) -> None:
    table = EmbeddingBag(100, 4, mode="mean")
    plan = bag_plan.plan_for(table)
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    table.schedule = plan.schedule
    lookups, bags = round(plan.trace.lookups), round(plan.trace.bags)
    own = compiled("--plan", str(tmp_path / "plan.json"))
    indices, offsets = torch.zeros(lookups, dtype=torch.int64), torch.arange(bags) * (lookups // bags)
    assert {kernel for kernel in own if kernel[2] != "rf_pin_rows"} == lowered(table, indices, offsets)
    assert sum(kernel[2] == "rf_pin_rows" for kernel in own) == 4


@pytest.mark.parametrize("kind", ["gradients", "sgd"])
def test_a_collection_of_a_file(compiled, tmp_path: Path, kind: str) -> None:
    tables = [Table(3000, 8, feature_names=("a", "b")), Table(50_000, 16, dtype=torch.bfloat16)]
    torch.save(FusedEmbeddingBagCollection(tables), tmp_path / "tables.pt")
    given = ["--collection", str(tmp_path / "tables.pt"), "--pooling", "3", "20", "--training", kind]
    own, generator = compiled(*given), random.Random(2)
    new = lambda sparse: FusedEmbeddingBagCollection(tables, sparse=sparse)  # noqa: E731
    for pooling in 3, 20:
        for bags in 1, 500, 20_000:
            batch = torch.zeros(3 * bags * pooling).long(), torch.arange(3 * bags + 1) * pooling
            assert lowered(new(False), *batch) <= own
    unknown = torch.zeros(4).long(), torch.zeros(4).long()  # no lengths, so a kernel maps
    assert "rf_fused_map" in {kernel[2] for kernel in lowered(new(False), *unknown)}
    assert lowered(new(False), *unknown) <= own
    for call, training in modules(KINDS[kind], new):
        for _ in range(6):
            bags, lookups = any_size(generator)
            batch = jagged(3, bags, lookups, torch.int64)
            used = lowered(call, *batch, training=training)
            assert {kernel for kernel in used if not is_forward(kernel)} <= own


COLUMNS = [
    Hash("city", num_embeddings=1000, embedding_dim=8),
    Identity("tags", num_embeddings=5000, embedding_dim=16, pooling="sum"),
    Bucketize("age", boundaries=[1, 2], embedding_dim=4),
]


@pytest.mark.parametrize("kind", [None, "gradients", "adam"])
def test_columns(compiled, tmp_path: Path, kind: str | None) -> None:
    EmbeddingColumns(COLUMNS).to_json(tmp_path / "columns.json")
    given = ["--columns", str(tmp_path / "columns.json"), "--batch", "64"]
    own = compiled(*given, *(["--training", kind] if kind else []))
    calls = [(EmbeddingColumns(COLUMNS), False)]
    if kind is not None:
        calls = modules(KINDS[kind], lambda sparse: EmbeddingColumns(COLUMNS, sparse=sparse))
    ages, cities = torch.zeros(64), torch.zeros(64).long()
    for call, training in calls:
        for tags in cities, (cities, torch.arange(65)):
            used = lowered(call, {"city": cities, "age": ages, "tags": tags}, training=training)
            assert used and used <= own


def test_columns_of_no_file(compiled) -> None:
    own = compiled("--columns")
    assert [kernel[2] for kernel in own].count("rf_embedding_columns") == 6
    assert {"rf_embedding_columns", "rf_columns_lookups", "rf_columns_scan"} == {one[2] for one in own}
    values = torch.zeros(64).long()
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        module = EmbeddingColumns([Identity("a", num_embeddings=9, embedding_dim=4, dtype=dtype)])
        for given in values, (values, torch.arange(65)):
            assert lowered(module, {"a": given}) <= own


def test_ikbo(compiled) -> None:
    own = compiled("--ikbo-linear", "64:32:32:16", "--ikbo-attention", "2:2:64:8:64", "--users", "2",
                   "--candidates", "8")  # fmt: skip
    half = torch.bfloat16
    parents = torch.arange(8) % 2
    linear = [torch.zeros(size, dtype=half) for size in ((64, 32), (64, 32), (2, 32, 16), (8, 32, 16))]
    attention = [torch.zeros(size, dtype=half) for size in ((8, 8, 2, 64), (2, 64, 2, 64), (2, 64, 2, 64))]
    found = lowered(recfuse.ikbo_linear, *linear, parents)
    found |= lowered(recfuse.ikbo_attention, *attention, parents)
    assert own == found and found


def test_other_sizes_of_a_gpu(compiled) -> None:
    given = ["--dim", "64", "--batch", "256", "--gpu"]
    sizes = compiled(*given, "132:60"), compiled(*given, "20:10")
    assert all(len({kernel for kernel in own if kernel[2] != "rf_pin_rows"}) == 1 for own in sizes)
    batch = torch.zeros(256 * 150).long(), torch.arange(256) * 150
    with Reserving():
        table = EmbeddingBag(500_000, 64, mode="sum")
    for own, gpu in zip(sizes, ("sm_90a:132:60", "sm_90a:20:10"), strict=True):
        assert set(recfuse.explain(table, *batch, gpu=gpu).kernels()) <= own
