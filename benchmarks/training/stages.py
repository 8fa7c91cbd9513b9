"""The least bytes of a step, its expected first change, and the time of a GPU by stage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.batches import Batch
from training.lookups import Subject
from training.sides import Optimizer, Side

FORWARD, TRANSPOSE, UPDATE, OTHER = "forward", "transpose", "backward + update", "other"
STAGES = (FORWARD, TRANSPOSE, UPDATE, OTHER)
# The stage of a kernel: the first expression that is found in its name. Names of recfuse's kernels begin with
# rf_, in the backward pass with rf_backward_; FBGEMM's contain their stage, and cub's sort is identified by
# its name.
_KERNELS = (
    (r"rf_small_lists|rf_backward_(keys|bag_factors|count|places|sort|group|sum_rows)", TRANSPOSE),
    (r"rf_(small_rows|backward|sample_weights)", UPDATE),
    (r"rf_", FORWARD),
    (r"linearize|[Rr]adix[Ss]ort|RunLengthEncode|DeviceScan|DeviceReduce|long_segments", TRANSPOSE),
    (r"backward", UPDATE),
    (r"forward", FORWARD),
)


def stage_of(kernel: str) -> str:
    """Returns the stage by the name of a kernel."""
    return next((stage for expression, stage in _KERNELS if re.search(expression, kernel)), OTHER)


def profile(step: Callable[[Batch], object], batches: Sequence[Batch], steps: int) -> dict[str, float]:
    """Returns the seconds of each kernel of a step; {} without a GPU, or if it cannot be profiled."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    if not set(activities) <= torch.profiler.supported_activities():
        return {}
    step(batches[0])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            step(batches[number % len(batches)])
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.time_range.elapsed_us() * 1e-6 / steps
            kernels[event.name] = kernels.get(event.name, 0.0) + spent
    return kernels


def by_stage(kernels: dict[str, float]) -> dict[str, float]:
    """Seconds of each stage."""
    stages = dict.fromkeys(STAGES, 0.0) if kernels else {}
    for kernel, seconds in kernels.items():
        stages[stage_of(kernel)] += seconds
    return stages


@dataclass
class Least:
    """The least bytes of a step, the mean of several, and its lookups and rows."""

    lookups: float
    unique_rows: float
    forward_bytes: float  # indices, offsets, each row in use once, the output
    backward_bytes: float  # indices, offsets, a list of 4 bytes a lookup, gradients, rows and states twice

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def least(subject: Subject, batches: Sequence[Batch], optimizer: Optimizer) -> Least:
    """Of these batches."""
    times = Least(0.0, 0.0, 0.0, 0.0)
    for batch in batches:
        rows = [len(indices.unique()) for indices, _ in batch.parts]
        read = sum(4 * count * dim for count, dim in zip(rows, subject.dims, strict=True))
        states = sum(4 * count * optimizer.states(dim) for count, dim in zip(rows, subject.dims, strict=True))
        ids, lookups = batch.indices.nbytes + batch.offsets.nbytes, len(batch.indices)
        times.lookups += lookups
        times.unique_rows += sum(rows)
        times.forward_bytes += ids + read + batch.grad.nbytes  # the output is as large as its gradient
        times.backward_bytes += ids + 8 * lookups + batch.grad.nbytes + 2 * read + 2 * states
    return Least(*(value / len(batches) for value in asdict(times).values()))


Changes = list[tuple[Tensor, Tensor]]  # of each table: rows that are looked up [n], their changes [n, dim]


def right_changes(subject: Subject, batch: Batch, optimizer: Optimizer) -> Changes:
    """Returns the change of each table by the first step on this batch, in float64."""
    changes, column = [], 0
    for (indices, starts), dim in zip(batch.parts, subject.dims, strict=True):
        ends = torch.cat((starts[1:], starts.new_tensor([len(indices)])))
        bags = torch.arange(batch.size, device=indices.device).repeat_interleave((ends - starts).long())
        rows, places = indices.long().unique(return_inverse=True)
        grad = batch.grad[:, column : column + dim].double()
        sums = grad.new_zeros(len(rows), dim).index_add_(0, places, grad[bags])
        changes.append((rows, optimizer.change(sums)))
        column += dim
    return changes


def first_step_error(side: Side, batch: Batch, right: Changes) -> float:
    """Returns the error of the changes of a side's first step, relative to their norm; undoes the step."""
    before = [table[rows] for table, (rows, _) in zip(side.tables, right, strict=True)]
    side.step(batch)
    wrong = torch.zeros((), dtype=torch.float64, device=batch.grad.device)
    norm = wrong.clone()
    with torch.no_grad():
        for table, old, (rows, change) in zip(side.tables, before, right, strict=True):
            wrong += (table[rows].double() - old - change).square().sum()
            norm += change.square().sum()
            table[rows] = old
    return (wrong / norm.clamp(min=1e-300)).sqrt().item()
