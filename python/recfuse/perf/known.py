"""Finds GPUs by name: the GPU of this machine, and data sheets of others."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from typing import Any

import torch

from recfuse.errors import ArgumentValueError
from recfuse.perf.calibration import here
from recfuse.perf.explain import known_gpus

_QUERY = "driver_version,power.limit,clocks.max.sm,mig.mode.current"


def gpu_names() -> list[str]:
    """Return the names of the GPUs whose data sheets are known."""
    return [gpu["name"] for gpu in known_gpus()]


def data_sheet(name: str) -> dict[str, Any]:
    """Return the data sheet of a GPU.

    Raises:
        ValueError: no GPU of that name is known.
    """
    for gpu in known_gpus():
        if name.lower().replace("_", " ") in (gpu["name"].lower(), gpu["arch"]):
            return gpu
    raise ArgumentValueError(f"recfuse.predict: gpu is {name!r}; expected {', '.join(gpu_names())} or cpu")


def name_here(device: torch.device) -> str:
    """Return the short name of a device: the longest known name that its full name contains."""
    if device.type != "cuda":
        return "cpu"
    full = torch.cuda.get_device_name(device)
    names = sorted((name for name in gpu_names() if all(word in full for word in name.split())), key=len)
    return names[-1] if names else full.removeprefix("NVIDIA ")


def facts_here(device: torch.device) -> dict[str, Any]:
    """Return facts of a device: driver, power limit, clock, memory, date and CPU."""
    facts = {**here(), "date": datetime.now(timezone.utc).date().isoformat(), "torch": torch.__version__}
    if device.type != "cuda":
        return {**facts, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    facts |= {"device": properties.name, "sms": properties.multi_processor_count,
              "memory_bytes": properties.total_memory}  # fmt: skip
    index = str(device.index or torch.cuda.current_device())
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-i", index]
    try:
        values = (
            subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip().split(", ")
        )
    except (OSError, subprocess.TimeoutExpired):
        return facts
    if len(values) == 4:
        facts |= {
            "driver": values[0],
            "power_limit": _number(values[1]),
            "clock": _number(values[2]),
            "mig": values[3],
        }
    return facts


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
