"""Embeddings with the MLP that follows them, and the host's time of a call."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.batches import Batch
from common.calls import EAGER, figure_of_samples, host_seconds, time_calls
from common.checks import relative_error
from common.report import Figure, Panels, Row, load_notes
from common.settings import fail
from common.table import Table, milliseconds, times
from fused_embedding_bag import bench
from fused_embedding_bag.candidates import (
    BASELINE,
    COMPILED,
    DEFAULT,
    SLOW,
    TUNED,
    V1,
    V2,
    default_collection,
    make_runs,
    tuned_collection,
)
from fused_embedding_bag.runs import compiled_run
from fused_embedding_bag.setting import FusedSetting, Subject
from fused_embedding_bag.streams import Run

MLP = (1024, 256, 128)
"""Hidden units after the concatenation, as published."""
_CANDIDATES = (BASELINE, COMPILED, V2, DEFAULT, TUNED)
_TOLERANCE = 1e-4  # relative, of sums of 25,000 products in fp32
_CALLS = 200  # of collection.map


def mlp(columns: int, device: torch.device, seed: int) -> torch.nn.Sequential:
    """Linear layers with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for width in MLP:
        layers += [torch.nn.Linear(columns, width, device=device), torch.nn.ReLU()]
        columns = width
    return torch.nn.Sequential(*layers[:-1]).requires_grad_(False)


@bench.figure("end_to_end", on=["cuda"])
def figure_end_to_end(setting: FusedSetting) -> Figure:
    """Models with the MLP, at the first of `--batch-sizes`."""
    arguments, notes, results = setting.arguments, [], {}
    size, records = arguments.batch_sizes[0], {}
    for name in tqdm(arguments.models, desc="end to end", leave=False):
        subject = setting.subject(name)
        runs, more = _whole(subject)
        error = _check(subject, runs, subject.batches(size)[0])
        batches, rounds = subject.batches(size), arguments.rounds
        result, failures = time_calls(runs, batches, subject.device, rounds=rounds, slow=SLOW)
        notes += [*more, *(f"{name}, {run}: no graph: {why}" for run, why in failures.items())]
        results[name] = result
        records[name] = {"relative_difference": error, "measured": result.to_json(environment=False)}
    measured = {name for result in results.values() for name in result.timings}
    names = [name for name in _CANDIDATES if name in measured]
    tables = [
        _table(
            f"ms of a whole model{how}, batch {size}, MLP {'-'.join(map(str, MLP))} in fp32",
            results,
            names,
            suffix,
        )
        for how, suffix in ((" as a CUDA graph", ""), (" as called, host included", EAGER))
    ]
    tables[0].notes += [*dict.fromkeys(notes), *load_notes(results.values())]
    panels: Panels = {}
    for ours, peer in itertools.product([name for name in (DEFAULT, TUNED) if name in names], (BASELINE, V2)):
        both = {name: result for name, result in results.items() if {ours, peer} <= set(result.timings)}
        if both:
            ratios = {name: result.ratio(ours, peer) for name, result in both.items()}
            panels.setdefault(f"{ours}, whole model", {})[peer] = ratios
    return Figure(tables, panels, records)


def _whole(subject: Subject) -> tuple[dict[str, Run], list[str]]:
    """Embeddings and MLP of each candidate."""
    names = [name for name in _CANDIDATES if name in subject.setting.arguments.candidates]
    runs, notes = make_runs(subject, names)
    layers = mlp(subject.output_dim, subject.device, subject.setting.arguments.seed)

    def with_mlp(run: Run) -> Run:
        @torch.inference_mode()
        def whole(batch: Batch) -> Tensor:
            return layers(run(batch))

        return whole

    return {
        name: compiled_run(subject.tables(), layers) if name == COMPILED else with_mlp(run)
        for name, run in runs.items()
    }, notes


def _check(subject: Subject, runs: dict[str, Run], batch: Batch) -> float:
    """Largest difference from the first candidate's output."""
    first, *others = runs.values()
    right = first(batch).double()
    error = max([relative_error(run(batch), right) for run in others], default=0.0)
    if not error <= _TOLERANCE:
        fail(subject.setting.parser, f"{subject.name}: outputs differ by {error:.1e}, end to end")
    return error


def _table(title: str, results: dict[str, Any], names: Sequence[str], suffix: str) -> Table:
    peers = [name for name in names if name != DEFAULT]
    table = Table(title, ["model", *names, *(f"{DEFAULT} over {peer}" for peer in peers)])
    for model, result in results.items():
        row = Row(model, result, {})
        cells = [
            milliseconds(result[name + suffix]) if name + suffix in result.timings else "-" for name in names
        ]
        ratios = [times(row.ratio(DEFAULT + suffix, peer + suffix)) for peer in peers]
        table.rows.append([model, *cells, *ratios])
    return table


@bench.figure("host", on=["cuda"])
def figure_host(setting: FusedSetting) -> Figure:
    """The host's time: of a call with all caches warm, and of the analysis of a batch."""
    arguments = setting.arguments
    name, size = arguments.models[0], arguments.batch_sizes[0]
    subject = setting.subject(name)
    batches = subject.batches(size)
    runs, notes = make_runs(subject, [run for run in (V1, V2, DEFAULT, TUNED) if run in arguments.candidates])
    calls: dict[str, Callable[[int], object]] = {
        label: lambda number, run=run: run(batches[number % len(batches)]) for label, run in runs.items()
    }
    module = (tuned_collection if TUNED in runs else default_collection)(subject, torch.float32)
    if DEFAULT in runs:
        mappings = [module.map(batch.host_offsets) for batch in batches]

        @torch.inference_mode()
        def mapped(number: int) -> Tensor:
            batch = batches[number % len(batches)]
            return module(batch.indices, batch.offsets, mapping=mappings[number % len(batches)])

        calls["recfuse, with a mapping"] = mapped
    samples = {label: host_seconds(call, subject.device, arguments.rounds) for label, call in calls.items()}
    samples["collection.map"] = _map_seconds(module, batches)
    return figure_of_samples(
        f", {name} ({subject.features:,} features), batch {size}",
        samples,
        [
            "A call: from Python's call to its return, with mappings and descriptions cached.",
            "collection.map: the host's analysis of a batch's offsets, an array, by one thread on one core.",
            *notes,
        ],
    )


def _map_seconds(module: Any, batches: Sequence[Batch]) -> list[float]:
    """Seconds of `module.map`, on one core."""
    cores = os.sched_getaffinity(0)
    samples = []
    os.sched_setaffinity(0, {max(cores)})
    try:
        for number in range(-10, _CALLS):
            offsets = batches[number % len(batches)].host_offsets
            start = time.perf_counter()
            module.map(offsets)
            spent = time.perf_counter() - start
            if number >= 0:
                samples.append(spent)
    finally:
        os.sched_setaffinity(0, cores)
    return samples
