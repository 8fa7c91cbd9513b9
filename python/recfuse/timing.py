"""One harness for benchmarks and the tuner: candidates in turns, medians, every sample kept.

A machine drifts (frequency, neighbours, page placement), so candidates that are timed one after
another are compared across that drift. Here every round times each candidate once, in an order that
rotates from round to round; a comparison is then a ratio of medians over rounds.

The state of caches is part of a measurement:
  "warm": each sample follows an untimed call of the same candidate on the *previous* inputs, so that
          caches hold what a steady stream of different requests leaves there;
  "cold": before each call a buffer of several times the last-level cache is read.

On the CPU the host's clock is read. On CUDA a sample lies between two events of the device, around its
back-to-back calls: what a stream of requests gets, host time included where the host is what binds.
`graphed` takes the host out: a replay costs what the device needs.
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

# A run that is expected to take longer than this many seconds shows a progress bar.
PROGRESS_AFTER = 2.0
_LEAST_LOAD = 0.1  # cores, from which on other processes disturb


class Stages(dict[str, float]):
    """Seconds by stage of one call. A candidate that returns one has its stages kept beside its total.

    with stages("embeddings"): ...

    On CUDA a block only records events; `read` waits for them and fills in the seconds.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Stages of a call whose work runs on `device`."""
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
    """Samples of one candidate, each in seconds a call, in the order they were taken."""

    name: str
    samples: list[float] = field(default_factory=list)
    stages: dict[str, Timing] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.samples)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles: the spread that half of the samples lie in."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def to_json(self) -> dict[str, Any]:
        """Median, spread and every sample, as plain JSON values."""
        record: dict[str, Any] = {"median_s": self.median, "iqr_s": self.iqr, "samples_s": self.samples}
        if self.stages:
            record["stages"] = {name: stage.to_json() for name, stage in self.stages.items()}
        return record


@dataclass
class Comparison:
    """What `compare` measured."""

    timings: dict[str, Timing]
    cache: Cache
    inputs: int  # how many different inputs were rotated through
    calls: int  # a sample is the mean of this many calls
    device: str
    other_load: float | None  # cores that other processes kept busy meanwhile; None: not known
    environment: dict[str, Any]

    def __getitem__(self, name: str) -> Timing:
        """The timing of one candidate."""
        return self.timings[name]

    def ratio(self, candidate: str, baseline: str) -> float:
        """How many times faster `candidate` is than `baseline`: the ratio of their medians."""
        return self.timings[baseline].median / self.timings[candidate].median

    def fastest(self, names: Iterable[str]) -> str:
        """The one of `names` with the smallest median."""
        return min(names, key=lambda name: self.timings[name].median)

    @property
    def disturbance(self) -> str:
        """A warning where other processes kept a tenth of a core or more busy meanwhile, else ""."""
        return disturbance(self.other_load)

    def to_json(self, *, environment: bool = True) -> dict[str, Any]:
        """Every sample and what it was measured with, as plain JSON values."""
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
    """What empties the caches of `device` of everything measured: a read of several times their size."""
    if torch.device(device).type == "cuda":
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        size = 4 * info.last_level_cache_bytes()
    buffer = torch.zeros(size // 8, dtype=torch.int64, device=device)
    return buffer.sum


def disturbance(other_load: float | None) -> str:
    """A warning where other processes kept a tenth of a core or more busy, of so many, else ""."""
    if (other_load or 0.0) < _LEAST_LOAD:
        return ""
    return (
        f"Not a quiet machine: other processes kept up to {other_load:.1f} cores busy. A loop of "
        "parallel operators suffers from that most of all; measure again."
    )


def other_load_since() -> Callable[[], float | None]:
    """What says how many cores other processes kept busy from now until it is called; None: not known."""
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
    inputs: argument tuples to rotate through; every candidate sees the same ones in the same order.
    rounds: samples of each candidate. min_time: least seconds of a sample (more calls are averaged).
    cache, device: see the module.
    progress: show a bar; None: on a terminal, when the run is expected to take more than two seconds.
    after: called behind each sample, untimed: undoes what a candidate leaves in the caches, say.

    ValueError: no candidates, no inputs, rounds < 1, an unknown cache state.
    """
    if not candidates or not inputs or rounds < 1 or cache not in ("warm", "cold"):
        raise ValueError(
            f"timing.compare: found {len(candidates)} candidates, {len(inputs)} inputs, rounds={rounds}, "
            f"cache={cache!r}; needs at least one of each and cache 'warm' or 'cold'"
        )
    watch = clock(device)
    sweep = _sweeper(device) if cache == "cold" else None
    names = list(candidates)

    def sample(name: str, first: int, calls: int) -> tuple[float, list[Stages]]:
        """Seconds a call of the calls from `first` on, and their stages."""
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

    # The first call of each pays for one-time work; a warm sample has an untimed call of its own.
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
    """`call` captured as a CUDA graph: a callable that replays it and returns the output of the capture.

    Every replay writes to the same output and reads the same inputs. The call runs a few times before,
    so that what it compiles or caches is there. On the CPU, which has no graphs, it is `call` itself.
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
    """`info.environment()`, and what `device` is where it is a GPU."""
    return {**info.environment(), **describe(device)}


def read_bandwidth(*, size: int = 256 << 20, rounds: int = 7) -> float:
    """Bytes a second at which the CPU reads a large array with torch's present number of threads.

    The ceiling for work whose data is not in a cache: the best of `rounds` reductions of `size` bytes,
    by two kernels that do next to no arithmetic. NumPy's memory is used because it asks for huge pages.
    """
    import numpy as np

    words = torch.from_numpy(np.full(size // 8, 1, dtype=np.int64))
    readers: dict[str, Callable[..., Any]] = {"sum": words.sum, "max": words.view(torch.int32).amax}
    result = compare(readers, rounds=rounds, progress=False)
    return words.nbytes / min(min(timing.samples) for timing in result.timings.values())
