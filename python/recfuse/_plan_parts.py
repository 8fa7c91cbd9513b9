"""The parts of a `Plan`, how they are read from JSON, and the device that a plan is for."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import types
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from recfuse.errors import ArgumentValueError

VERSION = 1
"""Of the file format."""


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


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the file of a plan of any kind holds, of a version that is known.

    Raises:
        OSError: it cannot be read. PlanError: it is no plan, or a newer one.
    """
    try:
        record = json.loads(Path(path).read_text())
    except ValueError as error:
        raise PlanError(f"recfuse.Plan: {path} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("recfuse_plan"), int):
        raise PlanError(f'recfuse.Plan: {path} has no number under "recfuse_plan": it is no plan')
    if record["recfuse_plan"] > VERSION:
        raise PlanError(
            f"recfuse.Plan: {path} is of format {record['recfuse_plan']}, this recfuse knows up to "
            f"{VERSION}; update recfuse, or tune again with this one"
        )
    return record


def write_file(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Writes JSON whole, or leaves the file that is there as it is."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=2, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


_KINDS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    float | None: (int, float, type(None)),
}


def read(kind: Any, record: Any, where: str) -> Any:
    """An object of a dataclass from what JSON gave; `where` leads to it in an error. A field whose type is
    Any is not in the file.
    """
    if not isinstance(record, dict):
        raise PlanError(f"recfuse.Plan: {where.rstrip('.')} is {record!r}, must be an object")
    types_of, values = get_type_hints(kind), {}
    for one in fields(kind):
        if types_of[one.name] is Any:
            continue
        if one.name not in record:
            raise PlanError(f"recfuse.Plan: {where}{one.name} is missing")
        values[one.name] = _value(types_of[one.name], record[one.name], f"{where}{one.name}")
    return kind(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    """A value of the type of a field: of `_KINDS`, a dataclass, one or None, or a list of any of these."""
    if get_origin(kind) is types.UnionType and kind not in _KINDS:
        return None if value is None else _value(get_args(kind)[0], value, where)
    if is_dataclass(kind):
        return read(kind, value, f"{where}.")
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise PlanError(f"recfuse.Plan: {where} is {value!r}, must be a list")
        return [_value(get_args(kind)[0], each, f"{where}[{at}]") for at, each in enumerate(value)]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind is not bool):
        name = "float | null" if kind == float | None else kind.__name__
        raise PlanError(f"recfuse.Plan: {where} is {value!r}, must be {name}")
    return value
