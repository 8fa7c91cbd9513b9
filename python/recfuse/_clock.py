"""What time is read from: the host's clock, or events of a CUDA device; and what that device is."""

from __future__ import annotations

import functools
import subprocess
import time
from typing import Any

import torch


class Clock:
    """Marks points of time and gives the seconds between two: by the host, whose work is done at once."""

    immediate = True  # seconds between marks are known without waiting for the device

    def mark(self) -> Any:
        """A point of time in the order of the work asked for so far."""
        return time.perf_counter()

    def finish(self) -> None:
        """Wait until all that was asked for is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks, after `finish`."""
        return end - start


class DeviceClock(Clock):
    """Events on the present stream of a CUDA device: they lie where the device passes them."""

    immediate = False

    def __init__(self, device: torch.device) -> None:
        """For work on `device`."""
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind the work asked for so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """By the device's own counter."""
        return start.elapsed_time(end) / 1e3


def clock(device: str | torch.device) -> Clock:
    """The clock for work on `device`."""
    device = torch.device(device)
    return DeviceClock(device) if device.type == "cuda" else Clock()


def describe(device: str | torch.device) -> dict[str, Any]:
    """What a CUDA device is and runs under, for the record of a measurement; {} for the CPU."""
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
    """Driver, clocks and power limit as nvidia-smi says; {} where it cannot be asked."""
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
