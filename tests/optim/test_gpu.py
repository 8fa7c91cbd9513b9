"""Fused optimizers on a GPU: the CPU's steps, whole steps in CUDA graphs, scalers, the compiler, streams."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.ops.training.applied_gradients import AppliedGradient
from recfuse.ops.training.optimizers import STATES
from support import gpu
from support.collection import SPECS, collection_of, lookups_of
from support.compiled import sees_optimizers
from support.gpu import moved

pytestmark = gpu.MARKS
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
SUMS = (
    Table(30, 4),
    Table(20, 16, mode="mean", padding_idx=2),
    Table(50, 8, feature_names=("a", "b")),
    (5, 1),
)
ON_CUDA = pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")


def pair(specs: Any = SUMS, kind: str = "Adagrad", lr: float = 0.1, **options: Any) -> list[Any]:
    """A collection on the GPU and its copy on the CPU, each with an optimizer."""
    theirs = collection_of(specs)
    ours = copy.deepcopy(theirs).to(gpu.DEVICE)
    return [(one, getattr(optim, kind)(one, lr=lr, **options)) for one in (ours, theirs)]


def step(module: Any, optimizer: Any, given: Any) -> None:
    """Makes a step whose gradients stay small."""
    optimizer.zero_grad()
    module(*given).sigmoid().sum().backward()
    optimizer.step()


def same(pairs: Any) -> None:
    """Compares weights and states."""
    (ours, own), (theirs, other) = pairs
    for one, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(one.cpu(), reference)
        for name, value in other.state[reference].items():
            if name != "step":
                close(own.state[one][name].cpu(), value)


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("specs", (SUMS, SPECS), ids=("sums", "modes"))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_cpu(kind: str, specs: Any, deferred: bool) -> None:
    pairs = pair(specs, kind, weight_decay=0.01, deferred=deferred)
    for _ in range(3):
        given = lookups_of(pairs[1][0], 40)
        for module, optimizer in pairs:
            step(module, optimizer, moved(given, next(module.parameters()).device))
        same(pairs)


@pytest.mark.parametrize("mode", ("sum", "mean", "max", "weighted"))
def test_a_single_bag(mode: str) -> None:
    bag = recfuse.nn.EmbeddingBag(60, 24, mode="sum" if mode == "weighted" else mode, padding_idx=3)
    pairs = [(one, optim.Adam(one, lr=0.1)) for one in (copy.deepcopy(bag).to(gpu.DEVICE), bag)]
    for _ in range(3):
        indices, offsets = torch.randint(0, 60, (200,)), torch.arange(0, 200, 8)
        factors = torch.rand(200) if mode == "weighted" else None
        for module, optimizer in pairs:
            own = [
                None if one is None else one.to(module.weight.device) for one in (indices, offsets, factors)
            ]
            step(module, optimizer, own)
    same(pairs)


@pytest.mark.parametrize("form", ("two calls", "frozen", "half", "mixed"))
def test_forms_of_calls(form: str) -> None:
    pairs = pair(SUMS, "Adam")
    for module, _ in pairs:
        if form == "frozen":
            next(module.parameters()).requires_grad_(False)
        if form == "half":
            module.to(torch.bfloat16)
    if form == "mixed":
        pairs = [(module, optim.Adam(list(module.parameters())[1:], lr=0.1)) for module, _ in pairs]
    for _ in range(3):
        given = lookups_of(pairs[1][0], 40)
        for module, optimizer in pairs:
            own = moved(given, next(module.parameters()).device)
            optimizer.zero_grad()
            out = module(*own).sigmoid()
            if form == "two calls":
                out = out * module(own[0].flip(0) % 5, own[1])
            out.float().sum().backward()
            optimizer.step()
    if form == "half":
        for one, other in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0.02, atol=0.05)
        return
    first = next(pairs[0][0].parameters()).grad
    assert (first is None) == (form != "mixed")
    if form == "mixed":
        for one, other in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            close(one.cpu(), other)
    else:
        same(pairs)


def test_stochastic_rounding_has_the_bits_of_the_cpu() -> None:
    weight = torch.randn(50, 40).to(torch.bfloat16)
    found = []
    for device in (gpu.DEVICE, torch.device("cpu")):
        bag = recfuse.nn.EmbeddingBag.from_pretrained(weight.clone().to(device), freeze=False, mode="sum")
        optimizer = optim.SGD(bag, lr=0.25, stochastic_rounding=True, seed=7)
        scale = torch.randn(20, 40, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
        for _ in range(3):  # each row once a step, so that no sum depends on an order
            rows = torch.arange(20, device=device) * 2
            (bag(rows, torch.arange(20, device=device)) * scale).sum().backward()
            optimizer.step()
        found.append(bag.weight.detach().cpu())
    assert torch.equal(*found) and not torch.equal(found[0], weight)


@ON_CUDA
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_gpu(kind: str) -> None:
    ((module, optimizer), _) = pair(SPECS, kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given = moved(lookups_of(module, 40))
    step(module, optimizer, given)
    gpu.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step(module, optimizer, given)
            scheduler.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Captured:
    """A whole step in a CUDA graph: forward, backward, and the optimizers' steps."""

    def __init__(self, module: Any, optimizer: Any, features: int, with_step: bool = True) -> None:
        self.indices = torch.zeros(features * 400, dtype=torch.int64, device=gpu.DEVICE)
        self.offsets = torch.zeros(features * 40 + 1, dtype=torch.int64, device=gpu.DEVICE)
        stream = torch.cuda.Stream(gpu.DEVICE)
        stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
        with torch.cuda.stream(stream):
            for _ in range(3):  # of no lookups
                step(module, optimizer, (self.indices, self.offsets))
        torch.cuda.current_stream(gpu.DEVICE).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            module(self.indices, self.offsets).sigmoid().sum().backward()
            if with_step:
                optimizer.step()

    def replay(self, given: tuple[Tensor, Tensor]) -> None:
        """With a batch of 40 bags per feature."""
        self.indices[: given[0].numel()].copy_(given[0])
        self.offsets.copy_(given[1])
        self.graph.replay()


