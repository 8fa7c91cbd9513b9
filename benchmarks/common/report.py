"""Reports of benchmarks: comparisons by row, figures, plots and result files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.plots import TIMES_FASTER, draw_panels, machine
from common.table import Table
from recfuse import timing

# title -> series -> label on the axis -> how many times faster
Panels = dict[str, dict[str, dict[str, float]]]


@dataclass
class Figure:
    """A figure: the text to print, the panels to plot and the record for the JSON file."""

    tables: list[Table]
    panels: Panels
    record: Any
    lines: str = ""  # name of the axis, if its labels are numbers and lines join the points
    unit: str = TIMES_FASTER  # of the values in panels
    name: str = ""  # key in the JSON file; default: the figure's function
    plot: str = ""  # name of the plot; default: from the benchmark and the figure


@dataclass
class Row:
    """The measurements of one subject; the record goes into the JSON file."""

    label: str
    result: timing.Comparison
    record: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    unit = 1  # tables or calls that a sample of the comparison counts for
    digits = 1

    def us(self, name: str) -> float:
        """Microseconds."""
        return self.result[name].median * 1e6 / self.unit

    def cell(self, name: str) -> str:
        """Returns median and spread in µs, or a dash."""
        if name not in self.result.timings:
            return "-"
        spread = self.result[name].iqr * 1e6 / self.unit
        return f"{self.us(name):.{self.digits}f} ± {spread:.{self.digits}f}"

    def ratio(self, name: str, baseline: str) -> float | None:
        """Returns how many times faster; None if either was not measured."""
        both = {name, baseline} <= set(self.result.timings)
        return self.result.ratio(name, baseline) if both else None


def load_notes(comparisons: Iterable[timing.Comparison]) -> list[str]:
    """Returns a warning if other processes used at least a tenth of a core during a measurement."""
    loudest = max(comparisons, key=lambda comparison: comparison.other_load or 0.0, default=None)
    return [loudest.disturbance] if loudest is not None and loudest.disturbance else []


def write_results(
    path: Path | None, tables: Sequence[Table], results: dict[str, Any], device: str | torch.device = "cpu"
) -> None:
    """Writes `results`, the printed tables and the environment as JSON, if a path was given."""
    if path is None:
        return
    record = {
        "environment": timing.environment(device),
        "tables": [vars(table) for table in tables],
        **results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def texts(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the command line in the form of result files."""
    return {name: str(value) for name, value in vars(arguments).items()}


class Report:
    """Shows the results of each part as they arrive, and rewrites the file after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        self._arguments = arguments
        self._tables: list[Table] = []
        self._results: dict[str, Any] = {"arguments": texts(arguments)}

    def add(self, name: str, tables: list[Table], record: Any) -> None:
        """Show the tables of a part and write everything so far."""
        for table in tables:
            table.show(self._arguments.markdown)
        self._tables += tables
        # A round trip through JSON detects values that a file cannot hold, and copies.
        self._results[name] = json.loads(json.dumps(record))
        write_results(self._arguments.json, self._tables, self._results, self._arguments.device)

    def add_figure(self, name: str, figure: Figure, plot: str) -> None:
        """Adds a figure, plotted as `plot`.png if --plots is given and it has panels."""
        self.add(name, figure.tables, figure.record)
        folder, device = getattr(self._arguments, "plots", None), self._arguments.device
        if folder is not None and figure.panels:
            title, path = f"{plot.replace('_', ' ')}: {figure.unit}", folder / f"{plot}.png"
            plot_ratios(path, figure.panels, figure.lines, figure.unit, title, device)


def plot_ratios(
    path: Path,
    panels: Panels,
    lines: str = "",
    unit: str = TIMES_FASTER,
    title: str = "",
    device: str = "cpu",
) -> None:
    """Draws panels as a PNG: grouped bars of ratios, or lines over `lines`."""
    draw_panels(path, panels, title=title, note=machine(timing.environment(device)), lines=lines, unit=unit)
