"""The ablation of the single bag: schedules that omit a kernel, or a part of a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.ablation import WITH, Cell, ablation, sized
from common.checks import TOLERANCES
from embedding_bag import bench
from embedding_bag.candidates import bag
from embedding_bag.setting import BagSetting, error_of_pass
from embedding_bag.short_bags import Cell as ShortCell
from embedding_bag.short_bags import TableSetting
from embedding_bag.sweeps import Figures

BAGS = ((1024, 1), (32768, 1), (131072, 1), (32768, 16), (131072, 16))
ALPHA = 1.05
LISTS, WHOLE, ONE_ROW = "station=register", "parts=1", "station=none"  # schedules


@ablation(bench)
def cells(setting: Figures) -> Iterator[Cell]:
    """Short bags without their kernel; long bags without the sweep of a table, and with one row in flight."""
    table = TableSetting(setting, sized(setting, 10**6), 128)
    for bags, pooling in BAGS:
        cell = ShortCell(len(table.weights[0]), 128, sized(setting, bags), pooling, ALPHA)
        yield _cell(
            f"{cell.rows:,} x 128, {cell.kind}, alpha {ALPHA}", {LISTS: "short_bags.cu"},
            table.weights, [[(0, table.part(cell))]],
        )  # fmt: skip
    del table
    arguments = setting.arguments
    arguments.rows, arguments.batch_size = sized(setting, 500_000), sized(setting, 2048)
    tables = BagSetting(setting.parser, arguments, 4)
    pooling = arguments.num_indices_per_lookup
    for hotness in ("high", "medium", "low", "random"):
        yield _cell(
            f"{arguments.rows:,} x 128, {arguments.batch_size} x {pooling}, {hotness}",
            {WHOLE: "parts of a table (bag.cuh)", ONE_ROW: "rows in flight (station.cuh)"},
            tables.weights, tables.workload(hotness).requests,
        )  # fmt: skip


def _cell(label: str, parts: dict[str, str], weights: list[torch.Tensor], requests: list) -> Cell:
    return Cell(
        label,
        parts,
        {WITH: bag("", weights), **{schedule: bag(schedule, weights) for schedule in parts}},
        requests,
        lambda _, outputs: error_of_pass(outputs, weights, requests[0]),
        TOLERANCES[torch.float32],
    )
