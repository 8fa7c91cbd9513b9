"""Collections on a GPU: gradients, training in a graph, the compiler, DLRM and TorchRec."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import opcheck

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support import gpu
from support.collection import SPECS, assert_packed, lookups_of
from support.compiled import compare, with_gradients
from support.dlrm import DLRM_Net, batch_of, train
from support.fused import Problem, every_mode
from support.gpu import moved
from support.gpu_fused import SUMS, batch, on_gpu, twin_of
from support.reference import Feature

pytestmark = gpu.MARKS

OPS = torch.ops.recfuse


@pytest.mark.parametrize(
    "specs", ([(9, 8), (7, 8), (5, 8)], [(9, 8), (7, 4), Table(5, 16, mode="max")]), ids=str
)
def test_a_training_step_in_a_graph(specs: Any) -> None:
    collection = on_gpu(specs)
    count = len(specs)
    indices = torch.zeros(count * 100, dtype=torch.int64, device=gpu.DEVICE)
    offsets = torch.zeros(count * 10 + 1, dtype=torch.int64, device=gpu.DEVICE)

    def fill() -> None:
        lookups, ends = lookups_of(collection, 10, 9)
        indices[: lookups.numel()].copy_(lookups)
        offsets.copy_(ends)

    def step() -> None:
        collection(indices, offsets).square().sum().backward()

    fill()
    stream = torch.cuda.Stream(gpu.DEVICE)
    stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
    with torch.cuda.stream(stream):
        for _ in range(3):
            collection.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream(gpu.DEVICE).wait_stream(stream)
    collection.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        fill()
        for weight in collection.parameters():
            weight.grad.zero_()
        graph.replay()
        got = [weight.grad.clone() for weight in collection.parameters()]
        twin = twin_of(collection)
        twin.zero_grad()
        twin(indices[: offsets[-1]].cpu(), offsets.cpu()).square().sum().backward()
        for one, weight in zip(got, twin.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("kind", ("modes", "weighted", "one dim"))
def test_gradients_are_those_of_the_cpu(sparse: bool, kind: str) -> None:
    if kind == "one dim":
        specs = [Table(9, 4, padding_idx=1), Table(7, 4, mode="mean"), Table(5, 4, feature_names=("x", "y"))]
    else:
        specs = SUMS if sparse or kind == "weighted" else SPECS
    collection = on_gpu(specs, sparse=sparse)
    if kind != "one dim":
        next(iter(collection.parameters())).requires_grad_(False)
    indices, offsets = lookups_of(collection, 30)
    found = []
    for module, device in ((collection, gpu.DEVICE), (twin_of(collection), torch.device("cpu"))):
        factors = torch.linspace(-1, 1, indices.numel(), device=device)
        factors = factors.requires_grad_() if kind == "weighted" else None
        module.zero_grad()
        out = module(indices.to(device), offsets.to(device), factors)
        scale = torch.arange(out.numel(), device=device).view(out.shape).cos()
        (out * scale).sum().backward()
        found.append([p.grad for p in module.parameters()] + [None if factors is None else factors.grad])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.layout == theirs.layout and ours.device == gpu.DEVICE
            torch.testing.assert_close(ours.to_dense().cpu(), theirs.to_dense(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sparse", (False, True))
def test_gradients_of_weights_agree_with_the_cpu(sparse: bool) -> None:
    """Of the operator itself, with tables of several dtypes."""
    specs = [(9, 4, torch.float32), (5, 8, torch.bfloat16), (7, 4, torch.float32), (3, 0, torch.float32)]
    modes = ("mean", "sum", "mean", "sum") if sparse else ("mean", "max", "sum", "max")
    problem = Problem(
        specs, [Feature(n, mode, None) for n, mode in enumerate(modes)] + [Feature(0, "sum", 1)]
    )
    indices, offsets = problem.lookups(12)
    grads = []
    for device in (gpu.DEVICE, torch.device("cpu")):
        weights = [weight.to(device).requires_grad_() for weight in problem.weights]
        out = problem.run(indices.to(device), offsets.to(device), weights=weights, sparse=sparse)
        (out * torch.arange(out.numel(), device=device).view(out.shape).cos()).sum().backward()
        grads.append([weight.grad for weight in weights])
    for ours, theirs in zip(*grads, strict=True):
        assert ours.is_sparse == sparse and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.to_dense().cpu(), theirs.to_dense(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    collection = on_gpu().to(dtype)
    given = batch(collection, 30)
    collection(*given).float().square().sum().backward()
    wide = copy.deepcopy(collection).float()
    wide.zero_grad()
    wide(*given).square().sum().backward()
    for ours, theirs in zip(collection.parameters(), wide.parameters(), strict=True):
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.05, atol=0.3)


def test_training_with_an_optimizer_made_before() -> None:
    bags = [nn.EmbeddingBag(20, dim, mode="sum") for dim in (4, 8, 4)]
    model = nn.Module()
    model.collection = FusedEmbeddingBagCollection.from_embedding_bags(bags, names=["x", "y", "z"])
    twin = twin_of(model.collection)
    model.to(gpu.DEVICE)
    optimizers = [torch.optim.Adagrad(one.parameters(), lr=0.5) for one in (model, twin)]
    for _ in range(4):
        indices, offsets = lookups_of(twin)
        model.collection(*moved((indices, offsets))).square().sum().backward()
        twin(indices, offsets).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    assert_packed(model.collection)


@pytest.mark.parametrize("gradients", (False, True))
def test_opcheck(gradients: bool) -> None:
    specs = [(9, dim, torch.float32) for dim in (4, 8, 3)]
    schedules = torch.tensor([[1, 0, 0, 0, 48]] * 3, dtype=torch.int32)
    for problem, sparse in ((Problem(specs), False), (Problem(specs), True),
                            (Problem(specs, every_mode(specs)), False)):  # fmt: skip
        indices, offsets = moved(problem.lookups(4))
        sample = (moved(problem.weights), problem.rows, indices, offsets, problem.output_dim, None, sparse)
        opcheck(OPS.fused_embedding_bag.default, with_gradients(sample, gradients))
        if len(problem.rows) == 3:
            rest = (-1, "on", schedules, 16, None)
            opcheck(OPS.fused_embedding_bag.default, with_gradients((*sample, *rest), gradients))
    for sparse in (False, True):
        collection = on_gpu([Table(9, 4), Table(5, 4, mode="mean"), Table(4, 7)], sparse=sparse)
        layout, (indices, offsets) = collection.layout, batch(collection, 4)
        call = collection.packed_weights(), layout.features, indices, offsets, layout.output_dim, None
        opcheck(OPS.fused_embedding_bag.default, (*call, sparse))
        opcheck(OPS.fused_embedding_bag.default, (*call, sparse, -1, "on", schedules, 0, None))


BACKENDS = ["aot_eager"]
if gpu.MISSING is None and shutil.which("cc"):
    BACKENDS.append("inductor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learned_before", (False, True))
def test_a_compiled_collection(backend: str, learned_before: bool) -> None:
    if backend == "inductor" and gpu.DEVICE.type == "cuda":
        pytest.importorskip("triton", reason="inductor needs triton for CUDA")
    module = on_gpu([Table(9, 4), Table(9, 4, mode="mean"), Table(9, 8), Table(9, 3, mode="max")])
    if learned_before:
        module(*batch(module))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    inputs = [batch(module, bags, 4) for bags in (2, 5)]
    with torch.no_grad():
        first = compiled(*inputs[0])
        assert (module.schedules is not None) == learned_before
        torch.testing.assert_close(first, module(*inputs[0]))
    compare(compiled, module, module, inputs)


@pytest.mark.parametrize("learned_before", (False, True))
def test_an_exported_collection(tmp_path: Path, learned_before: bool) -> None:
    module = on_gpu([Table(9, 4), Table(9, 4, mode="mean"), Table(9, 8, mode="max")]).eval()
    example = batch(module, 4)
    if learned_before:
        module(*example)
    bags = torch.export.Dim("bags", min=2, max=4096)
    shapes = {"indices": {0: torch.export.Dim.AUTO}, "offsets": {0: 3 * bags + 1}}
    exported = torch.export.export(module, example, dynamic_shapes=shapes)
    assert (module.schedules is not None) == learned_before
    assert str(exported.graph).count("recfuse.fused_embedding_bag") == 1
    torch.export.save(exported, tmp_path / "collection.pt2")
    loaded = torch.export.load(tmp_path / "collection.pt2")
    for one, count in itertools.product((exported, loaded), (2, 8)):
        given = batch(module, count)
        torch.testing.assert_close(one.module()(*given), module(*given))


@pytest.mark.parametrize("form", ("tensor", "list", "stacked"))
@pytest.mark.parametrize("weighted", (None, "fixed", "learned"))
@pytest.mark.parametrize("sparse", (True, False))
def test_a_dlrm_trains_with_the_same_losses(sparse: bool, weighted: str | None, form: str) -> None:
    model = DLRM_Net(sparse=sparse, weighted=weighted).to(gpu.DEVICE)
    if weighted == "fixed":
        model.v_W_l = [one.to(gpu.DEVICE) for one in model.v_W_l]
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin)]
    report = recfuse.swap(twin, optimizers=optimizers[1:])
    assert [entry.name for entry in report.fused] == ["emb_l"] and not report.left
    batches = [moved(batch_of(model, form=form)) for _ in range(5)]
    torch.testing.assert_close(
        train(twin, optimizers[1], batches), train(model, optimizers[0], batches), rtol=1e-4, atol=1e-4
    )
    for ours, theirs in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("form", ("tensor", "list", "stacked"))
def test_a_dlrm_does_not_wait_for_the_gpu(form: str) -> None:
    model = DLRM_Net(sparse=False).to(gpu.DEVICE)
    recfuse.swap(model)
    _, lS_o, lS_i = moved(batch_of(model, form=form))
    model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)[0].sum().backward()
    gpu.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_dlrm() -> None:
    model = DLRM_Net(sparse=False).to(gpu.DEVICE)
    recfuse.swap(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compare(compiled, model, model, [moved(batch_of(model, bags, "stacked")) for bags in (4, 9)])


def test_a_fused_dlrm_moves_there_and_back() -> None:
    model = DLRM_Net()
    plain = copy.deepcopy(model)
    recfuse.swap(model)
    given = batch_of(model)
    for device in (gpu.DEVICE, torch.device("cpu"), gpu.DEVICE):
        model.to(device)
        assert model.emb_l.has_kernel
        got = model(*moved(given, device))
        torch.testing.assert_close(got.cpu(), plain(*given), rtol=1e-4, atol=1e-4)


def test_tables_of_two_devices_are_replaced_one_by_one() -> None:
    if gpu.DEVICE.type != "cuda":
        pytest.skip("needs CUDA")
    model = DLRM_Net()
    model.emb_l[2].to(gpu.DEVICE)
    report = recfuse.swap(model)
    assert not report.fused and len(report.replaced) == 4
    assert "table 2 is on cuda:0; expected cpu, as table 0" in report.left[0].detail


def test_torchrecs_collection() -> None:
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed")
    from support.jagged import configs, keyed

    model = nn.Sequential(torchrec.EmbeddingBagCollection(tables=configs()))
    want = copy.deepcopy(model)
    recfuse.swap(model)
    model.to(gpu.DEVICE)
    try:
        features = keyed(("f2", "f3", "f1")).to(gpu.DEVICE)
        features.offsets()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this fbgemm_gpu has no CUDA kernels: {error}")
    model[0].calibrate([features])
    got, theirs = model(features), want(features.to("cpu"))
    assert got.keys() == theirs.keys()
    torch.testing.assert_close(got.values().cpu(), theirs.values(), rtol=1e-4, atol=1e-4)
    collection = FusedEmbeddingBagCollection(configs(), device=gpu.DEVICE)
    collection.load_state_dict(model[0].state_dict())
    assert torch.equal(collection(features), got.values())
    got.values().square().sum().backward()
    theirs.values().square().sum().backward()
    for ours, other in zip(model[0].tables.values(), want.parameters(), strict=True):
        torch.testing.assert_close(ours.weight.grad.cpu(), other.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ("none", "SGD", "Adagrad", "RowWiseAdagrad", "Adam"))
def test_tables_that_take_no_part(kind: str) -> None:
    """Their columns are detached: as on the CPU, no gradient has their rows and no step moves them."""
    lists = [recfuse.nn.FusedEmbeddingBagList([torch.nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3)])]
    lists.append(copy.deepcopy(lists[0]).to(gpu.DEVICE))
    make = None if kind == "none" else getattr(recfuse.optim, kind)
    optimizers = [make(one.parameters(), lr=0.1, weight_decay=0.1) if make else None for one in lists]
    indices, offsets = torch.randint(0, 50, (3, 64)), torch.arange(0, 64, 4).repeat(3, 1)
    for used in ((0, 1, 2), (0, 2), (1,)):
        for tables, optimizer in zip(lists, optimizers, strict=True):
            device = tables[0].weight.device
            pooled = tables.pool(offsets.to(device), indices.to(device))
            torch.cat([pooled[at] if at in used else pooled[at].detach() for at in range(3)]).sum().backward()
            if optimizer is not None:
                optimizer.step()
        for cpu, cuda in zip(*(one.parameters() for one in lists), strict=True):
            torch.testing.assert_close(cuda.detach().cpu(), cpu.detach(), rtol=1e-4, atol=1e-5)
            if optimizer is None:
                torch.testing.assert_close(cuda.grad.cpu(), cpu.grad, rtol=1e-4, atol=1e-5)
