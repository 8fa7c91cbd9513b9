"""Tuning a collection on the GPU: the two-stage, interference-simulated strategy.

Source: Pan et al., RecFlex, SC 2024, section IV-A.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from recfuse._files import parsing
from recfuse.data.collection import trace_of
from recfuse.errors import FileFormatError
from recfuse.ops.schedules import CHOSEN, FusedSchedule
from recfuse.plan.collection import CollectionPlan
from recfuse.plan.device import architecture, describe_device
from recfuse.plan.features import Occupancy, distinct
from recfuse.tuner.collection import global_stage
from recfuse.tuner.collection.candidates import classes_of
from recfuse.tuner.collection.global_stage import Contestant
from recfuse.tuner.collection.local_stage import Group, Local, LocalStage
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from recfuse.tuner.collection.state import Finished, State, identity, rows_of, rows_record
from recfuse.tuner.compile import Compiler
from recfuse.tuner.log import now

_WARPS = (40, 32, 28, 24, 20, 16)
_FAR_OFF = 1.5  # slowdown against the best, with the defaults, up to which an occupancy is tuned
# Shares of the time at which the local stage, the global stage and the refinement must end.
_LOCAL, _GLOBAL, _REFINE = 0.65, 0.8, 0.92


def tune_collection(
    collection: torch.nn.Module,
    batches: Iterable[Any],
    budget_s: float,
    *,
    progress: bool | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
) -> CollectionPlan:
    """Tune a collection on a GPU, as :func:`recfuse.tune` does."""
    start = time.monotonic()
    problem = FusedProblem.of(collection, batches)
    device = problem.device
    with torch.cuda.device(device), torch.no_grad():
        trace, described = trace_of(problem.batches, problem.tables), describe_device(device)
        finished = Finished(resume, identity(problem, trace, described, seed))
        with Compiler(progress=progress) as compiler:
            arch, deadline = architecture(device), start + budget_s
            state = State(problem, FusedBench(problem), compiler, arch, deadline, progress, seed)
            if finished.stale:
                state.note("resume", str(resume), None, False, "belongs to another search: started again")
            best, best_us, default_us, occupancies = _search(state, finished)
    tables, table_of = distinct(problem.tables)
    schedules, schedule_of = distinct(str(FusedSchedule.of_row(row)) for row in best.schedules)
    return CollectionPlan(
        schedules=schedules,
        schedule_of=schedule_of,
        expected=problem.expected_sixteenths.tolist(),
        warps=best.warps,
        tables=tables,
        table_of=table_of,
        form=problem.form,
        trace=trace,
        device=described,
        default_us=default_us,
        best_us=best_us,
        seconds=time.monotonic() - start,
        created=now(),
        occupancies=occupancies,
        decisions=state.decisions,
    )


def _search(state: State, finished: Finished) -> tuple[Contestant, float, float, list[Occupancy]]:
    """Return the winner, its microseconds, those of the defaults, and the times at each occupancy."""
    result = _compile_default(state)
    with_default = _occupancies(state, result)
    state.note_time("occupancies")
    locals_ = _local_stage(state, finished, with_default)
    state.note_time("local stage")
    best, times = _global_stage(state, locals_, with_default)
    state.note_time("global stage")
    if best is not None and (local := locals_.get(best.warps)) is not None:
        best = global_stage.refine(state, best, local.groups, state.by(_REFINE))
        state.note_time("refinement")
    warps = sorted(set(with_default) - {0} | set(times))
    occupancies = [Occupancy(number, with_default.get(number), times.get(number)) for number in warps]
    return *global_stage.confirm(state, best), occupancies


def _compile_default(state: State) -> dict[str, Any]:
    """Return the compiler's result for the kernel of the defaults; raise the compiler's error."""
    state.compiler.submit("default", state.bench.kernel(state.arch, state.defaults[None], 0, False))
    result: dict[str, Any] | Exception = state.compiler.result("default")
    if isinstance(result, Exception):
        raise result
    state.compiler.deadline = state.by(_LOCAL)
    return result


def _occupancies(state: State, result: dict[str, Any]) -> dict[int, float]:
    """Return the microseconds of the defaults by warps an SM, for occupancies worth tuning, the
    fastest first.

    The key 0 is the occupancy that the defaults choose themselves.
    """
    step = "occupancy"
    defaults = Contestant(state.defaults, 0)
    contestants = {f"default, {warps} warps": Contestant(state.defaults, warps) for warps in _WARPS}
    ready = global_stage.compiled(state, step, contestants)
    us = global_stage.in_turns(state, step, {"": defaults, **ready}, turns=3)
    why = f"schedules without a plan, {result['registers']} registers, {result['spill_bytes']} bytes spilled"
    state.note(step, "", us[""], True, why)
    least, times = min(us.values()), {0: us[""]}
    for name in sorted(ready, key=lambda name: us.get(name, np.inf)):
        if name in us:
            near = us[name] <= _FAR_OFF * least
            why = f"{us[''] / us[name]:.2f}x as fast as the defaults" + ("" if near else ": not tuned")
            state.note(step, name, us[name], near, why)
            if near:
                times[ready[name].warps] = us[name]
    return times


def _local_stage(state: State, finished: Finished, with_default: dict[int, float]) -> dict[int, Local]:
    """Return the best schedules of all features at each occupancy worth tuning, as far as the
    time allows.
    """
    if len(with_default) == 1:
        state.note("local", "", None, False, "no occupancy was timed: the budget is spent")
        return {}
    classes = classes_of(state.problem, state.bench)
    locals_: dict[int, Local] = {}
    stages: dict[int, LocalStage] = {}
    for warps in filter(None, with_default):  # 0 is the own choice of the defaults
        if (local := _resumed(state, finished, warps)) is not None:
            locals_[warps] = local
        else:
            stages[warps] = LocalStage(state, classes, warps, 1 + len(stages))
    for warps, stage in stages.items():
        local = stage.run(state.by(_LOCAL))
        if local.groups:
            locals_[warps] = local
        if local.whole:
            groups = [asdict(group) for group in local.groups]
            finished.put(warps, {"schedules": rows_record(local.schedules), "groups": groups})
    return {warps: locals_[warps] for warps in with_default if warps in locals_}


def _resumed(state: State, finished: Finished, warps: int) -> Local | None:
    record = finished.get(warps)
    if record is None:
        return None
    try:
        with parsing("recfuse.tune: resume"):
            schedules = rows_of(record["schedules"], state.defaults.shape)
            groups = [Group.of(group, len(schedules)) for group in record["groups"]]
    except FileFormatError as error:
        state.note(f"local {warps}", "", None, False, f"not resumed, damaged: {error}")
        return None
    state.note(f"local {warps}", f"{len(groups)} groups", None, True, "taken from an earlier run")
    return Local(warps, schedules, groups)


def _with_staged_tables(state: State, contestants: dict[str, Contestant]) -> dict[str, Contestant]:
    """Return contestants with the tables staged that the defaults stage; their kernel runs concurrently."""
    changed = {}
    if staged := state.bench.staged():
        for name, contestant in contestants.items():
            schedules = contestant.schedules.copy()
            schedules[staged, CHOSEN] = 0
            changed[f"{name}, {len(staged)} tables staged"] = Contestant(schedules, contestant.warps)
    return changed


def _global_stage(
    state: State, locals_: dict[int, Local], with_default: dict[int, float]
) -> tuple[Contestant | None, dict[int, float]]:
    """Return the fastest kernel (None: the defaults without a plan), and the times of tuned
    kernels by warps.
    """
    state.compiler.deadline = state.by(_GLOBAL)
    contestants = {
        f"tuned, {warps} warps": Contestant(local.schedules, warps) for warps, local in locals_.items()
    }
    contestants |= _with_staged_tables(state, contestants)
    ready = global_stage.compiled(state, "global", contestants)
    state.compiler.deadline = state.by(_REFINE)
    if not ready and len(with_default) < 2:
        return None, {}
    defaults = {"": Contestant(state.defaults, 0)}
    least = min((warps for warps in with_default if warps), key=with_default.__getitem__, default=None)
    if least is not None:
        defaults[f"default, {least} warps"] = Contestant(state.defaults, least)
    everyone = {**defaults, **ready}
    us = global_stage.in_turns(state, "global", everyone)
    fastest = min(us, key=us.__getitem__)
    for name in sorted(us, key=us.__getitem__):
        why = f"{us[''] / us[name]:.3f}x as fast as the defaults"
        state.note("global", name, us[name], name == fastest, why)
    times: dict[int, float] = {}
    for name, contestant in ready.items():
        if name in us:
            times[contestant.warps] = min(us[name], times.get(contestant.warps, np.inf))
    return (everyone[fastest] if fastest else None), times
