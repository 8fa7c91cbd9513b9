"""Forms of one model in turns, on a GPU as CUDA graphs and called, and their table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from common.calls import EAGER, time_calls
from common.report import load_notes
from common.table import Table, times
from recfuse import timing


def measure_forms(
    arguments: argparse.Namespace,
    title: str,
    runs: dict[str, Callable[[int], object]],
    batches: int,
    baselines: Sequence[str],
) -> tuple[Table, timing.Comparison]:
    """``runs`` take the number of a batch; ``baselines``: what others are compared with."""
    on_gpu = arguments.device == "cuda"
    result, failures = time_calls(
        runs, range(batches), torch.device(arguments.device), rounds=arguments.rounds, eager=on_gpu
    )
    table = Table(title, ["form", "µs (median ± IQR)", *(f"over {name}" for name in baselines)])
    for suffix, called in (("", ""), (EAGER, ", called")) if on_gpu else (("", ""),):
        for name in (name for name in runs if name + suffix in result.timings):
            timed = result[name + suffix]
            ratios = [
                times(result.ratio(name + suffix, other + suffix))
                if other + suffix in result.timings
                else "-"
                for other in baselines
            ]
            us = f"{timed.median * 1e6:.1f} ± {timed.iqr * 1e6:.1f}"
            table.rows.append([name + called, us, *ratios])
    table.notes += [f"{name} has no graph: {why}" for name, why in failures.items()]
    table.notes += load_notes([result])
    return table, result
