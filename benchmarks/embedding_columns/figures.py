"""The figures of columns: numbers of columns, models, and the gain of each part of the fusion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from common.calls import EAGER
from common.report import Figure, Panels, load_notes
from common.table import Table, times
from embedding_columns import bench
from embedding_columns.flags import PARTS
from embedding_columns.forms import (
    ABLATIONS,
    BAGS,
    BY_HAND,
    COLLECTION,
    COMPILED_BY_HAND,
    COMPILED_COLLECTION,
    COMPILED_RECFUSE,
    HASHED,
    NEED_COMPILER,
    RECFUSE,
)
from embedding_columns.measure import ColumnsSetting, Point, measure
from embedding_columns.models import Model, Subject, bucketize, mixed, model_kinds


@bench.figure("micro")
def figure_micro(setting: ColumnsSetting) -> Figure:
    """Equal bucketize columns, as in figure 17 of the paper."""
    arguments, points = setting.arguments, []
    size = arguments.batch
    for count in tqdm(arguments.columns, desc="columns", leave=False):
        subject = Subject(f"{count} columns", [bucketize(count)], setting)
        names = [name for name in chosen(setting, size) if name not in (HASHED, COMPILED_RECFUSE)]
        points.append(measure(setting, subject, size, names))
        release(setting)
    title = f"bucketize columns, 101 x 8 tables, batch {size}"
    labels = [str(count) for count in arguments.columns]
    tables = tabulated(title, "columns", labels, points, setting)
    records = [point.record for point in points]
    return Figure(tables, lines_of("bucketize columns", labels, points), records, lines="columns")


@bench.figure("mixed")
def figure_mixed(setting: ColumnsSetting) -> Figure:
    """Columns of many kinds, and numbers among them."""
    arguments = setting.arguments
    size, count = arguments.batch, arguments.mixed
    subject = Subject(f"{count} mixed columns", mixed(count), setting)
    without = (COLLECTION, COMPILED_COLLECTION, COMPILED_RECFUSE)
    names = [name for name in chosen(setting, size) if name not in without]
    point = measure(setting, subject, size, names)
    release(setting)
    tables = tabulated(f"mixed columns, batch {size}", "columns", [str(count)], [point], setting)
    return Figure(tables, {}, point.record)


@bench.figure("models")
def figure_models(setting: ColumnsSetting) -> Iterator[Figure]:
    """E and F over batch sizes, only the columns and whole models. After each model yields its tables,
    with the lines and records of all so far."""
    arguments = setting.arguments
    records: list[Any] = []
    lines: Panels = {}
    for name in tqdm(arguments.models, desc="models", leave=False):
        subject, tables = model_subject(name, setting), []
        model = Model(name, subject.output_dim, setting.device, arguments.seed)
        for part, follows in zip(PARTS, (None, model), strict=True):
            if part not in arguments.parts:
                continue
            points = []
            for size in tqdm(arguments.batches, desc=f"{name}, {part}", leave=False):
                names = chosen(setting, size)
                if follows is not None:
                    names = [one for one in names if one not in (BAGS, BY_HAND, COMPILED_BY_HAND)]
                points.append(measure(setting, subject, size, names, follows))
            labels = [str(size) for size in arguments.batches]
            tables += tabulated(f"{name}, {part}", "batch", labels, points, setting)
            lines |= lines_of(f"{name}, {part}", labels, points)
            records.append({"model": name, "part": part, "points": [point.record for point in points]})
        del subject, model
        release(setting)
        yield Figure(tables, dict(lines), list(records), lines="batch")


@bench.figure("ablations")
def figure_ablations(setting: ColumnsSetting) -> Figure:
    """recfuse with and without parts of its fusion."""
    arguments, points, labels = setting.arguments, [], []
    subjects = [("1,000 bucketize", [bucketize(max(arguments.columns))])]
    for name in arguments.models:
        subjects.append((name, model_subject_kinds(name, setting)))
    for label, kinds in tqdm(subjects, desc="ablations", leave=False):
        subject = Subject(label, kinds, setting)
        points.append(measure(setting, subject, arguments.batch, [RECFUSE, *ABLATIONS]))
        labels.append(f"{len(subject.columns):,} columns" if label not in arguments.models else label)
        release(setting)
    table = Table(
        f"Parts of the fusion, batch {arguments.batch}: µs (median ± IQR of {arguments.rounds})",
        ["", RECFUSE, *(cell for name in ABLATIONS for cell in (name, f"{RECFUSE} over {name}"))],
    )
    for label, point in zip(labels, points, strict=True):
        cells = [point.cell(RECFUSE)]
        for name in ABLATIONS:
            cells += [point.cell(name), times(point.ratio(RECFUSE, name))]
        table.rows.append([label, *cells])
    table.notes = load_notes(point.result for point in points)
    return Figure([table], {}, [point.record for point in points])


def model_subject_kinds(name: str, setting: ColumnsSetting) -> list[Any]:
    """Returns the kinds of E or F for the command line."""
    return model_kinds(name, setting.arguments.large_rows, setting.arguments.part)


def model_subject(name: str, setting: ColumnsSetting) -> Subject:
    """E or F."""
    return Subject(name, model_subject_kinds(name, setting), setting)


def chosen(setting: ColumnsSetting, size: int) -> list[str]:
    """Returns the contestants at a size; compiled ones only if requested."""
    arguments = setting.arguments
    with_compiler = size in arguments.compiled_at
    return [name for name in arguments.contestants if with_compiler or name not in NEED_COMPILER]


def release(setting: ColumnsSetting) -> None:
    """Releases the memory of a subject's contestants."""
    torch._dynamo.reset()
    setting.release()


