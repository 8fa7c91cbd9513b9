"""The times of contestants at one subject and batch size: checked against float64, then timed in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from common import measure as turns
from common.calls import EAGER
from common.ceilings import copy_speed
from common.checks import TOLERANCES, relative_error
from common.report import Row
from common.settings import Setting
from embedding_columns import bench
from embedding_columns.forms import BY_HAND, COMPILED_BY_HAND, HASHED, PEERS, RECFUSE, SLOW, Runs
from embedding_columns.models import Batch, Kind, Model, Subject, rows_of
from recfuse.nn.columns.reference_values import hash_integers, scaled

_WHOLE_TOLERANCE = 1e-4
"""Of whole models: sums of 9,700 products in float32."""
_CPU_COPY = 256 << 20  # bytes


@bench.setting
class ColumnsSetting(Setting):
    """A setting that knows the copy speed of the device."""

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second, read and written together."""
        return copy_speed(self.device, *([_CPU_COPY] if self.device.type == "cpu" else []))


@dataclass(kw_only=True)
class Point(Row):
    """The measurements of one subject at one size."""

    limit_s: float  # the least bytes at copy speed
    first_call: dict[str, float]

    def best(self, names: Sequence[str]) -> str | None:
        """Returns the fastest measured contestant, replayed as a graph if possible."""
        timed = [name for name in names if name in self.result.timings]
        return self.result.fastest(timed) if timed else None

    @property
    def peer(self) -> str | None:
        """The fastest of torch's forms that work column by column."""
        return self.best(PEERS)

    @property
    def by_hand(self) -> str | None:
        """The fastest of torch's forms that handle equal columns at once."""
        return self.best((BY_HAND, COMPILED_BY_HAND))

    @property
    def over_peer(self) -> float | None:
        """How many times faster than `peer` recfuse is."""
        return self.over(self.peer)

    def over(self, peer: str | None) -> float | None:
        """Returns how many times faster recfuse is."""
        return None if peer is None else self.ratio(RECFUSE, peer)


def hashed_rows(kind: Kind, values: Tensor, boundaries: Tensor) -> Tensor:
    """As `rows_of`, with integers by XXH64."""
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
    """Times contestants in turns, called and as graphs; `model`: the layers after the columns.

    Ends the program with status 1 if an output is wrong.
    """
    batches, runs = subject.batches(size), Runs(subject, model)
    calls = {name: runs.make(name) for name in names}
    label = f"{subject.name}, batch {size}{', whole' if model else ''}"
    rights: dict[bool, Tensor] = {}

    def error_of(name: str, output: Tensor) -> float:
        hashed = name == HASHED
        if hashed not in rights:
            right = right_output(subject, batches[0], hashed)
            if model is not None:
                with torch.inference_mode():
                    right = model(right.float(), batches[0].dense).double()
            rights[hashed] = right
        return relative_error(output, rights[hashed])

    allowed = _WHOLE_TOLERANCE if model else TOLERANCES[torch.float32]
    row = turns.measure(label, calls, batches, setting, error_of, allowed, eager=setting.on_gpu, slow=SLOW)
    for name in row.record["without_graph"]:
        row.result.timings.setdefault(name, row.result.timings[name + EAGER])
    least = sum(map(subject.least_bytes, batches)) / len(batches)
    limit = least / setting.copy_speed
    row.record |= {
        "subject": subject.name, "size": size, "least_bytes": least, "limit_us": limit * 1e6,
        "first_call_s": runs.first_call, "notes": row.notes,
    }  # fmt: skip
    return Point(**vars(row), limit_s=limit, first_call=runs.first_call)
