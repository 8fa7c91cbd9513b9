"""The paper's sweeps on this GPU: occupancy (figure 6), prefetch distance (9) and pinning (11).

Jain et al., "Pushing the Performance Envelope of DNN-based Recommendation Systems Inference on GPUs"
(MICRO'24). All times are of graph replays over tables in turn; the baseline is torch's EmbeddingBag, on the
same batches in the same run. schemes.py compares schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from common.report import Figure
from common.table import Table, times
from embedding_bag import bench
from embedding_bag.candidates import BASELINE, bag
from embedding_bag.pinning import hot_rows, pinned_before, pinned_concurrently
from embedding_bag.setting import BagSetting, Pass, Workload
from embedding_bag.speeds import (
    DISTANCES,
    STATIONS,
    WARPS,
    Speeds,
    measure_passes,
    measure_schedules,
    schedule,
)
from recfuse import _C
from recfuse.tuner.compile import compile_launches

POOLINGS = (10, 25, 50, 75, 100, 125, 150)
TUNED_WARPS, TUNED_DISTANCES = (16, 24, 32, 40, 48, 64), (2, 4, 8, 16)


@bench.setting
class Figures(BagSetting):
    """Measurements that several figures share."""

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """Creates a batch per table at each hotness."""
        return {hotness: self.workload(hotness) for hotness in self.arguments.hotness}

    @cached_property
    def mixed(self) -> BagSetting:
        """The setting of figure 17, with its own tables."""
        return BagSetting(self.parser, self.arguments, self.arguments.mix_tables)

    @cached_property
    def stations(self) -> Speeds:
        """Every station at several distances and occupancies."""
        schedules = [schedule("none", warps=warps) for warps in (None, *WARPS)]
        for station in STATIONS[1:]:
            schedules += [
                schedule(station, distance, warps)
                for distance in TUNED_DISTANCES
                for warps in (None, *TUNED_WARPS)
            ]
        return measure_schedules(self, self.workloads, schedules, "stations")

    def best(self, station: str, tuned: bool = True) -> str | None:
        """Returns a station's best schedule for all hotnesses; not `tuned`: at the compiler's occupancy."""
        return self.stations.fastest(
            name
            for name in self.stations.names()
            if name.split()[0] == f"station={station}" and ("warps=" in name) == tuned
        )


def paper_figure(number: int) -> Callable[[Callable[[Figures], Figure]], Callable[[Figures], Figure]]:
    """Registers a figure of the paper, which result files call "figure NUMBER"."""

    def register(function: Callable[[Figures], Figure]) -> Callable[[Figures], Figure]:
        def named(figures: Figures) -> Figure:
            return replace(function(figures), name=f"figure {number}", plot=f"figure_{number}")

        bench.figure(str(number), on=["cuda"], default=False)(named)
        return function

    return register


def speed_table(title: str, speeds: Speeds, names: Mapping[str, str]) -> Table:
    """Microseconds a table, and how many times faster than torch: names by row, labels by column."""
    table = Table(f"{title}: us a table (times faster than torch)", ["", *speeds.us])
    for label, name in {BASELINE: BASELINE, **names}.items():
        cells = [
            f"{us[name]:.2f} ({times(us[BASELINE] / us[name])})" if name in us else "-"
            for us in speeds.us.values()
        ]
        table.rows.append([label, *cells])
    table.notes += [f"refused: {name}: {why}" for name, why in speeds.refused.items()]
    return table


def by_hotness(speeds: Speeds, names: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """For a plot: a series for each label, a point for each name."""
    return {
        hotness: {label: us[BASELINE] / us[name] for label, name in names.items() if name in us}
        for hotness, us in speeds.us.items()
    }


@paper_figure(6)
def figure_6(figures: Figures) -> Figure:
    """Warps that an SM runs at once, for the kernel without prefetching and for recfuse's default."""
    kinds = {
        "no prefetching": {str(warps): schedule("none", warps=warps) for warps in WARPS},
        "recfuse's default": {str(warps): f"warps={warps}" for warps in WARPS},
    }
    schedules = [name for names in kinds.values() for name in names.values()]
    speeds = measure_schedules(figures, figures.workloads, schedules, "figure 6")
    tables, built = [], {}
    for kind, names in kinds.items():
        table = speed_table(f"Figure 6: warps an SM, {kind}", speeds, names)
        table.columns = [*table.columns, "registers", "spilled B"]
        for row in table.rows:
            info = None
            if row[0] in names and names[row[0]] not in speeds.refused:
                info = built[names[row[0]]] = compiled(figures, names[row[0]])
            row += [str(info["registers"]), str(info["spill_bytes"])] if info else ["-", "-"]
        tables.append(table)
    panels = {kind: by_hotness(speeds, names) for kind, names in kinds.items()}
    return Figure(tables, panels, {**speeds.to_json(), "compiled": built}, lines="warps an SM")


def compiled(setting: BagSetting, text: str) -> dict[str, Any]:
    """Returns the compiler's figures of a schedule's kernel for this setting."""
    major, minor = torch.cuda.get_device_capability(setting.device)
    # Hopper's kernels are compiled for its own instructions.
    arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
    arguments, dim = setting.arguments, setting.weights[0].shape[1]
    lookups = arguments.batch_size * arguments.num_indices_per_lookup
    fp32, int64, pooling_sum, alignment = 0, 1, 0, 16
    launches, _ = _C.embedding_bag_lower(
        arch, dim, dim, alignment, fp32, int64, int64, pooling_sum, False, False, True,
        lookups, arguments.batch_size, text,
    )  # fmt: skip
    return compile_launches(launches)


@paper_figure(9)
def figure_9(figures: Figures) -> Figure:
    """Prefetch distance into shared memory."""
    names = {str(distance): schedule("shared", distance) for distance in DISTANCES}
    speeds = measure_schedules(figures, figures.workloads, list(names.values()), "figure 9")
    table = speed_table("Figure 9: rows ahead into shared memory", speeds, names)
    return Figure([table], {"SMPF": by_hotness(speeds, names)}, speeds.to_json(), lines="prefetch distance")


@paper_figure(11)
def figure_11(setting: Figures) -> Figure:
    """Pinning over pooling factors, within the timed region: before each table, or concurrently with the
    previous one."""
    workloads = {
        f"{hotness} {pooling}": setting.workload(hotness, pooling)
        for hotness in setting.arguments.hotness
        for pooling in POOLINGS
    }
    plain = bag("", setting.weights)

    def passes(workload: Workload) -> dict[str, Pass]:
        hot = hot_rows(setting, workload)
        return {
            "not pinned": plain,
            "pinned before": pinned_before(plain, setting.weights, hot),
            "pinned concurrently": pinned_concurrently(plain, setting.weights, hot),
        }

    speeds = measure_passes(setting, workloads, passes, label="figure 11", after=setting.unpin)
    names = ("not pinned", "pinned before", "pinned concurrently")
    tables, panels = [], {}
    for hotness in setting.arguments.hotness:
        selected = Speeds({str(pooling): speeds.us[f"{hotness} {pooling}"] for pooling in POOLINGS})
        title = f"Figure 11: pooling factors, {hotness}, up to {setting.arguments.pin_mb:g} MB pinned"
        tables.append(speed_table(title, selected, {name: name for name in names}))
        panels[hotness] = {name: selected.over_torch(name) for name in names}
    return Figure(tables, panels, speeds.to_json(), lines="pooling factor")
