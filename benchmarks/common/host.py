"""What the host spends on a call, from Python's call to its return."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from common.calls import host_seconds
from common.checks import left_out
from common.report import Figure
from common.table import Table


def figure_host(
    title: str, runs: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int
) -> Figure:
    """Each run in turn; `title` says on what. Inputs are to be so small that no call waits for the device."""
    table = Table(f"us of the host: {title}", ["", "median", "p90", "least"])
    record = {}
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            table.notes.append(left_out("host", name, error))
            continue
        samples = host_seconds(lambda number, run=run: run(), device, rounds)
        cells = [statistics.median(samples), float(np.quantile(samples, 0.9)), min(samples)]
        table.rows.append([name, *(f"{cell * 1e6:.1f}" for cell in cells)])
        record[name] = {"samples_s": samples}
    return Figure([table], {}, record)
