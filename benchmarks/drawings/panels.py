"""Panels of plots from the tables of result files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from common.plots import TIMES_FASTER, Draw, Panels, draw_panels, machine
from common.results import RESULTS, find_table, read_runs
from common.table import Table

NUMBER = re.compile(r"\d[\d,.]*(?:e-\d+)?")
RESULTS_PATH = "benchmarks/results"
MEANS = "geometric mean"


def value(cell: str, part: int = 1) -> float | None:
    """Returns the figure of a cell, or its `part`th; None if it has no figure."""
    numbers = NUMBER.findall(cell)
    return float(numbers[part - 1].replace(",", "")) if len(numbers) >= part else None


def by_rows(table: Table, rows: str = "", columns: str = "", part: int = 1) -> dict[str, dict[str, float]]:
    """Returns a series per row, whose labels are the columns. `rows`, `columns`: expressions that select."""
    series: dict[str, dict[str, float]] = {}
    for row in table.rows:
        cells = dict(zip(table.columns[1:], row[1:], strict=True))
        kept = {name: value(cell, part) for name, cell in cells.items() if re.search(columns, name)}
        if re.search(rows, row[0]) and any(each is not None for each in kept.values()):
            series[row[0]] = {name: each for name, each in kept.items() if each is not None}
    return series


def by_columns(
    table: Table, columns: Mapping[str, str], rows: str = "", part: int = 1
) -> dict[str, dict[str, float]]:
    """Returns a series per column, whose labels are the rows. `columns`: column -> name of its series."""
    return {
        shown: {
            row[0]: number
            for row in table.rows
            if row[0] != MEANS
            and re.search(rows, " ".join(row[:2]))
            and (number := value(row[list(table.columns).index(column)], part)) is not None
        }
        for column, shown in columns.items()
    }


def over(series: Mapping[str, Mapping[str, float]], name: str) -> dict[str, dict[str, float]]:
    """Returns the ratios of the other series to the series `name`."""
    base = series[name]
    return {
        each: {label: base[label] / time for label, time in values.items()}
        for each, values in series.items()
        if each != name
    }


def renamed(
    series: Mapping[str, Mapping[str, float]], pattern: str, to: str = ""
) -> dict[str, dict[str, float]]:
    """Renames labels."""
    return {
        name: {re.sub(pattern, to, label): each for label, each in values.items()}
        for name, values in series.items()
    }


def picture(
    file: str,
    title: str,
    panels: Callable[[], Panels],
    *,
    words: str = "",
    lines: str = "",
    unit: str = TIMES_FASTER,
    logarithmic: bool = False,
    columns: int = 2,
) -> Draw:
    """Returns a function that draws the panels. `file`: its machine is printed at the bottom. `words`:
    explanations of names."""
    looks = {"lines": lines, "unit": unit, "logarithmic": logarithmic, "columns": columns}

    def draw(path: Path) -> None:
        note = f"{machine(read_runs(RESULTS / file)[0]['environment'])} {words}".strip()
        draw_panels(path, panels(), title=title, note=note, **looks)

    return draw


def table_of(file: str, title: str, number: int = 1) -> Callable[[], Table]:
    """Returns a function that reads the table."""
    return lambda: find_table(file, title, number)
