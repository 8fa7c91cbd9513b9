"""What the benchmarks share: flags, tables on the terminal or in Markdown, and result files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

from recfuse import timing


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, needs an integer of at least 1")
    return value


def dashed(text: str) -> list[int]:
    """An argparse type: positive integers joined by dashes, such as 512-256-64."""
    return [positive(part) for part in text.split("-")]


def comma_list(text: str) -> list[str]:
    """An argparse type: names or numbers joined by commas, such as A,B,C."""
    return [part.strip() for part in text.split(",") if part.strip()]


def add_arguments(parser: argparse.ArgumentParser, rounds: int | None = None) -> None:
    """Add the flags that every benchmark has; `--rounds` only where a default is given."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--threads", type=positive, help="threads of every candidate (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every sample")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--seed", type=int, default=0, help="of tables and inputs (default: 0)")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, help=f"samples of each candidate (default: {rounds})"
        )


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmarks that compare one operator with its peers."""
    parser.add_argument(
        "--num-batches", type=positive, default=4, help="batches to rotate through (default: 4)"
    )
    parser.add_argument("--cache", choices=["warm", "cold"], default="warm", help="default: warm")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the ratios as a PNG")


def start(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the shared flags and apply them; ends the program where one cannot be met."""
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no GPU; run with --device cpu")
    if arguments.seed < 0:
        parser.error(f"--seed: found {arguments.seed}, needs an integer of at least 0")
    check_folder(parser, "--json", arguments.json)
    check_plot(parser, getattr(arguments, "plot", None))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)


def check_folder(parser: argparse.ArgumentParser, flag: str, path: Path | None) -> None:
    """End the program, before it measures, where a result file could not be written."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        parser.error(f"{flag} {path}: {path.parent} is not a folder that can be written to")


def check_plot(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End the program, before it measures, where a plot could not be drawn."""
    check_folder(parser, "--plot", path)
    if path is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            parser.error(f"--plot: {error}; pip install matplotlib, which the extra recfuse[bench] brings")


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the program with status 1: the benchmark ran and found something wrong."""
    print(f"{parser.prog}: {message}", file=sys.stderr)
    raise SystemExit(1)


def largest_difference(candidates: Mapping[str, Callable[[Any], Tensor]], batch: Any, baseline: str) -> float:
    """Largest difference of any candidate's output from the baseline's, relative to the largest value."""
    expected = candidates[baseline](batch)
    differences = [(run(batch) - expected).abs().max() for run in candidates.values()]
    # torch's max keeps a NaN, Python's may lose it.
    return (torch.stack(differences).max() / expected.abs().max().clamp(min=1e-30)).item()


def check_agreement(parser: argparse.ArgumentParser, differences: Sequence[float], allowed: float) -> None:
    """End the program with status 1 where a difference exceeds `allowed` or is not a number."""
    if not all(difference <= allowed for difference in differences):
        fail(parser, f"the outputs do not agree: the largest difference above exceeds {allowed}")


@dataclass
class Table:
    """A table of strings with a title and notes below it."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.columns) + " |"]
        lines += ["| --- |" + " ---: |" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += [""] + [f"{note}  " for note in self.notes] if self.notes else []
        return "\n".join(lines) + "\n"

    def show(self, markdown: bool = False) -> None:
        """Print for a terminal, or in Markdown."""
        if markdown:
            print(self.markdown())
            return
        table = RichTable(box=box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        # Where output goes to a file there is no width to fit.
        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
        console.print(self.title)
        console.print(table)
        for note in self.notes:
            console.print(note)


def milliseconds(timing_: timing.Timing) -> str:
    """The median and, after it, the distance between the quartiles."""
    return f"{timing_.median * 1e3:.2f} ± {timing_.iqr * 1e3:.2f}"


def load_notes(comparisons: Iterable[timing.Comparison]) -> list[str]:
    """A warning where other processes used a tenth of a core or more while something was measured."""
    load = max((comparison.other_load or 0.0 for comparison in comparisons), default=0.0)
    if load < 0.1:
        return []
    return [
        f"Not a quiet machine: other processes kept up to {load:.1f} cores busy. A loop of parallel "
        "operators suffers from that most of all; measure again."
    ]


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def write_results(
    path: Path | None, tables: Sequence[Table], results: dict[str, Any], device: str | torch.device = "cpu"
) -> None:
    """Write `results`, the tables as shown and the environment as JSON, where a path was given."""
    if path is None:
        return
    record = {
        "environment": timing.environment(device),
        "tables": [vars(table) for table in tables],
        **results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot_ratios(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]], lines: str = "") -> None:
    """A PNG: panel title -> series -> place -> how many times faster; grouped bars, or lines over `lines`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False, sharey=True)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        width = 0.8 / len(series)
        for number, (label, ratios) in enumerate(series.items()):
            if lines:
                axis.plot([float(place) for place in ratios], list(ratios.values()), marker="o", label=label)
                continue
            places = [place + number * width for place in range(len(ratios))]
            axis.bar(places, list(ratios.values()), width, label=label)
            axis.set_xticks([place + 0.4 - width / 2 for place in range(len(ratios))], list(ratios))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=title, xlabel=lines)
        axis.margins(y=0.25)  # room for the legend
        axis.legend(fontsize="small", ncols=2)
    axes[0][0].set_ylabel("times faster")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
