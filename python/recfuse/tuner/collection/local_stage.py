"""The local stage: at one occupancy, finds the best schedule of each feature amid the traffic of
all features.

The clock cycles of blocks are summed for each feature and candidate, in kernels that hold all
candidates of a class. The features of the class take different candidates at a time (Pan et al.,
RecFlex, SC 2024, section IV-A2). The paper fills the GPU with copies of one feature's work; here
the work of the other features fills it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recfuse.errors import ArgumentValueError
from recfuse.ops.schedules import CHOSEN, FIELDS, SIXTEENTHS, FusedSchedule
from recfuse.plan.file import shown
from recfuse.tuner.collection.candidates import FeatureClass, Unit, mixtures, units_of
from recfuse.tuner.collection.state import State, check_rows
from recfuse.tuner.log import first_line, missing, spilled

_VARIANTS = 48  # candidates in a kernel, which also has the defaults of other classes
_MOST_CHOSEN = 64  # distinct schedules of classes in the kernel of all features
_REPEATS = 3
_BATCHES = 4
_ALIKE = 1.1  # features of a class whose mean bags differ by less share a decision
_LEAST_GAIN = 0.03  # least gain of a feature's own best over the choice of its group
_RANKED = 4  # candidates of a group that are tried in the whole kernel


@dataclass
class Group:
    """Features of a class with bags of similar length, and their candidates, the best first."""

    name: str
    features: list[int]
    ranked: list[list[int]]  # rows of schedules
    cycles: float  # of the best candidate, over all features

    @classmethod
    def of(cls, record: dict[str, Any], features: int) -> Group:
        """Read a record of a file. A bad record raises ArgumentValueError, or errors of dict and NumPy."""
        feature_class = np.array(record["features"], np.int64)
        ranked = np.array(record["ranked"], np.int32)
        if feature_class.ndim != 1 or ((feature_class < 0) | (feature_class >= features)).any():
            raise ArgumentValueError(
                f"a group has features {shown(feature_class.tolist())}; expected [0, {features})"
            )
        if ranked.size:
            check_rows(ranked, (len(ranked), FIELDS))
        return cls(str(record["name"]), feature_class.tolist(), ranked.tolist(), float(record["cycles"]))


@dataclass
class Local:
    """The result of the local stage for an occupancy."""

    warps: int
    schedules: NDArray[np.int32]  # [features, 5]
    groups: list[Group] = field(default_factory=list)
    whole: bool = True
    """Whether all classes were timed."""


class LocalStage:
    """Compiles the kernels of one occupancy in the background, then times them."""

    def __init__(self, state: State, classes: Sequence[FeatureClass], warps: int, rank: int) -> None:
        """Start to compile, after the kernels of lower rank."""
        self._state, self._classes, self._warps = state, classes, warps
        self._kernels = units_of(classes, warps, _VARIANTS)
        for number, units in enumerate(self._kernels):
            sets, _ = mixtures(units, state.defaults, state.seed)
            job = state.bench.kernel(state.arch, sets, warps, True)
            state.compiler.submit(("local", warps, number), job, rank)

    def run(self, deadline: float) -> Local:
        """Time the kernels. Features of a kernel that is not compiled or not started by the
        deadline keep the default.
        """
        local = Local(self._warps, self._state.defaults.copy())
        samples: dict[str, list[NDArray[np.float64]]] = {}
        for number in range(len(self._kernels)):
            reason = self._compiled(number)
            if reason is None and time.monotonic() > deadline:
                reason = "not timed: the budget is spent"
            if reason is None:
                try:
                    self._time(number, samples)
                except Exception as error:  # the classes of other kernels can still be timed
                    reason = f"does not run: {first_line(error)}"
            if reason is not None:
                local.whole = False
                self._note(self._names(number), False, reason)
        measured = [feature_class for feature_class in self._classes if feature_class.name in samples]
        self._share(
            local,
            {
                feature_class.name: self._choose(local, feature_class, samples[feature_class.name])
                for feature_class in measured
            },
        )
        return local

    def _share(self, local: Local, costs: dict[str, NDArray[np.float64]]) -> None:
        """Limit the schedules of a kernel: features take the best of the schedules with most cycles."""
        weights: dict[tuple[str, int], float] = {}
        chosen = {
            feature_class.name: _choices_of(feature_class, local.schedules)
            for feature_class in self._classes
            if feature_class.name in costs
        }
        for name, choices in chosen.items():
            for member, choice in enumerate(choices):
                spent = weights.get((name, choice), 0.0) + np.nan_to_num(costs[name][member, choice])
                weights[name, choice] = float(spent)
        chosen_pairs = set(sorted(weights, key=lambda pair: -weights[pair])[:_MOST_CHOSEN])
        if len(chosen_pairs) == len(weights):
            return
        for feature_class in self._classes:
            if feature_class.name not in chosen:
                continue
            remaining = [choice for name, choice in chosen_pairs if name == feature_class.name] or [0]
            for member, choice in enumerate(chosen[feature_class.name]):
                if (feature_class.name, choice) in chosen_pairs:
                    continue
                cost = costs[feature_class.name][member, remaining]
                best = 0 if np.isnan(cost).all() else remaining[int(np.nanargmin(cost))]
                local.schedules[feature_class.features[member], CHOSEN] = feature_class.candidates[
                    best, CHOSEN
                ]
        why = f"a kernel has at most {_MOST_CHOSEN}: those with the fewest cycles are left out"
        self._note(f"{len(weights)} schedules", False, why)

    def _note(self, candidate: str, kept: bool, why: str) -> None:
        self._state.note(f"local {self._warps}", candidate, None, kept, why)

    def _names(self, number: int) -> str:
        """Return the names of the classes of a kernel."""
        return ", ".join(unit.own.name for unit in self._kernels[number])

    def _compiled(self, number: int) -> str | None:
        """Wait for a kernel; return why it cannot be timed, or None. A kernel that spills is
        timed: cycles show the cost.
        """
        result = self._state.compiler.result(("local", self._warps, number))
        why = missing(result)
        if why is None and (bytes_spilled := spilled(result)):
            self._note(self._names(number), True, f"some candidates spill, {bytes_spilled}")
        return why

    def _time(self, number: int, samples: dict[str, list[NDArray[np.float64]]]) -> None:
        """Add cycles `[repeats, features of the class, candidates]` of each class; NaN: not taken."""
        state, units = self._state, self._kernels[number]
        sets, taken = mixtures(units, state.defaults, state.seed)
        batches = state.problem.some_batches(_BATCHES)
        cycles = [state.bench.cycles(sets, self._warps, batches) for _ in range(_REPEATS)]
        for unit in units:
            samples.setdefault(unit.own.name, []).append(_by_candidate(unit, np.stack(cycles), taken))

    def _choose(
        self, local: Local, feature_class: FeatureClass, parts: list[NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Choose schedules for the features of a class. Returns their cycles `[features of the
        class, candidates]`.
        """
        costs = _merged(parts)
        cost, noise = _statistics(costs)
        for name, members in _alike(feature_class, self._state.problem.expected_sixteenths):
            # Features without cycles (empty bags in these batches) do not vote.
            voters = members[cost[members, 0] > 0]
            if not len(voters):
                continue
            votes = _mean(cost[voters] / cost[voters, :1])
            order = [int(choice) for choice in np.argsort(votes, kind="stable") if np.isfinite(votes[choice])]
            for member in members:
                choice = _own_choice(cost[member], order[0], max(_LEAST_GAIN, 2 * noise[member]))
                local.schedules[feature_class.features[member], CHOSEN] = feature_class.candidates[
                    choice, CHOSEN
                ]
            ranked = [feature_class.candidates[choice].tolist() for choice in order[:_RANKED]]
            features = [feature_class.features[member] for member in members]
            best = float(np.nansum(cost[members, order[0]]))
            local.groups.append(Group(name, features, ranked, best))
            chosen, least = np.array(_choices_of(feature_class, local.schedules))[members], votes[order[0]]
            for choice in order:
                count = int((chosen == choice).sum())
                if count or choice == order[min(1, len(order) - 1)]:
                    text = str(FusedSchedule.of_row(feature_class.candidates[choice])) or "default"
                    why = f"{least / votes[choice]:.3f}x as fast as the best, by cycles"
                    self._note(f"{name}: {text}", count > 0, f"{why}, {count} of {len(members)} features")
            if len(order) > 1:
                worst = f"the slowest {least / votes[order[-1]]:.2f}x as fast as the best, by cycles"
                self._note(name, False, f"{len(order)} candidates timed, {worst}")
        return cost


