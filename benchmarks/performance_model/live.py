"""Measures steps on a device, and records each time with the operators that tracing lists."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import recfuse
from performance_model import PARTS, traces
from performance_model.targets import (
    NAMED,
    RANDOM_SEED,
    Target,
    named,
    named_half,
    random_targets,
    step_of,
)
from performance_model.traces import FORMS, LIMITS, Job, Limit, Traces, memory_targets
from recfuse._files import write_whole
from recfuse._progress import hidden
from recfuse.perf.calibrating.calls import Calls, groups
from recfuse.perf.calibrating.clock import DeviceClock, graphed
from recfuse.perf.calibrating.probes import Step
from recfuse.perf.calibrating.run import measured
from recfuse.perf.calibrating.sizes import EXTENTS
from recfuse.perf.known import facts_here, name_here
from recfuse.perf.tracing.unallocated import unallocated

_HELD_OUT = 3000  # begin of the held-out points of the low-discrepancy sequence
_SHARES = {"held": 30, "memory": 12, "named": 55, "random": 75, "swaps": 65, "limits": 10, "sizes": 20,
           "compiled": 30}  # fmt: skip
"""Shares of the time that each part may take; the rest of a share goes to the next part."""
_DETAILED = ("adam", "adagrad", "sparse_adam")
_BATCHES = 2

Plan = list[tuple[str, Callable[[], None]]]


class Recorder:
    """Measures targets one by one; writes each to the file at once."""

    def __init__(
        self, device: str, path: Path, seconds: float, tiny: bool = False, ahead: Traces | None = None
    ) -> None:
        """Measures ``device`` for at most that many seconds; ``ahead``: traces of other processes."""
        self.clock, self.path, self.tiny = DeviceClock(device), path, tiny
        self.began, self.seconds = time.monotonic(), seconds
        self.ahead = ahead or Traces()
        self.gpu = name_here(self.clock.device)
        self.record: dict[str, Any] = {
            "gpu": self.gpu, "facts": facts_here(self.clock.device), "held": {}, "targets": [], "swaps": [],
            "compiled": [], "limits": [], "memory": [], "sizes": [], "errors": [],
        }  # fmt: skip

    @property
    def lowered(self) -> str | None:
        """The GPU for which recfuse's operators are lowered."""
        return self.gpu if self.clock.is_cuda else None

    def passed(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self.began

    def save(self) -> None:
        """Write the record."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record, separators=(",", ":"))
        write_whole(str(self.path), lambda: [text], "benchmarks/performance_model.py")

    def attempt(self, name: str, call: Callable[[], None]) -> None:
        """Runs a measurement; an error is recorded, and the next measurement runs."""
        try:
            call()
        except Exception as error:
            self.record["errors"].append([name, f"{type(error).__name__}: {error}"[:300]])
            traceback.print_exc(limit=3)
        gc.collect()
        if self.clock.is_cuda:
            torch.cuda.empty_cache()

    def targets(self) -> dict[str, list[Target]]:
        """Returns the steps of the parts."""
        cuda = self.clock.is_cuda
        return {
            "named": [*named(), *named_half()] if cuda else named(200 if self.tiny else 200_000, (64,)),
            "random": random_targets(3 if self.tiny else 40, self.tiny, RANDOM_SEED),
            "memory": memory_targets(self.tiny) if cuda else [],
        }

    def swaps(self) -> range:
        """Returns the numbers of the random collections."""
        return range(2 if self.tiny else 40)

    def limits(self) -> list[Limit]:
        """Returns the questions for the largest batch under a latency."""
        return list(LIMITS) if self.clock.is_cuda else []

    def jobs(self, parts: Sequence[str] = PARTS) -> list[Job]:
        """Returns the traces that the parts need."""
        new: list[Job] = [
            (traces.of_target, (one, self.lowered))
            for part, targets in self.targets().items() if part in parts for one in targets
        ]  # fmt: skip
        if "swaps" in parts:
            new += [(traces.of_swap, (number, self.tiny, self.lowered)) for number in self.swaps()]
        if "limits" in parts:
            new += [(traces.of_limit, (one, self.gpu)) for one in self.limits()]
        return new

    def plan(self) -> dict[str, Plan]:
        """Returns the measurements of each part."""
        targets = self.targets()
        named = [one for one in targets["named"] if one.batch == 2048 or not self.clock.is_cuda]
        plan: dict[str, Plan] = {
            "held": [("held", self.held)],
            "memory": [(f"memory {one.name}", partial(self.memory, one)) for one in targets["memory"]],
            "named": [(f"{one.name} {one.batch}", partial(self.target, one)) for one in targets["named"]],
            "random": [(one.name, partial(self.target, one)) for one in targets["random"]],
            "swaps": [(f"swap {number}", partial(self.swap, number)) for number in self.swaps()],
            "limits": [(f"limit {one.model}", partial(self.limit, one)) for one in self.limits()],
            "sizes": [(f"sizes {one.name}", partial(self.sizes, one)) for one in named],
            "compiled": [(f"compiled {name}", partial(self.compiled, name)) for name in NAMED],
        }
        if not self.clock.is_cuda:
            plan["compiled"].clear()
        return plan

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Measure the parts in their order, each until its share of the time is over."""
        plan, whole, end = self.plan(), sum(_SHARES[part] for part in parts), self.passed()
        left = self.seconds - end
        for part in parts:
            end += left * _SHARES[part] / whole
            for what, call in tqdm(plan[part], desc=part, leave=False, disable=hidden()):
                if self.passed() > end:
                    break
                self.attempt(what, call)
            self.save()
            print(f"{part}: {self.passed():.0f} s", flush=True)

    def held(self) -> None:
        """Kernels of sizes that no calibration has."""
        extent = EXTENTS["tiny" if self.tiny else self.clock.device.type]
        for dtype in (torch.float32, torch.bfloat16) if self.clock.is_cuda else (torch.float32,):
            calls = Calls(str(self.clock.device), extent, dtype)
            for group in groups(calls, _HELD_OUT, 0.1).values():
                for kind, sizes, sample in measured(self.clock, group, 120):
                    self.record["held"].setdefault(kind, []).append(
                        [*sizes, round(sample.us, 3), sample.kernels]
                    )
            del calls

    def traced(self, target: Target) -> dict[str, Any]:
        """Returns facts of a target with its operators."""
        sizes = {name: value for name, value in asdict(target.sizes).items() if name != "rows"}
        record = {"model": target.name, "batch": target.batch, "optimizer": target.optimizer,
                 "dtype": target.sizes.dtype, "tables": len(target.sizes.rows), "sizes": sizes}  # fmt: skip
        return {**record, **self.ahead.get(traces.of_target, target, self.lowered)}

    def step(self, target: Target, batches: int = _BATCHES) -> Step:
        """Returns a step on the device."""
        device = str(self.clock.device)
        made = [target.sizes.batch(target.batch, seed, device) for seed in range(batches)]
        return step_of(target, target.sizes.model(device), made)

    def target(self, target: Target) -> None:
        """Measures one step: streams of it, its kernels, its graph, its memory, and the stream again."""
        record = self.traced(target)
        step = self.step(target)
        if self.clock.is_cuda:
            record |= self._memory(step)
        blocks = 5 if self.clock.is_cuda else 3
        record["us"], record["host_us"] = self.clock.stream_us(step, blocks)
        record["active_us"], record["kernels"] = self.clock.active(step)
        if self.clock.is_cuda and not target.training:
            record["graph_us"] = self._graph_us(step, blocks)
        record["again_us"], _ = self.clock.stream_us(step, blocks)
        record["active_again_us"], _ = self.clock.active(step)
        if self.clock.is_cuda and (target.optimizer in _DETAILED or target.sizes.dtype != "float32"):
            record["by_operator"] = by_operator(step)
        self.record["targets"].append(_rounded(record))

    def _graph_us(self, step: Step, blocks: int) -> float:
        replays = [graphed(partial(step.run, batch)) for batch in step.batches]
        us, _ = self.clock.stream_us(_rotating(replays), blocks)
        return us

    def memory(self, target: Target) -> None:
        """Measures the peak memory of one step."""
        record = self.traced(target)
        record |= self._memory(self.step(target, 1))
        del record["ops"]
        self.record["memory"].append(_rounded(record))

    def _memory(self, step: Step) -> dict[str, int]:
        """Returns the peak memory of a step after the first, including memory in use before, and of it
        the workspaces of matrix products.
        """
        for _ in range(2):
            step()
        self.clock.sync()
        torch._C._cuda_clearCublasWorkspaces()  # a workspace per stream of earlier graphs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        self.clock.sync()
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        others = sum(
            one.numel() * one.element_size() for batch in step.batches[1:] for part in batch
            for one in ([part] if isinstance(part, torch.Tensor) else part)
        )  # fmt: skip
        workspace = after - torch.cuda.memory_allocated()
        return {"memory": int(peak) - others, "workspace": int(workspace)}

    def swap(self, number: int) -> None:
        """A loop of bags against the same model after `recfuse.swap`."""
        sizes, device = traces.collection(number, self.tiny), str(self.clock.device)
        record: dict[str, Any] = {"number": number, "batch": sizes.batch, "tables": list(sizes.tables)}
        listed = self.ahead.get(traces.of_swap, number, self.tiny, self.lowered)
        for form in FORMS:
            model = traces.bag_model(number, self.tiny, form, device)
            batches = [sizes.inputs(seed, device) for seed in range(_BATCHES)]
            calls = [partial(model, *batch) for batch in batches]
            turn = _rotating(calls)
            with torch.no_grad():
                own: dict[str, Any] = {"ops": listed[form]}
                own["us"], own["host_us"] = self.clock.stream_us(turn, 3)
                own["active_us"], own["kernels"] = self.clock.active(turn, _BATCHES)
                if self.clock.is_cuda:
                    own["graph_us"], _ = self.clock.stream_us(_rotating([graphed(one) for one in calls]), 3)
                own["again_us"], _ = self.clock.stream_us(turn, 3)
            record[form] = _rounded(own)
        self.record["swaps"].append(record)

    def limit(self, limit: Limit) -> None:
        """Measures the predicted largest batch under a latency."""
        for trace in self.ahead.get(traces.of_limit, limit, self.gpu):
            if trace["regime"] == "compiled" or not trace["batch"] or trace["by"] != "latency":
                continue
            step = self.step(traces.limit_target(limit, trace["batch"]))
            if trace["regime"] == "graph":
                us = self._graph_us(step, 3)
            else:
                us, _ = self.clock.stream_us(step, 3)
            self.record["limits"].append(
                _rounded({"model": limit.model, "limit": limit.seconds, "us": us, **trace})
            )

    def sizes(self, target: Target) -> None:
        """Measures the kernels of one step by `recfuse.predict`, which predicts the step from them."""
        with unallocated():
            model = target.sizes.model()
        described = step_of(target, model, [target.sizes.batch(target.batch)])
        gpu = None if self.clock.is_cuda else "cpu"
        begin = time.perf_counter()
        predicted = recfuse.predict(described, gpu=gpu, training=target.training, measure=True)
        seconds = time.perf_counter() - begin
        step = self.step(target)
        active, kernels = self.clock.active(step)
        record = {"model": target.name, "batch": target.batch, "optimizer": target.optimizer,
                 "dtype": target.sizes.dtype, "seconds": seconds, "notes": list(predicted.notes),
                 "active_us": active, "kernels": kernels, "predicted_kernels": predicted.kernels,
                 "predicted_active_us": predicted.active.seconds * 1e6}  # fmt: skip
        if predicted.graph is not None and not target.training:
            record["predicted_graph_us"] = predicted.graph.seconds * 1e6
            record["graph_us"] = self._graph_us(step, 3)
        self.record["sizes"].append(_rounded(record))

    def compiled(self, name: str) -> None:
        """A named model under torch.compile."""
        target = Target(name, NAMED[name], 2048)
        record = self.traced(target)
        step = self.step(target)
        step.model = torch.compile(step.model, dynamic=False)  # type: ignore[assignment]
        record["us"], record["host_us"] = self.clock.stream_us(step, 5)
        record["active_us"], record["kernels"] = self.clock.active(step)
        torch._dynamo.reset()
        self.record["compiled"].append(_rounded(record))


def by_operator(step: Callable[[], Any], steps: int = 2) -> dict[str, list[float]]:
    """Return microseconds and number of the kernels of a step, by the operator that launched them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    on_device = torch.autograd.DeviceType.CUDA
    names = {one.correlation_id(): one.name() for one in events if one.device_type() != on_device}
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in events:
        if one.device_type() == on_device:
            total = times[names.get(one.linked_correlation_id(), "")]
            total[0] += one.duration_ns() * 1e-3 / steps
            total[1] += 1 / steps
    return {name: [round(us, 2), round(count, 2)] for name, (us, count) in times.items()}


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Returns facts with five digits of each time."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in record.items()
    }


def _rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Returns a function that calls the next of `calls` each time."""

    def turns() -> Iterator[Callable[[], Any]]:
        while True:
            yield from calls

    order = turns()
    return lambda: next(order)()
