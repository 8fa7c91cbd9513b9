"""Every measured shape on a roofline: least operations per byte, and the rate achieved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.plots import colours, drawn, finish, machine
from common.points import DTYPES, RECFUSE, Point, PointSetting, matmul_rates
from common.report import Figure
from common.table import Table
from recfuse import timing

MARKERS = "s^Dv"
# Contestants in addition to recfuse at a point, in a mode: label -> name.
Shown = Callable[[Any, str], Mapping[str, "str | None"]]


def places(points: Sequence[Point], mode: str, others: Shown) -> list[dict[str, Any]]:
    """Returns for each point its FLOP per byte, the roof above it and the rates of contestants, in FLOP/s."""
    positions = []
    for point in points:
        names = {**others(point, mode), RECFUSE: RECFUSE}
        rates = {label: point.rate(mode, name or "") for label, name in names.items()}
        positions.append(
            {
                "shape": str(point.shape), "dtype": point.dtype, "mode": mode,
                "flop_per_byte": point.shape.flop / point.shape.least_bytes(DTYPES[point.dtype]),
                "roof": point.shape.flop / point.bound(mode), "matmul": point.matmul_rate(mode),
                "copy_speed": point.copy_speed,
                "reached": {label: rate for label, rate in rates.items() if rate is not None},
            }
        )  # fmt: skip
    return positions


def figure_roofline(
    points: Sequence[Point],
    modes: Sequence[str],
    path: Path | None,
    named: str,
    others: Shown,
    device: str = "cpu",
) -> Figure:
    """A table, and a PNG if there is a path. Each mode has its own roof: that of its matmul.

    `named`: the shape whose points are labelled. `others`: contestants in addition to recfuse.
    """
    table = Table(
        "Share of the roofline bound that recfuse reaches",
        ["type", "mode", "shapes", "least", "median", "most"],
    )
    record = {mode: places(points, mode, others) for mode in modes}
    for mode, positions in record.items():
        for dtype in dict.fromkeys(place["dtype"] for place in positions):
            shares = [
                place["reached"][RECFUSE] / place["roof"]
                for place in positions
                if place["dtype"] == dtype and RECFUSE in place["reached"]
            ]
            if not shares:
                continue
            cells = [f"{cell:.0%}" for cell in (min(shares), float(np.median(shares)), max(shares))]
            table.rows.append([dtype, mode, str(len(shares)), *cells])
    if path is not None:
        plot(path, record, named, "Roofline: every measured shape", machine(timing.environment(device)))
    return Figure([table], {}, record)


def last_figures(setting: PointSetting, prefix: str, others: Shown) -> Iterator[Figure]:
    """The roofline of all points of a run, and the rates of the large matmul."""
    arguments, points = setting.arguments, list(setting.points.values())
    if points:
        path = arguments.plots and arguments.plots / f"{prefix}_roofline.png"
        named = str(setting.shape)
        figure = figure_roofline(points, arguments.modes, path, named, others, arguments.device)
        yield replace(figure, name="roofline")
        yield Figure([matmul_rates(points)], {}, None, name="matmul")


def plot(path: Path, record: dict[str, list[dict[str, Any]]], named: str, title: str, note: str) -> None:
    """Draws a panel per mode with logarithmic axes. The points of the shape `named` are ringed."""
    with drawn(path, [record, named, title, note]) as plt:
        from matplotlib import ticker

        size = (5.6 * len(record) + (1.2 if len(record) == 1 else 0), 4.6)
        figure, axes = plt.subplots(
            1, len(record), figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        every = [label for positions in record.values() for place in positions for label in place["reached"]]
        labels = [*(label for label in dict.fromkeys(every) if label != RECFUSE), RECFUSE]
        colour = colours(dict.fromkeys(labels))
        for axis, (mode, positions) in zip(axes[0], record.items(), strict=True):
            peak = float(np.median([place["matmul"] for place in positions]))
            speed = positions[0]["copy_speed"]
            at = [place["flop_per_byte"] for place in positions]
            span = np.geomspace(min(*at, peak / speed) / 2, max(*at, peak / speed) * 2, 100)
            roof = "limit: copy speed, matmul"
            axis.plot(span, np.minimum(peak, span * speed) / 1e12, color="black", linewidth=1, label=roof)
            for label, marker in zip(labels, [*MARKERS[: len(labels) - 1], "o"], strict=True):
                shown = [place for place in positions if label in place["reached"]]
                reached = [place["reached"][label] / 1e12 for place in shown]
                intensity = [place["flop_per_byte"] for place in shown]
                axis.scatter(
                    intensity, reached, s=24, marker=marker, alpha=0.75, label=label, color=colour[label]
                )
            for place in (place for place in positions if place["shape"] == named):
                high = max(place["reached"].values()) / 1e12
                fastest = sorted(place["reached"].items(), key=lambda pair: -pair[1])
                text = "\n".join(
                    ["the main shape:", *(f"{label} {rate / 1e12:.3g}" for label, rate in fastest)]
                )
                axis.annotate(
                    text, (place["flop_per_byte"], high), (0.03, 0.97), textcoords="axes fraction",
                    va="top", fontsize=9, arrowprops={"arrowstyle": "-", "color": "#888888"},
                )  # fmt: skip
                break
            axis.set(xscale="log", yscale="log", title=mode, xlabel="least FLOP a byte")
            for line in (axis.xaxis, axis.yaxis):
                line.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
                line.set_major_formatter(ticker.FormatStrFormatter("%g"))
                line.set_minor_locator(ticker.NullLocator())
        axes[0][0].set_ylabel("TFLOP/s")
        finish(figure, title, note)
