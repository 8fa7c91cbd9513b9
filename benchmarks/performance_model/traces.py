"""Traces targets without a device, in other processes while the device is measured."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from typing import Any

import torch

import recfuse
from performance_model.targets import NAMED, Target, cut, step_of
from recfuse.perf.calibrating.fused import Collection, random_collection
from recfuse.perf.calibrating.probes import DlrmModel
from recfuse.perf.capacity import largest_batches
from recfuse.perf.predict import predict
from recfuse.perf.prediction import Prediction
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.memory import workspace_bytes
from recfuse.perf.tracing.operators import Operator
from recfuse.perf.tracing.tracer import Tracer, run_traced
from recfuse.perf.tracing.unallocated import unallocated

FORMS = "loop", "swapped"


def listed(operators: list[Operator]) -> list[list[Any]]:
    """Return operators as JSON: name, phase, kind, sizes, fusable, storages read and written."""
    return [
        [one.name, one.phase, one.kind, [round(float(size), 3) for size in one.sizes], int(one.fusable),
         list(one.reads), list(one.writes)]
        for one in operators
    ]  # fmt: skip


def of_target(target: Target, gpu: str | None) -> dict[str, Any]:
    """Traces the operators of a target on the CPU, without its memory."""
    begin = time.perf_counter()
    batch = target.sizes.batch(target.batch)
    with unallocated():
        model = target.sizes.model()
        step = step_of(target, model, [batch])
    traced_s = time.perf_counter() - begin
    operators, memory = run_traced(Tracer(gpu, target.training, KeptState(gpu is not None)), step, model)
    seconds = time.perf_counter() - begin - traced_s
    return {"ops": listed(operators), "peak": memory.peak + workspace_bytes(operators, gpu),
            "resident": memory.resident,
            "trace_seconds": round(seconds, 4)}  # fmt: skip


def collection(number: int, tiny: bool) -> Collection:
    """Return the sizes of a random collection."""
    return random_collection(random.Random(500 + number), 2000 if tiny else 300_000, 8 if tiny else 200)


def bag_model(number: int, tiny: bool, form: str, device: str) -> BagModel:
    """Return the bags of a random collection in a loop, or swapped."""
    model = BagModel(collection(number, tiny).bags(device))
    if form == "swapped":
        recfuse.swap(model)
    return model


def of_swap(number: int, tiny: bool, gpu: str | None) -> dict[str, Any]:
    """Traces the inference of a random collection, as a loop and swapped."""
    traces = {}
    for form in FORMS:
        with unallocated():
            model = bag_model(number, tiny, form, "cpu")
        inputs = collection(number, tiny).inputs(0, "cpu")

        def call(model: Any = model, inputs: Any = inputs) -> None:
            with torch.no_grad():
                model(*inputs)

        operators, _ = run_traced(Tracer(gpu, False, KeptState()), call, model)
        traces[form] = listed(operators)
    return traces


@dataclass(frozen=True)
class Limit:
    """The question for the largest batch under a latency."""

    model: str
    seconds: float
    tiny: bool = False


LIMITS = tuple(Limit(model, ms * 1e-3) for model in NAMED for ms in (1.0, 2.5, 6.0))


def limit_target(limit: Limit, batch: int) -> Target:
    """Return the inference of a named model."""
    sizes = NAMED[limit.model]
    return Target(limit.model, cut(sizes, 200) if limit.tiny else sizes, batch)


def of_limit(limit: Limit, gpu: str) -> list[dict[str, Any]]:
    """Predicts the largest batch of each regime under a latency."""

    def at(batch: int) -> Prediction:
        target = limit_target(limit, batch)
        with unallocated():
            model = target.sizes.model()
        return predict(model, target.sizes.batch(batch)[:3], gpu=gpu)

    most = 64 if limit.tiny else 1 << 15
    return [
        {"regime": one.regime, "batch": one.batch, "seconds": one.seconds, "by": one.by}
        for one in largest_batches(at, limit.seconds, most)
    ]


class BagModel(torch.nn.Module):
    """Bags in a list with the names of facebookresearch/dlrm, which `recfuse.swap` pools in one call."""

    def __init__(self, bags: torch.nn.ModuleList) -> None:
        """Takes the bags."""
        super().__init__()
        self.emb_l = bags

    apply_emb = DlrmModel.apply_emb

    def forward(self, offsets: Any, indices: Any) -> torch.Tensor:
        """Returns the concatenated pooled rows."""
        return torch.cat(self.apply_emb(offsets, indices, self.emb_l, []), dim=1)


Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Traces:
    """Runs jobs in processes that use no GPU, or in this process when their result is read."""

    def __init__(self, processes: int = 0) -> None:
        """Start processes; 0: none."""
        self._pool = None
        self._results: dict[Job, AsyncResult[Any]] = {}
        if processes:
            context = multiprocessing.get_context("spawn")
            hidden, visible = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ[hidden] = ""
            self._pool = context.Pool(processes, torch.set_num_threads, (1,))
            del os.environ[hidden]
            if visible is not None:
                os.environ[hidden] = visible

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start jobs in the other processes, if there are any."""
        if self._pool is not None:
            for job in jobs:
                if job not in self._results:
                    self._results[job] = self._pool.apply_async(*job)

    def wait(self, seconds: float) -> int:
        """Wait until all jobs have ended or the time is over, end the processes, and return the number
        of unfinished jobs.
        """
        end = time.monotonic() + seconds
        for result in self._results.values():
            result.wait(max(end - time.monotonic(), 0.0))
        unfinished = [job for job, result in self._results.items() if not result.ready()]
        for job in unfinished:
            del self._results[job]
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
        return len(unfinished)

    def get(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a job: that of another process, else computed here."""
        if (result := self._results.get((function, arguments))) is not None:
            return result.get(0)
        return function(*arguments)


def memory_targets(tiny: bool = False) -> list[Target]:
    """Return training steps whose memory is compared: dense and sparse gradients, SGD and Adam."""
    targets = []
    for name, sizes in NAMED.items():
        for sparse in (True, False):
            cut_sizes = replace(cut(sizes, 200 if tiny else 1_000_000), sparse=sparse)
            for optimizer in ("sgd", "sparse_adam" if sparse else "adam"):
                targets.append(Target(name, cut_sizes, 16 if tiny else 2048, optimizer))
    return targets
