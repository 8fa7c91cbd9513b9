"""Equal features: many equal tables in one launch, ten thousand features, MLPerf's tables with one lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from common.batches import MLPERF_ROWS, MLPERF_SKEW, Batch, from_host, scattered, side_by_side
from common.calls import time_calls
from common.checks import TOLERANCES, relative_error
from common.measure import measure as measure_runs
from common.report import Figure, Panels, Row
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import DEFAULT, ONE_WARP, TUNED, V1, V2, make_runs
from fused_embedding_bag.models import as_figure, measure
from fused_embedding_bag.setting import FusedSetting, Subject, right_output
from fused_embedding_bag.streams import Run
from recfuse.data import traces
from recfuse.timing import Comparison

EQUAL = (V1, V2, ONE_WARP, DEFAULT, TUNED)
"""The candidates for equal tables."""
ONE_HOT = (V1, V2, DEFAULT)
"""The candidates for tables with one lookup a sample."""
# Batches for a plan.
_TUNING_BATCHES = 2


class EqualSubject(Subject):
    """Equal tables of one hotness, each with its own trace."""

    index_dtype = torch.int64

    def __init__(self, hotness: str, setting: FusedSetting, like: EqualSubject | None = None) -> None:
        """`like`: a subject with the same tables; its candidates serve this subject too, except for its
        plan."""
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
        seeds = range(first_seed, first_seed + count)
        return side_by_side(lambda seed: traces.generate(self.name, rows=rows, seed=seed), seeds)

    def make(self, sizes: Sequence[int], first_seed: int) -> list[Batch]:
        """Creates consecutive batches along the traces; `first_seed` is the number of the first."""
        return [self._batch(self._traces, size, number) for number, size in enumerate(sizes, first_seed)]

    def _batch(self, accesses: Sequence[NDArray[np.int64]], size: int, number: int) -> Batch:
        pooling = self.setting.arguments.equal_pooling
        indices = np.concatenate([traces.bags(trace, size, pooling, number)[0] for trace in accesses])
        offsets = np.arange(len(accesses) * size + 1, dtype=np.int64) * pooling
        return from_host(indices, offsets, size, self.device)

    @property
    def tuning_batches(self) -> list[Batch]:
        """Creates batches of other traces."""
        accesses = self._generate(self.setting.arguments.seed + self.features)
        size = self.setting.arguments.equal_bags
        return [self._batch(accesses, size, number) for number in range(_TUNING_BATCHES)]


@bench.figure("equal", on=["cuda"])
def figure_equal(setting: FusedSetting) -> Figure:
    """The five levels of hotness."""
    arguments, rows, subject = setting.arguments, [], None
    names = [name for name in EQUAL if name in arguments.candidates]
    for hotness in tqdm(arguments.hotness, desc="equal tables", leave=False):
        subject = EqualSubject(hotness, setting, subject)
        rows.append(measure(subject, arguments.equal_bags, torch.float32, names))
    figure = as_figure(rows, setting, torch.float32)
    tables = arguments.equal_tables
    each = Table(
        f"us a table, {tables} tables of {arguments.equal_rows:,} x {arguments.equal_dim} in one launch, "
        f"batch {arguments.equal_bags} x {arguments.equal_pooling}",
        ["hotness", *rows[0].names, "limit"],
    )
    for row in rows:
        cells = [
            row.us(name) / tables if name in row.result.timings else float("nan") for name in rows[0].names
        ]
        each.rows.append([row.label, *(f"{cell:.2f}" for cell in [*cells, row.limit.seconds * 1e6 / tables])])
    figure.tables.insert(0, each)
    return figure


@bench.figure("features", on=["cuda"])
def figure_features(setting: FusedSetting) -> Figure:
    """Bytes per second with 10,000 features, compared with A's thousand and with D's, which are like F's."""
    arguments, rows = setting.arguments, []
    size = arguments.batch_sizes[0]
    for name in ("A", "D", "F"):
        # Tuning ten times as many features would take minutes.
        wanted = (DEFAULT, V2) if name == "F" else (DEFAULT, TUNED, V2)
        names = [candidate for candidate in wanted if candidate in arguments.candidates]
        rows.append(measure(setting.subject(name), size, torch.float32, names))
        if name not in arguments.models:
            setting.drop(name)
    figure = as_figure(rows, setting, torch.float32)
    table = Table(
        f"Bytes of rows a second, batch {size}",
        ["model", "features", "candidate", "TB/s", "of A's", "of D's"],
    )
    speeds = {
        (row.record["subject"], name): row.limit.gathered_bytes / (row.us(name) / 1e6)
        for row in rows
        for name in row.names
        if name in row.result.timings
    }
    for row in rows:
        for name in [candidate for candidate in row.names if candidate in row.result.timings]:
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
            parts.append(scattered(uniform**MLPERF_SKEW * rows, rows))
        offsets = np.arange(self.features * size + 1, dtype=np.int64)
        return from_host(torch.cat(parts).numpy(), offsets, size, self.device)


