"""The place of every measured shape on a roofline: least operations a byte, and what was reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.points import DTYPES, RECFUSE, Point
from common.report import Figure
from common.table import Table

MARKERS = "s^Dv"
LABEL_STEP = 1.16  # from one label up to the next, so that they do not overlap
# Contestants shown besides recfuse at a point, in a mode: label -> name.
Shown = Callable[[Any, str], Mapping[str, "str | None"]]


def places(points: Sequence[Point], mode: str, others: Shown) -> list[dict[str, Any]]:
    """Of each point its FLOP a byte, the roof above it and what contestants reached, in FLOP/s."""
    found = []
    for point in points:
        names = {**others(point, mode), RECFUSE: RECFUSE}
        rates = {label: point.rate(mode, name or "") for label, name in names.items()}
        found.append(
            {
                "shape": str(point.shape), "dtype": point.dtype, "mode": mode,
                "flop_per_byte": point.shape.flop / point.shape.least_bytes(DTYPES[point.dtype]),
                "roof": point.shape.flop / point.bound(mode), "matmul": point.matmul_rate(mode),
                "copy_speed": point.copy_speed,
                "reached": {label: rate for label, rate in rates.items() if rate is not None},
            }
        )  # fmt: skip
    return found


def figure_roofline(
    points: Sequence[Point], modes: Sequence[str], path: Path | None, named: str, others: Shown
) -> Figure:
    """A table, and a PNG where there is a path. Each mode has its own roof: that of its matmul.

    `named`: the shape whose places are labelled. `others`: what is shown besides recfuse.
    """
    table = Table(
        "Share of the roofline bound that recfuse reaches",
        ["type", "mode", "shapes", "least", "median", "most"],
    )
    record = {mode: places(points, mode, others) for mode in modes}
    for mode, found in record.items():
        for dtype in dict.fromkeys(place["dtype"] for place in found):
            shares = [
                place["reached"][RECFUSE] / place["roof"]
                for place in found
                if place["dtype"] == dtype and RECFUSE in place["reached"]
            ]
            if not shares:
                continue
            cells = [f"{cell:.0%}" for cell in (min(shares), float(np.median(shares)), max(shares))]
            table.rows.append([dtype, mode, str(len(shares)), *cells])
    if path is not None:
        plot(path, record, named)
    return Figure([table], {}, record)


def plot(path: Path, record: dict[str, list[dict[str, Any]]], named: str) -> None:
    """A panel a mode, both axes by powers of ten."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(1, len(record), figsize=(6 * len(record), 4.5), squeeze=False, sharey=True)
    for axis, (mode, found) in zip(axes[0], record.items(), strict=True):
        peak = float(np.median([place["matmul"] for place in found]))
        speed = found[0]["copy_speed"]
        at = [place["flop_per_byte"] for place in found]
        span = np.geomspace(min(*at, peak / speed) / 2, max(*at, peak / speed) * 2, 100)
        axis.plot(
            span, np.minimum(peak, span * speed) / 1e12, color="black", linewidth=1, label="copy, matmul"
        )
        labels = dict.fromkeys(label for place in found for label in place["reached"] if label != RECFUSE)
        for label, marker in zip([*labels, RECFUSE], [*MARKERS[: len(labels)], "o"], strict=True):
            shown = [place for place in found if label in place["reached"]]
            reached = [place["reached"][label] / 1e12 for place in shown]
            intensity = [place["flop_per_byte"] for place in shown]
            axis.scatter(intensity, reached, s=22, marker=marker, alpha=0.7, label=label)
        place = next((place for place in found if place["shape"] == named), None)
        height = 0.0
        for label, reached in sorted(place["reached"].items(), key=lambda pair: pair[1]) if place else ():
            height = max(reached / 1e12, height * LABEL_STEP)
            text = f"{label}: {reached / 1e12:.3g}"
            axis.text(span[-1], height, text, ha="right", va="center", fontsize="x-small")
        axis.set(xscale="log", yscale="log", title=mode, xlabel="least FLOP a byte")
        for line in (axis.xaxis, axis.yaxis):
            line.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            line.set_major_formatter(ticker.FormatStrFormatter("%g"))
            line.set_minor_locator(ticker.NullLocator())
        axis.legend(fontsize="small", loc="lower right")
    axes[0][0].set_ylabel("TFLOP/s")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
