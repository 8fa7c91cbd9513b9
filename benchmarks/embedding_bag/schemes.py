"""The paper's schemes on this GPU: figures 12, 15, 16 and 17, and the rows of table IX.

OptMT: no prefetching, at the best occupancy; RPF, SMPF, LMPF, L1DPF: prefetching into registers, shared
memory, local memory, L1; L2P: hot rows pinned in L2, which is timed too. As in the paper a scheme has one
setting for every hotness: the best of a sweep. "recfuse" is the default, without any tuning.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.report import Figure
from common.table import Table
from common.traces import MIXES, mix_levels
from embedding_bag.candidates import BASELINE, bag
from embedding_bag.pinning import hot_rows, pinned_before
from embedding_bag.setting import BagSetting, Pass, Workload
from embedding_bag.speeds import STATIONS, Speeds, measure_passes
from embedding_bag.sweeps import Figures, paper_figure, speed_table

ABBREVIATIONS = {"register": "RPF", "shared": "SMPF", "local": "LMPF", "l1": "L1DPF"}


def measure_schemes(
    setting: BagSetting,
    workloads: Mapping[str, Workload],
    schedules: Mapping[str, str | None],
    pinned: Mapping[str, str | None],
    label: str,
) -> Speeds:
    """Times schemes: names and their schedules, then those that also pin; a schedule of None is left out."""

    def passes(workload: Workload) -> dict[str, Pass]:
        weights, hot = setting.weights, hot_rows(setting, workload)
        plain = {name: bag(text, weights) for name, text in schedules.items() if text is not None}
        return plain | {
            name: pinned_before(bag(text, weights), weights, hot)
            for name, text in pinned.items()
            if text is not None
        }

    return measure_passes(
        setting, workloads, passes, label=label, rounds=setting.arguments.rounds, after=setting.unpin
    )


def _figure(figures: Figures, title: str, speeds: Speeds, schedules: Mapping[str, str | None]) -> Figure:
    """A table and a plot of schemes, with their schedules from the sweep."""
    names = {name: name for name in speeds.names() if name != BASELINE}
    table = speed_table(title, speeds, names)
    settings = ", ".join(
        f"{name}: {text or 'default'}" for name, text in schedules.items() if text is not None
    )
    table.notes.append(f"Schedules: {settings}.")
    table.notes += [f"refused: {name}: {why}" for name, why in figures.stations.refused.items()]
    return Figure(
        [table],
        {title: {name: speeds.over_torch(name) for name in names}},
        {**speeds.to_json(), "schedules": dict(schedules)},
    )


def _tuned(figures: Figures) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Returns the schemes of figure 12: without and with pinning."""
    none, register = figures.best("none"), figures.best("register")
    return (
        {"OptMT": none, "RPF+OptMT": register, "recfuse": ""},
        {"L2P+OptMT": none, "RPF+L2P+OptMT": register, "recfuse+L2P": ""},
    )


@paper_figure(12)
def figure_12(figures: Figures) -> Figure:
    """Occupancy, prefetching into registers, pinning, and all of them; with the rows of table IX."""
    plain, pinned = _tuned(figures)
    speeds = measure_schemes(figures, figures.workloads, plain, pinned, "figure 12")
    figure = _figure(figures, "Figure 12: schemes", speeds, plain | pinned)
    figure.tables.append(_table_9(figures, speeds))
    return figure


def _table_9(figures: Figures, speeds: Speeds) -> Table:
    """Kernel times, with the traffic as far as it is known without counters."""
    row_bytes = figures.row_bytes
    table = Table("Table IX: us a table / TB/s of rows looked up", ["scheme", *figures.workloads])
    for name in speeds.names():
        cells = []
        for hotness, workload in figures.workloads.items():
            us = speeds.us[hotness][name]
            cells.append(f"{us:.2f} / {workload.lookups * row_bytes / us / 1e6:.2f}")
        table.rows.append([name, *cells])
    in_use = [workload.unique_rows() * row_bytes / 1e6 for workload in figures.workloads.values()]
    table.rows.append(["rows in use, MB", *(f"{size:.1f}" for size in in_use)])
    return table


@paper_figure(15)
def figure_15(figures: Figures) -> Figure:
    """Stations, each at its best distance and occupancy."""
    schedules = {"OptMT": figures.best("none")}
    schedules |= {f"{ABBREVIATIONS[station]}+OptMT": figures.best(station) for station in STATIONS[1:]}
    speeds = measure_schemes(figures, figures.workloads, schedules, {}, "figure 15")
    return _figure(figures, "Figure 15: stations at tuned occupancy", speeds, schedules)


@paper_figure(16)
def figure_16(figures: Figures) -> Figure:
    """Stations at the compiler's occupancy, and pinning."""
    schedules = {ABBREVIATIONS[station]: figures.best(station, tuned=False) for station in STATIONS[1:]}
    winner = figures.stations.fastest(text for text in schedules.values() if text is not None)
    named = next((name for name, text in schedules.items() if text == winner), "")
    pinned = {"L2P": "station=none", f"{named}+L2P": winner}
    plain = {"no prefetching": "station=none", **schedules}
    speeds = measure_schemes(figures, figures.workloads, plain, pinned, "figure 16")
    return _figure(figures, "Figure 16: stations and pinning at default occupancy", speeds, plain | pinned)


@paper_figure(17)
def figure_17(figures: Figures) -> Figure:
    """Tables of mixed hotness."""
    plain, pinned = _tuned(figures)
    setting = figures.mixed
    tables = len(setting.weights)
    workloads = {name: setting.workload(mix_levels(name, tables)) for name in MIXES}
    speeds = measure_schemes(setting, workloads, plain, pinned, "figure 17")
    return _figure(figures, f"Figure 17: mixes of table VII, {tables} tables", speeds, plain | pinned)
