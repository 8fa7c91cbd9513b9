"""Times of sharded models: of whole steps, and of the calls of their compute kernels."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.models import dense_optimizer

STEPS = 10  # of a sample
LEAST_STEPS = 2
SAMPLE_SECONDS = 0.3
KERNEL_BATCHES, KERNEL_ROUNDS = 2, 3  # of the calls of kernels: a batch of model A has gigabytes
Run = Callable[[int], Any]
Samples = dict[str, list[float]]  # of each model


def slowest(value: float, device: torch.device) -> float:
    """Returns the largest of the ranks' values."""
    largest = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def plain(model: Any, batches: list[Any]) -> Run:
    """Returns a function that makes steps one after the other."""
    dense = dense_optimizer(model)

    def run(steps: int) -> None:
        for step in range(steps):
            loss, _ = model(batches[step % len(batches)])
            dense.zero_grad()
            loss.backward()
            dense.step()

    return run


def pipelined(model: Any, batches: list[Any], device: torch.device) -> Run:
    """Returns a function that makes steps in TorchRec's pipeline, which takes the model over."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), device)

    def endless() -> Iterator[Any]:
        while True:
            yield from batches

    source = endless()

    def run(steps: int) -> None:
        for _ in range(steps):
            pipeline.progress(source)

    return run


def seconds(run: Run, steps: int, device: torch.device) -> float:
    """Returns the slowest rank's time of a step."""
    dist.barrier()
    finish(device)
    begin = time.perf_counter()
    run(steps)
    finish(device)
    return slowest((time.perf_counter() - begin) / steps, device)


def compare(runs: Mapping[str, Run], rounds: int, device: torch.device) -> Samples:
    """Returns samples in microseconds of a step, in turns, after two warm-up samples."""
    for run in runs.values():
        run(LEAST_STEPS)
    steps = {
        name: int(min(max(SAMPLE_SECONDS / seconds(run, LEAST_STEPS, device), LEAST_STEPS), STEPS))
        for name, run in runs.items()
    }
    samples: Samples = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(seconds(run, steps[name], device) * 1e6)
    return samples


class KernelCalls:
    """The compute kernels of a model on this rank, with the features of some steps."""

    def __init__(self, model: Any, batches: Iterable[Any]) -> None:
        """Makes a step with each of the first batches, and keeps the features of each kernel."""
        from recfuse.torchrec.sharder import kernels_of

        self.calls: list[list[tuple[Any, Any]]] = []
        self.kernels = list(kernels_of(model))
        dense = dense_optimizer(model)
        for batch in itertools.islice(batches, KERNEL_BATCHES):
            call: list[tuple[Any, Any]] = []

            def keep(kernel: Any, inputs: tuple[Any, ...], call: list[tuple[Any, Any]] = call) -> None:
                call.append((kernel, inputs[0]))

            hooks = [kernel.register_forward_pre_hook(keep) for kernel in self.kernels]
            model(batch)[0].backward()
            dense.zero_grad()
            for hook in hooks:
                hook.remove()
            self.calls.append(call)

    def run(self, number: int, device: torch.device) -> tuple[float, float]:
        """Returns the microseconds of the lookups, and of the backward passes with updates, of a step."""
        outputs: list[Tensor] = []

        def lookup() -> None:
            outputs.extend(kernel(features) for kernel, features in self.calls[number])

        def update() -> None:
            torch.autograd.backward(outputs, gradients)

        forward = busy_us(lookup, device)
        gradients = [torch.full_like(output, 1e-6) for output in outputs]
        backward = busy_us(update, device)
        for kernel in self.kernels:
            for parameter in kernel.parameters():
                parameter.grad = None
        return forward, backward


def busy_us(call: Callable[[], None], device: torch.device) -> float:
    """Returns the microseconds that the GPU computes or copies for a call; on the CPU the call's time."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0, 0
    for begin_ns, end_ns in spans:  # streams overlap
        busy += max(end_ns - max(begin_ns, until), 0)
        until = max(until, end_ns)
    return busy * 1e-3


def kernel_samples(
    calls: Mapping[str, KernelCalls], device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Returns the slowest rank's microseconds of lookups, of updates and of both, of each model in turns."""
    samples: dict[str, dict[str, list[float]]] = {
        part: {name: [] for name in calls} for part in ("lookup", "update", "lookup and update")
    }
    for number in [0, *range(KERNEL_BATCHES)] + [*range(KERNEL_BATCHES)] * (KERNEL_ROUNDS - 1):
        for name, each in calls.items():
            forward, backward = each.run(number, device)
            for part, us in zip(samples, (forward, backward, forward + backward), strict=True):
                samples[part][name].append(slowest(us, device))
    return {
        part: {name: us[1:] for name, us in of.items()} for part, of in samples.items()
    }  # the first warms


def medians(samples: Mapping[str, list[float]]) -> list[float]:
    """Returns the median of each."""
    return [statistics.median(each) for each in samples.values()]
