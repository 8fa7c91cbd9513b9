"""The comparison on the CPU: one model at one hotness, by stage, with its memory."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import recfuse
from common.checks import check_agreement
from common.report import Figure, load_notes
from common.settings import Setting
from common.table import Table, milliseconds, times
from common.traces import table_traces
from common.verdict import verdict
from dlrm import bench
from dlrm.model import (
    AGAINST,
    BASELINE,
    CANDIDATE,
    DLRM,
    TOLERANCE,
    MiniBatch,
    Staged,
    largest_differences,
    swap_note,
)
from recfuse import timing
from recfuse.data import traces

# Different mini-batches to rotate through; more only cost memory.
DIFFERENT_BATCHES = 8


def make_batches(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rows: list[int]
) -> list[MiniBatch]:
    """Creates mini-batches whose indices follow the trace; each table has its own trace or its own start
    in it."""
    size, pooling = arguments.mini_batch_size, arguments.num_indices_per_lookup
    table_rows = table_traces(parser, arguments.trace, rows, arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    batches = []
    for number in range(min(arguments.num_batches, DIFFERENT_BATCHES)):
        bags = [traces.bags(trace, size, pooling, number) for trace in table_rows]
        indices, offsets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*bags, strict=True))
        dense = torch.rand(size, arguments.arch_mlp_bot[0], generator=generator)
        batches.append(MiniBatch(dense, offsets, indices))
    return batches


def tabulate(arguments: argparse.Namespace, rows: list[int], result: timing.Comparison) -> Table:
    """Returns the table of stages and their total."""
    table = Table(
        f"DLRM, {len(rows)} tables, batch {arguments.mini_batch_size} x {arguments.num_indices_per_lookup} "
        f"lookups a table, dim {arguments.arch_sparse_feature_size}, trace {Path(arguments.trace).name}, "
        f"{torch.get_num_threads()} threads",
        ["stage, ms (median ± IQR)", BASELINE, CANDIDATE, "ratio"],
    )
    for stage, baseline in result[BASELINE].stages.items():
        candidate = result[CANDIDATE].stages[stage]
        ratio = times(baseline.median / candidate.median)
        table.rows.append([stage, milliseconds(baseline), milliseconds(candidate), ratio])
    total = [milliseconds(result[name]) for name in (BASELINE, CANDIDATE)]
    table.rows.append(["total", *total, times(result.ratio(CANDIDATE, BASELINE))])
    return table


def parameter_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the model's parameters; shared memory counts once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@bench.figure("inference", on=["cpu"])
def figure_inference(setting: Setting) -> Iterator[Figure]:
    """One model at one hotness, by stage."""
    parser, arguments, rows = setting.parser, setting.arguments, setting.arguments.arch_embedding_size
    torch.manual_seed(arguments.seed)
    batches = make_batches(parser, arguments, rows)
    baseline = DLRM(
        rows, arguments.arch_sparse_feature_size, arguments.arch_mlp_bot, arguments.arch_mlp_top
    ).eval()
    swapped = copy.deepcopy(baseline)
    report = recfuse.swap(swapped)
    models = {BASELINE: baseline, CANDIDATE: swapped}
    candidates = {name: Staged(model, "cpu") for name, model in models.items()}
    differences = largest_differences(candidates, batches, BASELINE, "cpu")
    result = timing.compare(
        candidates, inputs=[(batch,) for batch in batches], rounds=arguments.num_batches,
        progress=True, label="mini-batches",
    )  # fmt: skip
    memory = {name: parameter_bytes(model) for name, model in models.items()}
    table = tabulate(arguments, rows, result)
    table.notes += [
        f"Memory of the model: {memory[BASELINE] / 1e6:,.0f} MB with {BASELINE}, "
        f"{memory[CANDIDATE] / 1e6:,.0f} MB with {CANDIDATE}.",
        f"Largest difference of the outputs {differences[0]:.1e}, of the pooled embeddings "
        f"{differences[1]:.1e} of the largest value, on {len(batches)} mini-batches.",
        swap_note(report),
        *load_notes([result]),
    ]
    line = verdict({"": result}, CANDIDATE, BASELINE, AGAINST, differences)
    ratios = {"total": result.ratio(CANDIDATE, BASELINE)}
    for stage, spent in result[BASELINE].stages.items():
        ratios[stage] = spent.median / result[CANDIDATE].stages[stage].median
    yield Figure([table], {}, ratios, name="ratio")
    for name, record in {
        "verdict": line,
        "model_bytes": memory,
        "difference": {"outputs": differences[0], "embeddings_relative": differences[1]},
        "measured": result.to_json(environment=False),
    }.items():
        yield Figure([], {}, record, name=name)
    check_agreement(parser, differences, TOLERANCE)
    print(line)
