"""The launches of a call: facts of each kernel, and their table."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from recfuse import _C
from recfuse._lowering import Kernel, compile_kernels, kernel_of, kernels_of

_UNITS = ("", "k", "M", "G", "T", "P")
_COLUMNS = (
    "operator", "kernel", "grid", "threads", "shared", "registers", "blocks/SM", "waves",
    "read", "written", "FLOPs", "bound", "cached",
)  # fmt: skip
_RECORDED = (
    "operator", "call", "kernel", "file", "defines", "grid", "block", "cluster", "dynamic_shared",
    "read_bytes", "written_bytes", "flops", "tensor_flops",
)  # fmt: skip
_LAUNCH_SECONDS = 2e-6  # from the end of a kernel to the start of the next on the same stream


@dataclass(frozen=True)
class Launch:
    """A kernel of a call, or a fill of memory with zeros.

    Attributes:
        operator: the operator that launches it, such as ``"embedding_bag"``.
        call: number of the call that it belongs to, from 0.
        kernel: name of the kernel, as profilers show it; ``"fill"`` for a fill.
        file: its source under ``recfuse/kernels``; None for a fill.
        defines: the ``-D`` options that it is compiled with.
        grid, block, cluster: blocks, threads, and blocks of a cluster, in x, y and z.
        shared_bytes: dynamic shared memory of a block.
        dynamic_shared: dynamic shared memory that the kernel is loaded with.
        read_bytes, written_bytes: the least traffic: each row of a table counts at most once.
        flops, tensor_flops: operations in float32, and on tensor cores.
        registers, spill_bytes: of a thread, as the compiler says; None if it is not compiled.
        cached: whether the kernel is in the cache on disk.
        blocks_per_sm: blocks that an SM runs at once; None if it is not compiled.
        waves: the grid over all blocks that the GPU runs at once; None if it is not compiled.
        bound: ``"memory"``, ``"compute"`` or ``"launch"``: the limit that takes longest at the GPU's rates.
        bound_seconds: the least time of this limit.
    """

    operator: str
    call: int
    kernel: str
    file: str | None
    defines: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared: int
    read_bytes: int
    written_bytes: int
    flops: float
    tensor_flops: float
    registers: int | None
    spill_bytes: int | None
    cached: bool
    blocks_per_sm: int | None
    waves: float | None
    bound: str
    bound_seconds: float

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)


class Launches(Sequence[Launch]):
    """The launches of a call in their order. Prints as a table; notebooks show it as a table.

    Attributes:
        gpu: facts of the GPU, such as ``gpu["sms"]``; empty without launches.
        workspace_bytes: device memory that the largest call takes while it runs.
    """

    def __init__(self, recorded: Sequence[Mapping[str, Any]]) -> None:
        """Take the records of `_C.explain_end`."""
        self._recorded = recorded
        cached = {kernel: _C.kernel_compile(*kernel, True) for kernel in self.kernels()}
        self._launches = tuple(_launch_of(record, cached.get(kernel_of(record))) for record in recorded)
        self.gpu: dict[str, Any] = recorded[0]["gpu"] if recorded else {}
        self.workspace_bytes: int = max((record["workspace_bytes"] for record in recorded), default=0)

    @overload
    def __getitem__(self, at: int) -> Launch: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Launch]: ...
    def __getitem__(self, at: int | slice) -> Launch | Sequence[Launch]:
        """A launch, or several."""
        return self._launches[at]

    def __len__(self) -> int:
        """The number of launches."""
        return len(self._launches)

    @property
    def bound_seconds(self) -> float:
        """Sum of the launches' bounds."""
        return sum(launch.bound_seconds for launch in self)

    def kernels(self) -> list[Kernel]:
        """Return the distinct kernels: architecture, file, name, ``-D`` options."""
        return kernels_of(self._recorded)

    def compile(self) -> Launches:
        """Compile the kernels into the cache and return the launches with the compiler's facts.

        Raises:
            NotImplementedError: there is no compiler, or ``RECFUSE_JIT=off`` forbids it.
        """
        compile_kernels(self._recorded)
        return Launches(self._recorded)

    def __str__(self) -> str:
        """Format a table with a line per launch."""
        if not self:
            return "no launches: the call has nothing to do, or runs outside of recfuse"
        rows = [_COLUMNS, *(_row(launch) for launch in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[:2] = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            lines.append("  ".join(cells).rstrip())
        total = f"{_time(self.bound_seconds)} at least; workspace {_amount(self.workspace_bytes)}B"
        return "\n".join([f"{self.gpu['name']} ({self.gpu['arch']}, {self.gpu['sms']} SMs)", *lines, total])

    def _repr_html_(self) -> str:
        """Format the table for notebooks."""

        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        if not self:
            return html.escape(str(self))
        body = line(_COLUMNS, "th") + "".join(line(_row(launch), "td") for launch in self)
        return f"<table><caption>{html.escape(self.gpu['name'])}</caption>{body}</table>"


def _launch_of(record: Mapping[str, Any], compiled: Mapping[str, Any] | None) -> Launch:
    """Return a launch with the facts of its compiled kernel; None: the kernel is not in the cache."""
    gpu = record["gpu"]
    registers = compiled["registers"] if compiled else None
    threads, shared, blocks_per_sm, waves = math.prod(record["block"]), record["shared_bytes"], None, None
    if registers is not None and registers > 0 and threads > 0:
        facts = [gpu[name] for name in ("registers_per_sm", "shared_per_sm", "reserved_shared_per_block",
                                        "threads_per_sm", "blocks_per_sm")]  # fmt: skip
        if (
            record["limiting_shared_bytes"]
            and _C.occupancy(*facts, registers, threads, 0) > record["most_blocks"]
        ):
            shared = record["limiting_shared_bytes"]
        blocks_per_sm = _C.occupancy(*facts, registers, threads, compiled["shared_bytes"] + shared)
        if blocks_per_sm:
            waves = math.prod(record["grid"]) / (blocks_per_sm * gpu["sms"])
    bound, seconds = _bound(record, gpu)
    return Launch(
        **{name: record[name] for name in _RECORDED},
        shared_bytes=shared,
        registers=registers,
        spill_bytes=compiled["spill_bytes"] if compiled else None,
        cached=compiled is not None or record["file"] is None,
        blocks_per_sm=blocks_per_sm,
        waves=waves,
        bound=bound,
        bound_seconds=seconds,
    )


def _bound(record: Mapping[str, Any], gpu: Mapping[str, Any]) -> tuple[str, float]:
    """Return the limit that takes longest at the GPU's rates, and its seconds."""

    def over(amount: float, rate: float) -> float:
        return amount / rate if rate > 0 else 0.0

    cycles = gpu["sms"] * gpu["clock"]
    times = {
        "memory": over(record["read_bytes"] + record["written_bytes"], gpu["bytes_per_second"]),
        "compute": over(record["flops"], cycles * gpu["flops_per_clock"])
        + over(record["tensor_flops"], cycles * gpu["tensor_flops_per_clock"]),
        "launch": _LAUNCH_SECONDS,
    }
    name = max(times, key=lambda name: times[name])
    return name, times[name]


def _amount(value: float) -> str:
    """Format a number in three digits with a prefix: 12.3M."""
    unit = 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    return f"{value:.3g}{_UNITS[unit]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _sizes(sizes: Sequence[int]) -> str:
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return " x ".join(f"{size:,}" for size in sizes)


def _row(launch: Launch) -> tuple[str, ...]:
    def or_dash(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    cluster = "" if math.prod(launch.cluster) == 1 else f" in {_sizes(launch.cluster)}"
    return (
        launch.operator,
        launch.kernel,
        _sizes(launch.grid) + cluster,
        str(launch.threads),
        f"{launch.shared_bytes:,}",
        or_dash(launch.registers),
        or_dash(launch.blocks_per_sm),
        or_dash(launch.waves, ".1f"),
        _amount(launch.read_bytes) + "B",
        _amount(launch.written_bytes) + "B",
        _amount(launch.flops + launch.tensor_flops),
        f"{launch.bound} {_time(launch.bound_seconds)}",
        "yes" if launch.cached else "no",
    )
