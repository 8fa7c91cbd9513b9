"""A sequence group: features with the same histories, in each layout."""

from __future__ import annotations

import torch
from torch import Tensor

from common.calls import EAGER
from common.measure import measure
from common.report import Figure, Row, load_notes
from common.settings import Setting
from common.table import Table, times
from sequences import bench
from sequences.sides import FBGEMM, LAYOUTS, RECFUSE, TORCH, TORCHREC, Batch, batch_of, contestants

NAMES = (TORCH, TORCHREC, FBGEMM, RECFUSE)


def difference_of(output: Tensor, right: Tensor) -> float:
    """0 if all bits are equal, since rows are copied."""
    same = output.dtype == right.dtype and output.shape == right.shape and torch.equal(output, right)
    return 0.0 if same else float("inf")


def table_of(
    title: str, rows: list[Row], setting: Setting, limits: dict[str, float], notes: list[str]
) -> Table:
    """Medians of contestants, and how many times faster recfuse is; `limits`: seconds of the least bytes."""
    columns = ["", "call", *NAMES, *(f"over {name}" for name in NAMES[:-1]), "over the limit of bytes"]
    table = Table(f"us a call, {title}", columns)
    for row in rows:
        for suffix, called in (("", "graph"), (EAGER, "called")) if setting.on_gpu else (("", "called"),):
            cells = [row.cell(name + suffix) for name in NAMES]
            ratios = [times(row.ratio(RECFUSE + suffix, name + suffix)) for name in NAMES[:-1]]
            limit = limits.get(row.label)
            over = "-"
            if limit and RECFUSE + suffix in row.result.timings:
                over = f"{row.result[RECFUSE + suffix].median / limit:.2f}x"
            table.rows.append([row.label, called, *cells, *ratios, over])
        notes = [*notes, *row.notes]
    table.notes += [*dict.fromkeys(notes), *load_notes([row.result for row in rows])]
    return table


def group_batches(setting: Setting) -> tuple[list[Tensor], list[Batch]]:
    """Tables, and batches whose features have the same lengths."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    weights = [
        torch.randn(arguments.rows, arguments.dim, device=setting.device) for _ in range(arguments.features)
    ]
    batches = []
    for _ in range(arguments.num_batches):
        lengths = torch.randint(1, arguments.longest + 1, (arguments.batch,))
        total = int(lengths.sum())
        indices = [torch.randint(arguments.rows, (total,)) for _ in weights]
        batches.append(batch_of([lengths] * arguments.features, indices, setting.device))
    return weights, batches


@bench.figure("group")
@torch.inference_mode()
def figure_group(setting: Setting) -> Figure:
    """All layouts."""
    arguments = setting.arguments
    weights, batches = group_batches(setting)
    rows, notes, limits, record = [], [], {}, {}
    for layout in LAYOUTS:
        runs, missing = contestants(weights, layout, arguments.longest)
        notes += missing
        right = runs[TORCH](batches[0])
        row = measure(
            layout,
            runs,
            batches,
            setting,
            lambda name, output, right=right: difference_of(output, right),
            0.0,
        )
        lookups, size = len(batches[0].indices), arguments.dim * 4
        unique = sum(len(own.unique()) for own in batches[0].indices.split(batches[0].sizes))
        written = right.numel() * 4
        if setting.on_gpu:
            limits[layout] = (unique * size + lookups * 8 + written) / setting.copy_speed
        rows.append(row)
        record[layout] = row.record
        setting.release()
    title = (
        f"{arguments.features} features x {arguments.batch} histories of 1 to {arguments.longest}, "
        f"{arguments.rows:,} x {arguments.dim} each"
    )
    return Figure([table_of(title, rows, setting, limits, notes)], {}, record)
