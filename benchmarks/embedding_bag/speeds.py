"""Schedules of recfuse's kernel side by side, each against torch on the same batches in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import torch
from tqdm import tqdm

from common.checks import TOLERANCES, check_error
from common.settings import fail
from embedding_bag.candidates import BASELINE, bag, torch_bag
from embedding_bag.setting import BagSetting, Pass, Workload, error_of_pass, tables_of, time_passes

WARPS = (8, 16, 24, 32, 40, 48, 56, 64)
DISTANCES = (1, 2, 4, 6, 8, 10, 12, 16)
STATIONS = ("none", "register", "shared", "local", "l1")
FEW_ROUNDS = 5


def schedule(station: str, distance: int | None = None, warps: int | None = None) -> str:
    """Returns the text of a schedule; omitted fields keep their default."""
    fields = {"station": station, "distance": distance, "warps": warps}
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


@dataclass
class Speeds:
    """Microseconds a table of named passes, torch's among them, by hotness (or another label)."""

    us: dict[str, dict[str, float]] = field(default_factory=dict)  # label -> name -> us
    refused: dict[str, str] = field(default_factory=dict)  # schedule -> why
    samples: dict[str, Any] = field(default_factory=dict)  # label -> everything measured

    def over_torch(self, name: str) -> dict[str, float]:
        """Returns how many times faster than torch, by label."""
        return {label: us[BASELINE] / us[name] for label, us in self.us.items() if name in us}

    def names(self) -> list[str]:
        """All that was measured under every label."""
        first, *others = self.us.values()
        return [name for name in first if all(name in us for us in others)]

    def fastest(self, names: Iterable[str]) -> str | None:
        """Returns the name with the best geometric mean over the labels; None without names."""
        return max(names, key=lambda name: geometric_mean(self.over_torch(name).values()), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self)


def measure_passes(
    setting: BagSetting,
    workloads: Mapping[str, Workload],
    passes: Callable[[Workload], Mapping[str, Pass]],
    *,
    label: str,
    rounds: int = FEW_ROUNDS,
    after: Callable[[], object] | None = None,
) -> Speeds:
    """Times the passes of each workload in turns with torch's; checks their outputs first."""
    speeds = Speeds()
    for name, workload in tqdm(workloads.items(), desc=label, leave=False):
        candidates = {BASELINE: torch_bag(setting.weights), **passes(workload)}
        first = workload.requests[0][:2]
        for candidate, run in candidates.items():
            error = error_of_pass(run(first), setting.weights, first)
            check_error(setting.parser, f"{name}, {candidate}", error, TOLERANCES[torch.float32])
        result, failures = time_passes(candidates, workload, setting.device, rounds=rounds, after=after)
        for candidate, why in failures.items():
            fail(setting.parser, f"{candidate}: cannot be captured as a CUDA graph: {why}")
        tables = tables_of(result, workload)
        speeds.us[name] = {
            candidate: timing_.median * 1e6 / tables for candidate, timing_ in result.timings.items()
        }
        speeds.samples[name] = result.to_json(environment=False)
    return speeds


def measure_schedules(
    setting: BagSetting, workloads: Mapping[str, Workload], schedules: Sequence[str], label: str
) -> Speeds:
    """Times schedules; those that the operator refuses are left out, with its reason."""
    refused = _compile_ahead(setting, next(iter(workloads.values())), schedules)
    usable = {text: bag(text, setting.weights) for text in schedules if text not in refused}
    speeds = measure_passes(setting, workloads, lambda workload: usable, label=label)
    speeds.refused = refused
    return speeds


def _compile_ahead(setting: BagSetting, workload: Workload, schedules: Sequence[str]) -> dict[str, str]:
    """Runs each schedule once, so that their kernels are compiled side by side; why some do not run."""

    def attempt(text: str) -> str | None:
        try:
            bag(text, setting.weights)(workload.requests[0][:1])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return str(error).partition("\n")[0]
        return None

    with ThreadPoolExecutor(8) as pool:
        reasons = list(tqdm(pool.map(attempt, schedules), total=len(schedules), desc="compile", leave=False))
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    return {text: why for text, why in zip(schedules, reasons, strict=True) if why is not None}
