"""Measures a device group by group; each finished group is saved, so that a run can be resumed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from recfuse._progress import hidden
from recfuse.errors import ArgumentValueError
from recfuse.perf.calibrating.calls import Calls, Measured, groups, usual
from recfuse.perf.calibrating.clock import DeviceClock, graphed
from recfuse.perf.calibrating.fused import fused_samples
from recfuse.perf.calibrating.probes import Dlrm, PooledDlrmModel, Step, random_probe
from recfuse.perf.calibrating.sizes import EXTENTS, Extent
from recfuse.perf.calibration import Calibration, torch_minor
from recfuse.perf.known import facts_here, gpu_names, name_here
from recfuse.perf.models.host import counts_of
from recfuse.perf.models.regimes import Gaps
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.operators import Operator
from recfuse.perf.tracing.tracer import Tracer, run_traced

_CHUNK = {"products": 500, "usual": 500, "interactions": 240, "bags": 60, "others": 120, "sparse": 60}
_PROBES, _TINY_PROBES = 30, 4
_FURTHER = (("sparse", "float32", 1.0), ("others", "float32", 2.0), ("interactions", "float32", 0.4),
            ("products", "bfloat16", 0.5), ("interactions", "bfloat16", 0.4))  # fmt: skip
_SKIP = 1000  # first point of the further groups
_SHARES = {"float32": 1.0, "bfloat16": 0.4, "tf32": 0.35}
MOST_SPREAD = 5.0
"""Median spread of a point over its rounds, in percent, above which the device is too noisy."""


class Calibrator:
    """Measures a device into a calibration.

    Each finished group is written to the file immediately. Ctrl-C keeps the finished groups; the
    next run continues.
    """

    def __init__(
        self, device: str, path: Path | None = None, tiny: bool = False, seconds: float = 180.0
    ) -> None:
        """Measure ``device``; ``tiny``: a few sizes per group, to test the procedure."""
        self.clock = DeviceClock(device)
        self.path, self.tiny, self.deadline = path, tiny, time.monotonic() + seconds
        self.extent: Extent = EXTENTS["tiny" if tiny else self.clock.device.type]
        version = torch_minor(torch.__version__)
        self.calibration = Calibration(
            name_here(self.clock.device), version, facts=facts_here(self.clock.device)
        )
        self.spreads: list[float] = []
        if path is not None and path.exists():
            self._resume(Calibration.load(path))

    def _resume(self, saved: Calibration) -> None:
        current = self.calibration
        if (saved.gpu, saved.torch) != (current.gpu, current.torch):
            raise ArgumentValueError(
                f"recfuse predict --calibrate: {self.path} is of {saved.gpu} and torch {saved.torch}, this "
                f"is {current.gpu} and torch {current.torch}. Give another --calibration FILE."
            )
        self.calibration = saved

    def plan(self) -> dict[str, Callable[[], None]]:
        """Return the groups in their order."""
        plan: dict[str, Callable[[], None]] = {"gaps": self._gaps}
        forms = _SHARES if self.clock.is_cuda or self.tiny else {"float32": 1.0}
        for form, share in forms.items():
            for group in ("products", "interactions", "bags", "others") if form != "tf32" else ("products",):
                plan[f"{group} {form}"] = lambda group=group, form=form, share=share: self._points(
                    group, form, share
                )  # type: ignore[misc]
        plan["usual float32"] = lambda: self._points("usual", "float32", 1.0)
        for group, form, share in _FURTHER if self.clock.is_cuda else ():
            plan[f"{group} {form}, further"] = lambda group=group, form=form, share=share: self._points(  # type: ignore[misc]
                group, form, share, _SKIP
            )
        plan["probes"] = self._probes
        if self.clock.is_cuda:
            plan["graphs"], plan["compiled"] = self._graphs, self._compiled
        plan["recfuse"] = self._fused
        return plan

    def run(self) -> Calibration:
        """Measure the unfinished groups until the time is over."""
        began, plan = time.monotonic(), self.plan()
        unfinished = [group for group in plan if group not in self.calibration.groups]
        with tqdm(unfinished, desc="calibrating", unit="group", disable=hidden(), leave=False) as bar:
            for group in bar:
                bar.set_postfix_str(group)
                if time.monotonic() > self.deadline:
                    break
                plan[group]()
                self.calibration.groups.append(group)
                self._save(began)
        return self.calibration

    def _save(self, began: float) -> None:
        facts = self.calibration.facts
        facts["seconds"] = round(float(facts.get("seconds_before", 0.0)) + time.monotonic() - began, 1)
        if self.spreads:
            facts["spread"] = round(100 * float(np.median(self.spreads)), 2)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.calibration.save(self.path)

    def _points(self, group: str, form: str, share: float, skip: int = 20) -> None:
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = form == "tf32"
        try:
            calls = Calls(
                str(self.clock.device), self.extent, torch.bfloat16 if form == "bfloat16" else torch.float32
            )
            made = usual(calls) if group == "usual" else groups(calls, skip, share)[group]
            for kind, sizes, sample in measured(self.clock, made, _CHUNK[group]):
                self.calibration.add(kind, sizes, sample.us, sample.kernels)
                self.spreads.append(sample.spread)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            if self.clock.is_cuda:
                torch.cuda.empty_cache()

    def _fused(self) -> None:
        count = 3 if self.tiny else 30
        for kind, sizes, us, kernels in fused_samples(self.clock, count, self.deadline):
            self.calibration.add(kind, sizes, us, kernels)

    def probes(self, modes: tuple[bool, ...] = (False, True)) -> Iterator[tuple[Step, list[Operator], bool]]:
        """Yield steps of small models on the device, their operators, and whether they train."""
        rng = random.Random(7)
        for number in range(_TINY_PROBES if self.tiny else _PROBES):
            sizes, batch, optimizer = random_probe(rng, number)
            device = str(self.clock.device)
            described, model = sizes.model(), sizes.model(device)
            batches = [sizes.batch(batch, seed, device) for seed in range(2)]
            for training in modes:
                name = optimizer if training else None
                traced = Step(described, [sizes.batch(batch)], name)
                operators, _ = run_traced(Tracer(None, training, self._state()), traced, described)
                yield Step(model, batches, name), operators, training
            if len(modes) > 1 and number % 3 == 0:
                yield self._pooled(sizes, batch)

    def _state(self) -> KeptState:
        return KeptState(foreach=self.clock.is_cuda)

    def _pooled(self, sizes: Dlrm, batch: int) -> tuple[Step, list[Operator], bool]:
        """Return the inference of a small model whose tables recfuse pools in one call."""
        device = str(self.clock.device)
        measured, described = (PooledDlrmModel(sizes.model(where)) for where in (device, "cpu"))
        gpu = self.calibration.gpu if self.clock.is_cuda and self.calibration.gpu in gpu_names() else None
        traced = Step(described, [sizes.batch(batch)])
        operators, _ = run_traced(Tracer(gpu, False, self._state()), traced, described)
        return Step(measured, [sizes.batch(batch, seed, device) for seed in range(2)]), operators, False

    def _probes(self) -> None:
        probes = []
        for step, operators, _ in self.probes():
            if time.monotonic() > self.deadline:
                break
            us, _ = self.clock.stream_us(step, 3 if self.tiny else 7)
            if not self.clock.is_cuda:  # leaves the time outside the operators themselves
                kernels = self.calibration.kernels
                us = max(us - sum(kernels.time(operator).us for operator in operators), 0.1 * us)
            probes.append((counts_of(operators), us))
        self.calibration.probes[:] = probes

    def _graphs(self) -> None:
        rows = []
        for step, _, _ in itertools.islice(self.probes((False,)), 12):
            active, kernels = self.clock.active(step)
            graph, _ = self.clock.stream_us(graphed(step))
            rows.append((kernels, graph - active))
        design = np.array([[1.0, kernels] for kernels, _ in rows])
        (start, gap), *_ = np.linalg.lstsq(design, np.array([gaps_us for _, gaps_us in rows]), rcond=None)
        gaps = self.calibration.gaps
        self.calibration.gaps = replace(gaps, graph_start=float(start), graph_gap=float(max(gap, 0.0)))

    def _compiled(self) -> None:
        rows = []
        for step, _, _ in itertools.islice(self.probes((False,)), 2, 6):
            compiled = Step(torch.compile(step.model, dynamic=False), step.batches)  # type: ignore[arg-type]
            _, kernels = self.clock.active(compiled)
            us, _ = self.clock.stream_us(compiled)
            rows.append((kernels, us))
            torch._dynamo.reset()
            if time.monotonic() > self.deadline:
                break
        if len(rows) < 2:
            return
        design = np.array([[1.0, kernels] for kernels, _ in rows])
        (call, launch), *_ = np.linalg.lstsq(design, np.array([us for _, us in rows]), rcond=None)
        self.calibration.gaps = replace(
            self.calibration.gaps,
            compiled_call=float(max(call, 1.0)),
            compiled_launch=float(max(launch, 0.5)),
        )

    def _gaps(self) -> None:
        if not self.clock.is_cuda:
            self.calibration.gaps = Gaps(*[0.0] * 7)
            return
        self.calibration.gaps = replace(Gaps(), **measured_gaps())


def measured(
    clock: DeviceClock, made: Iterable[Iterator[Measured]], chunk: int, rounds: int = 3
) -> Iterator[tuple[str, tuple[float, ...], Any]]:
    """Yield kind, sizes and sample of calls; calls that do not fit in the device's memory are left out."""
    waiting: list[Measured] = []

    def flush() -> Iterator[tuple[str, tuple[float, ...], Any]]:
        samples = clock.samples([(point.call, point.touch) for point in waiting], rounds)
        for point, sample in zip(waiting, samples, strict=True):
            if sample is not None and sample.us > 0:
                yield point.kind, point.sizes, sample
        waiting.clear()

    for calls in made:
        try:
            waiting.extend(calls)
        except (IndexError, torch.OutOfMemoryError):
            continue
        if len(waiting) >= chunk:
            yield from flush()
    yield from flush()


def measured_gaps() -> dict[str, float]:
    """Return the gap between kernels of a full stream, the delay of a launch, and the cost of a wait."""
    x, y = torch.randn(1 << 22, device="cuda"), torch.zeros(16, device="cuda")
    clock, many = DeviceClock("cuda"), 300

    def stream() -> None:
        for _ in range(many):
            x.mul_(1.0)

    active, kernels = clock.active(stream, 2)
    spans = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(5):
        torch.cuda._sleep(20_000_000)  # meanwhile the queue fills
        begin.record()
        stream()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / many)

    def times(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        return float(np.median(seconds)) * 1e6

    wait, host = times(torch.cuda.synchronize), times(lambda: y.add_(1))
    total = times(lambda: (y.add_(1), torch.cuda.synchronize()))
    gap = max(0.0, float(np.median(spans)) - active / max(kernels, 1.0))
    return {"gap": gap, "wait": wait, "delay": max(0.5, total - host - 1.5 - wait / 2)}
