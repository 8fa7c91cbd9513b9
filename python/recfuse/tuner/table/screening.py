"""Ranks candidates by a model before they are compiled, so that only the first third is measured.

A lookup waits for memory. An SM reaches the bandwidth of memory if enough bytes are in flight: by Little's
law the bandwidth times the latency. Bytes in flight are the warps that an SM runs at once, times 16 bytes of
each lane, times the prefetch distance. Registers and shared memory limit the warps. The blocks of a batch run
in waves, of which the last may be small.

In recorded measurements the first third has a candidate within 1 % of the best if warps, stations or
distances vary. The model does not rank threads, block sizes or parts of the table better than chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recfuse.ops.schedules import Schedule

_LANES, _WORD = 32, 16  # of a warp; bytes that a lane reads at a time
_ENOUGH = 30 << 10  # bytes in flight of an SM that reach the bandwidth of memory
_REGISTERS, _OF_ROW = 32, 4  # of a thread; of a prefetched row in registers
_WITHOUT_PREFETCH = 2  # rows that a lane has in flight without prefetches
_THREADS, _BLOCK = 64, 512  # defaults of open fields
_DETOUR = {"shared": 1.02, "l1": 1.05, "local": 1.05}  # further instructions of a station


@dataclass(frozen=True)
class Device:
    """The limits of a GPU: SMs, and of each SM warps, registers and bytes of shared memory."""

    sms: int
    warps: int
    registers: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Return the limits of a CUDA device."""
        of = torch.cuda.get_device_properties(device)
        return cls(
            of.multi_processor_count, of.max_threads_per_multi_processor // _LANES,
            of.regs_per_multiprocessor, of.shared_memory_per_multiprocessor,
        )  # fmt: skip


def cost(schedule: Schedule, device: Device, bags: int) -> float:
    """Return a number that grows with the time of a batch of `bags` bags."""
    station, distance = schedule.station or "register", schedule.distance or 1
    threads, block = schedule.threads or _THREADS, schedule.block or _BLOCK
    registers = _REGISTERS + _OF_ROW * (distance if station == "register" else 2)
    warps = min(schedule.warps or device.warps, device.warps, device.registers // (_LANES * registers))
    if station == "shared":
        warps = min(warps, device.shared_bytes // (_LANES * _WORD * distance))
    blocks = max(warps * _LANES // block, 1)  # of an SM at once
    waves = math.ceil(bags * threads / block) / (device.sms * blocks)
    resident = min(blocks * block, bags * threads / device.sms) / _LANES
    ahead = _WITHOUT_PREFETCH if station == "none" else distance
    in_flight = resident * _LANES * _WORD * ahead
    rounding = math.ceil(waves) / waves if waves else 1.0
    return _DETOUR.get(station, 1.0) * math.sqrt(rounding) / min(in_flight, _ENOUGH)


def first_third(
    candidates: Sequence[Schedule], device: Device, bags: int, default: Schedule
) -> list[Schedule]:
    """Return the third of the candidates with the least cost; open fields are those of the default."""
    threads, block = default.threads, default.block

    def completed(schedule: Schedule) -> Schedule:
        return schedule.but(threads=schedule.threads or threads, block=schedule.block or block)

    ranked = sorted(candidates, key=lambda schedule: cost(completed(schedule), device, bags))
    return ranked[: math.ceil(len(ranked) / 3)]
