"""The parts of a `Plan`, and the device that a plan is for."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from recfuse._codes import DType, Integer, Mode
from recfuse.plan.file import PlanError

_MOST_BYTES = 1 << 62  # of all tables
_MOST_COLUMNS = (1 << 31) - 1  # of one


@dataclass(frozen=True)
class Decision:
    """One step of the tuner: a candidate, its time, what became of it and why."""

    step: str
    candidate: str
    us: float | None
    """Microseconds a batch; None where it was not timed."""
    kept: bool
    why: str


@dataclass(frozen=True)
class Table:
    """The table, and the form of its calls."""

    rows: int
    dim: int
    dtype: DType
    mode: Mode
    padded: bool
    weighted: bool
    indices: Integer
    offsets: Integer


@dataclass(frozen=True)
class Device:
    """What it was tuned on."""

    type: Literal["cuda", "cpu"]
    name: str
    arch: str
    """As in "sm_90a"; on the CPU the instruction set."""
    driver: str
    """"" on the CPU."""
    recfuse: str
    torch: str


@dataclass(frozen=True)
class Pinned:
    """Rows to keep in L2: the hottest ones of a trace, as many as fit."""

    rows: int
    l2_fraction: float
    sha256: str
    """Of the trace, as in `Hotness`."""


def describe_device(device: torch.device) -> Device:
    """The device that a plan is for, with the versions at hand."""
    import recfuse
    from recfuse import info

    versions = {"recfuse": recfuse.__version__, "torch": str(torch.__version__)}
    if device.type != "cuda":
        return Device(device.type, info.cpu_model(), torch.ops.recfuse.cpu_isa(), "", **versions)
    name = torch.cuda.get_device_name(device)
    return Device("cuda", name, architecture(device), _driver(device), **versions)


@functools.cache
def _driver(device: torch.device) -> str:
    """Version of the driver; asking takes a second."""
    from recfuse._clock import describe

    return str(describe(device).get("gpu_driver_version", "unknown"))


def architecture(device: torch.device) -> str:
    """What kernels for a CUDA device are compiled for, as in "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def differences(before: Device, now: Device) -> list[str]:
    """What of a device, and of recfuse, is not as it was."""
    return [
        f"{name if name == 'recfuse' else f'device {name}'} was {getattr(before, name)}, "
        f"is {getattr(now, name)}"
        for name in ("type", "name", "arch", "recfuse")
        if getattr(before, name) != getattr(now, name)
    ]


def row_bytes(dim: int, dtype: str) -> int:
    """Of a row of a table."""
    return dim * (4 if dtype == "float32" else 2)


def check_sizes(tables: Iterable[tuple[str, int, int, str]]) -> None:
    """Raises PlanError where tables (name, rows, dim, dtype) fit in no memory."""
    total = 0
    for name, rows, dim, dtype in tables:
        if dim > _MOST_COLUMNS:
            raise PlanError(f"{name}.dim is {dim}, must be {_MOST_COLUMNS} at most")
        total += rows * row_bytes(dim, dtype)
        if total > _MOST_BYTES:
            raise PlanError(f"{name}.rows is {rows}; all tables must have {_MOST_BYTES} bytes at most")


def check_times(default_us: float, best_us: float) -> None:
    """Raises PlanError for times that nothing takes."""
    for name, us in (("default_us", default_us), ("best_us", best_us)):
        if not us > 0:
            raise PlanError(f"{name} is {us}, must be above 0")
