"""TorchRec's pipelines, 2D sharding and optimizer wrappers with recfuse's kernels, beside FBGEMM's, on gloo.

On the CPU there are no streams: pipelines then run their stages one after the other. Where TorchRec insists
on CUDA, a stand-in without effect takes the place of a stream, and the CPU that of the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, model_parallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from recfuse.torchrec import uses_recfuse
from support.processes.ranks import check, run_cases
from support.torchrec.models import SHARDERS, Model, batch, dense_optimizer, loss_of, plan_of, sharded

pytestmark = pytest.mark.long

KERNELS = ("fbgemm", "recfuse")
STEPS = 6
ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
CPU = torch.device("cpu")
OF_2D = [("table", EmbOptimType.EXACT_SGD), ("table", ROWWISE), ("row", ROWWISE), ("column", ROWWISE)]


class Losses(Model):
    """Returns what pipelines expect: the loss, and an output."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss = (super().forward(features) - 1).square().mean()
        return loss, loss.detach()


def _new(kernels: str, sharding: str = "mixed", optimizer: EmbOptimType = ROWWISE) -> Any:
    torch.manual_seed(0)
    parallel = sharded(kernels, sharding, optimizer, Losses())
    assert uses_recfuse(parallel) == (kernels == "recfuse")
    return parallel


def _batches() -> Iterator[KeyedJaggedTensor]:
    return iter([batch(step, dist.get_rank()) for step in range(STEPS)])


def _plain(kernels: str) -> list[float]:
    parallel, losses = _new(kernels), []
    dense = dense_optimizer(parallel)
    for features in _batches():
        dense.zero_grad()
        loss, _ = parallel(features)
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def _pipeline(kind: Any, kernels: str) -> list[float]:
    parallel, losses, batches = _new(kernels), [], _batches()
    pipeline = kind(parallel, dense_optimizer(parallel), CPU)
    while True:
        try:
            losses.append(pipeline.progress(batches).item())
        except StopIteration:
            return losses


class _Stream:
    """No stream."""

    device = CPU


class _Batch:
    """Features that no stream uses."""

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features = features

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return _Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: Any) -> None:
        pass


def _staged(kernels: str) -> list[float]:
    parallel, losses = _new(kernels), []
    dense, stream = dense_optimizer(parallel), _Stream()
    stages = [PipelineStage(name, lambda item: item.to(CPU), stream) for name in ("copy", "copy again")]
    pipeline = StagedTrainPipeline(stages, compute_stream=stream)
    batches = map(_Batch, _batches())
    while (item := pipeline.progress(batches)) is not None:
        dense.zero_grad()
        loss, _ = parallel(item.features)
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses


def _refused(kernels: str) -> list[str]:
    """What two ways of prefetching say, at construction."""
    parallel = _new(kernels)
    ways: list[Callable[[], Any]] = [
        lambda: PrefetchTrainPipelineSparseDist(parallel, dense_optimizer(parallel), CPU),
        lambda: SparseDataDistUtil(parallel, _Stream(), prefetch_stream=_Stream()),
        lambda: SparseDataDistUtil(parallel, _Stream()),
    ]
    said = []
    for way in ways:
        try:
            way()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def _clipped(kernels: str, clipping: GradientClipping) -> tuple[list[float], list[float]]:
    """Losses, and the largest clipped gradient of each step: of the linear layer and data-parallel tables."""
    parallel, losses, norms = _new(kernels), [], []
    parameters = {
        name: value
        for name, value in parallel.named_parameters()
        if not hasattr(value, "_in_backward_optimizers")
    }
    dense = KeyedOptimizerWrapper(parameters, lambda values: torch.optim.SGD(values, lr=0.1))
    combined = CombinedOptimizer([parallel.fused_optimizer, dense])
    optimizer = GradientClippingOptimizer(combined, clipping=clipping, max_gradient=0.05)
    for features in _batches():
        optimizer.zero_grad()
        loss, _ = parallel(features)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(max(value.grad.abs().max().item() for value in parameters.values()))
    return losses, norms


def _warmed_up(kernels: str) -> tuple[list[float], list[float]]:
    """Losses, and the learning rate after each step."""
    parallel, losses, rates = _new(kernels, "table"), [], []
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1),
        WarmupStage(WarmupPolicy.INVSQRT, max_iters=100, value=1.0, decay_iters=2),
    ]
    optimizer = WarmupOptimizer(parallel.fused_optimizer, stages, lr=0.2)
    for features in _batches():
        optimizer.zero_grad()
        loss, _ = parallel(features)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates


def _cases() -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {}
    for kernels in KERNELS:
        cases[f"plain {kernels}"] = functools.partial(_plain, kernels)
        cases[f"base {kernels}"] = functools.partial(_pipeline, TrainPipelineBase, kernels)
        cases[f"sparse_dist {kernels}"] = functools.partial(_pipeline, TrainPipelineSparseDist, kernels)
        cases[f"staged {kernels}"] = functools.partial(_staged, kernels)
        cases[f"refused {kernels}"] = functools.partial(_refused, kernels)
        for clipping in (GradientClipping.NORM, GradientClipping.VALUE):
            cases[f"{clipping.value} {kernels}"] = functools.partial(_clipped, kernels, clipping)
        cases[f"warm-up {kernels}"] = functools.partial(_warmed_up, kernels)
    return cases


