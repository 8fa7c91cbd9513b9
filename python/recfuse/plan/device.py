"""The device that a plan is for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from recfuse import info
from recfuse._clock import describe


@dataclass(frozen=True)
class Device:
    """The device and the versions of a tuning."""

    type: Literal["cuda", "cpu"]
    name: str
    arch: str
    """As in "sm_90a"; on the CPU the instruction set."""
    driver: str
    """"" on the CPU."""
    recfuse: str
    torch: str

    def differences(self, now: Device) -> list[str]:
        """Return the differences of another device and its version of recfuse, as texts."""
        return [
            f"{name if name == 'recfuse' else f'device {name}'} was {getattr(self, name)}, "
            f"is {getattr(now, name)}"
            for name in ("type", "name", "arch", "recfuse")
            if getattr(self, name) != getattr(now, name)
        ]


def describe_device(device: torch.device) -> Device:
    """Return the description of a device, with the present versions."""
    kind: Any = device.type
    versions = {"recfuse": torch.ops.recfuse.library_version(), "torch": str(torch.__version__)}
    if kind != "cuda":
        return Device(kind, info.cpu_model(), torch.ops.recfuse.cpu_isa(), "", **versions)
    name = torch.cuda.get_device_name(device)
    return Device(kind, name, architecture(device), _driver(device), **versions)


@functools.cache
def _driver(device: torch.device) -> str:
    """Return the version of the driver; the query takes a second."""
    return str(describe(device).get("gpu_driver_version", "unknown"))


def architecture(device: torch.device) -> str:
    """Return the architecture of the kernels for a CUDA device, as in "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
