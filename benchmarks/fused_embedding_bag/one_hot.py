"""MLPerf's tables with one lookup a sample: few features, at small and large batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

import numpy as np
import torch
from tqdm import tqdm

from common.calls import time_calls
from common.mlperf import MLPERF_ROWS, MLPERF_SKEW, scattered
from common.report import Figure, Panels, Row
from common.table import Table, times
from fused_embedding_bag.candidates import DEFAULT, V1, V2, make_runs
from fused_embedding_bag.models import checked
from fused_embedding_bag.setting import Batch, FusedSetting, Subject, to_device
from fused_embedding_bag.streams import Run
from recfuse.timing import Comparison

_NAMES = (V1, V2, DEFAULT)


class OneHotSubject(Subject):
    """The tables in one dimension, of at most `--one-hot-rows` rows."""

    index_dtype = torch.int64

    def __init__(self, dim: int, setting: FusedSetting) -> None:
        """`dim`: of all tables."""
        rows = [min(each, setting.arguments.one_hot_rows) for each in MLPERF_ROWS]
        count = len(rows)
        super().__init__(f"one-hot x {dim}", rows, [dim] * count, [1] * count, setting)

    def make(self, sizes: Sequence[int], first_seed: int) -> list[Batch]:
        """Rows by their rank, u ** 5 times rows, scattered."""
        return [self._batch(size, seed) for seed, size in enumerate(sizes, first_seed)]

    def _batch(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for rows in self.rows:
            uniform = torch.rand(size, generator=generator, dtype=torch.float64)
            ranks = (uniform**MLPERF_SKEW * rows).long().clamp_(0, rows - 1)
            parts.append(scattered(ranks, rows))
        offsets = np.arange(self.features * size + 1, dtype=np.int64)
        return to_device(torch.cat(parts).numpy(), offsets, size, self.device)


def figure_one_hot(setting: FusedSetting) -> Figure:
    """Both dimensions at each of `--one-hot-batches`, as CUDA graphs: of one call, of several in a row."""
    arguments, notes, rows = setting.arguments, [], []
    names = [name for name in _NAMES if name in arguments.candidates]
    for dim in arguments.one_hot_dims:
        subject = OneHotSubject(dim, setting)
        made, more = make_runs(subject, names)
        notes += more
        for size in tqdm(arguments.one_hot_batches, desc=subject.name, leave=False):
            runs, errors, more = checked(subject, made, size, torch.float32)
            rows.append(_measure(subject, runs, dim, size, errors))
            notes += more
        del subject, made, runs
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return _figure(rows, list(dict.fromkeys(notes)), arguments.num_batches)


def _measure(
    subject: Subject, runs: dict[str, Run], dim: int, size: int, errors: dict[str, float]
) -> _OneHotRow:
    batches, rounds, device = subject.batches(size), subject.setting.arguments.rounds, subject.device
    alone, failures = time_calls(runs, batches, device, rounds=rounds, eager=False)
    in_a_row = {name: partial(_all_of, run) for name, run in runs.items()}
    together, more = time_calls(in_a_row, [batches], device, rounds=rounds, eager=False)
    row = _OneHotRow(f"{dim} x {size}", alone, {}, together, len(batches))
    row.record = {
        "dim": dim,
        "batch_size": size,
        "relative_error": errors,
        "without_graph": failures | more,
        "us": {name: row.us(name) for name in alone.timings},
        "us_in_a_row": {name: row.us_in_a_row(name) for name in together.timings},
        "measured": alone.to_json(environment=False),
        "measured_in_a_row": together.to_json(environment=False),
    }
    return row


def _all_of(run: Run, batches: Sequence[Batch]) -> None:
    for batch in batches:
        run(batch)


@dataclass
class _OneHotRow(Row):
    """A dimension and a batch size."""

    in_a_row: Comparison
    batches: int

    def us_in_a_row(self, name: str) -> float:
        """Microseconds a call."""
        return self.in_a_row[name].median * 1e6 / self.batches

    def both(self, name: str) -> str:
        """Of a call alone, and of one in a row."""
        if not {name} <= set(self.result.timings) & set(self.in_a_row.timings):
            return "-"
        return f"{self.us(name):.2f} / {self.us_in_a_row(name):.2f}"

    def over_peers(self) -> tuple[float, float] | None:
        """How many times faster than the best of FBGEMM's kernels, in both ways."""
        peers = [name for name in (V1, V2) if name in self.result.timings and name in self.in_a_row.timings]
        if not peers:
            return None
        best = min(self.us(name) for name in peers), min(self.us_in_a_row(name) for name in peers)
        return best[0] / self.us(DEFAULT), best[1] / self.us_in_a_row(DEFAULT)


def _figure(rows: list[_OneHotRow], notes: list[str], batches: int) -> Figure:
    names = [name for name in _NAMES if any(name in row.result.timings for row in rows)]
    kind = f"in a CUDA graph of its own / of {batches} calls"
    table = Table(
        f"us a call, MLPerf's tables with one lookup a sample, {kind}",
        ["dim x batch", *names, "over FBGEMM's best"],
    )
    ratios = {row.label: row.over_peers() for row in rows}
    for row in rows:
        ratio = ratios[row.label]
        shown = " / ".join(times(each) for each in ratio) if ratio else "-"
        table.rows.append([row.label, *(row.both(name) for name in names), shown])
    found = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    panels: Panels = {}
    if found:
        means = [geometric_mean(each) for each in zip(*found.values(), strict=True)]
        table.rows.append(["geometric mean", *([""] * len(names)), " / ".join(times(mean) for mean in means)])
        panels = {
            "recfuse over FBGEMM's best": {
                way: {label: ratio[number] for label, ratio in found.items()}
                for number, way in enumerate(("alone", "in a row"))
            }
        }
    table.notes = notes
    return Figure([table], panels, {row.label: row.record for row in rows})
