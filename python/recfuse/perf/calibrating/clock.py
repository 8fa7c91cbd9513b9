"""Measures calls on a device: end to end, the host's part, and the kernels alone."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
_BLOCK_SECONDS = 0.012


@dataclass(frozen=True)
class KernelSample:
    """Microseconds and number of the kernels of a call, and the spread over its rounds."""

    us: float
    kernels: int
    spread: float


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class DeviceClock:
    """Measures calls on the CPU or on a CUDA device."""

    def __init__(self, device: str) -> None:
        """Measure on a device, by its name in torch."""
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def stream_us(self, call: Call, blocks: int = 7) -> tuple[float, float]:
        """Return the medians of a call in a stream of calls: end to end, and the host's part."""
        for _ in range(2):
            call()
        self.sync()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        self.sync()
        each = (time.perf_counter() - begin) / 3
        count = int(min(max(_BLOCK_SECONDS / max(each, 1e-7), 3), 200))
        total, host = [], []
        with _no_collection():
            for _ in range(blocks):
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                middle = time.perf_counter()
                self.sync()
                total.append((time.perf_counter() - begin) / count)
                host.append((middle - begin) / count)
        return float(np.median(total)) * 1e6, float(np.median(host)) * 1e6

    def latency_us(self, call: Call, rounds: int = 30) -> float:
        """Return the median of a call with a wait after each call."""
        call()
        self.sync()
        times = []
        with _no_collection():
            for _ in range(rounds):
                begin = time.perf_counter()
                call()
                self.sync()
                times.append(time.perf_counter() - begin)
        return float(np.median(times)) * 1e6

    def active(self, call: Call, steps: int = 4, prefix: str = "") -> tuple[float, float]:
        """Return microseconds and number of the kernels of a call; on the CPU its time.

        Only kernels whose names begin with ``prefix`` count.
        """
        if not self.is_cuda:
            return self.latency_us(call, 5), 0.0
        call()
        self.sync()
        with _no_collection(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                call()
            self.sync()
        events = [event for event in _device_events(profiler) if event[1].startswith(prefix)]
        return sum(us for _, _, us in events) / steps, len(events) / steps

    def samples(
        self, calls: Sequence[tuple[Call, Call | None]], rounds: int = 3, seed: int = 0
    ) -> list[KernelSample | None]:
        """Measure the kernels of calls, each in ``rounds`` rounds in random order.

        Args:
            calls: a call, and a second call (or None) that brings its operand into the cache before, as the
                previous operator would.

        Returns:
            A sample of each call; None if the profiler has lost events.
        """
        order: list[int] = []
        for number in range(rounds):
            turn = list(range(len(calls)))
            random.Random(seed + number).shuffle(turn)
            order += turn
        for call, _ in calls:
            call()
        self.sync()
        times = self._marked(calls, order) if self.is_cuda else self._walled(calls, order)
        if times is None:
            return [None] * len(calls)
        samples: list[KernelSample | None] = []
        for number in range(len(calls)):
            of_call = [sample for at, sample in zip(order, times, strict=True) if at == number]
            us, count = float(np.median([us for us, _ in of_call])), of_call[-1][1]
            low, high = min(us for us, _ in of_call), max(us for us, _ in of_call)
            samples.append(KernelSample(us, count, (high - low) / us if us else 0.0) if count else None)
        return samples

    def _marked(
        self, calls: Sequence[tuple[Call, Call | None]], order: Sequence[int]
    ) -> list[tuple[float, int]] | None:
        """Return the sum of the kernels between two marker kernels, of each call; None if
        events were lost.
        """
        with _no_collection(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for number in order:
                call, touch = calls[number]
                if touch is not None:
                    touch()
                torch.cuda._sleep(1)
                call()
                torch.cuda._sleep(1)
            self.sync()
        groups: list[tuple[float, int]] = []
        inside: list[float] | None = None
        for _, name, us in _device_events(profiler):
            if "spin_kernel" not in name:
                if inside is not None:
                    inside.append(us)
            elif inside is None:
                inside = []
            else:
                groups.append((sum(inside), len(inside)))
                inside = None
        return groups if len(groups) == len(order) else None

    def _walled(
        self, calls: Sequence[tuple[Call, Call | None]], order: Sequence[int]
    ) -> list[tuple[float, int]]:
        times = []
        with _no_collection():
            for number in order:
                call, touch = calls[number]
                if touch is not None:
                    touch()
                begin = time.perf_counter()
                call()
                times.append(((time.perf_counter() - begin) * 1e6, 1))
        return times


def _device_events(profiler: profile) -> list[tuple[float, str, float]]:
    """Return start, name and microseconds of all events on the device, in order."""
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return sorted(
        (event.start_ns(), event.name(), event.duration_ns() * 1e-3)
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )


def graphed(call: Call) -> Call:
    """Return the replay of a call that is captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
