"""The harness of benchmarks and the tuner: candidates in turns, medians, and all samples.

The speed of a machine drifts (frequency, neighbours, page placement). If candidates were timed in sequence,
their comparison would include this drift. Here every round times each candidate once, in an order that
rotates from round to round. A comparison is a ratio of medians over rounds.

The state of caches is part of a measurement:
  "warm": each sample follows an untimed call of the same candidate on the *previous* inputs, so that
          caches have the contents that a steady stream of different requests leaves;
  "cold": before each call a buffer of several times the last-level cache is read.

On the CPU samples use the host's clock. On CUDA a sample is the time between two events of the device, around
its back-to-back calls. This is the time of a stream of requests, with host time if the host is the
bottleneck. `graphed` excludes the host: a replay takes the time of the device.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm import tqdm

from recfuse import info
from recfuse._clock import clock, describe
from recfuse._progress import hidden

Cache = Literal["warm", "cold"]

# A run with an expected time of more seconds shows a progress bar.
PROGRESS_AFTER = 2.0
_LEAST_LOAD = 0.1  # cores; more load of other processes disturbs a measurement


class Stages(dict[str, float]):
    """Seconds by stage of a call. If a candidate returns it, the stages are stored in addition to the total.

    with stages("embeddings"): ...

    On CUDA a block only records events; `read` waits for them and fills in the seconds.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Create the stages of a call whose work runs on `device`."""
        super().__init__()
        self._clock = clock(device)
        self._blocks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to the stage `name`."""
        start = self._clock.mark()
        yield
        self._blocks.append((name, start, self._clock.mark()))
        if self._clock.immediate:
            self.read()

    def read(self) -> Stages:
        """Wait for the device, and add the seconds of the blocks since the last time."""
        self._clock.finish()
        for name, start, end in self._blocks:
            self[name] = self.get(name, 0.0) + self._clock.seconds(start, end)
        self._blocks.clear()
        return self


@dataclass
class Timing:
    """Samples of a candidate, each in seconds per call, in order of time."""

    name: str
    samples: list[float] = field(default_factory=list)
    stages: dict[str, Timing] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median of the seconds of a call."""
        return statistics.median(self.samples)

    @property
    def iqr(self) -> float:
        """The spread: the distance between the quartiles."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def to_json(self) -> dict[str, Any]:
        """Return median, spread and all samples, as plain JSON values."""
        record: dict[str, Any] = {"median_s": self.median, "iqr_s": self.iqr, "samples_s": self.samples}
        if self.stages:
            record["stages"] = {name: stage.to_json() for name, stage in self.stages.items()}
        return record


@dataclass
class Comparison:
    """The result of `compare`."""

    timings: dict[str, Timing]
    cache: Cache
    inputs: int  # number of different inputs
    calls: int  # a sample is the mean of this many calls
    device: str
    other_load: float | None  # cores that other processes kept busy; None: unknown
    environment: dict[str, Any]

    def __getitem__(self, name: str) -> Timing:
        """Return the timing of a candidate."""
        return self.timings[name]

    def ratio(self, candidate: str, baseline: str) -> float:
        """Return the speedup of `candidate` over `baseline`: the ratio of their medians."""
        return self.timings[baseline].median / self.timings[candidate].median

    def fastest(self, names: Iterable[str]) -> str:
        """Return the name with the smallest median among `names`."""
        return min(names, key=lambda name: self.timings[name].median)

    @property
    def disturbance(self) -> str:
        """A warning if other processes kept a tenth of a core or more busy, else ""."""
        return disturbance(self.other_load)

    def to_json(self, *, environment: bool = True) -> dict[str, Any]:
        """Return all samples and the conditions of the measurement, as plain JSON values."""
        record = {
            "cache": self.cache,
            "inputs": self.inputs,
            "calls_per_sample": self.calls,
            "device": self.device,
            "other_load": self.other_load,
            "timings": {name: timing.to_json() for name, timing in self.timings.items()},
        }
        return {**record, "environment": self.environment} if environment else record


