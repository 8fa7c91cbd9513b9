"""Tables, batches and the way to time them, for the GPU benchmarks of a single table.

A *pass* looks up one batch in each table in turn, as the embedding stage of a model does; every table has a
trace of its own. Times are those of a pass over its tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import recfuse
from _common import fail
from recfuse import timing
from recfuse.data import traces

Part = tuple[Tensor, Tensor]  # indices [bags * pooling] int64, offsets [bags + 1] int64
Request = tuple[int, Part]  # the number of a table, and its part
Pass = Callable[[Sequence[Request]], list[Tensor]]
Trace = NDArray[np.int64]
Input = TypeVar("Input")

EAGER = ", eager"
# A pass is repeated until a sample takes so many seconds; events resolve half a microsecond.
LEAST_SAMPLE = 5e-4
COLD_TABLES = 4


def each(run: Callable[[int, Tensor, Tensor], Tensor]) -> Pass:
    """A pass that calls `run` with the number of each table, its indices and its offsets."""
    return lambda requests: [run(table, *part) for table, part in requests]


@dataclass
class Workload:
    """What is looked up in the tables: batches of one hotness, or of a mix of them."""

    name: str
    traces: list[Trace]  # of each table
    batches: list[list[Part]]  # [number][table]
    bags: int
    pooling: int

    @property
    def requests(self) -> list[list[Request]]:
        """Each batch as a pass wants it."""
        return [list(enumerate(parts)) for parts in self.batches]

    @property
    def lookups(self) -> int:
        """Of one table."""
        return self.bags * self.pooling

    def unique_rows(self) -> float:
        """Different rows that the first batch reads in a table, the mean over tables."""
        return float(np.mean([len(indices.unique()) for indices, _ in self.batches[0]]))

    def least_bytes(self, row_bytes: int) -> float:
        """What must move for a table: rows in use once, indices and offsets once, the output once."""
        inputs = sum(tensor.nbytes for tensor in self.batches[0][0])
        return (self.unique_rows() + self.bags) * row_bytes + inputs

    def hot_rows(self, limit: int) -> list[Tensor]:
        """Of each table the rows that its trace reads most often, the hottest first, up to `limit`."""
        device = self.batches[0][0][0].device
        return [torch.from_numpy(traces.hottest(trace, limit)).to(device) for trace in self.traces]


class Setting:
    """Tables of one shape on a device, and workloads for them."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        arguments: argparse.Namespace,
        tables: int,
        medium: Trace | None,
    ) -> None:
        """`arguments`: the benchmark's. `medium`: a trace to use in place of the generated one."""
        self.parser, self.arguments, self._medium = parser, arguments, medium
        self._traces: dict[tuple[str, int], Trace] = {}
        self.device = torch.device(arguments.device)
        generator = torch.Generator(self.device).manual_seed(arguments.seed)
        self.weights = [
            torch.randn(arguments.rows, arguments.dims[0], device=self.device, generator=generator)
            for _ in range(tables)
        ]

    @property
    def row_bytes(self) -> int:
        """Of a row in fp32."""
        return 4 * self.weights[0].shape[1]

    def unpin(self) -> None:
        """Gives L2 back to everybody, where rows were pinned."""
        recfuse.unpin(self.weights[0])

    def trace(self, hotness: str, table: int) -> Trace:
        """The trace of one table: generated, or the file's, from another place on for each table."""
        if hotness == "medium" and self._medium is not None:
            # One place more than there are tables: the number behind the last table is in use too.
            return np.roll(self._medium, -(table * len(self._medium) // (len(self.weights) + 1)))
        key = (hotness, table)
        if key not in self._traces:
            seed = self.arguments.seed + table
            self._traces[key] = traces.generate(hotness, rows=self.arguments.rows, seed=seed)
        return self._traces[key]

    def workload(
        self, hotness: str | Sequence[str], pooling: int | None = None, batches: int = 1
    ) -> Workload:
        """Batches of one hotness, or of one for each table."""
        bags, pooling = self.arguments.batch_size, pooling or self.arguments.num_indices_per_lookup
        levels = [hotness] * len(self.weights) if isinstance(hotness, str) else list(hotness)
        row_ids = [
            self.trace(level, table)
            for table, level in enumerate(tqdm(levels, desc="traces", delay=1, leave=False))
        ]
        parts = [[self.part(trace, bags, pooling, number) for trace in row_ids] for number in range(batches)]
        return Workload(hotness if isinstance(hotness, str) else "mix", row_ids, parts, bags, pooling)

    def part(self, trace: Trace, bags: int, pooling: int, number: int) -> Part:
        """Batch `number` of a trace, on the device."""
        indices, offsets = traces.bags(trace, bags, pooling, number, include_last_offset=True)
        return torch.from_numpy(indices).to(self.device), torch.from_numpy(offsets).to(self.device)


def graphs_and_calls(
    runs: Mapping[str, Callable[[Input], object]], inputs: Sequence[Input], device: torch.device, eager: bool
) -> tuple[dict[str, Callable[[int], object]], dict[str, str]]:
    """Candidates that take the number of an input: each run replayed as a graph ("NAME") and, with `eager` or
    where there is no graph, called ("NAME, eager"). Returns them, and why a run has no graph.
    """
    candidates: dict[str, Callable[[int], object]] = {}
    failures = {}
    for name, run in runs.items():
        try:
            graphs = [timing.graphed(lambda r=run, i=one: r(i), device) for one in inputs]
            candidates[name] = lambda number, graphs=graphs: graphs[number]()
        except RuntimeError as error:
            failures[name] = str(error).partition("\n")[0]
        if eager or name in failures:
            candidates[name + EAGER] = lambda number, run=run: run(inputs[number])
    return candidates, failures


def time_passes(
    passes: Mapping[str, Pass],
    workload: Workload,
    device: torch.device,
    *,
    rounds: int,
    cache: timing.Cache = "warm",
    eager: bool = False,
    after: Callable[[], object] | None = None,
) -> tuple[timing.Comparison, dict[str, str]]:
    """Times passes in turns, each replayed as a graph ("NAME") and, with `eager`, called ("NAME, eager").

    Cold: graphs of one table each, because a pass would warm the caches for its own later tables.
    Returns the comparison, in seconds a pass or a cold table, and why a pass has no graph.
    """
    inputs = workload.requests
    if cache == "cold":
        inputs = [[request] for request in inputs[0][:COLD_TABLES]]
    candidates, failures = graphs_and_calls(passes, inputs, device, eager)
    result = timing.compare(
        candidates, inputs=[(number,) for number in range(len(inputs))], rounds=rounds, min_time=LEAST_SAMPLE,
        cache=cache, device=device, progress=False, after=after,
    )  # fmt: skip
    return result, failures


def tables_of(result: timing.Comparison, workload: Workload) -> int:
    """Tables that one call of the comparison looks up."""
    return 1 if result.cache == "cold" else len(workload.batches[0])


def relative_error(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], requests: Sequence[Request]
) -> float:
    """Largest difference of a pass's outputs from sums in float64, relative to the largest value."""
    worst = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    for output, (table, (indices, offsets)) in zip(outputs, requests, strict=True):
        bags = len(offsets) - 1  # all of them equally long
        for first in range(0, bags, 512):  # in shares: all rows in float64 are more than a table
            rows = indices.view(bags, -1)[first : first + 512]
            expected = weights[table][rows].double().sum(1)
            difference = (output[first : first + 512].double() - expected).abs().max()
            # torch's max keeps a NaN, Python's may lose it.
            worst = torch.stack([worst, difference / expected.abs().max().clamp(min=1e-30)]).max()
    return worst.item()


def check_error(setting: Setting, name: str, error: float, allowed: float) -> None:
    """End the program with status 1 where an output is wrong."""
    if not error <= allowed:
        message = f"{name}: the outputs differ from sums in float64 by {error:.1e}, allowed {allowed:.0e}"
        fail(setting.parser, message)
