"""Measures the kernels of a single step: the sizes of its operators, on the device of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from recfuse._progress import hidden
from recfuse.perf.calibrating.clock import DeviceClock
from recfuse.perf.calibration import Calibration, torch_minor
from recfuse.perf.known import facts_here, name_here
from recfuse.perf.tracing.recorded_calls import RecordedCall

_MOST_CALLS = 24  # measured in a chunk
_SHARE, _SHARE_OF_CHUNK = 0.8, 0.2  # of the free memory that a call, and a chunk of calls, may take
_SECONDS_TO_BAR = 2.0

_Pair = tuple[Callable[[], Any], Callable[[], Any] | None]


@dataclass
class StepMeasurement:
    """The measured points of a step.

    Attributes:
        points: a calibration of these points alone.
        sizes: the number of distinct kinds and sizes of the step.
        too_large: names of operators that need more memory than is free.
        failed: names of operators that cannot run alone on the device.
        interrupted: whether Ctrl-C ended the measurement.
    """

    points: Calibration
    sizes: int
    too_large: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    interrupted: bool = False

    def note(self) -> str:
        """Return the measured and the missing sizes in words."""
        words = f"measured {self.points.count} of {self.sizes} sizes of this step"
        for names, reason in ((self.too_large, "too large to measure"), (self.failed, "cannot run alone")):
            if names:
                words += f"; {reason}: {', '.join(sorted({*names}))}"
        return words + ("; interrupted" if self.interrupted else "")


def measure_calls(
    device: str, calls: Iterable[RecordedCall], rounds: int = 5, most_bytes: int | None = None
) -> StepMeasurement:
    """Measure each call on random tensors. Ctrl-C keeps the measured points.

    Args:
        device: a device by its name in torch.
        calls: the calls of a traced step.
        rounds: repetitions, in random order; the median counts.
        most_bytes: memory that a call may take; default: most of the free memory.
    """
    clock, every = DeviceClock(device), list(calls)
    points = Calibration(name_here(clock.device), torch_minor(torch.__version__))
    points.facts = facts_here(clock.device)
    measurement = StepMeasurement(points, len(every))
    devices = [clock.device] if clock.is_cuda else []
    bar = tqdm(total=len(every), desc="measuring", delay=_SECONDS_TO_BAR, leave=False, disable=hidden())
    try:
        with bar, torch.random.fork_rng(devices=devices), torch.no_grad():
            for chunk in _chunks(clock, every, measurement, most_bytes):
                samples = clock.samples([pair for _, pair in chunk], rounds)
                for (call, _), sample in zip(chunk, samples, strict=True):
                    if sample is not None and sample.us > 0:
                        points.add(call.kind, call.sizes, sample.us, sample.kernels)
                bar.update(len(chunk))
    except KeyboardInterrupt:
        measurement.interrupted = True
    return measurement


def _chunks(
    clock: DeviceClock, calls: list[RecordedCall], measurement: StepMeasurement, most_bytes: int | None
) -> Iterator[list[tuple[RecordedCall, _Pair]]]:
    """Yield calls that fit in memory together, each after a first run; list the others in ``measurement``."""
    free = free_bytes(clock.device) if most_bytes is None else most_bytes
    chunk: list[tuple[RecordedCall, _Pair]] = []
    taken = 0
    for call in calls:
        size = call.nbytes()
        if size > (_SHARE * free if most_bytes is None else free):
            measurement.too_large.append(call.name)
            continue
        if chunk and (len(chunk) == _MOST_CALLS or taken + size > _SHARE_OF_CHUNK * free):
            yield chunk
            chunk, taken = [], 0
            if clock.is_cuda:
                torch.cuda.empty_cache()
        try:
            pair = call.on(clock.device)
            pair[0]()
            clock.sync()
        except torch.OutOfMemoryError:
            measurement.too_large.append(call.name)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            measurement.failed.append(call.name)
        else:
            chunk.append((call, pair))
            taken += size
    if chunk:
        yield chunk


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, or of the machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def with_points(base: Calibration, points: Calibration) -> Calibration:
    """Return a calibration in which measured points replace those of the same sizes.

    A base of another GPU or another torch keeps its own name: its other points are not of this device.
    """
    merged = {kind: [*rows] for kind, rows in base.points.items()}
    for kind, rows in points.points.items():
        sizes = {tuple(row[:-2]) for row in rows}
        merged[kind] = [row for row in merged.get(kind, ()) if tuple(row[:-2]) not in sizes] + rows
    return replace(base, points=merged)