def _sweeper(device: str | torch.device) -> Callable[[], Any]:
    """Return a function that evicts measured data from the caches of `device`.

    It reads a buffer of several times their size.
    """
    if torch.device(device).type == "cuda":
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        size = 4 * info.last_level_cache_bytes()
    buffer = torch.zeros(size // 8, dtype=torch.int64, device=device)
    return buffer.sum


def disturbance(other_load: float | None) -> str:
    """Return a warning if other processes kept a tenth of a core or more busy, else ""."""
    if (other_load or 0.0) < _LEAST_LOAD:
        return ""
    return (
        f"Not a quiet machine: other processes kept up to {other_load:.1f} cores busy. A loop of "
        "parallel operators suffers from that most of all; measure again."
    )


def other_load_since() -> Callable[[], float | None]:
    """Return a function that returns the cores that other processes keep busy from now until its call.

    It returns None if the system does not report them.
    """
    busy_before, own_before, wall_before = info.busy_seconds(), time.process_time(), time.perf_counter()

    def read() -> float | None:
        busy, own, wall = info.busy_seconds(), time.process_time(), time.perf_counter()
        if busy is None or busy_before is None:
            return None
        return max(0.0, ((busy - busy_before) - (own - own_before)) / (wall - wall_before))

    return read


def compare(
    candidates: Mapping[str, Callable[..., Any]],
    *,
    inputs: Sequence[tuple[Any, ...]] = ((),),
    rounds: int = 15,
    min_time: float = 0.0,
    cache: Cache = "warm",
    device: str | torch.device = "cpu",
    progress: bool | None = None,
    label: str = "timing",
    after: Callable[[], Any] | None = None,
) -> Comparison:
    """Time `candidates` in turns.

    candidates: name -> callable, called with one element of `inputs` as its arguments.
    inputs: argument tuples to rotate through; every candidate gets the same inputs in the same order.
    rounds: samples of each candidate. min_time: least seconds of a sample (more calls are averaged).
    cache, device: see the module.
    progress: show a bar; None: on a terminal, when the run is expected to take more than two seconds.
    after: called after each sample, untimed, for example to evict data of a candidate from the caches.

    ValueError: no candidates, no inputs, rounds < 1, an unknown cache state.
    """
    if not candidates or not inputs or rounds < 1 or cache not in ("warm", "cold"):
        raise ValueError(
            f"timing.compare: found {len(candidates)} candidates, {len(inputs)} inputs, rounds={rounds}, "
            f"cache={cache!r}; expected at least one of each and cache 'warm' or 'cold'"
        )
    watch = clock(device)
    sweep = _sweeper(device) if cache == "cold" else None
    names = list(candidates)

    def sample(name: str, first: int, calls: int) -> tuple[float, list[Stages]]:
        """Return seconds per call of the calls from `first` on, and their stages."""
        spans: list[tuple[Any, Any]] = []
        staged: list[Stages] = []

        def timed(numbers: range) -> None:
            start = watch.mark()
            for number in numbers:
                result = candidates[name](*inputs[number % len(inputs)])
                if isinstance(result, Stages):
                    staged.append(result)
            spans.append((start, watch.mark()))

        if sweep is None:
            candidates[name](*inputs[(first - 1) % len(inputs)])
            timed(range(first, first + calls))
        else:
            for number in range(first, first + calls):
                sweep()
                timed(range(number, number + 1))
        watch.finish()
        if after is not None:
            after()
        return sum(watch.seconds(*span) for span in spans) / calls, [stages.read() for stages in staged]

    # The first call of each candidate includes one-time work; a warm sample begins with an untimed call.
    if cache == "cold":
        for name in names:
            sample(name, 0, 1)
    estimates = [sample(name, 1, 1)[0] for name in names]
    calls = max(1, math.ceil(min_time / max(min(estimates), 1e-9)))
    expected = rounds * (calls + 1) * sum(estimates)
    timings = {name: Timing(name) for name in names}

    other_load = other_load_since()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        show = expected > PROGRESS_AFTER and not hidden() if progress is None else progress
        for number in tqdm(range(rounds), desc=label, unit="round", disable=not show, leave=False):
            turn = number % len(names)
            first = number * calls
            for name in names[turn:] + names[:turn]:
                seconds, staged = sample(name, first, calls)
                timings[name].samples.append(seconds)
                for stages in staged:
                    for stage, spent in stages.items():
                        timings[name].stages.setdefault(stage, Timing(stage)).samples.append(spent)
    finally:
        if collecting:
            gc.enable()
    return Comparison(timings, cache, len(inputs), calls, str(device), other_load(), environment(device))


def graphed(call: Callable[[], Any], device: str | torch.device) -> Callable[[], Any]:
    """Capture `call` as a CUDA graph; return a function that replays it and returns the captured output.

    Every replay writes to the same output and reads the same inputs. The call runs a few times before the
    capture, to compile kernels and fill caches. On the CPU, which has no graphs, the result is `call` itself.
    """
    if torch.device(device).type != "cuda":
        return call
    with torch.cuda.device(device):
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return `info.environment()`, with properties of `device` if it is a GPU."""
    return {**info.environment(), **describe(device)}


def read_bandwidth(*, size: int = 256 << 20, rounds: int = 7) -> float:
    """Measure the bytes per second at which the CPU reads a large array with torch's current threads.

    This is the ceiling for work whose data is not in a cache: the best of `rounds` reductions of `size`
    bytes, by two kernels with almost no arithmetic. NumPy allocates the memory, because it requests huge
    pages.
    """
    import numpy as np

    words = torch.from_numpy(np.full(size // 8, 1, dtype=np.int64))
    readers: dict[str, Callable[..., Any]] = {"sum": words.sum, "max": words.view(torch.int32).amax}
    result = compare(readers, rounds=rounds, progress=False)
    return words.nbytes / min(min(timing.samples) for timing in result.timings.values())