@bench.figure("one_hot", on=["cuda"])
def figure_one_hot(setting: FusedSetting) -> Figure:
    """Both dimensions at each of `--one-hot-batches`, as CUDA graphs of a single call and of several
    calls."""
    arguments, notes, rows = setting.arguments, [], []
    names = [name for name in ONE_HOT if name in arguments.candidates]
    for dim in arguments.one_hot_dims:
        subject = OneHotSubject(dim, setting)
        runs, more = make_runs(subject, names)
        notes += more
        for size in tqdm(arguments.one_hot_batches, desc=subject.name, leave=False):
            rows.append(_measure_one_hot(subject, runs, dim, size))
            notes += rows[-1].notes
        del subject, runs
        setting.release()
    return _one_hot_figure(rows, list(dict.fromkeys(notes)), arguments.num_batches)


def _measure_one_hot(subject: Subject, runs: dict[str, Run], dim: int, size: int) -> _OneHotRow:
    batches, setting = subject.batches(size), subject.setting
    right = right_output(subject, batches[0], torch.float32)
    alone = measure_runs(
        f"{dim} x {size}", runs, batches, setting, lambda name, output: relative_error(output, right),
        TOLERANCES[torch.float32], eager=False,
    )  # fmt: skip
    in_a_row = {name: partial(_all_of, runs[name]) for name in alone.record["relative_error"]}
    rounds = setting.arguments.rounds
    together, more = time_calls(in_a_row, [batches], subject.device, rounds=rounds, eager=False)
    row = _OneHotRow(**vars(alone), in_a_row=together, batches=len(batches))
    row.record = {
        "dim": dim,
        "batch_size": size,
        **alone.record,
        "without_graph": alone.record["without_graph"] | more,
        "us_in_a_row": {name: row.us_in_a_row(name) for name in together.timings},
        "measured_in_a_row": together.to_json(environment=False),
    }
    return row


def _all_of(run: Run, batches: Sequence[Batch]) -> None:
    for batch in batches:
        run(batch)


@dataclass(kw_only=True)
class _OneHotRow(Row):
    """A dimension and a batch size."""

    in_a_row: Comparison
    batches: int

    def us_in_a_row(self, name: str) -> float:
        """Microseconds a call."""
        return self.in_a_row[name].median * 1e6 / self.batches

    def both(self, name: str) -> str:
        """Returns the time of a single call, and of a call among several."""
        if not {name} <= set(self.result.timings) & set(self.in_a_row.timings):
            return "-"
        return f"{self.us(name):.2f} / {self.us_in_a_row(name):.2f}"

    def over_peers(self) -> tuple[float, float] | None:
        """Returns how many times faster than the best of FBGEMM's kernels, in both ways."""
        peers = [name for name in (V1, V2) if name in self.result.timings and name in self.in_a_row.timings]
        if not peers:
            return None
        best = min(self.us(name) for name in peers), min(self.us_in_a_row(name) for name in peers)
        return best[0] / self.us(DEFAULT), best[1] / self.us_in_a_row(DEFAULT)


def _one_hot_figure(rows: list[_OneHotRow], notes: list[str], batches: int) -> Figure:
    names = [name for name in ONE_HOT if any(name in row.result.timings for row in rows)]
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
    known = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    panels: Panels = {}
    if known:
        means = [geometric_mean(each) for each in zip(*known.values(), strict=True)]
        table.rows.append(["geometric mean", *([""] * len(names)), " / ".join(times(mean) for mean in means)])
        panels = {
            "recfuse over FBGEMM's best": {
                way: {label: ratio[number] for label, ratio in known.items()}
                for number, way in enumerate(("alone", "in a row"))
            }
        }
    table.notes = notes
    return Figure([table], panels, {row.label: row.record for row in rows})
