"""What the host spends on a call, from Python's call to its return."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from common.calls import host_seconds
from common.checks import left_out
from common.report import Figure
from common.table import Table


def figure_of_samples(title: str, samples: Mapping[str, Sequence[float]], notes: Sequence[str]) -> Figure:
    """Seconds of the host on each call, by name."""
    table = Table(f"us of the host{title}", ["", "median", "p90", "least"], notes=list(notes))
    for name, seconds in samples.items():
        cells = statistics.median(seconds), float(np.quantile(seconds, 0.9)), min(seconds)
        table.rows.append([name, *(f"{cell * 1e6:.1f}" for cell in cells)])
    return Figure([table], {}, {name: {"samples_s": list(seconds)} for name, seconds in samples.items()})


def figure_host(
    title: str, runs: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int
) -> Figure:
    """Each run in turn; `title` says on what. Inputs are to be so small that no call waits for the device."""
    samples, notes = {}, []
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            notes.append(left_out("host", name, error))
            continue
        samples[name] = host_seconds(lambda number, run=run: run(), device, rounds)
    return figure_of_samples(f": {title}", samples, notes)
