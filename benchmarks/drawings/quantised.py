"""Errors of the formats of rows, computed on rows of normal values."""

from __future__ import annotations

from pathlib import Path

import torch

from common.plots import Draw, drawn
from recfuse.ops import dequantize_rows, quantize_rows

DIMS = (8, 16, 32, 64, 128, 256)
ROWS = 4096
BITS = {"int4": 4, "int8": 8, "bfloat16": 16, "float16": 16}
STYLES = {
    "int4": ("#dd7a1f", "o"),
    "int8": ("#1b7f5c", "s"),
    "bfloat16": ("#4a7fb5", "^"),
    "float16": ("#7d5ba6", "D"),
}


def _values(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in ("int4", "int8"):
        return dequantize_rows(*quantize_rows(weight, kind), weight.shape[1]).double()
    return weight.to(getattr(torch, kind)).double()


def errors() -> dict[str, list[float]]:
    """Returns relative errors of each format by dim, in percent to two digits: |x - x'| / |x| of all rows."""
    found: dict[str, list[float]] = {}
    for kind in BITS:
        for dim in DIMS:
            weight = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(dim))
            distance = (_values(weight, kind) - weight.double()).norm() / weight.double().norm()
            found.setdefault(kind, []).append(float(f"{100 * float(distance):.2g}"))
    return found


def _draw(path: Path) -> None:
    data = errors()
    with drawn(path, data) as plt:
        _, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
        for kind, percent in data.items():
            colour, marker = STYLES[kind]
            left.plot(DIMS, percent, marker=marker, color=colour, label=kind)
            dim = DIMS.index(128)
            size = (128 * BITS[kind] // 8 + 4 * (kind in ("int4", "int8"))) / 512
            right.plot([size], [percent[dim]], marker=marker, color=colour, linestyle="none")
            right.annotate(f" {kind}", (size, percent[dim]), fontsize=9, va="bottom")
        left.set(xscale="log", yscale="log", xlabel="columns of a row", ylabel="relative error, %")
        left.set_xticks(DIMS, [str(dim) for dim in DIMS])
        left.minorticks_off()
        left.legend(fontsize=9, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.7))
        right.set(
            yscale="log",
            xlabel="memory of 128 columns, of float32's",
            ylabel="relative error, %",
            xlim=(0, 0.62),
        )
        for axis in (left, right):
            axis.grid(alpha=0.3)


QUANTISED: dict[str, Draw] = {"docs/pictures/quantised_errors.svg": _draw}
