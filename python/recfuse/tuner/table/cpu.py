"""The tuner of a table on the CPU: it chooses the prefetch distance."""

from __future__ import annotations

import random
import time
from functools import partial

import torch

from recfuse import timing
from recfuse.data.table import Hotness
from recfuse.ops.schedules import Schedule
from recfuse.plan.report import Decision
from recfuse.tuner.log import WORTH, counted
from recfuse.tuner.table.problem import Found, Problem

_DISTANCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_DEFAULT = -1
# Of each heat: rounds, the slowdown against the fastest at which a distance stays, and the share of the time.
_HEATS = ((3, 1.3, 0.3), (7, 1.1, 0.7))
_CONFIRM_ROUNDS = 15
_SAMPLE_S = 5e-3  # least seconds of a sample; a small batch is called several times


@torch.no_grad()
def search(
    problem: Problem,
    trace: Hotness,
    deadline: float,
    *,
    progress: bool | None,
    pin: bool | None,
    seed: int,
    predict: bool,
) -> Found:
    """Find the best prefetch distance for a problem on the CPU, by the deadline of `time.monotonic`."""
    del trace, pin, predict  # only of a GPU
    start = time.monotonic()
    decisions: list[Decision] = []
    default_us = _compare(problem, [_DEFAULT], 1, progress, sample_s=0)[_DEFAULT]
    decisions.append(Decision("default", "", default_us, True, "schedule without a plan"))
    us = {_DEFAULT: default_us}
    running = [_DEFAULT, *random.Random(seed).sample(_DISTANCES, len(_DISTANCES))]
    for rounds, limit, share in _HEATS:
        rounds = min(rounds, _rounds_until(start + share * (deadline - start), len(running), default_us))
        if rounds < 1:
            return _default(us[_DEFAULT], "the budget is spent: the default stays", decisions)
        us = _compare(problem, running, rounds, progress)
        fastest = min(us.values())
        running = [d for d in running if us[d] <= limit * fastest or d == _DEFAULT]
        for distance in sorted(us):
            why = f"{us[_DEFAULT] / us[distance]:.2f}x as fast as the default, {counted(rounds)}"
            why += ": the fastest" * (us[distance] == fastest)
            decisions.append(Decision("prefetch", _text(distance), us[distance], distance in running, why))
    best = min(us, key=us.__getitem__)
    if best == _DEFAULT:
        return _default(us[best], "no distance was faster than the default", decisions)
    rounds = max(1, min(_CONFIRM_ROUNDS, _rounds_until(deadline, 2, default_us)))
    us = _compare(problem, [best, _DEFAULT], rounds, progress)
    won = us[best] * WORTH < us[_DEFAULT]
    why = f"{us[_DEFAULT] / us[best]:.3f}x as fast as the default, {counted(rounds)}"
    decisions.append(Decision("confirm", _text(best), us[best], won, why))
    decisions.append(Decision("confirm", "", us[_DEFAULT], not won, "the default"))
    if won:
        return Found(_text(best), us[_DEFAULT], us[best], decisions=decisions)
    return Found("", us[_DEFAULT], us[_DEFAULT], decisions=decisions)


def _default(us: float, why: str, decisions: list[Decision]) -> Found:
    """Return the default as the winner, without a last run."""
    return Found("", us, us, decisions=[*decisions, Decision("confirm", "", us, True, why)])


def _text(distance: int) -> str:
    return "" if distance == _DEFAULT else str(Schedule(distance=distance))


def _rounds_until(deadline: float, candidates: int, us: float) -> int:
    """Return the number of rounds of `candidates` that fit before the deadline; an untimed call
    precedes each sample.
    """
    return int((deadline - time.monotonic()) / (candidates * (us * 1e-6 + max(us * 1e-6, _SAMPLE_S))))


def _compare(
    problem: Problem, distances: list[int], rounds: int, progress: bool | None, sample_s: float = _SAMPLE_S
) -> dict[int, float]:
    """Return the median microseconds per batch of each distance."""
    compared = timing.compare(
        {str(distance): partial(problem.pool, prefetch_distance=distance) for distance in distances},
        inputs=[(batch,) for batch in problem.batches],
        rounds=rounds,
        min_time=sample_s,
        progress=progress,
        label="prefetch distance",
    )
    return {distance: compared[str(distance)].median * 1e6 for distance in distances}