@ON_CUDA
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_step_in_a_graph_sees_the_scheduler(kind: str) -> None:
    pairs = pair(SPECS, kind)
    (module, optimizer), (twin, other) = pairs
    captured = Captured(module, optimizer, len(module.feature_names))
    for _ in range(3):
        step(twin, other, (torch.zeros(0, dtype=torch.int64), torch.zeros(241, dtype=torch.int64)))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for _, one in pairs]
    before = copy.deepcopy((optimizer.state_dict(), module.state_dict()))
    for _ in range(4):
        given = lookups_of(twin, 40, 9)
        captured.replay(given)
        step(twin, other, given)
        for scheduler in schedulers:
            scheduler.step()
        same(pairs)
    if kind == "Adam":  # the capture itself is no step
        steps = [one.state_dict()["state"][0]["step"] for one in (optimizer, other)]
        assert steps == [7, 7]
    optimizer.load_state_dict(before[0])  # into the memory that the graph knows
    module.load_state_dict(before[1])
    twin.load_state_dict(before[1])
    other.load_state_dict(before[0])
    for _ in range(2):
        given = lookups_of(twin, 40, 9)
        captured.replay(given)
        step(twin, other, given)
        same(pairs)


@ON_CUDA
def test_a_graph_without_the_step_is_refused() -> None:
    ((module, optimizer), _) = pair(SUMS, "Adam")
    Captured(module, optimizer, len(module.feature_names), with_step=False)
    with pytest.raises(ValueError, match=r"captured in a CUDA graph, step\(\) was not"):
        optimizer.step()


