"""What contestants need at one subject and batch size: checked against float64, then timed in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.calls import EAGER, time_calls
from common.ceilings import copy_speed
from common.checks import TOLERANCES, checked, relative_error
from common.report import Row
from common.settings import Setting
from embedding_columns.forms import BY_HAND, COMPILED_BY_HAND, HASHED, PEERS, RECFUSE, SLOW, Runs
from embedding_columns.models import Batch, Kind, Model, Subject, rows_of
from recfuse.nn.columns.reference import hash_integers, scaled

_WHOLE_TOLERANCE = 1e-4
"""Of whole models: sums of 9,700 products in float32."""
_CPU_COPY = 256 << 20  # bytes


class ColumnsSetting(Setting):
    """The command line, the device, and how fast it copies."""

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second, read and written together."""
        return copy_speed(self.device, *([_CPU_COPY] if self.device.type == "cpu" else []))


@dataclass
class Point:
    """What was measured of one subject at one size."""

    subject: str
    size: int
    row: Row
    limit_s: float  # the least bytes at copy speed
    first_call: dict[str, float]
    notes: list[str]

    def best(self, names: Sequence[str]) -> str | None:
        """The fastest of those that were measured, replayed as a graph where there is one."""
        found = [name for name in names if name in self.row.result.timings]
        return self.row.result.fastest(found) if found else None

    @property
    def peer(self) -> str | None:
        """The best of torch's that has a column at a time."""
        return self.best(PEERS)

    @property
    def by_hand(self) -> str | None:
        """The best of torch's that has alike columns at once."""
        return self.best((BY_HAND, COMPILED_BY_HAND))

    def to_json(self) -> dict[str, Any]:
        """Figures and every sample."""
        return {
            **self.row.record,
            "subject": self.subject, "size": self.size, "limit_us": self.limit_s * 1e6,
            "first_call_s": self.first_call, "notes": self.notes,
            "us": {name: timing.median * 1e6 for name, timing in self.row.result.timings.items()},
            "measured": self.row.result.to_json(environment=False),
        }  # fmt: skip


def hashed_rows(kind: Kind, values: Tensor, boundaries: Tensor) -> Tensor:
    """As `rows_of`, integers by XXH64."""
    if kind.buckets or kind.numeric:
        return rows_of(kind, values, boundaries)
    return scaled(hash_integers([values.long()], 0), kind.rows)


def right_output(subject: Subject, batch: Batch, hashed: bool = False) -> Tensor:
    """In float64, of the rows in use."""
    pooled = []
    for kind, table, feature in zip(subject.columns, subject.tables, batch.features, strict=True):
        values, offsets = feature if isinstance(feature, tuple) else (feature, None)
        if offsets is None:
            offsets = torch.arange(batch.size + 1, device=subject.device)
        if kind.numeric:
            pooled.append(values.double()[:, None])
            continue
        find = hashed_rows if hashed else rows_of
        rows, numbers = find(kind, values, subject.boundaries).unique(return_inverse=True)
        pooled.append(
            functional.embedding_bag(
                numbers, table[rows].double(), offsets, mode=kind.pooling, include_last_offset=True
            )
        )
    return torch.cat(pooled, dim=1)


def measure(
    setting: ColumnsSetting, subject: Subject, size: int, names: Sequence[str], model: Model | None = None
) -> Point:
    """Contestants in turns, called and as graphs; `model`: what follows the columns.

    Ends the program with status 1 where an output is wrong.
    """
    batches, runs = subject.batches(size), Runs(subject, model)
    calls = {name: runs.make(name) for name in names}
    label = f"{subject.name}, batch {size}{', whole' if model else ''}"
    rights: dict[bool, Tensor] = {}

    def right(name: str) -> Tensor:
        hashed = name == HASHED
        if hashed not in rights:
            output = right_output(subject, batches[0], hashed)
            if model is not None:
                with torch.inference_mode():
                    output = model(output.float(), batches[0].dense).double()
            rights[hashed] = output
        return rights[hashed]

    tolerance = _WHOLE_TOLERANCE if model else TOLERANCES[torch.float32]
    errors, notes = checked(
        setting.parser, label, {name: lambda run=run: run(batches[0]) for name, run in calls.items()},
        lambda name, output: relative_error(output, right(name)), lambda name: tolerance,
    )  # fmt: skip
    calls = {name: calls[name] for name in errors}
    on_gpu = setting.device.type == "cuda"
    result, failures = time_calls(
        calls, batches, setting.device, rounds=setting.arguments.rounds, eager=on_gpu, slow=SLOW
    )
    notes += [f"{label}: {name} has no graph: {why}" for name, why in failures.items()]
    for name in failures:
        result.timings.setdefault(name, result.timings[name + EAGER])
    least = sum(map(subject.least_bytes, batches)) / len(batches)
    record = {"least_bytes": least, "relative_error": errors}
    row = Row(label, result, record)
    return Point(subject.name, size, row, least / setting.copy_speed, runs.first_call, notes)


def ours_over(point: Point, peer: str | None, ours: str = RECFUSE) -> float | None:
    """How many times faster recfuse is."""
    return None if peer is None else point.row.ratio(ours, peer)