def lines_of(title: str, labels: Sequence[str], points: Sequence[Point]) -> Panels:
    """Returns a line of the measured points."""
    ratios = {label: point.over_peer for label, point in zip(labels, points, strict=True)}
    known = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    return {title: {"recfuse over the best of torch's": known}} if known else {}


def tabulated(
    title: str, first: str, labels: Sequence[str], points: Sequence[Point], setting: ColumnsSetting
) -> list[Table]:
    """Tabulates times as graphs and, on a GPU, as called, with their ratios."""
    names = measured(points, setting.arguments.contestants)
    spread = f"(median ± IQR of {setting.arguments.rounds})"
    forms = {"": "µs" if setting.device.type == "cpu" else "µs as a CUDA graph"}
    if setting.device.type == "cuda":
        forms[EAGER] = "µs as called, host included"
    tables = []
    for suffix, how in forms.items():
        table = Table(f"{title}: {how} {spread}", [first, *names])
        for label, point in zip(labels, points, strict=True):
            table.rows.append([label, *(point.cell(name + suffix) for name in names)])
        tables.append(table)
    summary = Table(
        f"{title}: recfuse",
        [
            first,
            "µs",
            "best of torch's",
            "times faster",
            "over similar columns joined",
            "limit, µs",
            "share of limit",
        ],
    )
    for label, point in zip(labels, points, strict=True):
        peer = point.peer
        summary.rows.append(
            [
                label, f"{point.us(RECFUSE):.1f}", peer or "-", times(point.over(peer)),
                times(point.over(point.by_hand)), f"{point.limit_s * 1e6:.1f}",
                f"{point.limit_s / point.result[RECFUSE].median:.0%}",
            ]
        )  # fmt: skip
    notes = list(dict.fromkeys(note for point in points for note in point.notes))
    summary.notes = [*notes, *compile_notes(labels, points), *load_notes(point.result for point in points)]
    return [*tables, summary]


def measured(points: Iterable[Point], names: Sequence[str]) -> list[str]:
    """Contestants that were measured somewhere, in order."""
    found = {name for point in points for name in point.result.timings}
    return [name for name in names if name in found]


def compile_notes(labels: Sequence[str], points: Sequence[Point]) -> list[str]:
    """Returns notes on the time of the first call of compiled contestants."""
    spent = {
        label: ", ".join(
            f"{name} {seconds:.0f} s" for name, seconds in point.first_call.items() if name in NEED_COMPILER
        )
        for label, point in zip(labels, points, strict=True)
    }
    return [f"First call at {label}: {text}." for label, text in spent.items() if text]
