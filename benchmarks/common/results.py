"""Result files: the runs that they hold, and their tables."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from common.table import Table

RESULTS = Path(__file__).resolve().parents[1] / "results"


@functools.cache
def read_runs(path: Path) -> list[dict[str, Any]]:
    """Returns the runs of a result file, which holds a run or a list of runs; ValueError otherwise."""
    try:
        record = json.loads(path.read_text())
        runs = record if isinstance(record, list) else [record]
        for run in runs:
            run["environment"]["command"], [Table(**table) for table in run["tables"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no result file of these benchmarks ({error})") from None
    return runs


def find_table(name: str, title: str, number: int = 1) -> Table:
    """Returns the `number`th table with this prefix of the title from each run of results/NAME, the rows
    of all runs joined."""
    tables = []
    for run in read_runs(RESULTS / name):
        alike = [table for table in run["tables"] if table["title"].startswith(title)]
        if len(alike) < number:
            raise ValueError(f"{name}: has no table {number} whose title begins with {title!r}")
        tables.append(alike[number - 1])
    return Table(tables[0]["title"], tables[0]["columns"], [row for table in tables for row in table["rows"]])


def select(table: Table, columns: list[str] | None = None, rows: str = "") -> Table:
    """Returns a part of a table: the first column and `columns`, and the rows in whose first two cells
    `rows` is found."""
    chosen = [table.columns[0], *(columns or table.columns[1:])]
    if missing := set(chosen) - set(table.columns):
        raise ValueError(f"{table.title!r} has columns {table.columns}; expected {sorted(missing)}")
    numbers = [table.columns.index(column) for column in chosen]
    rows_kept = [row for row in table.rows if re.search(rows, " ".join(row[:2]))]
    return Table(table.title, chosen, [[row[number] for number in numbers] for row in rows_kept])
