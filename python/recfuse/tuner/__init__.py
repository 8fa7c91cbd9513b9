"""The tuner: `recfuse.tune` finds how to run one table on the device and the lookups at hand.

Source: Jain et al., MICRO 2024, section VII (a static profiling framework), whose steps are functions of
`steps`: is there anything to win, how many warps, where to prefetch to and how far ahead, what to pin.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import torch

from recfuse._batches import hotness
from recfuse._plan_parts import describe_device
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.plan import Plan
from recfuse.tuner.problem import Problem

__all__ = ["tune"]


def tune(
    module: torch.nn.Module,
    batches: Iterable[Any],
    budget_s: float = 60.0,
    *,
    progress: bool | None = None,
    pin: bool | None = None,
    seed: int = 0,
) -> Plan:
    """Finds the best schedule for one table by measuring, and says why.

    On CUDA it sweeps warps an SM, stations, rows in flight, threads and block sizes, and rows pinned in L2.
    On the CPU it sweeps the prefetch distance. Every decision is in the plan; what is not more than 1 %
    faster than the defaults, in a last run of both in turns, is not taken.

    Batches are timed in turns as well, so that caches hold what a stream of different ones leaves there: give
    several, as they really come. One batch alone finds its rows in L2 each time.

    Args:
        module: a :class:`recfuse.nn.EmbeddingBag` or ``torch.nn.EmbeddingBag``; not changed: see
            :meth:`recfuse.Plan.apply`.
        batches: what its ``forward`` is called with: a tensor ``[bags, n]``, or a tuple ``(input,
            offsets)`` or ``(input, offsets, per_sample_weights)``, for each call.
        budget_s: seconds to spend, about. The defaults are measured in any case.
        progress: show bars; None: on a terminal.
        pin: try to pin rows: None where the lookups are skewed and their rows do not fit in L2 anyway; True
            wherever there is a GPU; False never.
        seed: of the order in which candidates are tried.

    Returns:
        The plan. ``print`` it; ``plan.apply(module)``; ``plan.save(path)``.

    Raises:
        TypeError, ValueError: a bad argument. IndexError: an index in a batch outside the table.
        NotImplementedError: no kernel for this table, or no way to compile one.
    """
    if not isinstance(module, torch.nn.EmbeddingBag):
        raise ArgumentTypeError(
            f"recfuse.tune: module is a {type(module).__name__}, must be a recfuse.nn.EmbeddingBag or a "
            "torch.nn.EmbeddingBag"
        )
    if not budget_s >= 0:
        raise ArgumentValueError(f"recfuse.tune: budget_s is {budget_s}, must be >= 0")
    if module.weight.is_cuda:
        from recfuse.tuner.gpu import search
    else:
        from recfuse.tuner.cpu import search
    start = time.monotonic()
    problem = Problem.of(module, batches)
    trace = hotness(problem.batches)
    found = search(problem, trace, start + budget_s, progress=progress, pin=pin, seed=seed)
    return Plan(
        schedule=found.schedule,
        table=problem.table,
        trace=trace,
        device=describe_device(module.weight.device),
        default_us=found.default_us,
        best_us=found.best_us,
        floor_us=found.floor_us,
        seconds=time.monotonic() - start,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        pinned=found.pinned,
        decisions=found.decisions,
        hottest=found.hottest,
    )
