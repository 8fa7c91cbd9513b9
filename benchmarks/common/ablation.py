"""Ablations: a call with a part of a family and without it, in turns.

A part of more than 150 lines is kept if it gains 5 % in its best published cell.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from common.measure import measure
from common.registry import Benchmark
from common.report import Figure, Row
from common.settings import Setting, fail
from common.table import Table, times

WITH = "as shipped"
NAME = "ablation"
_SMALLER = 1000  # sizes with --quick


@dataclass
class Cell:
    """A cell of a page, with the calls that are compared.

    Attributes:
        parts: the part that each run except `WITH` omits: a file, a folder or a path.
        runs: `WITH` and others, which take an element of `inputs`.
        error_of: returns the error of the output of a run.
        first: returns the outputs to compare; None: each run on the first input.
    """

    label: str
    parts: Mapping[str, str]
    runs: Mapping[str, Callable[[Any], Any]]
    inputs: Sequence[Any]
    error_of: Callable[[str, Any], float]
    allowed: float
    first: Mapping[str, Callable[[], Any]] | None = None


def sized(setting: Setting, size: int) -> int:
    """Returns a size, or a small size with `--quick`."""
    return max(size // _SMALLER, 2) if setting.arguments.quick else size


def ablation(bench: Benchmark) -> Callable[[Callable[[Any], Iterator[Cell]]], Any]:
    """Registers the figure `ablation` of a family: a table with a row for each part and cell."""

    def register(cells: Callable[[Any], Iterator[Cell]]) -> Callable[[Any], Figure]:
        return bench.figure(NAME, on=["cuda"], default=None)(lambda setting: _figure(setting, cells(setting)))

    return register


def _figure(setting: Setting, cells: Iterator[Cell]) -> Figure:
    rounds, record = setting.arguments.rounds, {}
    table = Table(
        f"Parts: µs as a CUDA graph (median ± IQR of {rounds})",
        ["part", "cell", WITH, "alternative", "µs of the alternative", "speedup by the part"],
    )
    for cell in tqdm(cells, desc=NAME, leave=False):
        row = measure(
            cell.label,
            cell.runs,
            cell.inputs,
            setting,
            cell.error_of,
            cell.allowed,
            first=cell.first,
            eager=False,
        )
        if WITH not in row.record["relative_error"]:
            fail(setting.parser, f"{cell.label}: recfuse does not run: {row.notes}")
        for cells_of_row in _rows(cell, row):  # at once: a run that is cut short has shown them
            tqdm.write(" | ".join(cells_of_row), file=sys.stderr)
            table.rows.append(cells_of_row)
        table.notes += row.notes
        record[cell.label] = row.record
        del cell
        gc.collect()  # modules and graphs hold each other
        setting.release()
    return Figure([table], {}, record)


def _rows(cell: Cell, row: Row) -> list[list[str]]:
    """Returns µs with a part, µs without it, and the gain."""
    return [
        [cell.parts[name], cell.label, row.cell(WITH), name, row.cell(name), times(row.ratio(WITH, name))]
        for name in cell.runs
        if name != WITH and row.ratio(WITH, name) is not None
    ]
