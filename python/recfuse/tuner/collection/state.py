"""The state of a search over a collection: its problem, deadlines, measurements and decisions."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recfuse._arguments import path_of
from recfuse._files import read_json, write_json
from recfuse.data.collection import CollectionTrace
from recfuse.errors import ArgumentValueError, FileFormatError
from recfuse.ops.schedules import ALWAYS_EMPTY, CHOSEN, EXPECTED, KIND, KINDS
from recfuse.plan.device import Device
from recfuse.plan.features import of_runs, runs
from recfuse.plan.file import MOST_BYTES, MOST_VALUES
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from recfuse.tuner.compile import Compiler
from recfuse.tuner.log import Log

_FORMAT = 2


@dataclass
class State(Log):
    """The state that the stages of a search share."""

    problem: FusedProblem
    bench: FusedBench
    compiler: Compiler
    arch: str
    deadline: float
    progress: bool | None
    seed: int

    def __post_init__(self) -> None:
        """Create the default schedules."""
        super().__init__()
        self.begun = self._before = time.monotonic()
        self.defaults = self.problem.defaults()

    def by(self, share: float) -> float:
        """Return the time of `time.monotonic` at which a share of the budget is spent."""
        return self.begun + share * max(self.deadline - self.begun, 0)

    def note_time(self, stage: str) -> None:
        """Record the seconds of a stage, since the end of the previous stage."""
        now = time.monotonic()
        self.note("time", stage, None, True, f"{now - self._before:.1f} s")
        self._before = now


class Finished:
    """Finished measurements in a file, with the identity of their search; without a path nothing is saved."""

    def __init__(self, path: str | os.PathLike[str] | None, identity: str) -> None:
        """Read the file, if it exists; raise ValueError for a file of another kind, which
        stays unchanged.
        """
        self._path = None if path is None else path_of(path, "recfuse.tune: resume")
        self._identity = identity
        self._records: dict[str, Any] = {}
        self.stale = False
        """Whether the file belongs to another search; it will be overwritten."""
        if self._path is None or not Path(self._path).exists():
            return
        try:
            record = read_json(self._path, "recfuse.tune: resume", MOST_BYTES, MOST_VALUES)
        except FileFormatError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("recfuse_tuning"), int):
            raise FileFormatError(
                f"recfuse.tune: resume is {str(path)!r}, which is there and holds no finished measurements. "
                "Name another file, or remove it."
            )
        self.stale = record["recfuse_tuning"] != _FORMAT or record.get("identity") != identity
        if not self.stale and isinstance(record.get("occupancies"), dict):
            self._records = record["occupancies"]

    def get(self, warps: int) -> Any:
        """Return the record of an occupancy; None: no record."""
        return self._records.get(str(warps))

    def put(self, warps: int, record: dict[str, Any]) -> None:
        """Add the measurements of an occupancy."""
        self._records[str(warps)] = record
        if self._path is not None:
            head = {"recfuse_tuning": _FORMAT, "identity": self._identity}
            record = {**head, "occupancies": self._records}
            write_json(self._path, record, "recfuse.tune: resume")


def identity(problem: FusedProblem, trace: CollectionTrace, device: Device, seed: int) -> str:
    """Return a hash of the collection, lookups, device and versions that measurements belong to."""
    digest = hashlib.sha256(problem.features[:, 2:].tobytes() + problem.expected_sixteenths.tobytes())
    kinds = [asdict(table) for table in dict.fromkeys(problem.tables)]
    parts = [trace.sha256, seed, asdict(problem.form), asdict(device), kinds]
    digest.update(json.dumps(parts, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def rows_record(rows: NDArray[np.int32]) -> dict[str, Any]:
    """Convert rows of schedules to a record of a file."""
    different, numbers = np.unique(rows, axis=0, return_inverse=True)
    return {"rows": different.tolist(), "of": runs(numbers.reshape(-1).tolist())}


def rows_of(record: Any, shape: Sequence[int]) -> NDArray[np.int32]:
    """Return the rows of a record; raise ArgumentValueError for another shape or bad values,
    and NumPy's errors.
    """
    rows = np.array(record["rows"], np.int32)[of_runs(record["of"], "of")]
    check_rows(rows, shape)
    return rows


def check_rows(rows: NDArray[np.int32], shape: Sequence[int]) -> None:
    """Raise ArgumentValueError unless the rows are schedules of the given shape."""
    if rows.shape != tuple(shape):
        raise ArgumentValueError(f"schedules are {list(rows.shape)}; expected {list(shape)}")
    if (
        (rows[:, CHOSEN] < 0).any()
        or (rows[:, KIND] > len(KINDS)).any()
        or (rows[:, EXPECTED] < ALWAYS_EMPTY).any()
    ):
        raise ArgumentValueError(
            f"schedules have other numbers; expected a kind from 0 to {len(KINDS)} and no negative numbers"
        )
