"""Clocks of measurements: the host's clock or events of a CUDA device; and a description of the device."""

from __future__ import annotations

import functools
import subprocess
import time
from typing import Any

import torch


class Clock:
    """The host's clock: marks points of time and returns the seconds between two marks.

    The host's work is complete when a call returns.
    """

    immediate = True  # seconds between marks are known without waiting for the device

    def mark(self) -> Any:
        """Return a point of time in the order of the submitted work."""
        return time.perf_counter()

    def finish(self) -> None:
        """Wait until all submitted work is complete."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `finish`."""
        return end - start


class DeviceClock(Clock):
    """The clock of a CUDA device, with events on its current stream."""

    immediate = False

    def __init__(self, device: torch.device) -> None:
        """Create a clock for work on `device`."""
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Return an event after the submitted work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events, by the device's counter."""
        return start.elapsed_time(end) / 1e3


def clock(device: str | torch.device) -> Clock:
    """Return the clock for work on `device`."""
    device = torch.device(device)
    return DeviceClock(device) if device.type == "cuda" else Clock()


def describe(device: str | torch.device) -> dict[str, Any]:
    """Return properties and driver of a CUDA device, for the record of a measurement; {} for the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_sms": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_l2_bytes": properties.L2_cache_size,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        **_driver(str(properties.uuid)),
    }


@functools.cache
def _driver(uuid: str) -> dict[str, str]:
    """Return driver, clocks and power limit from nvidia-smi, or {} without nvidia-smi."""
    fields = ["driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit"]
    query = [
        "nvidia-smi",
        f"--id=GPU-{uuid.removeprefix('GPU-')}",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.partition("\n")[0].split(",")]
    return {f"gpu_{name.replace('.', '_')}": value for name, value in zip(fields, values, strict=False)}
