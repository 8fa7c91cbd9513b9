"""Ceilings of the GPU at hand, measured in the same run: copy speed, and a gather of plain rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recfuse import timing

KERNELS = Path(__file__).parent.parent / "kernels"
GATHER = "gather.cu"
THREADS = 256


@functools.cache
def compiled(file: str, options: tuple[str, ...]) -> Any:
    """Compiles the kernel rf_NAME of kernels/NAME.cu."""
    from torch.utils import cpp_extension

    # torch wants to name a toolkit's headers to the compiler, which these kernels do not include.
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or "/usr/local/cuda"
    source, entry = (KERNELS / file).read_text(), f"rf_{Path(file).stem}"
    return torch.cuda._compile_kernel(source, entry, nvcc_options=list(options))


@dataclass(frozen=True)
class Shape:
    """A configuration of benchmarks/kernels/gather.cu, which documents the fields."""

    in_flight: int
    blocks: int  # per SM
    rolling: bool
    l1: bool
    waves: int  # blocks are this many times as many as fit at once

    def __str__(self) -> str:
        """Short, for a result file."""
        order = "rolling" if self.rolling else "in batches"
        cache = "" if self.l1 else ", past L1"
        return f"{self.in_flight} rows {order}, {self.blocks} x {self.waves} blocks an SM{cache}"


# Blocks, and the rows in flight that their registers hold without spills.
_FLIGHTS = ((4, 6, False), (8, 4, False), (16, 2, False), (8, 3, True), (16, 2, True))
SHAPES = [
    Shape(*flight, l1=l1, waves=waves)
    for flight, l1, waves in itertools.product(_FLIGHTS, (True, False), (1, 2))
]


def options(shape: Shape, row_bytes: int, every: int = 0) -> list[str]:
    """Returns the compiler's options for a shape, a row size and the rows to write."""
    # A warp reads its 32 indices in 32 / (rows at once) steps; wide rows need more registers each.
    lanes = min(32, row_bytes // 16)
    in_flight = max(1, min(shape.in_flight // (row_bytes // 16 // lanes), lanes))
    values = {
        "ROW_BYTES": row_bytes,
        "IN_FLIGHT": in_flight,
        "BLOCKS": shape.blocks,
        "ROLLING": int(shape.rolling),
        "L1": int(shape.l1),
        "EVERY": every,
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def gather(
    shape: Shape, table: Tensor, indices: Tensor, checksum: Tensor | None = None, every: int = 0
) -> Tensor:
    """Reads the rows `indices` (int64) of a table [rows, dim] on the GPU; `checksum`, int32 [4], receives
    their xor.

    Returns every `every`-th row, [lookups / every, dim], or no rows if it is 0.
    """
    row_bytes = table.shape[1] * table.element_size()
    kernel = compiled(GATHER, tuple(options(shape, row_bytes, every)))
    written = table.new_empty(len(indices) // every if every else 0, table.shape[1])
    sms = torch.cuda.get_device_properties(table.device).multi_processor_count
    # The address of an empty tensor is null.
    checksum = torch.empty(0, dtype=torch.int32, device=table.device) if checksum is None else checksum
    grid = (sms * shape.blocks * shape.waves, 1, 1)
    kernel(grid=grid, block=(THREADS, 1, 1), args=[table, indices, len(indices), checksum, written])
    return written


def fastest_shape(
    requests: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    every: int = 0,
) -> tuple[Shape, float]:
    """Returns the fastest shape for these (table, indices), gathered one after another, and its seconds.

    `every`: the rows to write.
    """

    def gather_all(shape: Shape) -> None:
        for table, indices in requests:
            gather(shape, table, indices, every=every)

    graphs = {str(shape): timing.graphed(lambda s=shape: gather_all(s), device) for shape in shapes}
    result = timing.compare(graphs, rounds=7, min_time=1e-3, device=device, progress=False)
    best = result.fastest(graphs)
    return next(shape for shape in shapes if str(shape) == best), result[best].median


def copy_speed(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read and written together, of a copy of `size` bytes on the device."""
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    copies: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "kernel": lambda: torch.neg(source, out=target),
    }
    result = timing.compare(copies, rounds=9, device=device, progress=False)
    return 2 * source.nbytes / min(timing_.median for timing_ in result.timings.values())
