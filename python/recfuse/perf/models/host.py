"""Predicts the host's time for each operator, by ridge regression on unprofiled steps of small models.

A probe is the counts of (operator, phase) of a step and the step's time. Each phase has a cost
per operator; each operator deviates from it as far as the probes require. Errors are relative,
because steps differ in length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from recfuse.perf.tracing.operators import Operator

Counts: TypeAlias = Mapping[str, float]
Probe: TypeAlias = tuple[Counts, float]
"""Counts of "operator|phase", and microseconds of a step."""

_STRENGTH = 0.01  # of the ridge that pulls an operator to the cost of its phase
_DEFAULT_US = 6.0
_NO_COST = frozenset(("(call)",))


def counts_of(operators: Iterable[Operator]) -> dict[str, float]:
    """Return the count of each operator in each phase of a step, and a single call."""
    counts: Counter[str] = Counter(f"{operator.name}|{operator.phase}" for operator in operators)
    phases = {key.rpartition("|")[2] for key in counts}
    counts[f"(call)|{'forward' if 'backward' in phases or 'forward' in phases else 'inference'}"] = 1
    return dict(counts)


class HostModel:
    """Microseconds that each operator takes on the host."""

    def __init__(self, probes: Sequence[Probe], strength: float = _STRENGTH) -> None:
        """Fit the costs to probes."""
        self._probes, self._strength = list(probes), strength
        self.phase_us: dict[str, float] = {}
        self.operator_us: dict[str, float] = {}
        if probes:
            self._fit()

    def _fit(self) -> None:
        keys = sorted({key for counts, _ in self._probes for key in counts})
        phases = sorted({key.rpartition("|")[2] for key in keys})
        us = np.array([time for _, time in self._probes])
        counts = np.array([[probe.get(key, 0.0) for key in keys] for probe, _ in self._probes]) / us[:, None]
        of_phase = np.array([[float(key.endswith(f"|{phase}")) for phase in phases] for key in keys])
        by_phase = counts @ of_phase
        mean = float(by_phase.sum(1).sum() / (by_phase.sum(1) ** 2).sum())
        ridge = 1e-3 * np.eye(len(phases)) * np.trace(by_phase.T @ by_phase) / len(phases)
        residual = 1 - mean * by_phase.sum(1)
        scale = mean + np.linalg.solve(by_phase.T @ by_phase + ridge, by_phase.T @ residual)
        scale = np.clip(scale, 0.3 * mean, 3 * mean)
        design = counts * (of_phase @ scale)
        normal = design.T @ design + self._strength * np.eye(len(keys))
        factor = 1 + np.linalg.solve(normal, design.T @ (1 - design.sum(1)))
        self.phase_us = dict(zip(phases, map(float, scale), strict=True))
        costs = np.clip(factor, 0.2, 4.0) * (of_phase @ scale)
        self.operator_us = dict(zip(keys, map(float, costs), strict=True))

    def us(self, name: str, phase: str) -> float:
        """Return the cost of an operator: its own, its cost in another phase, or the mean of its phase."""
        for other in (phase, "forward", "inference", "backward", "optimizer"):
            if (cost := self.operator_us.get(f"{name}|{other}")) is not None:
                return cost
        if name.startswith("_foreach") or phase not in self.phase_us:
            return self.phase_us.get("optimizer", _DEFAULT_US)
        return self.phase_us[phase]

    def total(self, counts: Counts) -> float:
        """Return the microseconds of a step."""
        return sum(number * self.us(*_split(key)) for key, number in counts.items())

    @cached_property
    def spread(self) -> dict[str, float]:
        """Standard deviation of log(predicted / measured) of each probe, predicted from the
        others, by mode.
        """
        errors: dict[str, list[float]] = {"inference": [], "training": []}
        for number, (counts, us) in enumerate(self._probes):
            other_probes = self._probes[:number] + self._probes[number + 1 :]
            mode = "inference" if any(key.endswith("|inference") for key in counts) else "training"
            if len(other_probes) > 3:
                errors[mode].append(
                    float(np.log(max(HostModel(other_probes, self._strength).total(counts), 1e-3) / us))
                )
        return {
            mode: max(float(np.sqrt(np.mean(np.square(errors_of_mode)))), 0.02)
            if len(errors_of_mode) > 2
            else 0.3
            for mode, errors_of_mode in errors.items()
        }


def _split(key: str) -> tuple[str, str]:
    name, _, phase = key.rpartition("|")
    return name, phase
