"""Seconds of recfuse's pass for a graph of many columns, without torch.compile's own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import recfuse
from common.report import Figure
from common.settings import Setting
from common.table import Table
from passes import bench


class Columns(nn.Module):
    """Columns of three kinds: bucketized floats, remainders, integers that are clamped."""

    def __init__(self, columns: int) -> None:
        """Small tables, because only the graph matters."""
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11 + number % 7, 4) for number in range(columns))
        self.requires_grad_(False)

    def forward(self, floats: Tensor, integers: Tensor) -> Tensor:
        """[batch, columns] each to [batch, 4 * columns]."""
        outputs = []
        for number, table in enumerate(self.tables):
            rows = table.num_embeddings
            if number % 3 == 0:
                boundaries = torch.tensor([0.1 * step for step in range(rows - 1)])
                index = torch.bucketize(floats[:, number].clamp(0, 1), boundaries)
            elif number % 3 == 1:
                index = (integers[:, number] % rows).clamp(0, rows - 1)
            else:
                index = integers[:, number].clamp(0, rows - 1)
            outputs.append(table(index))
        return torch.cat(outputs, 1)


@bench.figure("pass")
def figure_pass(setting: Setting) -> Figure:
    """Seconds of the pass over a graph that torch.compile has captured, and over an exported program."""
    columns = setting.arguments.columns
    torch.manual_seed(setting.arguments.seed)
    model = Columns(columns).eval()

    def batch_of(samples: int) -> tuple[Tensor, Tensor]:
        return torch.rand(samples, columns), torch.randint(0, 10**6, (samples, columns))

    spent: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin, processor = time.perf_counter(), time.process_time()
        result = work()
        spent[name] = time.perf_counter() - begin
        spent[f"{name}, processor"] = time.process_time() - processor
        return result

    backend = recfuse.backend("eager")
    torch.compiler.reset()

    def compile_with(module: Any, inputs: Any) -> Any:
        return timed("recfuse.backend()", lambda: backend(module, inputs))

    with torch.no_grad():
        compiled = torch.compile(model, backend=compile_with, fullgraph=True, dynamic=True)
        timed("torch.compile with recfuse.backend()", lambda: compiled(*batch_of(32)))
        for samples in (256, 2048):
            compiled(*batch_of(samples))
        batch = torch.export.Dim("batch", min=2)
        options: Any = {"dynamic_shapes": ({0: batch}, {0: batch}), "strict": False}
        program = timed("torch.export", lambda: torch.export.export(model, batch_of(64), **options))
        timed("recfuse.swap(program)", lambda: recfuse.swap(program))
    table = Table(f"pass over {columns} columns", ["step", "seconds", "CPU seconds"])
    for name in [name for name in spent if not name.endswith(", processor")]:
        table.rows.append([name, f"{spent[name]:.1f}", f"{spent[f'{name}, processor']:.1f}"])
    swapped = len(backend.reports[-1].found("columns"))
    table.notes.append(
        f"Columns swapped: {swapped}. Graphs for batches of 32, 256 and 2,048: {len(backend.reports)}."
    )
    return Figure([table], {}, {**spent, "graphs": len(backend.reports)})
