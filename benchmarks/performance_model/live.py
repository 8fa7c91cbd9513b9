"""Measures steps on a device, and records each time with the operators that tracing lists."""

from __future__ import annotations

import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import recfuse
from performance_model.targets import NAMED, Target, named, random_targets
from recfuse._files import write_whole
from recfuse._progress import hidden
from recfuse.perf.calibrating.calls import Calls, groups
from recfuse.perf.calibrating.clock import DeviceClock, graphed
from recfuse.perf.calibrating.fused import random_collection
from recfuse.perf.calibrating.probes import DlrmModel, Step
from recfuse.perf.calibrating.run import measured
from recfuse.perf.calibrating.sizes import EXTENTS
from recfuse.perf.known import facts_here, name_here
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.operators import Operator
from recfuse.perf.tracing.tracer import Tracer, run_traced
from recfuse.perf.tracing.unallocated import unallocated

PARTS = ("held", "named", "swaps", "compiled", "random")
_HELD_OUT = 3000  # begin of the held-out points of the low-discrepancy sequence


def listed(operators: list[Operator]) -> list[list[Any]]:
    """Return operators as JSON: name, phase, kind, sizes, fusable, storages read and written."""
    return [
        [one.name, one.phase, one.kind, [round(float(size), 3) for size in one.sizes], int(one.fusable),
         list(one.reads), list(one.writes)]
        for one in operators
    ]  # fmt: skip