@ON_CUDA
def test_a_scaler() -> None:
    pairs = pair(SUMS, "Adam", deferred=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    (module, optimizer), (twin, other) = pairs
    for number in range(4):
        given, bad = lookups_of(twin, 40), number == 1
        scaler.scale(module(*moved(given)).sigmoid().sum() * (torch.inf if bad else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not bad:
            step(twin, other, given)
        same(pairs)
    assert scaler.get_scale() == 512 and optimizer.state_dict()["state"][0]["step"] == 3


@ON_CUDA
def test_a_forward_pass_on_another_stream() -> None:
    pairs = pair(SUMS, "Adagrad")
    (module, optimizer), (twin, other) = pairs
    stream = torch.cuda.Stream(gpu.DEVICE)
    for _ in range(5):
        given = lookups_of(twin, 40)
        own = moved(given)
        stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
        with torch.cuda.stream(stream):
            loss = module(*own).sigmoid().sum()
        torch.cuda.current_stream(gpu.DEVICE).wait_stream(stream)
        loss.backward()
        optimizer.step()
        step(twin, other, given)
    same(pairs)


BACKENDS: list[dict[str, Any]] = [{"backend": "aot_eager"}]
if gpu.MISSING is None and shutil.which("cc"):
    BACKENDS += [{"backend": "inductor"}, {"mode": "reduce-overhead"}]


@sees_optimizers
@pytest.mark.parametrize("how", BACKENDS, ids=str)
@pytest.mark.parametrize("kind", ("SGD", "Adam"))
def test_compiled_training(kind: str, how: dict[str, Any]) -> None:
    if how != BACKENDS[0] and gpu.DEVICE.type == "cuda":
        pytest.importorskip("triton", reason="inductor needs triton for CUDA")
    pairs = pair(SPECS, kind)
    (module, optimizer), (twin, other) = pairs
    compiled = torch.compile(module, fullgraph=True, **how)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for _, one in pairs]
    indices, offsets = lookups_of(twin, 40)
    for turn in range(6):
        given = indices.flip(0) % 5 if turn % 2 else indices % 5, offsets
        optimizer.zero_grad()
        compiled(*moved(given)).sigmoid().sum().backward()
        optimizer.step()
        step(twin, other, given)
        if turn == 3:
            for one, _ in pairs:
                with torch.no_grad():
                    next(one.parameters()).mul_(0.5)
        for scheduler in schedulers:
            scheduler.step()
        same(pairs)


@pytest.mark.parametrize("kind", range(4))
def test_opcheck(kind: int) -> None:
    weights = moved([torch.randn(9, 4), torch.randn(7, 8)])
    shapes = [tuple(weight.shape[: 1 if kind == 2 else 2]) for weight in weights]
    states = [torch.rand(shape, device=gpu.DEVICE) for shape in shapes for _ in range(STATES[kind])]
    features = torch.tensor([[0, 0, 9, 4, 0, -1, 0], [1, 0, 7, 8, 1, 2, 4]])
    indices, offsets, grad = moved((torch.randint(0, 7, (12,)), torch.arange(0, 13, 2), torch.randn(3, 12)))
    numbers = torch.tensor([0.1, 0.0, 1e-8, 0.9, 0.99, 1.0, 1.0, 0.0], device=gpu.DEVICE)
    call = grad, weights, states, features, indices, offsets, None, None, numbers, [], kind
    tests = ("test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.recfuse.fused_embedding_bag_update.default, call, test_utils=tests)
    rows = torch.tensor([1, 4], device=gpu.DEVICE)
    call = weights[0], states[: STATES[kind]], rows, torch.randn(2, 4, device=gpu.DEVICE), numbers, kind
    opcheck(torch.ops.recfuse.rows_update.default, call)


class Net(nn.Module):
    """Tables and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = FusedEmbeddingBagCollection([(20, 4), (9, 8)])
        self.top = nn.Linear(12, 1)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.tables(indices, offsets))


@ON_CUDA
@pytest.mark.skipif(not dist.is_available() or not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_one_process_of_nccl(tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for deferred in (False, True):
            torch.manual_seed(3)
            model = Net()
            twin = copy.deepcopy(model)
            model.to(gpu.DEVICE)
            names = [name for name, _ in model.named_parameters() if name.startswith("tables.")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            parallel = DistributedDataParallel(model, device_ids=[gpu.DEVICE.index])
            own = optim.SGD(model.tables, lr=0.1, deferred=deferred)
            top = torch.optim.SGD(model.top.parameters(), lr=0.1)
            other = torch.optim.SGD(twin.parameters(), lr=0.1)
            for _ in range(3):
                given = lookups_of(twin.tables, 20)
                parallel(*moved(given)).sigmoid().sum().backward()
                if deferred:
                    optim.average_gradients(model.tables.parameters())
                for one in (own, top):
                    one.step()
                    one.zero_grad()
                other.zero_grad()
                twin(*given).sigmoid().sum().backward()
                other.step()
            for mine, reference in zip(model.parameters(), twin.parameters(), strict=True):
                close(mine.cpu(), reference)
    finally:
        dist.destroy_process_group()


@gpu.TWO_GPUS
def test_tables_on_the_second_gpu() -> None:
    pairs = pair(SUMS, "Adam")
    module = copy.deepcopy(pairs[1][0]).to("cuda:1")
    pairs[0] = module, optim.Adam(module, lr=0.1)
    for _ in range(3):
        given = lookups_of(pairs[1][0], 40)
        for one, optimizer in pairs:
            step(one, optimizer, moved(given, next(one.parameters()).device))
    same(pairs)


@ON_CUDA
def test_swap_with_optimizers() -> None:
    from support.dlrm import DLRM_Net, batch_of, train

    model = DLRM_Net(sparse=True).to(gpu.DEVICE)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adagrad(one.parameters(), lr=0.1) for one in (model, twin)]
    report = recfuse.swap(twin, optimizers=optimizers[1:], fuse_optimizers=True)
    assert len(report.fused_optimizers) == 1
    batches = [moved(batch_of(model)) for _ in range(5)]
    close(train(twin, optimizers[1], batches), train(model, optimizers[0], batches))
    assert all(type(table.grad) is AppliedGradient for table in optim.embedding_parameters(twin))


@ON_CUDA
@pytest.mark.parametrize("foreach", (None, True))
def test_gradients_that_are_applied_cannot_be_read(foreach: bool | None) -> None:
    module, optimizer = pair(SUMS, "SGD")[0]
    given = moved(lookups_of(module, 20))
    scaler = torch.amp.GradScaler("cuda")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        scaler.scale(module(*given).sum()).backward()
    assert all(map(torch.equal, module.parameters(), before))
    module(*given).sum().backward()
    with pytest.raises(ValueError, match="reads the gradient of a Parameter"):
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=foreach)
    with pytest.raises(ValueError, match="reads the gradient of a Parameter"):
        scaler.unscale_(optimizer)
    optimizer.step()
