"""The main tables of the GPU benchmark of fused collections: batches of one size, as graphs and eager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

import torch
from tqdm import tqdm

from common import checks
from common import measure as turns
from common.calls import EAGER
from common.checks import TOLERANCES, relative_error
from common.report import Figure, Panels, Row, load_notes
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import (
    BASELINE,
    DEFAULT,
    HALF_OUTPUTS,
    ONE_WARP,
    SLOW,
    TUNED,
    V1,
    V2,
    make_runs,
)
from fused_embedding_bag.limits import Limit
from fused_embedding_bag.setting import FusedSetting, Subject, right_output
from fused_embedding_bag.streams import Run


@dataclass(kw_only=True)
class SubjectRow(Row):
    """One subject and batch size, in µs a call."""

    limit: Limit

    @property
    def names(self) -> list[str]:
        """The candidates that ran."""
        return list(self.record["relative_error"])

    def best(self, prefix: str) -> str | None:
        """Returns the fastest of the candidates with a prefix, over output types."""
        names = [name for name in (prefix, prefix + HALF_OUTPUTS) if name in self.result.timings]
        return self.result.fastest(names) if names else None

    def over(self, name: str, peer: str) -> float | None:
        """Returns how many times faster than the fastest form of a peer; None if either was not measured."""
        best = self.best(peer)
        return self.ratio(name, best) if best else None


def checked(
    subject: Subject, runs: dict[str, Run], size: int, dtype: torch.dtype
) -> tuple[dict[str, Run], dict[str, float], list[str]]:
    """Returns the candidates that run here, the error of each output against sums in float64, and notes.

    Ends the program with status 1 if an output is wrong.
    """
    batch = subject.batches(size)[0]
    right = right_output(subject, batch, dtype)
    errors, notes = checks.checked(
        subject.setting.parser, f"{subject.name} {size}",
        {name: partial(run, batch) for name, run in runs.items()},
        lambda name, output: relative_error(output, right), lambda name: TOLERANCES[dtype],
    )  # fmt: skip
    return {name: runs[name] for name in errors}, errors, notes


def measure(subject: Subject, size: int, dtype: torch.dtype, names: Sequence[str]) -> SubjectRow:
    """One subject and batch size."""
    runs, notes = make_runs(subject, names, dtype)
    setting, batches, label = subject.setting, subject.batches(size), f"{subject.name} {size}"
    right = right_output(subject, batches[0], dtype)
    row = turns.measure(
        label, runs, batches, setting, lambda name, output: relative_error(output, right),
        TOLERANCES[dtype], slow=SLOW,
    )  # fmt: skip
    row.notes[:0] = notes
    limit = setting.ceilings.limit(subject, dtype, batches)
    record = {
        "subject": subject.name,
        "batch_size": size,
        "dtype": str(dtype),
        "features": subject.features,
        "lookups": sum(len(batch.indices) for batch in batches) / len(batches),
        **row.record,
        "limit": limit.to_json(),
        "of_limit": {
            name: row.result[name].median / limit.seconds for name in runs if name in row.result.timings
        },
    }
    if (TUNED, dtype) in subject.kept:
        plan = subject.kept["plan", dtype]
        record["tuning_s"], record["plan"] = plan.seconds, str(plan.plan)
    row.record = record
    return SubjectRow(**vars(row), limit=limit)


@bench.figure("models", on=["cuda"])
def figure_models(setting: FusedSetting) -> Figure:
    """Models at each of `--batch-sizes`."""
    return figure_of_models(setting, setting.arguments.models, torch.float32)


@bench.figure("skewed", on=["cuda"])
def figure_skewed(setting: FusedSetting) -> Figure:
    """Skewed variants; releases the memory of each."""
    return figure_of_models(setting, setting.arguments.skewed, torch.float32, drop=True)


def figure_of_models(
    setting: FusedSetting, subjects: Sequence[str], dtype: torch.dtype, drop: bool = False
) -> Figure:
    """Subjects at each of `--batch-sizes`; `drop`: releases the memory of each."""
    arguments, rows = setting.arguments, []
    names = candidate_names(arguments.candidates, dtype)
    for name in tqdm(subjects, desc="models", leave=False):
        subject = setting.subject(name)
        rows += [measure(subject, size, dtype, names) for size in arguments.batch_sizes]
        if drop:
            setting.drop(name)
    return as_figure(rows, setting, dtype)


def candidate_names(names: Sequence[str], dtype: torch.dtype) -> list[str]:
    """Returns the candidates: for half tables FBGEMM with both types of output, and no slow candidates."""
    if dtype == torch.float32:
        return list(names)
    names = [name for name in names if name not in SLOW]
    return [each for name in names for each in ([name, name + HALF_OUTPUTS] if "fbgemm" in name else [name])]


def as_figure(rows: list[SubjectRow], setting: FusedSetting, dtype: torch.dtype) -> Figure:
    """Times as graphs and as called, ratios and limits."""
    arguments = setting.arguments
    kind = f"{str(dtype).removeprefix('torch.')} tables, {arguments.num_batches} batches in turn, warm L2"
    names = list(dict.fromkeys(name for row in rows for name in row.names))
    title = f"us a call as a CUDA graph, {kind} (median ± IQR of {arguments.rounds})"
    graphs = turns.tabulate(title, "subject, batch", rows, names)
    errors = {name: max(row.record["relative_error"].get(name, 0.0) for row in rows) for name in names}
    graphs.notes = [
        "Largest error, as a share of the largest value, against sums in float64: "
        + ", ".join(f"{error:.0e} ({name})" for name, error in errors.items())
        + ".",
        *dict.fromkeys(note for row in rows for note in row.notes),
        *_tuning_notes(rows),
        *load_notes(row.result for row in rows),
    ]
    title = f"us a call as called, host included, {kind}"
    called = turns.tabulate(title, "subject, batch", rows, names, EAGER)
    panels = {
        f"{ours} over": {
            peer: {row.label: ratio for row in rows if (ratio := row.over(ours, peer)) is not None}
            for peer in (V1, V2, ONE_WARP)
        }
        for ours in (DEFAULT, TUNED)
    }
    record = {row.label: row.record for row in rows}
    return Figure([graphs, called, _summary(rows, kind, setting.copy_speed)], _without_empty(panels), record)


def _without_empty(panels: Panels) -> Panels:
    kept = {
        title: {label: ratios for label, ratios in series.items() if ratios}
        for title, series in panels.items()
    }
    return {title: series for title, series in kept.items() if series}


def _tuning_notes(rows: Sequence[SubjectRow]) -> list[str]:
    seconds = {
        row.record["subject"]: row.record["tuning_s"]
        for row in rows
        if row.record.get("tuning_s") is not None
    }
    if not seconds:
        return []
    cells = ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items())
    return [f"Tuning time, with the kernels of earlier runs in the cache: {cells}."]


def _summary(rows: Sequence[SubjectRow], kind: str, copy_speed: float) -> Table:
    """Ratios and limits of recfuse's candidates: a row for each subject, batch size and candidate."""
    peers = [peer for peer in (V1, V2, ONE_WARP, BASELINE) if any(row.best(peer) is not None for row in rows)]
    ours = [name for name in (DEFAULT, TUNED) if name in rows[0].names]
    columns = ["subject, batch", "candidate", *(f"over {peer}" for peer in peers), f"over {DEFAULT}"]
    columns += ["TB/s", "least MB", "us at copy speed", "gathered MB", "us of gather", "time / limit"]
    table = Table(f"recfuse, {kind}", columns)
    for row in rows:
        for name in [name for name in ours if name in row.result.timings]:
            ratios = [row.over(name, peer) for peer in [*peers, DEFAULT]]
            limit, seconds = row.limit, row.us(name) / 1e6
            table.rows.append(
                [row.label, name]
                + [times(ratio) for ratio in ratios]
                + [f"{limit.gathered_bytes / seconds / 1e12:.2f}", f"{limit.least_bytes / 1e6:.1f}"]
                + [f"{limit.copy_s * 1e6:.1f}", f"{limit.gathered_bytes / 1e6:.1f}"]
                + [f"{limit.gather_s * 1e6:.1f}", f"{seconds / limit.seconds:.2f}"]
            )
    for name in ours:
        means = [
            [ratio for row in rows if (ratio := row.over(name, peer)) is not None]
            for peer in [*peers, DEFAULT]
        ]
        cells = [times(geometric_mean(ratios)) if ratios else "-" for ratios in means]
        share = geometric_mean(
            row.us(name) / 1e6 / row.limit.seconds for row in rows if name in row.result.timings
        )
        table.rows.append(["geometric mean", name, *cells, "", "", "", "", "", f"{share:.2f}"])
    table.notes = [
        "Ratios are of graph replays; FBGEMM with half tables counts with the faster of its output types. "
        "TB/s: bytes of the rows looked up.",
        "limit: the greater of least MB (rows in use, indices, offsets and output once) at "
        f"{copy_speed / 1e12:.2f} TB/s, the speed of a large copy, and of a plain gather of the same rows in "
        "the same order (kernels/gather.cu), a launch for each size of rows.",
    ]
    return table
