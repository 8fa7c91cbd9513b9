"""Predicts the time of a step: eager, compiled, as a CUDA graph.

Eager is the paper's Algorithm 1, the critical path over two clocks. The host issues an operator after the
previous operator. A kernel starts after its launch and the end of the previous kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recfuse.perf.models.fusion import fuse
from recfuse.perf.models.host import HostModel
from recfuse.perf.models.kernels import KernelModel, KernelTime
from recfuse.perf.tracing.operators import Operator

QUANTILE_80 = 1.2816  # half the width of an 80 % interval, in standard deviations
_ALIKE = 0.3  # correlation of the errors of kernels within a step
_WIDER = 1.5  # factor with which the intervals hold for four of five recorded steps
_STEPS = 4
_LAUNCH_AT = 0.6  # share of an operator's host time at which it launches


@dataclass(frozen=True)
class Gaps:
    """Constants of a device, in microseconds.

    Attributes:
        gap: between two kernels of a stream.
        delay: from a launch to the start of its kernel.
        wait: of a synchronisation.
        graph_gap: between two kernels of a graph.
        graph_start: of a graph's launch.
        compiled_call: of the host for a call of compiled code.
        compiled_launch: of the host for a launch of compiled code.
    """

    gap: float = 1.0
    delay: float = 6.0
    wait: float = 10.0
    graph_gap: float = 0.4
    graph_start: float = 4.0
    compiled_call: float = 60.0
    compiled_launch: float = 6.0


@dataclass(frozen=True)
class Estimate:
    """A predicted time with its 80 % interval, in seconds."""

    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, us: float, spread: float) -> Estimate:
        """Create the estimate from microseconds and the standard deviation of their logarithm."""
        seconds, half = us * 1e-6, math.exp(QUANTILE_80 * spread)
        return cls(seconds, seconds / half, seconds * half)


@dataclass(frozen=True)
class Timed:
    """An operator with its times in a step, in microseconds from the start of the step."""

    operator: Operator
    kernel: KernelTime
    host_us: float
    issued: float = 0.0
    begin: float = 0.0
    end: float = 0.0


def timed(
    operators: Sequence[Operator], kernels: KernelModel, host: HostModel, exact: bool = True
) -> list[Timed]:
    """Return the operators with the times of their kernels and of the host."""
    return [
        Timed(operator, kernels.time(operator, exact), host.us(operator.name, operator.phase))
        for operator in operators
    ]


def active_us(times: Sequence[Timed]) -> float:
    """Return the sum of the kernels' times."""
    return sum(timed.kernel.us for timed in times)


def active_spread(times: Sequence[Timed]) -> float:
    """Return the standard deviation of the logarithm of the sum, for partly correlated errors."""
    total = active_us(times)
    if total <= 0:
        return 0.0
    deviations = [timed.kernel.us * timed.kernel.spread for timed in times]
    independent = sum(deviation * deviation for deviation in deviations)
    return _WIDER * math.sqrt((1 - _ALIKE) * independent + _ALIKE * sum(deviations) ** 2 * 0.25) / total


def eager(times: Sequence[Timed], gaps: Gaps, call_us: float) -> tuple[float, list[Timed]]:
    """Return the microseconds of a step in a stream of steps, and the operators of the last step."""
    host = device = before = 0.0
    placed: list[Timed] = []
    for _ in range(_STEPS):
        before, placed = max(host, device), []
        start = host
        host += call_us
        for timed in times:
            launched, begin = host + _LAUNCH_AT * timed.host_us, 0.0
            if timed.kernel.kernels:
                device = max(device + gaps.gap * timed.kernel.kernels, launched + gaps.delay)
                begin, device = device, device + timed.kernel.us
            placed.append(
                Timed(
                    timed.operator, timed.kernel, timed.host_us, host - start, begin - start, device - start
                )
            )
            host += timed.host_us
    return max(host, device) - before, placed


def graph_us(times: Sequence[Timed], gaps: Gaps) -> float:
    """Return the microseconds of a step that is replayed as a CUDA graph."""
    launches = sum(timed.kernel.kernels for timed in times)
    return gaps.graph_start + active_us(times) + gaps.graph_gap * launches


def compiled_times(operators: Sequence[Operator], kernels: KernelModel, gaps: Gaps) -> list[Timed]:
    """Return the kernels of a compiled step, each with the host's cost of its launches."""
    times = []
    for kernel_group in fuse(operators):
        kernel = kernels.time(kernel_group)
        times.append(Timed(kernel_group, kernel, gaps.compiled_launch * max(kernel.kernels, 1.0)))
    return times
