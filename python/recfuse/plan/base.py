"""Base of all plans: file, report, checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from recfuse._arguments import path_of
from recfuse._codes import row_bytes
from recfuse._files import parsing, write_json
from recfuse.errors import ArgumentValueError, FileFormatError
from recfuse.plan.device import Device
from recfuse.plan.file import VERSION, read, shown
from recfuse.plan.report import Decision, Line, render

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_BYTES = 1 << 62  # of all tables
_MOST_COLUMNS = (1 << 31) - 1  # of a table
_UNIQUE_DRIFT = 0.2  # largest relative change of the share of different rows


@dataclass(frozen=True)
class Match:
    """The differences between a plan and a module; true if there are none."""

    reasons: list[str]
    """The differences, a text for each."""

    def __bool__(self) -> bool:
        """Return True if nothing differs."""
        return not self.reasons

    def warn(self) -> None:
        """Warn the caller of a plan's `apply` of the differences."""
        if self.reasons:
            warnings.warn(
                f"recfuse.Plan: this plan is for something else, since {', and '.join(self.reasons)}",
                stacklevel=3,
            )


@dataclass(kw_only=True)
class BasePlan:
    """Base of plans; the fields of the dataclass are those of the file."""

    KIND: ClassVar[str]
    """The kind of plan in its file: the operator that it tunes."""
    device: Device
    default_us: float
    """Microseconds per batch with the defaults."""
    best_us: float
    """Microseconds per batch with the plan, in the same run."""
    seconds: float
    """Duration of the tuning."""
    created: str
    decisions: list[Decision] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """The default's time divided by the plan's."""
        return self.default_us / self.best_us if self.best_us else 1.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file. An error leaves an existing file unchanged.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        where = path_of(path, "recfuse.Plan.save")
        record = {"recfuse_plan": VERSION, "kind": self.KIND, **self._record()}
        write_json(where, record, "recfuse.Plan.save")

    @classmethod
    def of_record(cls, record: Mapping[str, Any], path: str) -> Self:
        """Return the plan of the contents of a file.

        Raises:
            ValueError: the contents are not a plan of this class; names the file and the key.
        """
        if record.get("kind") != cls.KIND:
            kind = shown(record.get("kind"))
            raise FileFormatError(f'recfuse.Plan: {path} is a plan for {kind}, not for "{cls.KIND}"')
        with parsing(f"recfuse.Plan: {path}"):
            plan: Self = read(cls, record, cls._decoded(record))
            plan._check()
        return plan

    def _record(self) -> dict[str, Any]:
        """Return the fields in the form of the file."""
        record = asdict(self)
        return record | {"decisions": record.pop("decisions")}  # at the end, because they are long

    @classmethod
    def _decoded(cls, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that have another form in the file."""
        del record
        return {}

    def _check(self) -> None:
        """Raise ArgumentValueError for values that a plan cannot have."""
        for name in ("default_us", "best_us"):
            if not (us := getattr(self, name)) > 0:
                raise ArgumentValueError(f"{name} is {us}; expected more than 0")

    def _times(self, digits: int) -> str:
        """Return the times of a batch and their ratio; above 1: the plan is faster."""
        times = f"default {self.default_us:.2f} µs, plan {self.best_us:.2f} µs"
        return f"{times}: {self.speedup:.{digits}f}x as fast"

    def _chosen(self) -> str:
        """Return a short description of the result, or "" if the defaults won."""
        raise NotImplementedError

    def _winner(self) -> str:
        if not (chosen := self._chosen()):
            return "the defaults: no candidate is faster by more than 1 %"
        times = f"{self.best_us:.2f} µs a batch, the defaults {self.default_us:.2f} µs"
        return f"{chosen}: {self.speedup:.2f}x as fast as the defaults ({times})"

    def _origin(self) -> list[Line]:
        device, versions = self.device, f"recfuse {self.device.recfuse}, torch {self.device.torch}"
        names = filter(None, [device.name, device.arch, device.driver and f"driver {device.driver}"])
        return [
            ("device", ", ".join(names)),
            ("created", f"{self.created}, in {self.seconds:.1f} s; {versions}"),
        ]

    def _summary(self) -> list[Line]:
        raise NotImplementedError

    def report(self) -> str:
        """Return the report: the result, the measurements, and every decision in order."""
        winner: Line = ("winner", self._winner())
        return render([winner, *self._summary()], self.decisions, winner)

    def __str__(self) -> str:
        """The report."""
        return self.report()


def check_sizes(tables: Iterable[tuple[str, int, int, str]]) -> None:
    """Raise ArgumentValueError if tables (name, rows, dim, dtype) exceed any memory."""
    total = 0
    for name, rows, dim, dtype in tables:
        if dim > _MOST_COLUMNS:
            raise ArgumentValueError(f"{name}.dim is {dim}; expected {_MOST_COLUMNS} at most")
        total += rows * row_bytes(dim, getattr(torch, dtype))
        if total > _MOST_BYTES:
            raise ArgumentValueError(
                f"{name}.rows is {rows}; expected {_MOST_BYTES} bytes at most in all tables"
            )


def unique_drift(before: float, now: float, noun: str) -> list[str]:
    """Return the reason to tune again if the share of different rows has changed, else an empty list."""
    if abs(now - before) <= _UNIQUE_DRIFT * before:
        return []
    return [f"{before:.1%} of {noun} were of different rows, {now:.1%} are"]
