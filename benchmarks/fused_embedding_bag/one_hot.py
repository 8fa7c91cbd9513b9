"""MLPerf's tables with one lookup a sample: few features, at small and large batches."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

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
    """Both dimensions at each of `--one-hot-batches`, as CUDA graphs."""
    arguments, notes, rows = setting.arguments, [], []
    names = [name for name in _NAMES if name in arguments.candidates]
    for dim in arguments.one_hot_dims:
        subject = OneHotSubject(dim, setting)
        made, more = make_runs(subject, names)
        notes += more
        for size in tqdm(arguments.one_hot_batches, desc=subject.name, leave=False):
            runs, errors, more = checked(subject, made, size, torch.float32)
            notes += more
            result, failures = time_calls(
                runs, subject.batches(size), subject.device, rounds=arguments.rounds, eager=False
            )
            record: dict[str, Any] = {
                "dim": dim, "batch_size": size, "relative_error": errors, "without_graph": failures,
                "us": {name: timing.median * 1e6 for name, timing in result.timings.items()},
                "measured": result.to_json(environment=False),
            }  # fmt: skip
            rows.append(_OneHotRow(f"{dim} x {size}", result, record))
        del subject, made, runs
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return _figure(rows, list(dict.fromkeys(notes)))


class _OneHotRow(Row):
    """A dimension and a batch size."""

    digits = 2

    @property
    def over_peers(self) -> float | None:
        """How many times faster than the best of FBGEMM's kernels."""
        peers = [name for name in (V1, V2) if name in self.result.timings]
        return self.ratio(DEFAULT, self.result.fastest(peers)) if peers else None


def _figure(rows: list[_OneHotRow], notes: list[str]) -> Figure:
    names = [name for name in _NAMES if any(name in row.result.timings for row in rows)]
    table = Table(
        "us a call as a CUDA graph, MLPerf's tables with one lookup a sample",
        ["dim x batch", *names, "over FBGEMM's best"],
    )
    ratios = {row.label: row.over_peers for row in rows}
    for row in rows:
        ratio = ratios[row.label]
        cells = [row.cell(name) for name in names]
        table.rows.append([row.label, *cells, times(ratio)])
    found = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    panels: Panels = {}
    if found:
        mean = geometric_mean(found.values())
        table.rows.append(["geometric mean", *([""] * len(names)), times(mean)])
        panels = {"recfuse over": {"FBGEMM's best": found}}
    table.notes = notes
    return Figure([table], panels, {row.label: row.record for row in rows})
