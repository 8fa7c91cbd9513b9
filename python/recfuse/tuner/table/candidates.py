"""The candidate schedules of each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from recfuse.ops.schedules import STATIONS, Schedule
from recfuse.tuner.native import power_of_two
from recfuse.tuner.table.problem import Problem

# None: as many warps as registers allow. A number also reserves shared memory (and so reduces L1) to limit
# occupancy.
_WARPS = (None, 8, 16, 24, 32, 40, 48, 64)
_DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_BLOCKS = (64, 128, 256, 512)
_MOST_THREADS = 256
_PARTS = (1, 2, 4, 8, 16)
_SEGMENTS = (64, 128, 256)
_BAGS = (1, 2, 4, 8, 16, 32)
_MOST_LOOKUPS = 64  # mean lookups of a short bag
_LIMITS = {
    "distance": 64,
    "threads": 1024,
    "block": 1024,
    "parts": 16,
    "segment": 256,
    "bags": 32,
}  # from 1 to these, inclusive


def most_warps(device: torch.device) -> int:
    """Return the largest number of warps that an SM of a CUDA device can run at once."""
    return torch.cuda.get_device_properties(device).max_threads_per_multi_processor // 32


def occupancies(most: int) -> list[Schedule]:
    """Return schedules without prefetching and with prefetching to registers, for each number of
    warps an SM up to `most`.
    """
    return [
        Schedule(station=station, warps=warps)
        for station in ("none", "register")
        for warps in _WARPS
        if (warps or 0) <= most
    ]


def prefetches(warps: Iterable[int | None]) -> list[Schedule]:
    """Return every station and distance, at these numbers of warps and with an open number of warps."""
    return [
        Schedule(station=station, distance=distance, warps=count)
        for station in STATIONS
        if station != "none"
        for distance in _DISTANCES
        for count in dict.fromkeys([None, *warps])
    ]


def short_bags(problem: Problem) -> list[Schedule]:
    """Return schedules with several bags per warp, if bags are short and pooled by sum or mean without
    weights. The operator refuses schedules that do not fit.
    """
    lookups, bags = _lookups_and_bags(problem)
    weighted = any(batch.weights is not None for batch in problem.batches)
    if problem.mode == "max" or weighted or lookups > _MOST_LOOKUPS * bags:
        return []
    return [Schedule(bags=count, block=block) for count in _BAGS for block in _BLOCKS]


def _lookups_and_bags(problem: Problem) -> tuple[int, int]:
    lookups = sum(batch.indices.numel() for batch in problem.batches)
    return lookups, max(sum(batch.bags for batch in problem.batches), 1)


def shapes(problem: Problem, best: Iterable[Schedule]) -> list[Schedule]:
    """Vary the threads per bag and the block size of the best schedules.

    The threads range from the lanes of a row to the lanes of all rows of a mean bag.
    """
    lookups, bags = _lookups_and_bags(problem)
    pooling = power_of_two(lookups // bags)
    most = min(_MOST_THREADS, problem.lanes * pooling)
    threads = [problem.lanes << shift for shift in range(9) if problem.lanes << shift <= most]
    return [
        schedule.but(threads=count, block=block)
        for schedule in best
        if schedule.bags is None
        for count in threads
        for block in _BLOCKS
        if count <= block <= 32 * (schedule.warps or block)
    ]


def sweeps(best: Iterable[Schedule]) -> list[Schedule]:
    """Vary the parts of the table and the segment of the best schedules."""
    return [
        schedule.but(parts=parts, segment=segment)
        for schedule in best
        if schedule.bags is None
        for parts in _PARTS
        for segment in _SEGMENTS
    ]


def neighbours(schedule: Schedule, most: int) -> list[Schedule]:
    """Vary one field of a schedule slightly, with at most `most` warps. Of its fields only
    warps may be open.
    """
    steps = {"distance": (-2, -1, 1, 2), "warps": (-8, -4, 4, 8)}
    schedules = [
        schedule.but(**{name: value + step})
        for name, changes in steps.items()
        if (value := getattr(schedule, name)) is not None
        for step in changes
    ]
    for name in ("threads", "block", "parts", "segment", "bags"):
        if (value := getattr(schedule, name)) is not None:
            schedules += [schedule.but(**{name: value // 2}), schedule.but(**{name: value * 2})]
    return [neighbour for neighbour in schedules if _possible(neighbour, most)]


def _possible(schedule: Schedule, most_warps: int) -> bool:
    fields = {name: getattr(schedule, name) for name in _LIMITS}
    fits = all(1 <= value <= _LIMITS[name] for name, value in fields.items() if value is not None)
    fits = fits and (schedule.station != "none" or schedule.distance == 1)
    threads, block = schedule.threads or 32, schedule.block or 0  # a warp, if bags are short
    return fits and threads <= block <= 32 * (schedule.warps or most_warps) <= 32 * most_warps
