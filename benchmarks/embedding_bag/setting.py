"""Tables, batches and timing for the GPU benchmarks of a single table.

A *pass* pools one batch in each table in turn, like the embedding stage of a model; every table has its own
trace. Times are those of a pass over its tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.calls import time_calls
from common.checks import difference, largest
from common.settings import Setting
from common.traces import check_rows, read_traces
from recfuse import timing
from recfuse.data import traces

Part = tuple[Tensor, Tensor]  # indices [bags * pooling] int64, offsets [bags + 1] int64
Request = tuple[int, Part]  # the number of a table, and its part
Pass = Callable[[Sequence[Request]], list[Tensor]]
Trace = NDArray[np.int64]

COLD_TABLES = 4


def each(run: Callable[[int, Tensor, Tensor], Tensor]) -> Pass:
    """Returns a pass that calls `run` with the number of each table, its indices and its offsets."""
    return lambda requests: [run(table, *part) for table, part in requests]


@dataclass
class Workload:
    """The lookups in the tables: batches of one hotness, or of a mix."""

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
        """Lookups of one table."""
        return self.bags * self.pooling

    def unique_rows(self) -> float:
        """Different rows that the first batch reads in a table, the mean over tables."""
        return float(np.mean([len(indices.unique()) for indices, _ in self.batches[0]]))

    def least_bytes(self, row_bytes: int) -> float:
        """Returns the least bytes to move for a table: rows in use once, indices and offsets once, the
        output once."""
        inputs = sum(tensor.nbytes for tensor in self.batches[0][0])
        return (self.unique_rows() + self.bags) * row_bytes + inputs

    def hot_rows(self, limit: int) -> list[Tensor]:
        """Returns for each table the most frequent rows of its trace, the hottest first, up to `limit`."""
        device = self.batches[0][0][0].device
        return [torch.from_numpy(traces.hottest(trace, limit)).to(device) for trace in self.traces]


class BagSetting(Setting):
    """Tables of one shape on a device, and workloads for them."""

    def __init__(
        self, parser: argparse.ArgumentParser, arguments: argparse.Namespace, tables: int | None = None
    ) -> None:
        """`tables`: their number; None: `--tables`."""
        super().__init__(parser, arguments)
        self._tables = tables
        self._traces: dict[tuple[str, int], Trace] = {}

    @cached_property
    def medium(self) -> Trace | None:
        """The rows of `--trace`, which replace the generated medium trace."""
        if self.arguments.trace is None:
            return None
        trace = read_traces(self.parser, self.arguments.trace)[0]
        check_rows(self.parser, self.arguments.trace, trace, self.arguments.rows)
        return trace

    @cached_property
    def weights(self) -> list[Tensor]:
        """The tables."""
        arguments = self.arguments
        generator = torch.Generator(self.device).manual_seed(arguments.seed)
        size = arguments.rows, arguments.dims[0]
        count = self._tables or arguments.tables
        return [torch.randn(size, device=self.device, generator=generator) for _ in range(count)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in fp32."""
        return 4 * self.weights[0].shape[1]

    def unpin(self) -> None:
        """Resets the policy of L2 after rows were pinned."""
        recfuse.unpin(self.weights[0])

    def trace(self, hotness: str, table: int) -> Trace:
        """Returns the trace of a table: generated, or the file's, with another start for each table."""
        if hotness == "medium" and self.medium is not None:
            # One more start than tables: the tuner's table has the number after the last.
            return np.roll(self.medium, -(table * len(self.medium) // (len(self.weights) + 1)))
        key = (hotness, table)
        if key not in self._traces:
            seed = self.arguments.seed + table
            self._traces[key] = traces.generate(hotness, rows=self.arguments.rows, seed=seed)
        return self._traces[key]

    def workload(
        self, hotness: str | Sequence[str], pooling: int | None = None, batches: int = 1
    ) -> Workload:
        """Creates batches of one hotness, or of one hotness per table."""
        bags, pooling = self.arguments.batch_size, pooling or self.arguments.num_indices_per_lookup
        levels = [hotness] * len(self.weights) if isinstance(hotness, str) else list(hotness)
        rows = [
            self.trace(level, table)
            for table, level in enumerate(tqdm(levels, desc="traces", delay=1, leave=False))
        ]
        parts = [[self.part(trace, bags, pooling, number) for trace in rows] for number in range(batches)]
        return Workload(hotness if isinstance(hotness, str) else "mix", rows, parts, bags, pooling)

    def part(self, trace: Trace, bags: int, pooling: int, number: int) -> Part:
        """Batch `number` of a trace, on the device."""
        indices, offsets = traces.bags(trace, bags, pooling, number, include_last_offset=True)
        return torch.from_numpy(indices).to(self.device), torch.from_numpy(offsets).to(self.device)


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

    Returns the comparison, in seconds a pass or a cold table, and why a pass has no graph.
    """
    inputs = inputs_of(workload, cache)
    return time_calls(passes, inputs, device, rounds=rounds, eager=eager, cache=cache, after=after)


def inputs_of(workload: Workload, cache: timing.Cache) -> list[list[Request]]:
    """Passes. Cold: single tables, since a pass would warm the caches for its later tables."""
    if cache == "warm":
        return workload.requests
    return [[request] for request in workload.requests[0][:COLD_TABLES]]


def tables_of(result: timing.Comparison, workload: Workload) -> int:
    """Returns the number of tables that a call of the comparison pools."""
    return 1 if result.cache == "cold" else len(workload.batches[0])


def error_of_pass(outputs: Sequence[Tensor], weights: Sequence[Tensor], requests: Sequence[Request]) -> float:
    """Largest difference of a pass's outputs from sums in float64, relative to the largest value."""
    differences = []
    for output, (table, (indices, offsets)) in zip(outputs, requests, strict=True):
        bags = len(offsets) - 1  # all of them equally long
        for first in range(0, bags, 512):  # in shares: all rows in float64 are more than a table
            rows = indices.view(bags, -1)[first : first + 512]
            differences.append(difference(output[first : first + 512], weights[table][rows].double().sum(1)))
    return largest(differences)