def _two_dimensional(kernels: str, sharding: str, optimizer: EmbOptimType) -> DMPCollection:
    """Groups of two ranks that shard, of two that replicate. Gloo has no mean, so that a hook takes it."""
    fused = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-3, "stochastic_rounding": False}
    sharder, model = SHARDERS[kernels](fused_params=fused), Model()
    begin, groups = DistributedModelParallel.__init__, DMPCollection._create_process_groups
    remote = model_parallel._remote_device

    def on_cpu(self: Any, module: Any, env: Any, _: torch.device, *others: Any) -> None:
        begin(self, module, env, CPU, *others)

    def groups_on_cpu(self: Any, *arguments: Any, **named: Any) -> Any:
        self._device = CPU
        return groups(self, *arguments, **named)

    with (
        mock.patch.object(DistributedModelParallel, "__init__", on_cpu),
        mock.patch.object(DMPCollection, "_create_process_groups", groups_on_cpu),
        mock.patch.object(model_parallel, "_remote_device", lambda text: remote(text.rpartition(":")[0])),
    ):
        plan = plan_of(model, sharding, sharder, 2)
        found = DMPCollection(model, torch.device("cuda"), plan, 4, 2, dist.group.WORLD, sharders=[sharder])
    group = found._default_ctx.replica_pg

    def mean(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
            tensor /= dist.get_world_size(group)

    found.set_all_reduce_hook(mean)
    return found


def _train_2d(kernels: str, sharding: str, optimizer: EmbOptimType) -> tuple[list[float], list[Tensor]]:
    """Losses; tables and states after the last sync."""
    torch.manual_seed(0)
    parallel = _two_dimensional(kernels, sharding, optimizer)
    assert uses_recfuse(parallel) == (kernels == "recfuse") or sharding == "table"
    context = parallel._default_ctx
    for tables in context.weights_by_dtype.values():
        for number, rows in enumerate(tables):
            rows.copy_(torch.rand(rows.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    dense, losses = dense_optimizer(parallel), []
    for step in range(STEPS):
        loss = loss_of(parallel, batch(step, dist.get_rank()))
        dense.zero_grad()
        loss.backward()
        dense.step()
        parallel.sync()
        losses.append(loss.item())
    kept = [*context.weights_by_dtype.values(), *context.optimizer_tensors_by_dtype.values()]
    return losses, [tensor.clone() for tensors in kept for tensor in tensors]


def _cases_of_four() -> dict[str, Callable[[], Any]]:
    return {
        f"{kernels} {sharding} {optimizer.name}": functools.partial(_train_2d, kernels, sharding, optimizer)
        for sharding, optimizer in OF_2D
        for kernels in KERNELS
    }


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return run_cases(2, _cases)


@pytest.fixture(scope="module")
def results_of_four() -> dict[str, list[Any]]:
    return run_cases(4, _cases_of_four)


def _assert_alike(results: dict[str, list[Any]], name: str) -> list[Any]:
    """Compares both kernels on all ranks; returns recfuse's."""
    theirs, own = (check(results, f"{name} {kernels}") for kernels in KERNELS)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)
    return own


@pytest.mark.parametrize("name", ["base", "sparse_dist", "staged"])
def test_a_pipeline_trains_like_a_loop(results, name):
    loops = _assert_alike(results, "plain")
    for losses, loop in zip(_assert_alike(results, name), loops, strict=True):
        assert losses == loop and len(losses) == STEPS


def test_prefetching_into_no_cache_is_refused(results):
    for pipeline, staged, without in check(results, "refused recfuse"):
        assert "PrefetchTrainPipelineSparseDist has nothing to prefetch" in pipeline
        assert "Use TrainPipelineSparseDist" in pipeline
        assert "SparseDataDistUtil with prefetch_stream has nothing to prefetch" in staged
        assert without == ""
    assert check(results, "refused fbgemm") == [["", "", ""]] * 2


@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_gradient_clipping(results, clipping):
    loops = check(results, "plain recfuse")
    for (losses, norms), loop in zip(_assert_alike(results, clipping), loops, strict=True):
        assert max(norms) <= 0.05 * (1 + 1e-6) and losses != loop


def test_a_warm_up_of_the_fused_optimizer(results):
    for losses, rates in _assert_alike(results, "warm-up"):
        assert rates[0] < rates[2] and rates[-1] < max(rates) and len(losses) == STEPS


@pytest.mark.parametrize(("sharding", "optimizer"), OF_2D, ids=str)
def test_two_dimensional_sharding(results_of_four, sharding, optimizer):
    found = {kernels: check(results_of_four, f"{kernels} {sharding} {optimizer.name}") for kernels in KERNELS}
    for own, theirs in zip(found["recfuse"], found["fbgemm"], strict=True):
        torch.testing.assert_close(own[0], theirs[0], rtol=1e-5, atol=1e-6)
        assert len(own[1]) == len(theirs[1]) > 0
        for one, other in zip(own[1], theirs[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for rank in (0, 2):  # the ranks after it replicate them
        for one, other in zip(found["recfuse"][rank][1], found["recfuse"][rank + 1][1], strict=True):
            assert torch.equal(one, other)
