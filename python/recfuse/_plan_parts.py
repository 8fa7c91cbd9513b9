"""The parts of a `Plan`, how they are read from JSON, and the device that a plan is for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch

from recfuse._batches import Hotness
from recfuse.errors import ArgumentValueError


class PlanError(ArgumentValueError):
    """A file is no plan, or not one that this version understands."""


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
    dtype: str
    mode: str
    padded: bool
    weighted: bool
    indices: str
    offsets: str


@dataclass(frozen=True)
class Device:
    """What it was tuned on."""

    type: str
    """"cuda" or "cpu"."""
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

    versions = {"recfuse": recfuse.__version__, "torch": torch.__version__}
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


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}
_RECORDS: dict[str, type] = {"Table": Table, "Hotness": Hotness, "Device": Device, "Pinned | None": Pinned}


def read(kind: Any, record: Any, where: str) -> Any:
    """An object of a dataclass from what JSON gave; `where` leads to it in an error."""
    if not isinstance(record, dict):
        raise PlanError(f"recfuse.Plan: {where.rstrip('.')} is {record!r}, must be an object")
    values = {}
    for one in fields(kind):
        name, expected = f"{where}{one.name}", str(one.type)
        if one.name == "hottest":
            continue
        if one.name not in record:
            raise PlanError(f"recfuse.Plan: {name} is missing")
        value = record[one.name]
        if expected in _RECORDS:
            optional = value is None and expected.endswith("None")
            values[one.name] = None if optional else read(_RECORDS[expected], value, f"{name}.")
        elif expected == "list[Decision]":
            if not isinstance(value, list):
                raise PlanError(f"recfuse.Plan: {name} is {value!r}, must be a list")
            values[one.name] = [read(Decision, each, f"{name}[{at}].") for at, each in enumerate(value)]
        elif not isinstance(value, _KINDS[expected]) or (isinstance(value, bool) and expected != "bool"):
            raise PlanError(f"recfuse.Plan: {name} is {value!r}, must be {expected.replace('None', 'null')}")
        else:
            values[one.name] = value
    return kind(**values)
