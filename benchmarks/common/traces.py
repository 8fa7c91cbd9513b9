"""Traces of tables: from a file, generated at a level of hotness, or a mix of levels."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recfuse.data import traces

# Table VII of Jain et al. (MICRO'24): tables of each hotness, of 250.
MIXES = {
    "mix1": {"high": 100, "medium": 75, "low": 50, "random": 25},
    "mix2": {"high": 62, "medium": 63, "low": 63, "random": 62},
    "mix3": {"high": 25, "medium": 50, "low": 75, "random": 100},
}


def mix_levels(name: str, tables: int) -> list[str]:
    """Returns the hotness of each of `tables` tables, in the shares of a mix, with each level evenly
    spread."""
    spread: list[tuple[float, str]] = []
    seen, total = 0, sum(MIXES[name].values())
    for level, share in MIXES[name].items():
        # Rounded ends, so that the counts add up to `tables`.
        first, seen = seen, seen + share
        count = round(tables * seen / total) - round(tables * first / total)
        spread += [((number + 0.5) / count, level) for number in range(count)]
    return [level for _, level in sorted(spread)]


def read_traces(parser: argparse.ArgumentParser, path: Path) -> list[NDArray[np.int64]]:
    """Returns the rows of each table of a trace file that has any; ends the program if no table has."""
    try:
        return [table.indices for table in traces.read_tables(path) if len(table.indices)]
    except (OSError, ValueError) as error:
        parser.error(f"--trace {path}: {error}")


def check_rows(parser: argparse.ArgumentParser, path: Path, trace: NDArray[np.int64], rows: int) -> None:
    """End the program where a trace reads rows that a table does not have."""
    if trace.max() >= rows:
        parser.error(
            f"--trace {path}: index {trace.max()} is outside a table of {rows} rows. "
            f"Make every table of at least {trace.max() + 1} rows."
        )


def table_traces(
    parser: argparse.ArgumentParser, text: str, rows: list[int], seed: int
) -> list[NDArray[np.int64]]:
    """Returns a trace for each table of `rows`: generated at the hotness level `text`, or from the file
    `text`.

    The tables of the file are assigned in turn; tables that share a trace start at positions spread over it.
    """
    if text in traces.HOTNESS:
        return [traces.generate(text, rows=count, seed=seed + table) for table, count in enumerate(rows)]
    path = Path(text)
    if not path.is_file():
        parser.error(
            f"--trace: found {text}; expected a file or a hotness level ({', '.join(traces.HOTNESS)})"
        )
    sources = read_traces(parser, path)
    shared_by = -(-len(rows) // len(sources))
    dealt = []
    for table, count in enumerate(rows):
        trace = sources[table % len(sources)]
        check_rows(parser, path, trace, count)
        dealt.append(np.roll(trace, -(table // len(sources) * len(trace) // shared_by)))
    return dealt
