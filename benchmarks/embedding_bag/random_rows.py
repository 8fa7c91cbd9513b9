"""The ceiling of the GPU: a plain gather of random rows, by row size and working set."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tqdm import tqdm

from common.ceilings import SHAPES, fastest_shape
from common.report import Figure
from common.settings import Setting
from common.table import Table
from embedding_bag import bench

WORKING_SETS_MB = (8, 16, 32, 48, 64, 128, 256, 1024, 4096)
ROW_BYTES = (64, 128, 256, 512)
LONG_RUN = 1 << 23  # lookups: long enough for launching and the last wave not to count


@bench.figure("ceilings", on=["cuda"], default=False)
def figure_ceilings(setting: Setting) -> Figure:
    """Bytes a second of uniformly random rows by row size and working set, in batches and in a long run."""
    arguments, device = setting.arguments, setting.device
    lookups, seed = arguments.batch_size * arguments.num_indices_per_lookup, arguments.seed
    row_sizes, sets = ROW_BYTES, WORKING_SETS_MB
    if arguments.quick:
        row_sizes, sets = ROW_BYTES[-1:], WORKING_SETS_MB[::4]
    generator = torch.Generator(device).manual_seed(seed)
    largest = max(sets) << 20
    memory = torch.ones(largest // 4, device=device)
    records = []
    cases = list(itertools.product(row_sizes, sets))
    for row_bytes, size in tqdm(cases, desc="gather ceilings", leave=False):
        rows = (size << 20) // row_bytes
        table = memory.view(-1, row_bytes // 4)[:rows]
        indices = torch.randint(rows, (LONG_RUN,), device=device, generator=generator)
        record: dict[str, Any] = {"row_bytes": row_bytes, "working_set_bytes": rows * row_bytes}
        # Consecutive batches of different rows, enough for the long run.
        for name, parts in (("batch", indices.split(lookups)[:16]), ("long", (indices,))):
            shape, seconds = fastest_shape([(table, part) for part in parts], device)
            count = sum(len(part) for part in parts)
            record[name] = {"bytes_per_s": count * row_bytes / seconds, "shape": str(shape)}
        records.append(record)
    title = f"Gather of random rows, TB/s: batches of {lookups:,} lookups / one run of {LONG_RUN:,}"
    result = Table(title, ["row", *(f"{size} MB" for size in sets)])
    for row_bytes in row_sizes:
        cells = [record for record in records if record["row_bytes"] == row_bytes]
        rates = [
            f"{cell['batch']['bytes_per_s'] / 1e12:.2f} / {cell['long']['bytes_per_s'] / 1e12:.2f}"
            for cell in cells
        ]
        result.rows.append([f"{row_bytes} B", *rates])
    result.notes.append(
        f"benchmarks/kernels/gather.cu, the fastest of {len(SHAPES)} shapes for each cell; indices are int64 "
        "and not counted as bytes."
    )
    speed = f"Copy speed: {setting.copy_speed / 1e12:.2f} TB/s, read and written together."
    result.notes.append(speed)
    return Figure([result], {}, records)
