"""The tuner of a table on the GPU: the steps of the static profiling framework, in order."""

from __future__ import annotations

import time

import numpy as np
import torch

from recfuse.data.forms import BagLookups
from recfuse.data.table import Hotness
from recfuse.nn.pinning import rows_that_fit
from recfuse.ops import check, unpin
from recfuse.ops.schedules import Schedule
from recfuse.plan.device import architecture
from recfuse.plan.table import Pinned
from recfuse.tuner.log import WORTH
from recfuse.tuner.table import candidates
from recfuse.tuner.table.measure import copy_bandwidth
from recfuse.tuner.table.problem import Found, Problem
from recfuse.tuner.table.steps import Search

_AT_THE_FLOOR = 1.03  # ratio to the time of a copy of each byte, below which the defaults need no tuning
_CONFIRM_ROUNDS = 31
_PIN_ROUNDS, _PIN_TURNS = 3, 5
_L2_FRACTIONS = (0.25, 0.5, 0.75)
_HOT = 1.3  # least ratio of the reads of hot rows to their share of rows


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
    """Find the best schedule for a problem on a CUDA device, by the deadline of `time.monotonic`."""
    device = problem.weight.device
    with torch.cuda.device(device), torch.no_grad():
        # The last tenth of the time is left for the steps that compare the result with the defaults.
        soon = time.monotonic() + 0.9 * max(deadline - time.monotonic(), 0)
        for batch in problem.batches:
            problem.pool(batch)
        check(device)  # raises an error for an invalid index or offset of the batches
        state = Search(problem, architecture(device), soon, progress, seed, predict)
        state.measure_default()
        floor_us = _floor(state, trace)
        if floor_us is None or state.us[""] > _AT_THE_FLOOR * floor_us:
            _sweep(state, floor_us is not None)
        pinned, hottest = _pinning(state, trace, pin)
        return _confirm(state, floor_us, pinned, hottest)


def _floor(state: Search, trace: Hotness) -> float | None:
    """Step (i): returns the microseconds to move each byte of a batch once at copy speed; None if
    the rows fit in L2.
    """
    problem = state.problem
    working_set = trace.rows_in_use * problem.row_bytes
    l2_bytes = torch.cuda.get_device_properties(problem.weight.device).L2_cache_size
    if working_set <= l2_bytes:
        why = f"none: the {working_set / 2**20:.1f} MiB of rows in use fit in L2 ({l2_bytes / 2**20:.0f} MiB)"
        state.note("floor", "each byte once", None, True, why)
        return None
    bandwidth = copy_bandwidth(problem.weight.device)
    us = float(np.mean([_least_bytes(problem, batch) for batch in problem.batches])) / bandwidth * 1e6
    share = us / state.us[""]
    why = f"at the {bandwidth / 1e12:.2f} TB/s of a copy; the defaults reach {share:.0%} of that"
    if state.us[""] <= _AT_THE_FLOOR * us:
        why += ": no schedule can be faster"
    state.note("floor", "each byte once", us, True, why)
    return us


def _least_bytes(problem: Problem, batch: BagLookups) -> int:
    """Return the bytes of the distinct rows, lookups, offsets and output of a batch."""
    weights = 0 if batch.weights is None else batch.weights.nbytes
    rows = len(torch.unique(batch.indices)) + batch.bags
    return rows * problem.row_bytes + batch.indices.nbytes + batch.offsets.nbytes + weights


def _sweep(state: Search, beyond_l2: bool) -> None:
    """Steps (ii) to (vi): short bags, warps an SM, stations and distances, threads, blocks,
    parts, neighbours.
    """
    if short := candidates.short_bags(state.problem):
        state.step("short bags", short)
    most = candidates.most_warps(state.problem.weight.device)
    state.step("occupancy", state.screened("occupancy", candidates.occupancies(most)))
    warps = [_best_warps(state, station) for station in ("none", "register")]
    best = state.step("prefetch", state.screened("prefetch", candidates.prefetches(warps)), keep=3)
    best = state.step("threads", candidates.shapes(state.problem, best), keep=2)
    if beyond_l2:
        best = state.step("parts", candidates.sweeps(best))
    while not state.time_is_up:
        before = state.us[state.best]
        best = state.step("neighbours", candidates.neighbours(best[0], most))
        if state.us[state.best] * WORTH > before:
            break


def _best_warps(state: Search, station: str) -> int | None:
    """Return the warps of the fastest schedule of a station; None also if no schedule of the
    station was timed.
    """
    timed = [(us, Schedule.parse(text)) for text, us in state.us.items()]
    of_station = [(us, schedule.warps) for us, schedule in timed if schedule.station == station]
    return min(of_station, key=lambda pair: pair[0])[1] if of_station else None


