"""The figures: sweeps of TFLOP/s over one property of a shape, and the host's time of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from common.calls import figure_host
from common.points import DTYPES, RECFUSE, micro, tera
from common.report import Figure, Panels, load_notes
from common.roofline import last_figures
from common.settings import fail
from common.table import Table, times
from ikbo_attention import bench
from ikbo_attention.forms import (
    BY_FIGURE,
    COPIES,
    FA3_VARLEN,
    IN_SWEEPS,
    MEANINGS,
    NAMES,
    ON_THE_CPU,
    PATHS,
    TRITON,
    TWO_CALLS,
    VARLEN,
    make_runs,
    takes,
)
from ikbo_attention.measure import AttentionPoint, AttentionSetting
from ikbo_attention.problem import Problem, Shape, as_even

UNIT = "of the rate of a large matmul"
RATIOS = (FA3_VARLEN, VARLEN, TRITON, TWO_CALLS)
"""Contestants over which recfuse's gain is shown, in addition to the fastest."""
# The shape of the figure `host`: so small that a call never waits for the device.
_HOST = {"candidates": 8, "group": "4", "queries": 16, "kv": 128}


@dataclass(frozen=True)
class Sweep:
    """Shapes by the label of their column."""

    title: str
    axis: str
    shapes: Mapping[str, Shape]
    # The reference of recfuse's rate: its name, and its shape for each shape.
    against: tuple[str, Callable[[Shape], Shape]] | None = None
    names: Sequence[str] | None = None  # contestants, where not the figure's


Sweeps = Callable[[AttentionSetting], list[Sweep]]


def sweeps(name: str) -> Callable[[Sweeps], Sweeps]:
    """Registers a figure of some sweeps."""

    def register(make: Sweeps) -> Sweeps:
        bench.figure(name)(lambda setting: figure_sweeps(setting, name, make(setting)))
        return make

    return register


@sweeps("main")
def main_sweeps(setting: AttentionSetting) -> list[Sweep]:
    """Numbers of keys, for each group."""
    even = "even groups", as_even
    return [
        Sweep(
            f"{group} candidates a user", "kv",
            {str(kv): replace(setting.shape, group=group, kv=kv) for kv in setting.arguments.kv},
            even if as_even(replace(setting.shape, group=group)).group != group else None,
        )
        for group in setting.arguments.groups
    ]  # fmt: skip


@sweeps("ratios")
def ratio_sweeps(setting: AttentionSetting) -> list[Sweep]:
    """Candidates of a user."""
    usual = as_even(setting.shape)
    shapes = {group: replace(setting.shape, group=group) for group in setting.arguments.ratios}
    text = f"{usual.group} a user"
    return [Sweep(f"Ratios, kv {usual.kv}", "candidates a user", shapes, (text, lambda shape: usual))]


@sweeps("queries")
def query_sweeps(setting: AttentionSetting) -> list[Sweep]:
    """Queries of a candidate, for each group and some numbers of keys."""
    most = max(setting.arguments.queries)
    against = f"q {most}", lambda shape: replace(shape, queries=most)
    return [
        Sweep(
            f"Queries, kv {kv}, {group} candidates a user", "queries",
            {
                str(q): replace(setting.shape, group=group, kv=kv, queries=q)
                for q in setting.arguments.queries
            },
            against,
        )
        for kv in setting.arguments.sweep_kv
        for group in setting.arguments.groups
    ]  # fmt: skip


@sweeps("ragged")
def ragged_sweeps(setting: AttentionSetting) -> list[Sweep]:
    """Histories of 50 to 100 % of a number of keys, and, for recfuse, all of that number."""
    sizes = [kv for kv in setting.arguments.kv if kv <= setting.arguments.ragged_most]
    full = {str(kv): replace(setting.shape, kv=kv) for kv in sizes}
    ragged = {label: replace(shape, least_kv=50) for label, shape in full.items()}
    against = "histories of one length", lambda shape: replace(shape, least_kv=100)
    return [
        Sweep("Ragged kv, all of it", "kv", full, None, (VARLEN, FA3_VARLEN, RECFUSE)),
        Sweep("Ragged kv, 50 to 100 %", "at most kv", ragged, against),
    ]


@sweeps("self")
def self_sweeps(setting: AttentionSetting) -> list[Sweep]:
    """Each user's keys as queries as well."""
    shapes = {str(kv): replace(setting.shape, kv=kv, own=kv) for kv in setting.arguments.self_kv}
    return [Sweep("Self and target", "kv", shapes)]


def contestants(setting: AttentionSetting, figure: str) -> list[str]:
    """Returns the contestants of a figure, in the order of tables."""
    names = BY_FIGURE.get(figure, IN_SWEEPS)
    if setting.device.type == "cpu" and figure != "host":
        names = (*ON_THE_CPU[:4], *names)
    return [name for name in NAMES if name in names]


def figure_sweeps(setting: AttentionSetting, figure: str, sweeps: Sequence[Sweep]) -> Figure:
    """Every sweep of a figure, in each type and mode."""
    arguments = setting.arguments
    rounds = arguments.rounds if figure == "main" else arguments.sweep_rounds
    tables: list[Table] = []
    panels: Panels = {}
    record: dict[str, dict[str, object]] = {}
    # One type is enough for a plot; FlashAttention-3 runs in bfloat16.
    plotted = "bfloat16" if "bfloat16" in arguments.dtypes else arguments.dtypes[0]
    for dtype in arguments.dtypes:
        record[dtype] = {}
        for sweep in sweeps:
            points = {}
            for label, shape in sweep.shapes.items():
                names = sweep.names or contestants(setting, figure)
                if point := setting.point(shape, dtype, names, rounds):
                    points[label] = point
            if not points:
                continue
            record[dtype][sweep.title] = {label: point.to_json() for label, point in points.items()}
            for mode in arguments.modes:
                tables.append(_rates(setting, sweep, dtype, points, mode))
            for mode in arguments.modes:
                tables.append(_times(sweep, dtype, points, mode))
            tables.append(_errors(sweep, dtype, points))
            shares = _shares(points, arguments.modes[0])
            if shares and dtype == plotted:
                panels[f"{sweep.title}, {dtype}"] = shares
    if tables and figure == "main":
        tables[0].notes += [f"{name}: {meaning}." for name, meaning in MEANINGS.items()]
    return Figure(tables, panels, record, unit=UNIT)