class Recorder:
    """Measures targets one by one; writes each to the file at once."""

    def __init__(self, device: str, path: Path, seconds: float, tiny: bool = False) -> None:
        """Measures ``device`` for at most that many seconds."""
        self.clock, self.path, self.tiny = DeviceClock(device), path, tiny
        self.began, self.seconds = time.monotonic(), seconds
        self.gpu = name_here(self.clock.device)
        self.record: dict[str, Any] = {
            "gpu": self.gpu, "facts": facts_here(self.clock.device), "held": {}, "targets": [], "swaps": [],
            "compiled": [], "errors": [],
        }  # fmt: skip

    @property
    def lowered(self) -> str | None:
        """The GPU for which recfuse's operators are lowered."""
        return self.gpu if self.clock.is_cuda else None

    def left(self) -> float:
        """Remaining seconds."""
        return self.seconds - (time.monotonic() - self.began)

    def save(self) -> None:
        """Write the record."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record, separators=(",", ":"))
        write_whole(str(self.path), lambda: [text], "benchmarks/performance_model.py")

    def attempt(self, what: str, call: Callable[[], None]) -> None:
        """Runs a measurement; an error is recorded, and the next measurement runs."""
        try:
            call()
        except Exception as error:
            self.record["errors"].append([what, f"{type(error).__name__}: {error}"[:300]])
            traceback.print_exc(limit=3)
        gc.collect()
        if self.clock.is_cuda:
            torch.cuda.empty_cache()

    def run(self, parts: Sequence[str] = PARTS) -> None:
        """Measure the parts in their order, until the time is over."""
        if "held" in parts:
            self.attempt("held", self.held)
            self.save()
        targets = named(200 if self.tiny else 200_000, (64,)) if not self.clock.is_cuda else named()
        randoms = random_targets(3 if self.tiny else 30, self.tiny)
        plans: dict[str, list[tuple[str, Callable[[], None]]]] = {
            "named": [(f"{one.name} {one.batch}", partial(self.target, one)) for one in targets],
            "random": [(one.name, partial(self.target, one)) for one in randoms],
            "swaps": [
                (f"swap {number}", partial(self.swap, number)) for number in range(2 if self.tiny else 24)
            ],
            "compiled": [(f"compiled {name}", partial(self.compiled, name)) for name in NAMED],
        }
        if not self.clock.is_cuda:
            plans["compiled"].clear()
        plan = [one for part in parts for one in plans.get(part, ())]
        for what, call in tqdm(plan, desc="measuring", leave=False, disable=hidden()):
            if self.left() < 0:
                break
            self.attempt(what, call)
            self.save()

    def held(self) -> None:
        """Kernels of sizes that no calibration has."""
        extent = EXTENTS["tiny" if self.tiny else self.clock.device.type]
        for dtype in (torch.float32, torch.bfloat16) if self.clock.is_cuda else (torch.float32,):
            calls = Calls(str(self.clock.device), extent, dtype)
            for made in groups(calls, _HELD_OUT, 0.1).values():
                for kind, sizes, sample in measured(self.clock, made, 120):
                    self.record["held"].setdefault(kind, []).append(
                        [*sizes, round(sample.us, 3), sample.kernels]
                    )
            del calls

    def traced(self, target: Target) -> dict[str, Any]:
        """Traces the operators of a target on the CPU, without its memory."""
        begin = time.perf_counter()
        batch = target.sizes.batch(target.batch)
        with unallocated():
            model = target.sizes.model()
            step = Step(model, [batch], target.optimizer)
        made = time.perf_counter() - begin
        tracer = Tracer(self.lowered, target.training, KeptState())
        operators, memory = run_traced(tracer, step, model)
        seconds = time.perf_counter() - begin - made
        return {
            "ops": listed(operators),
            "peak": memory.peak,
            "resident": memory.resident,
            "trace_seconds": seconds,
        }

    def target(self, target: Target) -> None:
        """Measures one step: streams of it, its kernels, its graph, its memory, and the stream again."""
        found = {"model": target.name, "batch": target.batch, "optimizer": target.optimizer,
                 "sizes": asdict(target.sizes), **self.traced(target)}  # fmt: skip
        device = str(self.clock.device)
        model = target.sizes.model(device)
        batches = [
            target.sizes.batch(target.batch, seed, device) for seed in range(4 if self.clock.is_cuda else 2)
        ]
        step = Step(model, batches, target.optimizer)
        if self.clock.is_cuda:
            found["memory"] = self._peak(step)
        blocks = 5 if self.clock.is_cuda else 3
        found["us"], found["host_us"] = self.clock.stream_us(step, blocks)
        found["active_us"], found["kernels"] = self.clock.active(step)
        if self.clock.is_cuda and not target.training:
            replays = [graphed(lambda batch=batch: step.run(batch)) for batch in batches]  # type: ignore[misc]
            turn = _rotating(replays)
            found["graph_us"], _ = self.clock.stream_us(turn, blocks)
            del replays, turn
        found["again_us"], _ = self.clock.stream_us(step, blocks)
        self.record["targets"].append(found)

    def _peak(self, step: Step) -> int:
        """Returns the peak memory of a step after the first, including memory in use before."""
        for _ in range(2):
            step()
        self.clock.sync()
        torch._C._cuda_clearCublasWorkspaces()  # a workspace per stream of earlier graphs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        self.clock.sync()
        others = sum(
            one.numel() * one.element_size() for batch in step.batches[1:] for part in batch
            for one in ([part] if isinstance(part, torch.Tensor) else part)
        )  # fmt: skip
        return int(torch.cuda.max_memory_allocated()) - others

    def swap(self, number: int) -> None:
        """A loop of bags against the same model after `recfuse.swap`."""
        rng = random.Random(500 + number)
        sizes = random_collection(rng, 2000 if self.tiny else 300_000, 8 if self.tiny else 200)
        device = str(self.clock.device)
        found: dict[str, Any] = {"number": number, "batch": sizes.batch, "tables": list(sizes.tables)}
        for form in ("loop", "swapped"):
            with unallocated():
                described = BagModel(sizes.bags("cpu"))
                if form == "swapped":
                    recfuse.swap(described)
            tracer = Tracer(self.lowered, False, KeptState())
            inputs = sizes.inputs(0, "cpu")

            def call(described: Any = described, inputs: Any = inputs) -> None:
                with torch.no_grad():
                    described(*inputs)

            operators, _ = run_traced(tracer, call, described)
            model = BagModel(sizes.bags(device))
            if form == "swapped":
                recfuse.swap(model)
            batches = [sizes.inputs(seed, device) for seed in range(3)]
            turn = _rotating([lambda batch=batch, model=model: model(*batch) for batch in batches])  # type: ignore[misc]
            with torch.no_grad():
                own = {"ops": listed(operators)}
                own["us"], own["host_us"] = self.clock.stream_us(turn, 5)
                own["active_us"], own["kernels"] = self.clock.active(turn, 3)
                if self.clock.is_cuda:
                    replays = [graphed(lambda batch=batch, model=model: model(*batch)) for batch in batches]  # type: ignore[misc]
                    own["graph_us"], _ = self.clock.stream_us(_rotating(replays), 5)
            found[form] = own
        self.record["swaps"].append(found)

    def compiled(self, name: str) -> None:
        """A named model under torch.compile."""
        batch = 2048
        target = Target(name, NAMED[name], batch)
        found = {"model": name, "batch": batch, **self.traced(target)}
        device = str(self.clock.device)
        model = torch.compile(target.sizes.model(device), dynamic=False)
        step = Step(model, [target.sizes.batch(batch, seed, device) for seed in range(2)])  # type: ignore[arg-type]
        found["us"], found["host_us"] = self.clock.stream_us(step, 5)
        found["active_us"], found["kernels"] = self.clock.active(step)
        torch._dynamo.reset()
        self.record["compiled"].append(found)


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


def _rotating(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Returns a function that calls the next of `calls` each time."""

    def turns() -> Iterator[Callable[[], Any]]:
        while True:
            yield from calls

    order = turns()
    return lambda: next(order)()
