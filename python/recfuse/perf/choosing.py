"""Chooses the calibration of a prediction, and rates its differences from the requested device."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recfuse.errors import ArgumentValueError
from recfuse.perf.calibration import Calibration, available, torch_minor
from recfuse.perf.known import data_sheet, facts_here, gpu_names, name_here
from recfuse.perf.models.regimes import Gaps

DEFAULT_GPU = "H100"
_OTHER_TORCH, _OTHER_GPU, _OTHER_LIMIT = 0.04, 0.10, 0.08  # additional standard deviations of logarithms


@dataclass(frozen=True)
class Chosen:
    """A calibration for a device.

    Attributes:
        calibration: the chosen calibration.
        spread: standard deviation of the logarithm that its differences add.
        notes: the differences, in words.
    """

    calibration: Calibration
    spread: float = 0.0
    notes: tuple[str, ...] = field(default=())


def choose(
    gpu: str | None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    may_be_empty: bool = False,
) -> Chosen:
    """Return the calibration for a GPU by its name or for ``"cpu"``. None: the GPU of this
    machine, else an H100. ``may_be_empty``: a calibration without points if there is none.

    Raises:
        ValueError: an unknown GPU, or no calibration from which it could be scaled.
    """
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    if gpu is None:
        gpu = calibration.gpu if calibration else _name_of_default()
    if gpu.lower() == "cpu":
        gpu = "cpu"
    elif not (calibration and calibration.gpu.lower() == gpu.lower()):
        gpu = data_sheet(gpu)["name"]
    version = torch_minor(torch.__version__)
    notes: list[str] = []
    spread = 0.0
    if may_be_empty and not calibration and not has_calibration(gpu):
        calibration = Calibration(gpu, version, gaps=Gaps(*[0.0] * 7) if gpu == "cpu" else Gaps())
    chosen = calibration or _load(gpu, version)
    if not chosen.probes:
        notes.append(f"no calibration of the host: its cost on {gpu} is a default")
    if chosen.torch != version:
        notes.append(f"calibrated with torch {chosen.torch}, this is {version}")
        spread = math.hypot(spread, _OTHER_TORCH)
    if chosen.gpu.lower() != gpu.lower():
        if "cpu" in (chosen.gpu, gpu):
            raise ArgumentValueError(
                f"recfuse.predict: the calibration is of {chosen.gpu}, gpu is {gpu}; expected both of a CPU "
                "or both of a GPU"
            )
        notes.append(f"no calibration of {gpu}: scaled from {chosen.gpu} by data sheet")
        spread = math.hypot(spread, _OTHER_GPU)
        chosen = chosen.scaled_to(data_sheet(gpu), data_sheet(chosen.gpu))
    for note in _differences(chosen):
        notes.append(note)
        spread = math.hypot(spread, _OTHER_LIMIT)
    return Chosen(chosen, spread, tuple(notes))


def has_calibration(gpu: str) -> bool:
    """Return whether a calibration of a GPU exists, or one from which it could be scaled."""
    return any((name == "cpu") == (gpu == "cpu") for name, _ in available())


def _name_of_default() -> str:
    return name_here(torch.device("cuda")) if torch.cuda.is_available() else DEFAULT_GPU


def _load(gpu: str, version: str) -> Calibration:
    """Return the calibration of this GPU and torch; else of another torch, else of the most similar GPU."""
    paths = available()
    if (gpu, version) in paths:
        return Calibration.load(paths[gpu, version])
    keys = [key for key in paths if key[0] == gpu]
    if not keys and gpu != "cpu":
        sheet = data_sheet(gpu)
        gpus = {name for name, _ in paths if name in gpu_names()}
        nearest = min(gpus, key=lambda name: _distance(data_sheet(name), sheet), default=None)
        keys = [key for key in paths if key[0] == nearest]
    if not keys:
        there = ", ".join(f"{name} with torch {minor}" for name, minor in sorted(paths)) or "no calibration"
        raise ArgumentValueError(
            f"recfuse.predict: gpu is {gpu}, which has no calibration; expected {there}. Run recfuse predict "
            f"--calibrate{' --device cpu' if gpu == 'cpu' else ''} on a machine with this device."
        )
    return Calibration.load(
        paths[max(keys, key=lambda key: (-abs(_minor(key[1]) - _minor(version)), key[1]))]
    )


def _minor(version: str) -> int:
    major, _, minor = version.partition(".")
    return int(major) * 1000 + int(minor or 0)


def _distance(sheet: dict[str, Any], other: dict[str, Any]) -> float:
    arch = 0.0 if sheet["arch"] == other["arch"] else 1.0
    return arch + abs(math.log(sheet["bytes_per_second"] / other["bytes_per_second"]))


def _differences(calibration: Calibration) -> list[str]:
    """Return the differences between the GPU of this machine and the calibrated GPU of the same name."""
    if (
        calibration.is_cpu
        or calibration.source
        or not torch.cuda.is_available()
        or name_here(torch.device("cuda")) != calibration.gpu
    ):
        return []
    facts = facts_here(torch.device("cuda"))
    notes = []
    for name, words in (("power_limit", "a power limit of {} W"), ("sms", "{} SMs"), ("mig", "MIG {}")):
        current, calibrated = facts.get(name), calibration.facts.get(name)
        if current and calibrated and current != calibrated:
            notes.append(f"calibrated with {words.format(calibrated)}, here {words.format(current)}")
    return notes


def path_of_new(gpu: str, folder: Path) -> Path:
    """Return the path of a new calibration of a GPU."""
    from recfuse.perf.calibration import file_name

    return folder / file_name(gpu, torch_minor(torch.__version__))
