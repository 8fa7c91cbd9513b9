"""The global stage: times whole kernels with device events in turns: occupancies, refinement, confirmation.

Source: Pan et al., RecFlex, SC 2024, section IV-A2 (the occupancy), and IV-A3 (historical batches).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recfuse.ops.schedules import CHOSEN, FusedSchedule
from recfuse.tuner.collection.local_stage import Group
from recfuse.tuner.collection.state import State
from recfuse.tuner.log import bar, first_line, missing, spilled

_TURNS, _ROUNDS = 5, 3
_REFINE_ROUNDS = 7
_CONFIRM_TURNS = 9
_LEAST_GAIN = 0.002  # least gain of the whole kernel for another schedule
_TRIES = 12  # groups whose next candidate is tried at once
_BATCHES = 32


@dataclass(frozen=True, eq=False)
class Contestant:
    """A schedule for every feature, and an occupancy."""

    schedules: NDArray[np.int32]  # [features, 5]
    warps: int


def compiled(state: State, step: str, contestants: Mapping[str, Contestant]) -> dict[str, Contestant]:
    """Return the contestants whose kernels compile; record why others do not.

    A kernel that spills stays: its time includes the cost. The spill is recorded.
    """
    for name, contestant in contestants.items():
        job = state.bench.kernel(state.arch, contestant.schedules[None], contestant.warps, False)
        state.compiler.submit((step, name), job)
    ready = {}
    for name, contestant in contestants.items():
        result = state.compiler.result((step, name))
        if why := missing(result):
            state.note(step, name, None, False, why)
        else:
            if bytes_spilled := spilled(result):
                state.note(step, name, None, True, f"spills {bytes_spilled}")
            ready[name] = contestant
    return ready


def in_turns(
    state: State, step: str, contestants: Mapping[str, Contestant], turns: int = _TURNS
) -> dict[str, float]:
    """Return the median microseconds per batch of each contestant that runs, measured in turns."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    numbers = state.problem.some_batches(_BATCHES)
    for _ in bar(state.progress, step, range(turns)):
        for name in list(samples):
            sets, warps = contestants[name].schedules[None], contestants[name].warps
            try:
                times = state.bench.seconds(sets, warps, _ROUNDS, numbers)[0]
            except Exception as error:
                if name == "":  # the defaults must run
                    raise
                del samples[name]
                state.note(step, name, None, False, f"does not run: {first_line(error)}")
            else:
                samples[name].extend(float(value) * 1e6 for value in times)
    return {name: float(np.median(times)) for name, times in samples.items()}


def refine(state: State, best: Contestant, groups: list[Group], deadline: float) -> Contestant:
    """Try the next best schedules of groups in the whole kernel until the deadline, the groups
    with most cycles first.
    """
    queue = [
        (group, row)
        for rank in range(max((len(group.ranked) for group in groups), default=0))
        for group in sorted(groups, key=lambda group: -group.cycles)
        for row in group.ranked[rank : rank + 1]
        if (best.schedules[group.features, CHOSEN] != row[CHOSEN]).any()
    ]
    round_number = 0
    while queue and time.monotonic() < deadline:
        now: dict[str, tuple[Group, list[int]]] = {}
        failed = []
        for group, row in queue:
            if len(now) < _TRIES and all(group is not other for other, _ in now.values()):
                now[f"{group.name}: {str(FusedSchedule.of_row(row)) or 'default'}"] = group, row
            else:
                failed.append((group, row))
        queue = failed
        best = _try(state, f"refine {round_number}", best, now)
        round_number += 1
    if queue:
        state.note("refine", f"{len(queue)} schedules", None, False, "not tried: the budget is spent")
    return best


def _try(
    state: State, step: str, best: Contestant, tries: Mapping[str, tuple[Group, list[int]]]
) -> Contestant:
    """Return the fastest of a kernel, its variants with one group's schedule changed, and the variant with
    all changes that help.
    """
    changed = {name: _with(best, [change]) for name, change in tries.items()}
    ready = compiled(state, step, changed)
    us = _against(state, best, ready)
    enough = 1 - _LEAST_GAIN
    helps = {name: value for name, value in us.items() if name and value < enough * us[""]}
    if len(helps) > 1:
        name = f"all {len(helps)} that help"
        combined = compiled(state, f"{step} all", {name: _with(best, [tries[group] for group in helps])})
        fastest = min(helps, key=helps.__getitem__)
        again = _against(state, best, {**combined, fastest: ready[fastest]})
        us |= again
        ready |= combined
        helps = {name: value for name, value in again.items() if name and value < enough * again[""]}
    winner = min(helps, key=helps.__getitem__) if helps else ""
    for name, value in us.items():
        if name:
            why = f"{us[''] / value:.4f}x as fast as the best so far"
            state.note(step, name, value, name == winner, why)
    return ready[winner] if winner else best


def _with(best: Contestant, changes: list[tuple[Group, list[int]]]) -> Contestant:
    schedules = best.schedules.copy()
    for group, row in changes:
        schedules[group.features, CHOSEN] = row[CHOSEN]
    return Contestant(schedules, best.warps)


def _against(state: State, best: Contestant, others: Mapping[str, Contestant]) -> dict[str, float]:
    """Return the median microseconds of the best, named "", and of others with as many warps, in turns."""
    everyone = {"": best, **others}
    sets = np.stack([contestant.schedules for contestant in everyone.values()])
    numbers = state.problem.some_batches(_BATCHES)
    try:
        times = np.median(state.bench.seconds(sets, best.warps, _REFINE_ROUNDS, numbers), axis=1) * 1e6
    except Exception as error:  # a failed contestant fails the whole call: each is then timed alone
        state.note("refine", "", None, False, f"does not run: {first_line(error)}")
        return in_turns(state, "refine", everyone)
    return dict(zip(everyone, map(float, times), strict=True))


def confirm(state: State, best: Contestant | None) -> tuple[Contestant, float, float]:
    """Compare the winner with the defaults in a last run. Returns the better, its microseconds,
    and those of the defaults.
    """
    defaults = Contestant(state.defaults, 0)
    contestants = {"": defaults} if best is None else {"": defaults, "plan": best}
    us = in_turns(state, "confirm", contestants, _CONFIRM_TURNS)
    default_us = us[""]
    if best is None or "plan" not in us:
        state.note("confirm", "", default_us, True, "no schedule was faster than the defaults")
    elif state.confirm(f"plan, {best.warps} warps", us["plan"], default_us):
        return best, us["plan"], default_us
    return defaults, default_us, default_us
