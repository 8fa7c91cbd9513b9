"""The style of all plots: panels of bars or lines, a title that names the baseline, the machine at the
bottom."""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.table import readable

# title -> series -> label on the axis -> value
Panels = Mapping[str, Mapping[str, Mapping[str, float]]]

TIMES_FASTER = "times faster"
DPI = 110
DIGEST = "Description"  # metadata key of the data from which a picture was drawn
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "recfuse",
}
# A contestant has the same colour in every plot: torch grey, FBGEMM orange, others blue and violet, recfuse
# green.
_COLOURS = {
    **dict.fromkeys(("torch", "nn.EmbeddingBag", "varlen_attn", "best torch"), "#9a9a9a"),
    **dict.fromkeys(("torch.compile", "concatenated"), "#c4c4c4"),
    **dict.fromkeys(("torch fp16", "broadcast + concat"), "#6f6f6f"),
    **{"fbgemm v1": "#f2c185", "fbgemm v2": "#dd7a1f", "Triton": "#4a7fb5", "packed cuDNN": "#2f4b7c"},
    **{
        "FA3 varlen": "#7d5ba6",
        "FA3 batch": "#b39bd0",
        "FA3 varlen joined": "#b39bd0",
        "gather or copy": "#3d3d3d",
    },
    **{"recfuse": "#1b7f5c", "recfuse fp16": "#0d4d37", "recfuse bf16": "#a5d6c3"},
    **dict.fromkeys(("recfuse tuned", "recfuse+L2P", "recfuse two calls", "recfuse jagged"), "#66b597"),
    **{"one_item": "#b5485d", "high": "#dd7a1f", "medium": "#a08c3a", "low": "#5aa9a0", "random": "#2f4b7c"},
}
_REST = (
    "#4a7fb5",
    "#7d5ba6",
    "#b5485d",
    "#a08c3a",
    "#5aa9a0",
    "#6f6f6f",
    "#c98bb0",
    "#2f4b7c",
    "#dd7a1f",
    "#1b7f5c",
)
_MARKERS = "os^Dvp"
_WIDTH, _ALONE = 10.4, 7.0  # width in inches of several panels, and of a single panel
_MOST_VALUES, _MOST_LONG_VALUES = 20, 18  # bars of a panel that carry their value; with two decimals
_LABELS, _LEGEND, _TITLE, _NOTE = 9.5, 11, 9.6, 15.5  # characters an inch


@contextmanager
def drawn(path: Path, data: Any) -> Iterator[Any]:
    """matplotlib.pyplot in this project's style; the current figure is written to `path` and closed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    about = {DIGEST: digest(data)} | _undated(path)
    with plt.rc_context(_STYLE):
        yield plt
        plt.savefig(path, dpi=DPI, bbox_inches="tight", metadata=about)
        plt.close()


def digest(data: Any) -> str:
    """Returns a hash of the data that a picture shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def _undated(path: Path) -> dict[str, None]:
    return {"Date": None} if path.suffix == ".svg" else {"Software": None}


def name_of(text: str) -> str:
    """Returns the display name of a contestant."""
    return re.sub(r"\bfbgemm\b", "FBGEMM", readable(text))


def colours(names: Mapping[str, Any]) -> dict[str, str]:
    """Returns a different colour for each name."""
    known = {name: name.removeprefix("over ") for name in names}
    colour_of = {name: _COLOURS[known[name]] for name in names if known[name] in _COLOURS}
    free = (colour for colour in _REST if colour not in colour_of.values())
    return {name: colour_of.get(name) or next(free, "#000000") for name in names}


