"""A calibration: the measurements of a GPU with a minor version of torch. A JSON file."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from recfuse._files import parsing, read_json, write_whole
from recfuse.errors import ArgumentValueError, FileFormatError
from recfuse.perf.models.bags import BagModel
from recfuse.perf.models.host import HostModel, Probe
from recfuse.perf.models.kernels import KernelModel
from recfuse.perf.models.kinds import form_of
from recfuse.perf.models.regimes import Gaps

VERSION = 1
_MOST_BYTES, _MOST_VALUES = 8 << 20, 1_000_000
_SHIPPED = Path(__file__).parent / "calibrations"


@dataclass
class Calibration:
    """Measured points and costs of a device.

    Attributes:
        gpu: name of the device in `recfuse.explain`, such as ``"H100"``; ``"cpu"`` for the CPU.
        torch: minor version of torch, such as ``"2.11"``.
        points: for each kind of kernel, rows of sizes, microseconds, number of kernels.
        probes: counts of operators of steps, and microseconds of each step.
        gaps: constants of the device.
        facts: driver, date, spread of a point over its rounds in percent, clock, power limit, CPU.
        groups: finished groups of measurements.
        source: the GPU from which it is scaled by data sheet; empty if it was measured.

    Example:
        >>> from recfuse.perf.calibration import Calibration, available
        >>> path = next(iter(available().values()))
        >>> calibration = Calibration.load(path)
        >>> calibration.count > 0
        True
    """

    gpu: str
    torch: str
    points: dict[str, list[list[float]]] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    facts: dict[str, Any] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    source: str = ""

    def __repr__(self) -> str:
        """GPU, torch, and the numbers of points and probes."""
        return (
            f"Calibration({self.gpu!r}, torch {self.torch}, {self.count} points, {len(self.probes)} probes)"
        )

    @property
    def count(self) -> int:
        """Number of points."""
        return sum(map(len, self.points.values()))

    @property
    def is_cpu(self) -> bool:
        """True if the device is the CPU."""
        return self.gpu == "cpu"

    @cached_property
    def kernels(self) -> KernelModel:
        """The model of kernels."""
        return KernelModel(self.points)

    @cached_property
    def bags(self) -> BagModel:
        """The model of recfuse's calls on many tables."""
        return BagModel(self.points)

    @cached_property
    def host(self) -> HostModel:
        """The model of the host."""
        return HostModel(self.probes)

    def add(self, kind: str, sizes: Sequence[float], us: float, kernels: float) -> None:
        """Add a measured point.

        Args:
            kind: the kind of the kernel.
            sizes: the sizes that determine its time.
            us: the measured microseconds.
            kernels: the number of kernels.
        """
        short = [int(size) if float(size).is_integer() else float(f"{size:.8g}") for size in sizes]
        self.points.setdefault(kind, []).append([*short, _digits(us), int(kernels)])

    def merge(self, other: Calibration) -> Calibration:
        """Return a calibration with the points and probes of both.

        Args:
            other: a calibration of the same GPU and torch.

        Raises:
            ValueError: another GPU or another minor version of torch.
        """
        if (self.gpu, self.torch) != (other.gpu, other.torch):
            raise ArgumentValueError(
                f"Calibration.merge: the first calibration is of {self.gpu} and torch {self.torch}, the "
                f"second of {other.gpu} and torch {other.torch}. Merge calibrations of the same GPU and "
                "torch."
            )
        points = {kind: [*rows] for kind, rows in self.points.items()}
        for kind, rows in other.points.items():
            points.setdefault(kind, []).extend(rows)
        groups = list(dict.fromkeys((*self.groups, *other.groups)))
        gaps = other.gaps if "gaps" in other.groups else self.gaps
        probes = [*self.probes, *other.probes]
        return replace(
            self, points=points, probes=probes, groups=groups, gaps=gaps, facts={**self.facts, **other.facts}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON.

        Args:
            path: the file.
        """
        record = {
            "recfuse_calibration": VERSION, "gpu": self.gpu, "torch": self.torch, "facts": self.facts,
            "groups": self.groups,
            "gaps": {name: round(value, 3) for name, value in asdict(self.gaps).items()},
            "probes": [[dict(counts), _digits(us)] for counts, us in self.probes], "points": self.points,
        }  # fmt: skip
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        text = re.sub(r'("\w+":\[\[|"(?:probes|points|gaps|groups)":)', r"\n\1", text)
        write_whole(os.fspath(path), lambda: [text, "\n"], "Calibration.save")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from a file.

        Args:
            path: a file that :meth:`save` wrote.

        Returns:
            Calibration: the calibration.

        Raises:
            OSError: the file cannot be read.
            recfuse.errors.FileFormatError: it is damaged, not a calibration, or of a newer version.
        """
        path = os.fspath(path)
        record = read_json(path, "Calibration.load", _MOST_BYTES, _MOST_VALUES)
        version = record.get("recfuse_calibration") if isinstance(record, dict) else None
        if not isinstance(version, int):
            raise FileFormatError(
                f"Calibration.load: {path} is no calibration. Run recfuse predict --calibrate, which writes "
                "a calibration."
            )
        if version > VERSION:
            raise FileFormatError(
                f"Calibration.load: {path} has version {version}, this recfuse reads up to {VERSION}. "
                "Calibrate again, or update recfuse."
            )
        with parsing(f"Calibration.load: {path}"):
            return _checked(record)

    def scaled_to(self, target: dict[str, Any], source: dict[str, Any]) -> Calibration:
        """Return a calibration of another GPU, with times scaled by the data sheets of both.

        Args:
            target: facts of the other GPU.
            source: facts of this calibration's GPU.
        """
        memory = source["bytes_per_second"] / target["bytes_per_second"]
        points: dict[str, list[list[float]]] = {}
        for kind, rows in self.points.items():
            rate = "tensor_flops_per_clock" if kind.endswith(("_half", "_tf32")) else "flops_per_clock"
            compute = _rate(source, rate) / _rate(target, rate)
            floor = min(row[-2] for row in rows) if rows else 0.0
            factor = compute if form_of(kind).compute else memory
            points[kind] = [[*row[:-2], floor + (row[-2] - floor) * factor, row[-1]] for row in rows]
        return replace(self, gpu=target["name"], points=points, source=self.gpu)


def _rate(gpu: dict[str, Any], name: str) -> float:
    return float(gpu["sms"] * gpu["clock"] * gpu[name])


def _digits(us: float) -> float:
    return float(f"{us:.4g}")


def _checked(record: dict[str, Any]) -> Calibration:
    """Return the calibration of a file's record; raise ValueError or the errors of conversions
    for a bad record.
    """
    points: dict[str, list[list[float]]] = {}
    for kind, rows in record["points"].items():
        width = len(form_of(kind).sizes) + 2
        if not all(len(row) == width and min(row[:-1]) > 0 and row[-2] < 1e9 for row in rows):
            raise ValueError(
                f"points of {kind!r} have another form; expected rows of {width} positive numbers"
            )
        points[kind] = [[float(value) for value in row] for row in rows]
    probes = [
        ({str(key): float(number) for key, number in counts.items()}, float(us))
        for counts, us in record["probes"]
    ]
    if any(us <= 0 or not counts for counts, us in probes):
        raise ValueError("probes have other values; expected counts and positive times")
    gaps = Gaps(**{str(name): float(value) for name, value in record["gaps"].items()})
    facts = {str(name): value for name, value in record["facts"].items()}
    return Calibration(
        str(record["gpu"]), str(record["torch"]), points, probes, gaps, facts, list(record["groups"])
    )


def torch_minor(version: str) -> str:
    """Return the minor version of torch: "2.11" for "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def cache_folder() -> Path:
    """Return the folder of calibrations that were measured on this machine."""
    if folder := os.environ.get("RECFUSE_CACHE_DIR"):
        return Path(folder) / "calibrations"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "recfuse" / "calibrations"


def file_name(gpu: str, torch: str) -> str:
    """Return the name of a calibration's file."""
    return f"{gpu.replace(' ', '_')}-torch{torch}.json"


def available() -> dict[tuple[str, str], Path]:
    """Return the available calibrations by GPU and torch; those of this machine replace the
    shipped calibrations.
    """
    return {key: path for folder in (_SHIPPED, cache_folder()) for key, path in _in_folder(folder)}


def _in_folder(folder: Path) -> Iterator[tuple[tuple[str, str], Path]]:
    if folder.is_dir():
        for path in sorted(folder.glob("*-torch*.json")):
            gpu, _, torch = path.stem.rpartition("-torch")
            yield (gpu.replace("_", " "), torch), path


def here() -> dict[str, Any]:
    """Return facts of the machine for a calibration."""
    return {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
