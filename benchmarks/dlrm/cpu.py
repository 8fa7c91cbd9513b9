"""The comparison on the CPU: one model at one hotness, by stage, with its memory."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch

import recfuse
from common.checks import check_agreement
from common.report import load_notes, texts, write_results
from common.table import Table, milliseconds, times
from common.traces import table_traces
from common.verdict import verdict
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
    """Mini-batches whose row ids follow the trace; each table has its own, or starts elsewhere in it."""
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
    """The table of stages and their total."""
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
    """Bytes of memory behind the model's parameters; memory that several share counts once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run the comparison."""
    rows = arguments.arch_embedding_size
    torch.manual_seed(arguments.seed)
    batches = make_batches(parser, arguments, rows)
    baseline = DLRM(
        rows, arguments.arch_sparse_feature_size, arguments.arch_mlp_bot, arguments.arch_mlp_top
    ).eval()
    swapped = copy.deepcopy(baseline)
    report = recfuse.swap(swapped)
    models = {BASELINE: baseline, CANDIDATE: swapped}
    candidates = {name: Staged(model, "cpu") for name, model in models.items()}
    output_difference, embedding_difference = largest_differences(candidates, batches, BASELINE, "cpu")
    result = timing.compare(
        candidates, inputs=[(batch,) for batch in batches], rounds=arguments.num_batches,
        progress=True, label="mini-batches",
    )  # fmt: skip
    memory = {name: parameter_bytes(model) for name, model in models.items()}
    differences = [output_difference, embedding_difference]
    table = tabulate(arguments, rows, result)
    table.notes += [
        f"Memory of the model: {memory[BASELINE] / 1e6:,.0f} MB with {BASELINE}, "
        f"{memory[CANDIDATE] / 1e6:,.0f} MB with {CANDIDATE}.",
        f"Largest difference of the outputs {output_difference:.1e}, of the pooled embeddings "
        f"{embedding_difference:.1e} of the largest value, on {len(batches)} mini-batches.",
        swap_note(report),
    ]
    table.notes += load_notes([result])
    table.show(arguments.markdown)
    line = verdict({"": result}, CANDIDATE, BASELINE, AGAINST, differences)
    results = {
        "arguments": texts(arguments),
        "ratio": {
            "total": result.ratio(CANDIDATE, BASELINE),
            **{
                stage: result[BASELINE].stages[stage].median / result[CANDIDATE].stages[stage].median
                for stage in result[BASELINE].stages
            },
        },
        "verdict": line,
        "model_bytes": memory,
        "difference": {"outputs": output_difference, "embeddings_relative": embedding_difference},
        "measured": result.to_json(environment=False),
    }
    write_results(arguments.json, [table], results)
    check_agreement(parser, differences, TOLERANCE)
    print(line)
