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

It is one file because its classes and functions work only together; docstrings are almost half of it.
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
    """Seconds by stage of a call, for candidates of :func:`compare`.

    If a candidate returns its stages, they are stored in addition to the total. On CUDA a block only records
    events; :meth:`read` waits for them and adds the seconds.

    Args:
        device: the device on which the call works.

    Example:
        >>> stages = recfuse.timing.Stages()
        >>> with stages("sum"):
        ...     total = torch.ones(1000).sum()
        >>> list(stages)
        ['sum']
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
        """Wait for the device, and add the seconds of the blocks since the last time.

        Returns:
            Stages: these stages.
        """
        self._clock.finish()
        for name, start, end in self._blocks:
            self[name] = self.get(name, 0.0) + self._clock.seconds(start, end)
        self._blocks.clear()
        return self


@dataclass
class Timing:
    """Samples of a candidate, each in seconds per call, in order of time.

    Attributes:
        name: the name of the candidate, or of a stage.
        samples: the seconds per call, in order of time.
        stages: the samples of each stage, if the candidate returns :class:`Stages`.

    Example:
        >>> timing = recfuse.timing.Timing("sum", [1.0, 3.0, 2.0])
        >>> timing.median, timing.iqr
        (2.0, 1.0)
    """

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
    """Timings of several candidates in turns, the result of :func:`compare`.

    Attributes:
        timings: the timing of each candidate, by name.
        cache: the state of caches, "warm" or "cold".
        inputs: the number of different inputs.
        calls: a sample is the mean of this many calls.
        device: the device.
        other_load: cores that other processes kept busy; None if unknown.
        environment: the record of :func:`environment`.

    Example:
        >>> values = torch.ones(1000)
        >>> result = recfuse.timing.compare({"sum": values.sum, "max": values.max}, rounds=3)
        >>> result.fastest(["sum"])
        'sum'
    """

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
        """Return the speedup of a candidate over a baseline: the ratio of their medians.

        Args:
            candidate: the name of the candidate.
            baseline: the name of the other candidate.
        """
        return self.timings[baseline].median / self.timings[candidate].median

    def fastest(self, names: Iterable[str]) -> str:
        """Return the name with the smallest median.

        Args:
            names: names of candidates.
        """
        return min(names, key=lambda name: self.timings[name].median)

    @property
    def disturbance(self) -> str:
        """A warning if other processes kept a tenth of a core or more busy, else ""."""
        return disturbance(self.other_load)

    def to_json(self, *, environment: bool = True) -> dict[str, Any]:
        """Return all samples and the conditions of the measurement, as plain JSON values.

        Args:
            environment: include the record of the environment.
        """
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
    """Return a warning if other processes kept a tenth of a core or more busy.

    Args:
        other_load: the cores that other processes kept busy; None if unknown.

    Returns:
        str: the warning, or "".

    Example:
        >>> recfuse.timing.disturbance(0.01)
        ''
    """
    if (other_load or 0.0) < _LEAST_LOAD:
        return ""
    return (
        f"Not a quiet machine: other processes kept up to {other_load:.1f} cores busy. A loop of "
        "parallel operators suffers from that most of all; measure again."
    )


def other_load_since() -> Callable[[], float | None]:
    """Start to count the cores that other processes keep busy.

    Returns:
        Callable: a function that returns the mean number of cores since this call, or None if the system does
        not report it.

    Example:
        >>> read = recfuse.timing.other_load_since()
        >>> load = read()
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
    """Time candidates in turns.

    Every round times each candidate once, in an order that rotates from round to round.

    Args:
        candidates: the candidates by name; each is called with an element of ``inputs`` as its arguments.
        inputs: tuples of arguments to rotate through; every candidate gets the same inputs in the same order.
        rounds: samples of each candidate. Default: 15.
        min_time: least seconds of a sample; a shorter call is repeated and averaged. Default: 0.
        cache: "warm": an untimed call on the previous inputs comes before each sample. "cold": before each
            call a buffer of several times the last-level cache is read. Default: "warm".
        device: the device on which candidates work. Default: "cpu".
        progress: show a bar. Default: on a terminal, if the run is expected to take more than two seconds.
        label: the text of the bar.
        after: called after each sample, untimed, for example to evict data of a candidate from the caches.

    Returns:
        Comparison: the samples of each candidate, and the conditions of the measurement.

    Raises:
        ValueError: no candidates, no inputs, ``rounds`` below 1, or an unknown state of caches.

    Example:
        >>> values = torch.ones(1000)
        >>> result = recfuse.timing.compare({"sum": values.sum, "max": values.max}, rounds=3)
        >>> len(result["sum"].samples)
        3

    Note:
        On the CPU a sample uses the host's clock, on CUDA the time between two events of the device.
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
    """Capture a call as a CUDA graph.

    Every replay writes to the same output and reads the same inputs. The call runs three times before the
    capture, to compile kernels and fill caches.

    Args:
        call: the call, without arguments.
        device: the device of its tensors.

    Returns:
        Callable: a function that replays the graph and returns the captured output. On the CPU, which has no
        graphs, ``call`` itself.

    Example:
        >>> replay = recfuse.timing.graphed(lambda: torch.ones(3).sum(), "cpu")
        >>> replay()
        tensor(3.)
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
    """Return the record of :func:`recfuse.info.environment`, with properties of a GPU.

    Args:
        device: the device of the measurement. Default: "cpu".

    Returns:
        dict: the record.

    Example:
        >>> recfuse.timing.environment()["torch"] == torch.__version__
        True
    """
    return {**info.environment(), **describe(device)}


def read_bandwidth(*, size: int = 256 << 20, rounds: int = 7) -> float:
    """Measure the bytes per second at which the CPU reads a large array with torch's current threads.

    This is the ceiling for work whose data is not in a cache. It is the best of ``rounds`` reductions, by two
    kernels with almost no arithmetic. NumPy allocates the memory, because it requests huge pages.

    Args:
        size: bytes of the array. Default: 256 MiB.
        rounds: measurements of each kernel. Default: 7.

    Returns:
        float: bytes per second.

    Example:
        >>> recfuse.timing.read_bandwidth(size=1 << 20, rounds=1) > 0
        True
    """
    import numpy as np

    words = torch.from_numpy(np.full(size // 8, 1, dtype=np.int64))
    readers: dict[str, Callable[..., Any]] = {"sum": words.sum, "max": words.view(torch.int32).amax}
    result = compare(readers, rounds=rounds, progress=False)
    return words.nbytes / min(min(timing.samples) for timing in result.timings.values())
