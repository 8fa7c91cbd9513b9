"""Which schedules are worth a try, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from recfuse._schedule import Schedule
from recfuse.tuner.problem import Problem, power_of_two

_WARPS = (8, 16, 24, 32, 40, 48, 64)
_DISTANCES = (1, 2, 4, 6, 8, 10, 12, 16, 24, 32)
_BLOCKS = (64, 128, 256, 512)
_MOST_THREADS = 256


@dataclass(frozen=True)
class Limits:
    """What a device allows."""

    warps: int
    """Of an SM."""
    bulk: bool
    """Has bulk copies to shared memory."""

    @classmethod
    def of(cls, device: torch.device) -> Limits:
        """Those of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.max_threads_per_multi_processor // 32, properties.major >= 9)


def occupancies(limits: Limits) -> list[Schedule]:
    """Without prefetching and with it in registers, by how many warps an SM runs."""
    return [
        Schedule(station=station, warps=warps)
        for station in ("none", "register")
        for warps in _WARPS
        if warps <= limits.warps
    ]


def prefetches(limits: Limits, warps: Iterable[int | None]) -> list[Schedule]:
    """Every station and distance, at these numbers of warps."""
    stations = ("register", "shared", "local", "l1", *(["bulk"] if limits.bulk else []))
    return [
        Schedule(station=station, distance=distance, warps=count)
        for station in stations
        for distance in _DISTANCES
        for count in dict.fromkeys(warps)
    ]


def shapes(problem: Problem, best: Iterable[Schedule]) -> list[Schedule]:
    """The best ones with other threads a bag, from one row at a time to all of a bag's, and other blocks."""
    lookups = sum(batch.indices.numel() for batch in problem.batches)
    pooling = power_of_two(lookups // max(sum(batch.bags for batch in problem.batches), 1))
    most = min(_MOST_THREADS, problem.lanes * pooling)
    threads = [problem.lanes << shift for shift in range(9) if problem.lanes << shift <= most]
    return [
        schedule.but(threads=count, block=block)
        for schedule in best
        for count in threads
        for block in _BLOCKS
        if count <= block
    ]


def neighbours(schedule: Schedule, limits: Limits) -> list[Schedule]:
    """One field changed a little."""
    found = []
    if schedule.distance is not None:
        found += [schedule.but(distance=schedule.distance + step) for step in (-2, -1, 1, 2)]
    if schedule.warps is not None:
        found += [schedule.but(warps=schedule.warps + step) for step in (-8, -4, 4, 8)]
    if schedule.threads is not None:
        found += [schedule.but(threads=count) for count in (schedule.threads // 2, schedule.threads * 2)]
    if schedule.block is not None:
        found += [schedule.but(block=count) for count in (schedule.block // 2, schedule.block * 2)]
    return [one for one in found if _possible(one, limits)]


def _possible(schedule: Schedule, limits: Limits) -> bool:
    threads, block = schedule.threads or 1, schedule.block or 1024
    return (
        (schedule.distance is None or schedule.distance >= 1)
        and (schedule.warps is None or 1 <= schedule.warps <= limits.warps)
        and 1 <= threads <= block <= 1024
    )
