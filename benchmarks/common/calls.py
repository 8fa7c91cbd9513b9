"""Calls timed in turns, each replayed as a CUDA graph and as called."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch

from common.checks import left_out
from common.report import Figure
from common.table import Table
from recfuse import timing
from recfuse._clock import clock

Input = TypeVar("Input")

EAGER = ", eager"
LEAST_SAMPLE = 5e-4
"""The shortest sample on a GPU, in seconds; calls are repeated to reach it. Events resolve half a
microsecond."""


def graphs_and_calls(
    runs: Mapping[str, Callable[[Input], object]], inputs: Sequence[Input], device: torch.device, eager: bool
) -> tuple[dict[str, Callable[[int], object]], dict[str, str]]:
    """Creates candidates that take the number of an input. Each run is replayed as a graph ("NAME"); with
    `eager`, or if it has no graph, it is also called ("NAME, eager"). Returns them, and the reason for
    each missing graph."""
    candidates: dict[str, Callable[[int], object]] = {}
    failures = {}
    for name, run in runs.items():
        try:
            graphs = [timing.graphed(lambda r=run, i=each: r(i), device) for each in inputs]
            candidates[name] = lambda number, graphs=graphs: graphs[number]()
        except RuntimeError as error:
            failures[name] = str(error).partition("\n")[0]
        if eager or name in failures:
            candidates[name + EAGER] = lambda number, run=run: run(inputs[number])
    return candidates, failures


def time_calls(
    runs: Mapping[str, Callable[[Input], object]],
    inputs: Sequence[Input],
    device: torch.device,
    *,
    rounds: int,
    eager: bool = True,
    slow: Sequence[str] = (),
    cache: timing.Cache = "warm",
    after: Callable[[], object] | None = None,
    least_sample: float | None = None,
) -> tuple[timing.Comparison, dict[str, str]]:
    """Times `graphs_and_calls` in turns, each sample with another input.

    `slow`: candidates that take turns among themselves, with samples of single calls, because calls of
    milliseconds would otherwise be repeated as often as the fastest. `after`: is called after each sample.
    `least_sample`: least seconds of a sample of the others; None: the resolution of the device's events.
    Returns the comparison, in seconds per call, and the reason for each missing graph.
    """
    candidates, failures = graphs_and_calls(runs, inputs, device, eager)
    results = []
    if least_sample is None:
        least_sample = LEAST_SAMPLE if device.type == "cuda" else 0.0
    for apart, least in ((False, least_sample), (True, 0.0)):
        group = {
            name: call for name, call in candidates.items() if (name.removesuffix(EAGER) in slow) == apart
        }
        if group:
            results.append(
                timing.compare(
                    group, inputs=[(number,) for number in range(len(inputs))], rounds=rounds, min_time=least,
                    cache=cache, device=device, progress=False, after=after,
                )
            )  # fmt: skip
    for other in results[1:]:
        results[0].timings.update(other.timings)
    return results[0], failures


def host_seconds(
    call: Callable[[int], object], device: torch.device, rounds: int, calls: int = 50
) -> list[float]:
    """Seconds of the host on each of `rounds` times `calls` calls, after the device was let finish."""
    finish = clock(device).finish
    samples = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(calls):
            call(number)
        for _ in range(rounds):
            finish()
            for number in range(calls):
                start = time.perf_counter()
                call(number)
                samples.append(time.perf_counter() - start)
        finish()
    finally:
        if collecting:
            gc.enable()
    return samples


def fastest_config(
    run: Callable[[Any], object], configs: Sequence[Any], device: torch.device, min_time: float
) -> Any:
    """Returns the fastest configuration (dataclass) of a Triton kernel; RuntimeError if no configuration
    runs."""
    usable, failures = {}, []
    for config in configs:
        try:
            run(config)
            usable[str(config)] = config
        except Exception as error:  # for example too much shared memory
            failures.append(f"{asdict(config)}: {error}")
    if not usable:
        raise RuntimeError(f"no configuration of the Triton kernel runs here: {failures[0]}")
    calls = {name: lambda config=config: run(config) for name, config in usable.items()}
    result = timing.compare(calls, rounds=3, min_time=min_time, device=device, progress=False)
    return usable[result.fastest(calls)]


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
    """Times the host's part of each run in turns; `title` names the subject. Inputs must be so small that
    no call waits for the device."""
    samples, notes = {}, []
    for name, run in runs.items():
        try:
            run()
        except Exception as error:
            notes.append(left_out("host", name, error))
            continue
        samples[name] = host_seconds(lambda number, run=run: run(), device, rounds)
    return figure_of_samples(f": {title}", samples, notes)
