"""The place of every measured shape on a roofline: least operations a byte, and what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.report import Figure
from common.table import Table
from ikbo_linear.forms import RECFUSE, TRITON
from ikbo_linear.measure import DTYPES, Point
from ikbo_linear.problem import Shape

BEST = "best torch"


def places(points: Sequence[Point], mode: str) -> list[dict[str, Any]]:
    """Of each point its FLOP a byte, the roof above it and what contestants reached, in FLOP/s."""
    found = []
    for point in points:
        names = {RECFUSE: RECFUSE, TRITON: TRITON, BEST: point.best_torch(mode)}
        spent = {label: point.seconds(mode, name) for label, name in names.items()}
        found.append(
            {
                "shape": str(point.shape), "dtype": point.dtype, "mode": mode,
                "flop_per_byte": point.shape.flop / point.shape.least_bytes(DTYPES[point.dtype]),
                "roof": point.shape.flop / point.bound(mode), "matmul": point.matmul_rate(mode),
                "copy_speed": point.copy_speed,
                "reached": {
                    label: point.shape.flop / taken for label, taken in spent.items() if taken is not None
                },
            }
        )  # fmt: skip
    return found


def figure_roofline(points: Sequence[Point], modes: Sequence[str], path: Path | None, named: Shape) -> Figure:
    """A table, and a PNG where there is a path. Each mode has its own roof: that of its matmul.

    `named`: whose places are labelled.
    """
    table = Table(
        "Share of the roofline bound that recfuse reaches",
        ["type", "mode", "shapes", "least", "median", "most"],
    )
    record = {mode: places(points, mode) for mode in modes}
    for mode, found in record.items():
        for dtype in dict.fromkeys(place["dtype"] for place in found):
            shares = [place["reached"][RECFUSE] / place["roof"] for place in found if place["dtype"] == dtype]
            cells = [f"{cell:.0%}" for cell in (min(shares), float(np.median(shares)), max(shares))]
            table.rows.append([dtype, mode, str(len(shares)), *cells])
    if path is not None:
        plot(path, record, str(named))
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
        for label, marker in ((BEST, "s"), (TRITON, "^"), (RECFUSE, "o")):
            shown = [place for place in found if label in place["reached"]]
            if shown:
                reached = [place["reached"][label] / 1e12 for place in shown]
                intensity = [place["flop_per_byte"] for place in shown]
                axis.scatter(intensity, reached, s=22, marker=marker, alpha=0.7, label=label)
        place = next((place for place in found if place["shape"] == named), None)
        for label, reached in place["reached"].items() if place else ():
            text = f"{label}: {reached / 1e12:.3g}"
            axis.text(span[-1], reached / 1e12, text, ha="right", va="center", fontsize="x-small")
        axis.set(xscale="log", yscale="log", title=mode, xlabel="least FLOP a byte")
        for line in (axis.xaxis, axis.yaxis):
            line.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            line.set_major_formatter(ticker.FormatStrFormatter("%g"))
            line.set_minor_locator(ticker.NullLocator())
        axis.legend(fontsize="small", loc="lower right")
    axes[0][0].set_ylabel("TFLOP/s")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
