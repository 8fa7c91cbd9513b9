"""Draws a prediction as a trace for Perfetto, and as a figure."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recfuse._files import parsing, write_json
from recfuse.errors import FileFormatError
from recfuse.perf.models.regimes import Estimate, Timed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOST, _DEVICE = 1, 2
_PROCESS = 1_000_000  # above the numbers of processes, to separate it from a recorded trace
_BARS = 10


def trace_events(gpu: str, times: Sequence[Timed]) -> Iterator[dict[str, Any]]:
    """Yield the step as events of Chrome's trace format: a row for the host and a row for the device."""

    def name(kind: str, text: str, row: int = 0) -> dict[str, Any]:
        return {"ph": "M", "pid": _PROCESS, "tid": row, "name": kind, "args": {"name": text}}

    yield name("process_name", f"predicted: {gpu}")
    yield name("thread_name", "host", _HOST)
    yield name("thread_name", "device", _DEVICE)
    for timed in times:
        common = {"ph": "X", "pid": _PROCESS}
        facts = {"phase": timed.operator.phase, "module": timed.operator.module}
        yield {
            **common,
            "tid": _HOST,
            "name": timed.operator.name,
            "ts": timed.issued,
            "dur": timed.host_us,
            "args": facts,
        }
        if timed.kernel.kernels:
            sizes = {"sizes": list(timed.operator.sizes), "kernels": timed.kernel.kernels}
            yield {**common, "tid": _DEVICE, "name": timed.operator.kind, "ts": timed.begin,
                   "dur": timed.end - timed.begin, "args": {**facts, **sizes}}  # fmt: skip


def write_trace(
    gpu: str,
    times: Sequence[Timed],
    path: str | os.PathLike[str],
    recorded: str | os.PathLike[str] | None = None,
) -> None:
    """Write the step as a trace; ``recorded``: a trace of torch.profiler, whose events are added.

    Raises:
        recfuse.errors.FileFormatError: ``recorded`` is no trace.
    """
    events = list(trace_events(gpu, times))
    if recorded is not None:
        measured = _recorded(os.fspath(recorded))
        begin = min((event["ts"] for event in measured if event.get("ph") == "X"), default=0)
        events = measured + [
            {**event, "ts": event["ts"] + begin} if "ts" in event else event for event in events
        ]
    write_json(os.fspath(path), {"traceEvents": events, "displayTimeUnit": "ms"}, "recfuse predict")


def _recorded(path: str) -> list[dict[str, Any]]:
    with parsing(f"recfuse predict: {path}"):
        with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
            record = json.load(file)
        events = record["traceEvents"] if isinstance(record, dict) else record
        if not isinstance(events, list):
            raise FileFormatError(f"recfuse predict: {path} is no trace, since it has no list of events")
        return events


def figure_of(gpu: str, regimes: Mapping[str, Estimate], kinds: Mapping[str, float]) -> Figure:
    """Return a figure of the regimes with their intervals, and of the seconds of the slowest kinds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = list(regimes.values())
    low = [(estimate.seconds - estimate.low) * 1e3 for estimate in values]
    high = [(estimate.high - estimate.seconds) * 1e3 for estimate in values]
    colors = ["#4477aa", "#66ccee", "#228833"][: len(values)]
    left.bar(
        list(regimes),
        [estimate.seconds * 1e3 for estimate in values],
        yerr=[low, high],
        capsize=6,
        color=colors,
    )
    left.set(ylabel="ms a step", title=f"{gpu}: 80 % intervals")
    longest = list(kinds.items())[:_BARS][::-1]
    right.barh([kind for kind, _ in longest], [1e6 * seconds for _, seconds in longest], color="#ccbb44")
    right.set(xlabel="µs of kernels", title="kinds of kernels")
    right.tick_params(axis="y", labelsize="small")
    return figure
