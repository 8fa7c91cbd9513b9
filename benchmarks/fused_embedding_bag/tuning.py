"""The time of tuning: from nothing, with a warm cache of kernels, and with one compile a feature.

Tuning runs twice in separate processes, first with an empty cache folder: the caches of a process do not
count as warm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from common.report import Figure
from common.table import Table
from fused_embedding_bag import bench
from fused_embedding_bag.ablations import FP32
from fused_embedding_bag.candidates import default_collection
from fused_embedding_bag.native import EXPECTED, Native, schedules_of
from fused_embedding_bag.setting import FusedSetting, ModelSubject
from recfuse.ops.schedules import FIELDS

_CACHE = "RECFUSE_CACHE_DIR"
_ONE_BY_ONE = 8  # number of features that are compiled separately


def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of `call` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def tune_once(values: dict[str, Any], name: str) -> tuple[float, str]:
    """Tunes one model; returns seconds, and the plan as text. `values`: the command line's."""
    import recfuse

    setting = FusedSetting(argparse.ArgumentParser(), argparse.Namespace(**values))
    subject = setting.subject(name)
    module = default_collection(subject, FP32)
    batches = [(batch.indices, batch.offsets) for batch in subject.tuning_batches]
    start = time.perf_counter()
    plan = recfuse.tune(module, batches, budget_s=values["tune_budget"])
    return time.perf_counter() - start, str(plan)


@bench.figure("tuning", on=["cuda"])
def figure_tuning(setting: FusedSetting) -> Figure:
    """The first model, cold and warm."""
    name, record = setting.arguments.models[0], {}
    for state, folder in _folders():
        seconds, plan = _with_cache(folder, lambda: apart(tune_once, vars(setting.arguments), name))
        record[state] = {"seconds": seconds, "plan": plan}
    table = Table(f"Tuning {name}, {os.cpu_count()} cores: s", ["cache of kernels", "s"])
    table.rows = [[state, f"{entry['seconds']:.1f}"] for state, entry in record.items()]
    table.notes = ["Wanted: 120 s from nothing, 30 s with a warm cache."]
    return Figure([table], {}, record)


def _folders() -> Any:
    """Yields an empty cache folder, then the same folder warm."""
    with TemporaryDirectory() as folder:
        yield "empty", folder
        yield "warm", folder


def _with_cache(folder: str, call: Callable[[], Any]) -> Any:
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = folder
    try:
        return call()
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before


@bench.figure("per_feature", on=["cuda"], group="ablations")
def figure_per_feature(setting: FusedSetting) -> Figure:
    """One compile per feature, with all of its candidates in the kernel, as published; measured on a few."""
    arguments = setting.arguments
    subject: ModelSubject = setting.subject(arguments.models[0])
    module = default_collection(subject, FP32)
    batch = subject.batches(arguments.batch_sizes[0])[0]
    module(batch.indices, batch.offsets)  # without a plan it learns lengths from this
    sixteenths = schedules_of(module)[0][:, EXPECTED]
    chosen = np.random.default_rng(arguments.seed).permutation(subject.features)[:_ONE_BY_ONE]
    spent = []
    for feature in tqdm(chosen.tolist(), desc="one compile a feature", leave=False):
        native = Native(module, subject, feature)
        candidates = np.array(native.candidates(), np.int32).reshape(-1, FIELDS)
        candidates[:, EXPECTED] = sixteenths[feature]
        with TemporaryDirectory() as folder:
            start = time.perf_counter()
            compiled = _with_cache(folder, lambda n=native, c=candidates: n.compile_in_one(c))
            spent.append(
                {"feature": feature, "dim": subject.dims[feature], "candidates": len(candidates),
                 "seconds": time.perf_counter() - start, "cached": bool(compiled.get("cached"))}
            )  # fmt: skip
    fresh = [entry["seconds"] for entry in spent if not entry["cached"]] or [float("nan")]
    mean, cores = float(np.mean(fresh)), os.cpu_count() or 1
    table = Table(
        f"One compile a feature, as published: {subject.name}, {subject.features:,} features",
        ["", "one after another", f"{cores} side by side, at best"],
    )
    total = mean * subject.features
    table.rows = [
        ["one feature, s", f"{mean:.2f}", "-"],
        ["all features at one occupancy, s (extrapolated)", f"{total:.0f}", f"{total / cores:.0f}"],
        [
            f"all features at {arguments.occupancies} occupancies, s (extrapolated)",
            f"{total * arguments.occupancies:.0f}",
            f"{total * arguments.occupancies / cores:.0f}",
        ],
    ]
    table.notes = [
        f"Extrapolated from {len(fresh)} features, compiled one by one with an empty cache; nothing is timed "
        "but the compiler. recfuse compiles a kernel for each class of features and occupancy instead."
    ]
    return Figure([table], {}, {"compiled": spent, "mean_s": mean})
