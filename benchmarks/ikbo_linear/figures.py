"""The figures: one shape with every contestant, sweeps from it, and the host's time of a call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import geometric_mean

import torch
from tqdm import tqdm

from common.calls import EAGER, figure_host
from common.points import DTYPES, micro, tera
from common.report import Figure, Panels, load_notes
from common.roofline import last_figures
from common.table import Table, times
from ikbo_linear import bench
from ikbo_linear.forms import (
    BADDBMM,
    BROADCAST,
    COMPILED,
    CONCATENATED,
    DECOMPOSED,
    IN_CALL,
    MEANINGS,
    NAMES,
    PADDED,
    PATHS,
    RECFUSE,
    STAGES,
    TRITON,
    make_runs,
)  # fmt: skip
from ikbo_linear.measure import IkboSetting, LinearPoint
from ikbo_linear.problem import Problem, Shape

BEST = "best torch"
# Candidates of the figure `host`: so few that a call never waits for the device.
_HOST_CANDIDATES, _HOST_RATIO = 8, 4


@bench.figure("main")
def figure_main(setting: IkboSetting) -> Figure:
    """The shape of the command line, with every contestant."""
    arguments = setting.arguments
    tables: list[Table] = []
    stages: list[Table] = []
    panels: Panels = {}
    record = {}
    for dtype in tqdm(arguments.dtypes, desc="main", leave=False):
        # Compiling is slow: for the first type only.
        compiled = {COMPILED + name for name in arguments.compile if dtype == arguments.dtypes[0]}
        names = [name for name in NAMES if name in compiled.union(arguments.contestants)]
        point = setting.point(setting.shape, dtype, names, arguments.rounds, eager=True)
        record[dtype] = point.to_json()
        panel = {}
        for mode in point.results:
            tables.append(_contestants(point, mode))
            if speeds := _stage_speeds(point, mode):
                stages.append(_stages(point, mode))
                panel[mode] = speeds
        if panel:
            panels[f"{dtype}: times faster than {BROADCAST}"] = panel
    tables[0].notes += [f"{name}: {meaning}." for name, meaning in MEANINGS.items()]
    return Figure([*tables, *stages], panels, record)


def _contestants(point: LinearPoint, mode: str) -> Table:
    """Every contestant of one shape and type."""
    result, rate, bound = point.results[mode], point.matmul_rate(mode), point.bound(mode)
    table = Table(
        f"Contestants, {point.dtype}, {mode}: {point.shape}",
        [
            "contestant", "us", "as called, us", "TFLOP/s", "of the matmul rate", "of the bound",
            "recfuse over the contestant", "error", "of concatenated's",
        ],
    )  # fmt: skip
    for name in [name for name in NAMES if name in result.timings]:
        taken, speed = result[name], point.shape.flop / result[name].median
        called = point.seconds(mode, name + EAGER)
        table.rows.append(
            [
                name, f"{taken.median * 1e6:.1f} ± {taken.iqr * 1e6:.1f}",
                "-" if called is None else f"{called * 1e6:.1f}", tera(speed),
                f"{speed / rate:.0%}", f"{bound / taken.median:.0%}", times(point.over(mode, name)),
                f"{point.errors[name]:.2e}", times(point.error_ratio(name)),
            ]
        )  # fmt: skip
    table.notes = [
        f"recfuse takes the path {point.path!r}. Matmul in the same turns: {tera(rate)} TFLOP/s; copy "
        f"speed {point.copy_speed / 1e12:.2f} TB/s; bound {bound * 1e6:.1f} us: {point.shape.flop / 1e9:.1f} "
        f"GFLOP at that rate, or {point.shape.least_bytes(DTYPES[point.dtype]) / 1e6:.0f} MB.",
        "TFLOP/s count the least operations, also for forms that need more.",
        *load_notes([result]),
        *point.notes,
    ]
    return table


def _stage_speeds(point: LinearPoint, mode: str) -> dict[str, float]:
    """Times faster than the concatenated form, by stage."""
    spent = {name: point.seconds(mode, name) for name in (BROADCAST, *STAGES)}
    whole = spent.pop(BROADCAST)
    if whole is None:
        return {}
    return {STAGES[name]: whole / taken for name, taken in spent.items() if taken is not None}


def _stages(point: LinearPoint, mode: str) -> Table:
    """recfuse's paths as the paper's stages, each over the previous stage."""
    table = Table(
        f"Stages, {point.dtype}, {mode}: us", ["stage", "us", f"over {BROADCAST}", "over the previous stage"]
    )
    first = before = None
    for name in (BROADCAST, *STAGES):
        taken = point.seconds(mode, name)
        if taken is None:
            table.notes.append(f"{name} does not run on this machine.")
            continue
        first, before = first or taken, before or taken
        table.rows.append([name, f"{taken * 1e6:.1f}", times(first / taken), times(before / taken)])
        before = taken
    return table


@bench.figure("batches", on=["cuda"])
def figure_batches(setting: IkboSetting) -> Figure:
    """Numbers of candidates at the ratio of the command line."""
    counts = setting.arguments.batches
    shapes = {str(count): replace(setting.shape, candidates=count) for count in counts}
    return figure_sweep(setting, "Batches", "candidates", shapes)


@bench.figure("small", on=["cuda"])
def figure_small(setting: IkboSetting) -> Figure:
    """Few candidates, also as called."""
    counts = setting.arguments.small
    shapes = {str(count): replace(setting.shape, candidates=count) for count in counts}
    return figure_sweep(setting, "Small batches", "candidates", shapes, eager=True)


@bench.figure("ratios")
def figure_ratios(setting: IkboSetting) -> Figure:
    """Candidates a user at the number of candidates of the command line."""
    shapes = {str(ratio): replace(setting.shape, ratio=ratio) for ratio in setting.arguments.ratios}
    return figure_sweep(setting, "Ratios", "candidates a user", shapes)


@bench.figure("shapes", on=["cuda"])
def figure_shapes(setting: IkboSetting) -> Figure:
    """Shapes of other models."""
    shapes = {
        f"{m} x {n}, K {k_user} + {k_cand}": replace(setting.shape, m=m, n=n, k_user=k_user, k_cand=k_cand)
        for m, n, k_user, k_cand in setting.arguments.shapes
    }
    return figure_sweep(setting, "Shapes", "M x N", shapes)


def figure_sweep(
    setting: IkboSetting, title: str, axis: str, shapes: Mapping[str, Shape], *, eager: bool = False
) -> Figure:
    """Each shape in each type and mode. `axis`: name of the labels of `wanted`. `eager`: calls in
    addition."""
    arguments = setting.arguments
    tables: list[Table] = []
    panels: Panels = {}
    record = {}
    for dtype in arguments.dtypes:
        points = {
            label: setting.point(shape, dtype, arguments.in_sweeps, arguments.sweep_rounds, eager)
            for label, shape in tqdm(shapes.items(), desc=f"{title}, {dtype}", leave=False)
        }
        record[dtype] = {label: point.to_json() for label, point in points.items()}
        tables += [_sweep(f"{title}, {dtype}, {mode}: us", axis, points, mode) for mode in arguments.modes]
        if set(PATHS) & set(arguments.in_sweeps):
            tables += [
                _paths(f"{title}, {dtype}, {mode}, by path: us", axis, points, mode)
                for mode in arguments.modes
            ]
        if eager and setting.on_gpu:
            tables.append(_called(f"{title}, {dtype}, as called: us", axis, points, arguments.modes[0]))
        panels[f"{dtype}, {arguments.modes[0]}: over the {BEST} form"] = _speeds(points, arguments.modes[0])
    return Figure(tables, panels, record)


def _sweep(title: str, axis: str, points: Mapping[str, LinearPoint], mode: str) -> Table:
    peers = (BEST, TRITON, BROADCAST, CONCATENATED)
    table = Table(
        title,
        [
            axis, BROADCAST, CONCATENATED, BEST, "name of the best peer", TRITON, RECFUSE, "path", "TFLOP/s",
            "of the matmul rate", "of the bound", *(f"over {name}" for name in peers),
        ],
    )  # fmt: skip
    gains: dict[str, list[float]] = {name: [] for name in peers}
    for label, point in points.items():
        best, ours = point.best_torch(mode), point.results[mode][RECFUSE].median
        ratios = {name: point.over(mode, best if name == BEST else name) for name in peers}
        for name, ratio in ratios.items():
            gains[name] += [] if ratio is None else [ratio]
        speed = point.shape.flop / ours
        us = {name: micro(point.seconds(mode, name)) for name in (BROADCAST, CONCATENATED, best, TRITON)}
        table.rows.append(
            [
                label, us[BROADCAST], us[CONCATENATED], us[best], best, us[TRITON], micro(ours), point.path,
                tera(speed), f"{speed / point.matmul_rate(mode):.0%}",
                f"{point.bound(mode) / ours:.0%}", *(times(ratio) for ratio in ratios.values()),
            ]
        )  # fmt: skip
    for label, summary in (("geometric mean", geometric_mean), ("least", min)):
        cells = [times(summary(values)) if values else "-" for values in gains.values()]
        table.rows.append([label, *[""] * (len(table.columns) - 1 - len(cells)), *cells])
    notes = [note for point in points.values() for note in point.notes]
    table.notes = [*load_notes(point.results[mode] for point in points.values()), *dict.fromkeys(notes)]
    return table


def _paths(title: str, axis: str, points: Mapping[str, LinearPoint], mode: str) -> Table:
    """recfuse by each measured path, and by the path that it chooses."""
    names = [name for name in PATHS if any(name in point.results[mode].timings for point in points.values())]
    table = Table(title, [axis, BEST, *names, RECFUSE, "path", f"over {BEST}"])
    for label, point in points.items():
        best, ours = point.best_torch(mode), point.seconds(mode, RECFUSE)
        cells = [micro(point.seconds(mode, name)) for name in (best, *names, RECFUSE)]
        table.rows.append([label, *cells, point.path, times(point.seconds(mode, best) / ours)])
    return table


def _called(title: str, axis: str, points: Mapping[str, LinearPoint], mode: str) -> Table:
    """Calls without a graph, host included."""
    table = Table(title, [axis, BEST, "name of the best peer", RECFUSE, "path", f"over {BEST}"])
    for label, point in points.items():
        best = point.best_torch(mode, EAGER)
        theirs, ours = point.seconds(mode, best), point.seconds(mode, RECFUSE + EAGER)
        cells = [micro(theirs), best.removesuffix(EAGER), micro(ours), point.path, times(theirs / ours)]
        table.rows.append([label, *cells])
    return table


def _speeds(points: Mapping[str, LinearPoint], mode: str) -> dict[str, dict[str, float]]:
    """Returns by contestant and label how many times faster than the fastest of torch's forms."""
    series: dict[str, dict[str, float]] = {}
    for name in (RECFUSE, TRITON, CONCATENATED, BROADCAST):
        speeds = {}
        for label, point in points.items():
            taken, best = point.seconds(mode, name), point.seconds(mode, point.best_torch(mode))
            if taken is not None and best is not None:
                speeds[label] = best / taken
        if len(speeds) == len(points):
            series[name] = speeds
    return series


@bench.figure("host", on=["cuda"])
@torch.inference_mode()
def figure_host_calls(setting: IkboSetting) -> Figure:
    """The host's time of a call."""
    arguments = setting.arguments
    shape = replace(setting.shape, candidates=_HOST_CANDIDATES, ratio=_HOST_RATIO)
    problem = Problem(shape, DTYPES[arguments.dtypes[0]], setting.device, arguments.seed)
    names = [DECOMPOSED, PADDED, PADDED + BADDBMM, IN_CALL, TRITON, *PATHS, RECFUSE]
    runs = make_runs(problem, [name for name in names if name in arguments.contestants])
    calls = {name: functools.partial(run, problem.inputs[0]) for name, run in runs.items()}
    return figure_host(str(shape), calls, setting.device, arguments.rounds)


@bench.last
def figures_of_all_points(setting: IkboSetting) -> Iterator[Figure]:
    """The roofline, and the matmul's rates."""
    return last_figures(setting, "ikbo", lambda point, mode: {BEST: point.best_torch(mode), TRITON: TRITON})
