"""Predicted peaks of memory against the allocations of real steps on the CPU, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recfuse.perf.calibrating.probes import Batch, Dlrm, DlrmModel, Step
from recfuse.perf.calibration import Calibration
from recfuse.perf.predict import operators_of
from recfuse.perf.tracing.memory import MemoryCount, workspace_bytes
from recfuse.perf.tracing.operators import Operator

MODELS = {
    "many lookups": (Dlrm((13, 32, 16), (20_000, 5000, 3000, 800), 16, (64, 32, 1), pooling=20), 256),
    "large MLPs": (Dlrm((64, 512, 64), (3000, 500), 64, (512, 256, 1), pooling=2), 512),
    "large tables": (Dlrm((13, 64, 32), (100_000, 50_000), 32, (64, 1), pooling=5), 512),
    "many tables": (Dlrm((13, 64, 16), (1000,) * 26, 16, (128, 64, 1)), 1024),
}


class AdamOfBoth:
    """SparseAdam for the tables, Adam for the other Parameters."""

    def __init__(self, model: DlrmModel) -> None:
        rest = [*model.bot_l.parameters(), *model.top_l.parameters()]
        self.optimizers = torch.optim.SparseAdam(list(model.emb_l.parameters())), torch.optim.Adam(rest)

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def optimizers_of(step: Step) -> Sequence[torch.optim.Optimizer]:
    return getattr(step.optimizer, "optimizers", None) or (step.optimizer,)  # type: ignore[return-value]


def resident(step: Step, batch: Batch) -> int:
    """The bytes of Parameters, buffers, states and inputs."""

    def tensors() -> Iterator[Tensor]:
        yield from step.model.parameters()
        yield from step.model.buffers()
        for optimizer in optimizers_of(step):
            for state in optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, Tensor) and one.dim())
        for part in batch:
            yield from [part] if isinstance(part, Tensor) else part

    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors()}.values())


def real_peak(step: Step, batch: Batch) -> int:
    """The most bytes that live during a step after the first, which begins without gradients."""
    for _ in range(2):
        step()
    for parameter in step.model.parameters():
        parameter.grad = None
    before = resident(step, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0
    return before + peak


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step(name: str, sparse: bool, optimizer: str) -> None:
    sizes, size = MODELS[name]
    model, batch = replace(sizes, sparse=sparse).model(), sizes.batch(size)
    step = Step(model, [batch], optimizer if optimizer == "sgd" or not sparse else None)
    if sparse and optimizer == "adam":
        step.optimizer = AdamOfBoth(model)  # type: ignore[assignment]
    _, peak, before, _ = operators_of(step, None, Calibration("cpu", "2.13"), True)
    assert peak == pytest.approx(real_peak(step, batch), rel=0.05)
    assert before < peak


@pytest.mark.parametrize("shares", [True, False])
def test_shared_memory_counts_until_its_last_tensor_is_freed(shares: bool) -> None:
    count = MemoryCount()
    first = torch.empty(1024)
    count.add(first)
    second = first.detach().clone() if not shares else torch.empty(0).set_(torch.empty(1).untyped_storage())
    if shares:
        count.share(second, [first])
    else:
        count.add(second)
    assert count.bytes == (4096 if shares else 8192)
    del first
    assert count.bytes == 4096
    del second
    assert count.bytes == 0 and count.peak == (4096 if shares else 8192)


@pytest.mark.parametrize(
    ("gpu", "bytes_of_cublas"), [("H100", 32 << 20), ("A100", 8_519_680), (None, 0)], ids=str
)
def test_workspaces_of_products(gpu: str | None, bytes_of_cublas: int) -> None:
    product = Operator("mm", "forward", "mm_nn_aligned", (8, 8, 8))
    linear = replace(product, kind="addmm_nt_aligned")
    assert workspace_bytes([Operator("relu", "forward", "pointwise_1", (8,))], gpu) == 0
    assert workspace_bytes([product, product], gpu) == bytes_of_cublas
    both = workspace_bytes([linear, replace(product, phase="backward")], gpu)
    assert both == (2 * bytes_of_cublas + (1 << 20) if gpu else 0)


def test_inference_needs_no_gradients() -> None:
    sizes, size = MODELS["large tables"]
    peaks: list[int] = []
    calls: list[tuple[Callable[[], None], bool]] = [
        (Step(sizes.model(), [sizes.batch(size)], name), name is not None) for name in (None, "sgd")
    ]
    for call, training in calls:
        _, peak, _, _ = operators_of(call, None, Calibration("cpu", "2.13"), training)
        peaks.append(peak)
    assert peaks[0] < peaks[1]
