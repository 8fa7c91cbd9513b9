"""Many equal tables in one launch, and ten thousand features: where all features are alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from common.report import Figure
from common.table import Table
from fused_embedding_bag.candidates import DEFAULT, ONE_WARP, TUNED, V1, V2
from fused_embedding_bag.limits import Ceilings
from fused_embedding_bag.models import as_figure, measure
from fused_embedding_bag.setting import Batch, FusedSetting, Subject, to_device
from recfuse.data import traces

EQUAL = (V1, V2, ONE_WARP, DEFAULT, TUNED)
"""What is compared on equal tables."""
# Batches that a plan is made from.
_TUNING_BATCHES = 2


class EqualSubject(Subject):
    """Equal tables, each with a trace of its own, of one hotness."""

    index_dtype = torch.int64

    def __init__(self, hotness: str, setting: FusedSetting, like: EqualSubject | None = None) -> None:
        """`like`: a subject with the same tables, whose candidates serve this one too, but for its plan."""
        arguments = setting.arguments
        count = arguments.equal_tables
        if like is None:
            rows, dims = [arguments.equal_rows] * count, [arguments.equal_dim] * count
            super().__init__(hotness, rows, dims, [arguments.equal_pooling] * count, setting)
        else:
            self.__dict__.update(like.__dict__)
            self.name, self._batches = hotness, {}
            drop = ("plan", "tuned collection", TUNED)
            self.kept = {key: value for key, value in like.kept.items() if key[0] not in drop}
        self._traces = self._generate(arguments.seed)

    def _generate(self, first_seed: int) -> list[NDArray[np.int64]]:
        rows, count = self.setting.arguments.equal_rows, self.features
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            seeds = range(first_seed, first_seed + count)
            return list(pool.map(lambda seed: traces.generate(self.name, rows=rows, seed=seed), seeds))

    def make(self, sizes: Sequence[int], first_seed: int) -> list[Batch]:
        """Batches one after another along the traces; `first_seed` is the number of the first."""
        return [self._batch(self._traces, size, number) for number, size in enumerate(sizes, first_seed)]

    def _batch(self, accesses: Sequence[NDArray[np.int64]], size: int, number: int) -> Batch:
        pooling = self.setting.arguments.equal_pooling
        indices = np.concatenate([traces.bags(trace, size, pooling, number)[0] for trace in accesses])
        offsets = np.arange(len(accesses) * size + 1, dtype=np.int64) * pooling
        return to_device(indices, offsets, size, self.device)

    @property
    def tuning_batches(self) -> list[Batch]:
        """Of other traces."""
        accesses = self._generate(self.setting.arguments.seed + self.features)
        size = self.setting.arguments.equal_bags
        return [self._batch(accesses, size, number) for number in range(_TUNING_BATCHES)]


def figure_equal(setting: FusedSetting, ceilings: Ceilings) -> Figure:
    """The five levels of hotness."""
    arguments, rows, notes, subject = setting.arguments, [], [], None
    names = [name for name in EQUAL if name in arguments.candidates]
    for hotness in tqdm(arguments.hotness, desc="equal tables", leave=False):
        subject = EqualSubject(hotness, setting, subject)
        row, more = measure(subject, arguments.equal_bags, torch.float32, names, ceilings)
        rows.append(row)
        notes += more
    figure = as_figure(rows, notes, setting, torch.float32, ceilings.copy_speed)
    tables = arguments.equal_tables
    each = Table(
        f"us a table, {tables} tables of {arguments.equal_rows:,} x {arguments.equal_dim} in one launch, "
        f"batch {arguments.equal_bags} x {arguments.equal_pooling}",
        ["hotness", *rows[0].runs, "limit"],
    )
    for row in rows:
        cells = [
            row.us(name) / tables if name in row.result.timings else float("nan") for name in rows[0].runs
        ]
        each.rows.append([row.label, *(f"{cell:.2f}" for cell in [*cells, row.limit.seconds * 1e6 / tables])])
    figure.tables.insert(0, each)
    return figure


def figure_features(setting: FusedSetting, ceilings: Ceilings) -> Figure:
    """Bytes a second with 10,000 features, beside the thousand of A and those of D, which are like F's."""
    arguments, rows, notes = setting.arguments, [], []
    size = arguments.batch_sizes[0]
    for name in ("A", "D", "F"):
        # Ten times the features are not tuned here, which would take minutes.
        wanted = (DEFAULT, V2) if name == "F" else (DEFAULT, TUNED, V2)
        names = [candidate for candidate in wanted if candidate in arguments.candidates]
        row, more = measure(setting.subject(name), size, torch.float32, names, ceilings)
        rows.append(row)
        notes += more
        if name not in arguments.models:
            setting.release(name)
    figure = as_figure(rows, notes, setting, torch.float32, ceilings.copy_speed)
    table = Table(
        f"Bytes of rows a second, batch {size}",
        ["model", "features", "candidate", "TB/s", "of A's", "of D's"],
    )
    speeds = {
        (row.record["subject"], name): row.limit.gathered_bytes / (row.us(name) / 1e6)
        for row in rows
        for name in row.runs
        if name in row.result.timings
    }
    for row in rows:
        for name in [candidate for candidate in row.runs if candidate in row.result.timings]:
            speed = speeds[row.record["subject"], name]
            shares = [
                f"{speed / speeds[other, name]:.0%}" if (other, name) in speeds else "-" for other in "AD"
            ]
            cells = [
                row.record["subject"],
                f"{row.record['features']:,}",
                name,
                f"{speed / 1e12:.2f}",
                *shares,
            ]
            table.rows.append(cells)
    table.notes = [
        "Rows of D and F have 32 bytes, rows of A 16 to 512: the gather of narrow rows is slower by itself."
    ]
    figure.tables.insert(0, table)
    figure.record["bytes_per_s"] = {f"{model} {name}": speed for (model, name), speed in speeds.items()}
    return figure
