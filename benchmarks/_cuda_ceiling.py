"""What the GPU at hand can do at best, measured in the same run: copy speed, and a gather of plain rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from _common import Table
from recfuse import timing

SOURCE = Path(__file__).parent / "kernels" / "gather.cu"
THREADS = 256
WORKING_SETS_MB = (8, 16, 32, 48, 64, 128, 256, 1024, 4096)
ROW_BYTES = (64, 128, 256, 512)
LONG_RUN = 1 << 23  # lookups: long enough for launching and the last wave not to count


@dataclass(frozen=True)
class Shape:
    """One way to run benchmarks/kernels/gather.cu; what the fields mean is said there."""

    in_flight: int
    blocks: int  # an SM
    rolling: bool
    l1: bool
    waves: int  # blocks are this many times as many as fit at once

    def __str__(self) -> str:
        """Short, for a result file."""
        order = "rolling" if self.rolling else "in batches"
        cache = "" if self.l1 else ", past L1"
        return f"{self.in_flight} rows {order}, {self.blocks} x {self.waves} blocks an SM{cache}"


# As many rows in flight as the registers of so many blocks hold without spills.
_FLIGHTS = ((4, 6, False), (8, 4, False), (16, 2, False), (8, 3, True), (16, 2, True))
SHAPES = [
    Shape(*flight, l1=l1, waves=waves)
    for flight, l1, waves in itertools.product(_FLIGHTS, (True, False), (1, 2))
]


def options(shape: Shape, row_bytes: int) -> list[str]:
    """The compiler's options for a shape and a row size."""
    # A warp has 32 / rows-at-once steps for its 32 ids, and wide rows need more registers each.
    lanes = min(32, row_bytes // 16)
    in_flight = max(1, min(shape.in_flight // (row_bytes // 16 // lanes), lanes))
    values = {
        "ROW_BYTES": row_bytes,
        "IN_FLIGHT": in_flight,
        "BLOCKS": shape.blocks,
        "ROLLING": int(shape.rolling),
        "L1": int(shape.l1),
    }
    return [f"-D{name}={value}" for name, value in values.items()]


@functools.cache
def _compiled(compiler_options: tuple[str, ...]) -> Any:
    """The kernel, compiled by torch's NVRTC."""
    from torch.utils import cpp_extension

    # torch wants to name a toolkit's headers to the compiler, which this kernel does not include.
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or "/usr/local/cuda"
    return torch.cuda._compile_kernel(SOURCE.read_text(), "rf_gather", nvcc_options=list(compiler_options))


def gather(shape: Shape, table: Tensor, ids: Tensor, checksum: Tensor | None = None) -> None:
    """Reads the rows `ids` (int64) of a table [rows, dim] on the GPU; `checksum`, int32 [4]: their xor."""
    row_bytes = table.shape[1] * table.element_size()
    kernel = _compiled(tuple(options(shape, row_bytes)))
    sms = torch.cuda.get_device_properties(table.device).multi_processor_count
    # An empty tensor's address is null.
    checksum = torch.empty(0, dtype=torch.int32, device=table.device) if checksum is None else checksum
    grid = (sms * shape.blocks * shape.waves, 1, 1)
    kernel(grid=grid, block=(THREADS, 1, 1), args=[table, ids, len(ids), checksum])


def fastest_shape(requests: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Shape, float]:
    """Of all shapes the one that gathers these (table, ids) fastest, one after another; and its seconds."""

    def gather_all(shape: Shape) -> None:
        for table, ids in requests:
            gather(shape, table, ids)

    graphs = {str(shape): timing.graphed(lambda s=shape: gather_all(s), device) for shape in SHAPES}
    result = timing.compare(graphs, rounds=7, min_time=1e-3, device=device, progress=False)
    best = result.fastest(graphs)
    return next(shape for shape in SHAPES if str(shape) == best), result[best].median


def copy_speed(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read and written together, of a copy of `size` bytes on the device."""
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    copies: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "kernel": lambda: torch.neg(source, out=target),
    }
    result = timing.compare(copies, rounds=9, device=device, progress=False)
    return 2 * source.nbytes / min(timing_.median for timing_ in result.timings.values())


def gather_ceilings(
    device: torch.device, lookups: int, seed: int, quick: bool = False
) -> tuple[Table, list[dict[str, Any]]]:
    """Bytes a second of uniformly random rows by row size and working set, in batches and in a long run."""
    row_sizes, sets = (ROW_BYTES[-1:], WORKING_SETS_MB[::4]) if quick else (ROW_BYTES, WORKING_SETS_MB)
    generator = torch.Generator(device).manual_seed(seed)
    largest = max(sets) << 20
    memory = torch.ones(largest // 4, device=device)
    records = []
    cases = list(itertools.product(row_sizes, sets))
    for row_bytes, size in tqdm(cases, desc="gather ceilings", leave=False):
        rows = (size << 20) // row_bytes
        table = memory.view(-1, row_bytes // 4)[:rows]
        ids = torch.randint(rows, (LONG_RUN,), device=device, generator=generator)
        record: dict[str, Any] = {"row_bytes": row_bytes, "working_set_bytes": rows * row_bytes}
        # Batches of different rows, one after another, as many as make up the long run.
        for name, parts in (("batch", ids.split(lookups)[:16]), ("long", (ids,))):
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
        f"benchmarks/kernels/gather.cu, the fastest of {len(SHAPES)} shapes for each cell; row ids are int64 "
        "and not counted as bytes."
    )
    return result, records
