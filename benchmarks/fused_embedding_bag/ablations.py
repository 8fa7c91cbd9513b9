"""The gain of the tuner's parts: figures 11 and 12 of RecFlex (SC'24) on this GPU; occupancy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from common.batches import Batch
from common.calls import time_calls
from common.report import Figure, Panels
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import DEFAULT, TUNED, default_collection, tuned_collection
from fused_embedding_bag.models import checked
from fused_embedding_bag.native import EXPECTED, Native, Schedules, schedules_of
from fused_embedding_bag.separate import tune_separately
from fused_embedding_bag.setting import FusedSetting, ModelSubject, Subject
from fused_embedding_bag.streams import Run, time_stream

FP32 = torch.float32
WARPS = (8, 16, 24, 32, 40, 48, 56, 64)
SEPARATE = "separate and combine"
_FEW_BATCHES, _FEW_ROUNDS, _AGAIN = 2, 5, 25
_OURS = "recfuse, "  # these must not fail, unlike peers


def verified(subject: Subject, runs: dict[str, Run], size: int) -> tuple[dict[str, Run], dict[str, float]]:
    """Returns the same calls after a check of their outputs, and their errors against sums in float64."""
    outputs, errors, _ = checked(subject, {_OURS + name: run for name, run in runs.items()}, size, FP32)
    return (
        {name.removeprefix(_OURS): run for name, run in outputs.items()},
        {name.removeprefix(_OURS): error for name, error in errors.items()},
    )


def stream_us(subject: Subject, runs: dict[str, Run], batches: Sequence[Batch]) -> dict[str, float]:
    """Microseconds a batch of a stream, the mean over batches of the median over repeats."""
    streams = time_stream(runs, batches, subject.device, subject.setting.arguments.repeats)
    return {name: float(stream.medians.mean()) * 1e6 for name, stream in streams.items()}


@bench.figure("11", on=["cuda"], group="ablations")
def figure_11(setting: FusedSetting) -> Figure:
    """The two-stage tuner against tuning each feature separately by latency and combining the results."""
    names = (DEFAULT, SEPARATE, TUNED)
    table = Table(
        "Figure 11: us a batch of the published sizes, mean", ["model", *names, "two-stage over separate"]
    )
    record: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for name in tqdm(setting.arguments.models, desc="figure 11", leave=False):
        subject = setting.subject(name)
        module = tuned_collection(subject, FP32)
        native, (schedules, warps) = Native(module, subject), schedules_of(module)
        default = schedules.copy()
        default[:, :EXPECTED] = 0
        separate = separately(subject, module)
        runs = {
            DEFAULT: native.run(default), SEPARATE: native.run(separate),
            TUNED: native.run(schedules, warps),
        }  # fmt: skip
        runs, errors = verified(subject, runs, setting.arguments.batch_sizes[0])
        us = stream_us(subject, runs, subject.test_batches)
        ratios[name] = us[SEPARATE] / us[TUNED]
        record[name] = {"us": us, "relative_error": errors, "separate": separate.tolist()}
        table.rows.append([name, *(f"{us[each]:.1f}" for each in names), times(ratios[name])])
    table.rows.append(["geometric mean", "", "", "", times(geometric_mean(ratios.values()))])
    table.notes = [
        "Separate: each schedule of a feature in a launch that has nothing else to do; the fastest counts. "
        "Features of one group and dimension, alike but for their rows, share the result of one."
    ]
    return Figure([table], {"two-stage over separate": {"fused kernel": ratios}}, record)


def separately(subject: ModelSubject, module: Any) -> Schedules:
    """Returns for each feature the schedule with the least latency in a launch of its own."""
    alike: dict[tuple[int, int], list[int]] = {}
    for feature, kind in enumerate(zip(subject.model.group_of, subject.dims, strict=True)):
        alike.setdefault(kind, []).append(feature)
    batches = [(batch.indices, batch.offsets) for batch in subject.tuning_batches]
    firsts = [features[0] for features in alike.values()]
    schedules = tune_separately(module, batches, features=firsts).numpy().copy()
    for features in alike.values():
        schedules[features, :EXPECTED] = schedules[features[0], :EXPECTED]
    return schedules


@bench.figure("12", on=["cuda"], group="ablations")
def figure_12(setting: FusedSetting) -> Figure:
    """Single features of the first model by every schedule, in the tuned kernel."""
    arguments = setting.arguments
    subject = setting.subject(arguments.models[0])
    module = tuned_collection(subject, FP32)
    schedules, warps = schedules_of(module)
    native, batches = Native(module, subject), _usual(subject.tuning_batches)
    chosen = np.random.default_rng(arguments.seed).permutation(subject.features)[: arguments.mutations]
    table = Table(
        f"Figure 12: {subject.name}, one feature's schedule by another, us of the whole kernel",
        [
            "feature",
            "dim",
            "schedules",
            "tuned",
            "best",
            "tuned / best",
            "second run",
            "worst / best",
            "best schedule",
        ],
    )
    record: dict[str, Any] = {}
    series: dict[str, dict[str, float]] = {}
    for feature in tqdm(sorted(chosen.tolist()), desc="figure 12", leave=False):
        rows, sets = _mutations(native, schedules, feature)
        native.compile(sets, warps)
        seconds = _seconds(native, sets, warps, batches, arguments.repeats)
        best, tuned_s = int(seconds.argmin()), seconds[0]
        # The least of many noisy measurements is biased: measures both again to compare.
        anew = _seconds(native, [sets[0], sets[best]], warps, batches, _AGAIN * arguments.repeats)
        swept, again = tuned_s / seconds[best], anew[0] / anew[1]
        series[f"feature {feature} (dim {subject.dims[feature]})"] = {
            str(rank): float(tuned_s / each) for rank, each in enumerate(np.sort(seconds))
        }
        record[str(feature)] = {
            "schedules": rows,
            "s": seconds.tolist(),
            "tuned_over_best": swept,
            "second run": again,
        }
        ratios = swept, again, seconds.max() / seconds[best]
        cells = [
            feature,
            subject.dims[feature],
            len(rows),
            *(f"{each * 1e6:.2f}" for each in (tuned_s, seconds[best])),
            *(f"{ratio:.4f}" for ratio in ratios),
            rows[best],
        ]
        table.rows.append(list(map(str, cells)))
    worst, noisy = (max(each[key] for each in record.values()) for key in ("second run", "tuned_over_best"))
    table.notes = [
        f"Largest tuned / best: {worst:.4f} when both are measured again, {_AGAIN} times as often "
        f"({noisy:.4f} in the sweep, where the best is the least of many noisy ones); wanted: at most 1.02. "
        "Each kernel runs twice, the second time counts. "
        "Schedules: kind, threads, distance, split."
    ]
    panels = {f"{subject.name}: speed of the whole kernel, against the tuned one's": series}
    return Figure([table], panels, record, lines="schedule, the fastest first")


def _usual(batches: Sequence[Batch]) -> list[Batch]:
    """Returns a few of the sizes next to their mean."""
    mean = sum(batch.size for batch in batches) / len(batches)
    return sorted(batches, key=lambda batch: abs(batch.size - mean))[:_FEW_BATCHES]


def _mutations(native: Native, schedules: Schedules, feature: int) -> tuple[list[list[int]], list[Schedules]]:
    """Schedules that a feature can have, its own first, and those of all features with each."""
    schedule = schedules[feature, :EXPECTED].tolist()
    others = [list(each[:EXPECTED]) for each in native.candidates(feature)]
    rows = [schedule, *(each for each in others if each != schedule)]
    return rows, [mutated(schedules, feature, row) for row in rows]


def _seconds(
    native: Native, sets: Sequence[Schedules], warps: int, batches: Sequence[Batch], rounds: int
) -> NDArray[np.float64]:
    """Returns the seconds of the whole kernel with each set."""
    # Each twice in a row, as in use: after another kernel it would have to load its code.
    twice = [each for each in sets for _ in range(2)]
    return np.median(native.measure(twice, batches, warps, rounds), axis=1)[1::2]


def mutated(schedules: Schedules, feature: int, schedule: Sequence[int]) -> Schedules:
    """Returns the same with another schedule for one feature; its expected lookups stay."""
    changed = schedules.copy()
    changed[feature, :EXPECTED] = schedule[:EXPECTED]
    return changed


@bench.figure("occupancy", on=["cuda"], group="ablations")
def figure_occupancy(setting: FusedSetting) -> Figure:
    """Warps that an SM runs at once, with the plan's schedules and with the defaults."""
    size, record = setting.arguments.batch_sizes[0], {}
    as_it_is = "as shipped"
    table = Table(
        f"Occupancy: us a call by warps an SM, batch {size}",
        ["model", "schedules", *map(str, WARPS), as_it_is],
    )
    panels: Panels = {DEFAULT: {}, TUNED: {}}
    for name in tqdm(setting.arguments.models, desc="occupancy", leave=False):
        subject = setting.subject(name)
        batches = subject.batches(size)
        for kind, make in ((DEFAULT, default_collection), (TUNED, tuned_collection)):
            module = make(subject, FP32)
            module(batches[0].indices, batches[0].offsets)  # without a plan it learns lengths from this
            native, (schedules, warps) = Native(module, subject), schedules_of(module)
            runs = {str(each): native.run(schedules, each) for each in WARPS}
            runs[as_it_is] = native.run(schedules, warps)
            runs, errors = verified(subject, runs, size)
            result, _ = time_calls(runs, batches, subject.device, rounds=_FEW_ROUNDS, eager=False)
            us = {each: timing_.median * 1e6 for each, timing_ in result.timings.items()}
            record[f"{name} {kind}"] = {"us": us, "relative_error": errors, "warps": warps}
            table.rows.append([name, kind, *(f"{us[each]:.1f}" for each in [*map(str, WARPS), as_it_is])])
            panels[kind][name] = {str(each): us[as_it_is] / us[str(each)] for each in WARPS}
    return Figure([table], panels, record, lines="warps an SM")