def _by_candidate(unit: Unit, cycles: NDArray[np.float64], taken: NDArray[np.int64]) -> NDArray[np.float64]:
    """Reduce cycles `[repeats, set, features]` to means `[repeats, features of the class, candidates]`."""
    feature_class = unit.own
    cost = np.full((len(cycles), len(feature_class.features), len(feature_class.candidates)), np.nan)
    for member, feature in enumerate(feature_class.features):
        which = taken[:, feature]
        counts = np.bincount(which, minlength=len(feature_class.candidates))
        there = counts > 0
        for repeat, measured in enumerate(cycles[:, :, feature]):
            sums = np.bincount(which, weights=measured, minlength=len(feature_class.candidates))
            cost[repeat, member, there] = sums[there] / counts[there]
    return cost


def _merged(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Merge the costs of all candidates of a class, from kernels that each have a part of them
    and the default.
    """
    scales = np.array([np.nansum(part[:, :, 0]) for part in parts])
    if len(parts) > 1 and (scales > 0).all():
        parts = [part * (scales.mean() / scale) for part, scale in zip(parts, scales, strict=True)]
    # Every candidate except the default is in a single part.
    merged: NDArray[np.float64] = np.fmax.reduce(parts)
    merged[:, :, 0] = np.mean([part[:, :, 0] for part in parts], axis=0)
    return merged


def _choices_of(feature_class: FeatureClass, schedules: NDArray[np.int32]) -> list[int]:
    """Return the candidate of each feature of a class."""
    choice_of = {row.tobytes(): choice for choice, row in enumerate(feature_class.candidates[:, CHOSEN])}
    return [choice_of[schedules[feature, CHOSEN].tobytes()] for feature in feature_class.features]


def _statistics(costs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the costs `[features, candidates]`, and their relative spread between repeats, per feature."""
    with warnings.catch_warnings():
        # A feature has no cost for candidates that it does not take.
        warnings.simplefilter("ignore", RuntimeWarning)
        cost = np.nanmedian(costs, axis=0)
        spread = (np.nanmax(costs, axis=0) - np.nanmin(costs, axis=0)) / cost
        return cost, np.nan_to_num(np.nanmedian(spread, axis=1))


def _alike(
    feature_class: FeatureClass, expected_sixteenths: NDArray[np.int32]
) -> list[tuple[str, NDArray[np.int64]]]:
    """Group features of a class by similar bag length; return names, and positions in the class."""
    lengths = expected_sixteenths[feature_class.features] / SIXTEENTHS
    bins = np.rint(np.log(lengths) / np.log(_ALIKE)).astype(np.int64)
    alike = []
    for number in np.unique(bins):
        members = np.flatnonzero(bins == number)
        alike.append((f"{feature_class.name} x{lengths[members].mean():.3g}", members))
    return alike


def _mean(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of columns without NaN; inf for a column of NaN alone."""
    measured = ~np.isnan(relative)
    sums = np.where(measured, relative, 0).sum(axis=0)
    return np.where(measured.any(axis=0), sums / np.maximum(measured.sum(axis=0), 1), np.inf)


def _own_choice(cost: NDArray[np.float64], common: int, least_gain: float) -> int:
    """Return the candidate of a feature: its own best if that gains enough over the common candidate."""
    if np.isnan(cost).all():
        return 0
    best = int(np.nanargmin(cost))
    # The own best also wins if the common candidate has no cost.
    return common if cost[best] >= (1 - least_gain) * cost[common] else best