def _title(sweep: Sweep, *words: str) -> str:
    return ", ".join((sweep.title, *words))


def _rates(
    setting: AttentionSetting, sweep: Sweep, dtype: str, points: Mapping[str, AttentionPoint], mode: str
) -> Table:
    """Tabulates TFLOP/s by contestant, then the ratios of recfuse."""
    table = Table(
        f"{_title(sweep, dtype, mode)}: TFLOP/s. {next(iter(points.values())).shape}", [sweep.axis, *points]
    )

    def row(name: str, cell: Callable[[AttentionPoint], str]) -> None:
        cells = [cell(point) for point in points.values()]
        if set(cells) != {"-"}:
            table.rows.append([name, *cells])

    for name in NAMES:
        row(name, lambda point, name=name: tera(point.rate(mode, name)))
    row("matmul", lambda point: tera(point.matmul_rate(mode)))
    row("recfuse, of the matmul", lambda point: _percent(point.rate(mode, RECFUSE), point.matmul_rate(mode)))
    row("recfuse, of the bound", lambda point: _percent(point.bound(mode), point.seconds(mode, RECFUSE)))
    row("best peer", lambda point: point.best_peer(mode) or "-")
    row("recfuse over the best peer", lambda point: times(point.over(mode, point.best_peer(mode))))
    for name in RATIOS:
        row(f"recfuse over {name}", lambda point, name=name: times(point.over(mode, name)))
    if sweep.against is not None:
        text, beside = sweep.against

        def of_it(point: AttentionPoint) -> str:
            padded = setting.points.get((beside(point.shape), dtype))
            return _percent(point.rate(mode, RECFUSE), padded.rate(mode, RECFUSE)) if padded else "-"

        row(f"recfuse, of {text}", of_it)
    row("path", lambda point: point.path)
    table.notes = [
        "TFLOP/s count the least operations: of each user's own keys.",
        *load_notes(point.results[mode] for point in points.values()),
        *dict.fromkeys(note for point in points.values() for note in point.notes),
    ]
    return table


def _times(sweep: Sweep, dtype: str, points: Mapping[str, AttentionPoint], mode: str) -> Table:
    table = Table(f"{_title(sweep, dtype, mode)}: us", [sweep.axis, *points])
    for name in NAMES:
        cells = []
        for point in points.values():
            timing = point.results[mode].timings.get(name)
            cells.append(f"{micro(timing.median)} ± {micro(timing.iqr)}" if timing else "-")
        if set(cells) != {"-"}:
            table.rows.append([name, *cells])
    return table


def _errors(sweep: Sweep, dtype: str, points: Mapping[str, AttentionPoint]) -> Table:
    """Against float64, and times FlashAttention's."""
    table = Table(f"{_title(sweep, dtype)}: error (of FlashAttention's)", [sweep.axis, *points])
    for name in NAMES:
        if any(name in point.errors for point in points.values()):
            cells = [
                f"{point.errors[name]:.2e} ({times(point.error_ratio(name))})"
                if name in point.errors
                else "-"
                for point in points.values()
            ]
            table.rows.append([name, *cells])
    return table


def _percent(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part and whole else "-"


def _shares(points: Mapping[str, AttentionPoint], mode: str) -> dict[str, dict[str, float]]:
    """Returns shares of the large matmul's rate by contestant and label; of the faster forms that ran at
    every point."""
    series: dict[str, dict[str, float]] = {}
    for name in NAMES:
        if name in (*COPIES, *PATHS, "packed flash"):
            continue
        rates = {label: point.rate(mode, name) for label, point in points.items()}
        if None not in rates.values():
            series[name] = {label: rates[label] / point.matmul_rate(mode) for label, point in points.items()}
    return series


@bench.figure("host")
@torch.inference_mode()
def figure_host_calls(setting: AttentionSetting) -> Figure:
    """The host's time of a call."""
    arguments = setting.arguments
    shape = replace(setting.shape, **_HOST)
    problem = Problem(shape, DTYPES[arguments.dtypes[0]], setting.device, arguments.seed)
    names = [
        name
        for name in contestants(setting, "host")
        if name in arguments.contestants and takes(name, shape, setting.device.type == "cuda")
    ]
    runs = make_runs(problem, names)
    calls = {name: functools.partial(run, problem.inputs[0]) for name, run in runs.items()}
    return figure_host(str(shape), calls, setting.device, arguments.rounds)


@bench.last
def figures_of_all_points(setting: AttentionSetting) -> Iterator[Figure]:
    """The roofline, the matmul's rates, and status 1 if an output was wrong or recfuse did not run."""

    def others(point: AttentionPoint, mode: str) -> dict[str, str | None]:
        return {"best peer": point.best_peer(mode), FA3_VARLEN: FA3_VARLEN, TRITON: TRITON}

    yield from last_figures(setting, "attention", others)
    if setting.troubles:
        fail(setting.parser, "\n  ".join(["what did not run or is wrong:", *setting.troubles]))