def draw_panels(
    path: Path,
    panels: Panels,
    *,
    title: str,
    note: str,
    lines: str = "",
    unit: str = TIMES_FASTER,
    logarithmic: bool = False,
    columns: int = 2,
) -> None:
    """Draws grouped bars, or lines over `lines` if the labels of an axis are numbers.

    `columns`: panels in a row.
    """
    with drawn(path, [panels, title, note, lines, unit]) as plt:
        columns = min(columns, len(panels))
        rows = math.ceil(len(panels) / columns)
        width = _WIDTH / columns if len(panels) > 1 else _ALONE
        size = (width * columns, 3.4 * rows)
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        names = {name: None for series in panels.values() for name in series}
        colour = colours(names)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        used = list(axes.flat[: len(panels)])
        for axis, (heading, series) in zip(used, panels.items(), strict=True):
            if lines:
                _draw_lines(axis, series, colour)
                axis.set_xlabel(lines)
            else:
                _draw_bars(axis, series, colour, width)
            if unit.startswith(TIMES_FASTER):
                axis.axhline(1, color="black", linewidth=0.9)
            axis.set_title(name_of(heading))
            axis.tick_params(labelleft=True)
        if logarithmic:
            used[0].set_yscale("log")
        else:
            highest = max(each for series in panels.values() for v in series.values() for each in v.values())
            used[0].set_ylim(0, 1.06 * (max(highest, 1) if unit.startswith(TIMES_FASTER) else highest))
        for row in axes:
            row[0].set_ylabel(unit)
        finish(figure, title, note, legend=len(names) > 1)


def _draw_lines(axis: Any, series: Mapping[str, Mapping[str, float]], colour: Mapping[str, str]) -> None:
    for number, (name, values) in enumerate(series.items()):
        marker = _MARKERS[number % len(_MARKERS)] if len(values) <= 12 else None
        points = list(map(float, values)), list(values.values())
        axis.plot(*points, marker=marker, markersize=4.5, color=colour[name], label=name_of(name))


def _draw_bars(
    axis: Any, series: Mapping[str, Mapping[str, float]], colour: Mapping[str, str], inches: float
) -> None:
    fullest = sorted(series.values(), key=len, reverse=True)  # it has the labels in their order
    labels = list(dict.fromkeys(label for values in fullest for label in values))
    width, bars = 0.84 / len(series), sum(map(len, series.values()))
    for number, (name, values) in enumerate(series.items()):
        lefts = [labels.index(label) + number * width for label in values]
        drawn_bars = axis.bar(
            lefts, list(values.values()), width * 0.94, color=colour[name], label=name_of(name)
        )
        if bars <= _MOST_VALUES:
            texts = [_short(value, bars <= _MOST_LONG_VALUES) for value in values.values()]
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.3}
            axis.bar_label(drawn_bars, texts, fontsize=7.5, padding=1.5, bbox=box)
    widest = max(len(line) for label in labels for line in label.split("\n"))
    turned = (widest + 1) * len(labels) > _LABELS * inches
    options = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    axis.set_xticks([at + 0.42 - width / 2 for at in range(len(labels))], labels, fontsize=9, **options)
    axis.grid(axis="x", visible=False)


def _short(value: float, exact: bool) -> str:
    return f"{value:.0f}" if value >= 30 else f"{value:.2f}" if exact else f"{value:.1f}"


def finish(figure: Any, title: str, note: str, legend: bool = True) -> None:
    """Adds a legend above the panels, the title above it, and the machine and the explanations at the
    bottom."""
    inches, top = figure.get_size_inches()[0], 1.0
    if legend:
        handles: dict[str, Any] = {}
        for axis in figure.axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        room = inches * _LEGEND
        level = sum(len(label) + 5 for label in handles) <= room
        beside = len(handles) if level else max(2, int(room / (max(map(len, handles)) + 5)))
        options = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "fontsize": 9.5}
        shown = figure.legend(handles.values(), handles, ncols=beside, **options)
        figure.draw_without_rendering()  # computes its height
        top = shown.get_window_extent().y1 / figure.bbox.height
    heading = "\n".join(textwrap.wrap(title, int(inches * _TITLE)))
    figure.text(0.5, top + 0.01, heading, fontsize=12, fontweight="bold", ha="center", va="bottom")
    below = "\n".join(textwrap.wrap(note, int(inches * _NOTE)))
    figure.text(0.01, -0.01, below, fontsize=8.5, color="#555555", va="top")


def machine(environment: Mapping[str, Any]) -> str:
    """Returns the line at the bottom of a plot: machine and versions."""
    machine_name = environment.get("gpu") or f"{environment['cores']} cores of {environment['cpu']}"
    versions = [f"torch {environment['torch']}"]
    if environment.get("fbgemm"):
        versions.append(f"FBGEMM {environment['fbgemm']}")
    return f"{machine_name}, {', '.join(versions)}, {environment['time'][:10]}."


Draw = Callable[[Path], None]