def _pinning(state: Search, trace: Hotness, pin: bool | None) -> tuple[Pinned | None, torch.Tensor | None]:
    """Steps (v) and (vii): return the pinning of the hottest rows that makes the best schedule fastest.

    Times include refreshes. Returns (None, None) if no pinning is faster than the schedule alone.
    """
    problem, name = state.problem, "pinning"
    lookups = torch.cat([batch.indices.to(torch.int64) for batch in problem.batches])
    if pin is not True and (reason := _why_not_pin(problem, trace, pin, lookups)):
        state.note(name, "hottest rows", None, False, reason)
        return None, None
    rows = _by_heat(lookups)
    schedule, best = state.best, None
    for fraction in _L2_FRACTIONS:
        if state.time_is_up:
            state.note(name, f"{fraction:.0%} of L2", None, False, "not timed: the budget is spent")
            continue
        hot = rows[: rows_that_fit(problem.weight, fraction)]
        with_us, without_us = _in_turns(state, schedule, hot, schedule, _PIN_TURNS, _PIN_ROUNDS)
        won = with_us * WORTH < without_us and (best is None or with_us / without_us < best[0])
        why = f"{without_us / with_us:.3f}x as fast as without, refreshes included"
        state.note(name, f"{fraction:.0%} of L2, {len(hot):,} rows", with_us, won, why)
        if won:
            best = with_us / without_us, Pinned(len(hot), fraction, trace.sha256), hot
    return (None, None) if best is None else best[1:]


def _by_heat(lookups: torch.Tensor) -> torch.Tensor:
    """Return the distinct rows of the lookups, the hottest first."""
    rows, counts = torch.unique(lookups, return_counts=True)
    hottest: torch.Tensor = rows[torch.argsort(counts, descending=True, stable=True)]
    return hottest


def _why_not_pin(problem: Problem, trace: Hotness, pin: bool | None, lookups: torch.Tensor) -> str | None:
    if pin is False:
        return "disabled by pin=False"
    l2_bytes = torch.cuda.get_device_properties(problem.weight.device).L2_cache_size
    if trace.rows_in_use * problem.row_bytes <= l2_bytes:
        return "L2 holds all rows in use by itself"
    # Rows that were hot in the first half, counted in the second: within one half, some rows are hot by
    # chance.
    first, second = lookups.tensor_split(2)
    hot = _by_heat(first)[: rows_that_fit(problem.weight, _L2_FRACTIONS[0])]
    share = len(hot) / trace.rows_in_use
    heat = float(torch.isin(second, hot).double().mean()) / share if share else 0.0
    if heat < _HOT:
        return f"no rows stay hot: those of one half of the lookups get {heat:.2f}x their share of the other"
    return None


def _in_turns(
    state: Search, first: str, pinned: torch.Tensor | None, second: str, turns: int, rounds: int
) -> tuple[float, float]:
    """Return the microseconds of one schedule with pinned rows and of another without, in turns."""
    samples: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        samples[0].extend(state.bench.measure([first], rounds, pinned)[0])
        if pinned is not None:
            unpin(state.problem.weight)
        samples[1].extend(state.bench.measure([second], rounds)[0])
    return float(np.median(samples[0])) * 1e6, float(np.median(samples[1])) * 1e6


def _confirm(
    state: Search, floor_us: float | None, pinned: Pinned | None, hottest: torch.Tensor | None
) -> Found:
    """Compare the winner with the defaults in a last run; the winner must be faster by more than `WORTH`."""
    best, default_us = state.best, state.us[""]
    if best == "" and pinned is None:
        state.note("confirm", "", default_us, True, "no schedule was faster than the defaults")
        return Found("", default_us, default_us, floor_us, decisions=state.decisions)
    if pinned is None:
        times = np.median(state.bench.measure([best, ""], _CONFIRM_ROUNDS), axis=1) * 1e6
        best_us, default_us = float(times[0]), float(times[1])
    else:
        best_us, default_us = _in_turns(state, best, hottest, "", _PIN_TURNS, _PIN_ROUNDS)
    won = state.confirm(best, best_us, default_us)
    if not won and pinned is not None and best != "":
        return _confirm(state, floor_us, None, None)  # the schedule may be fast enough without the pinning
    if not won:
        return Found("", default_us, default_us, floor_us, decisions=state.decisions)
    rows = None if hottest is None else hottest.cpu()
    return Found(best, default_us, best_us, floor_us, pinned, rows, state.decisions)
