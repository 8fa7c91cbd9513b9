"""A DLRM with nn.EmbeddingBag and the same model after recfuse.swap: times by stage, ratios, memory.

Flags are named as in facebookresearch/dlrm. Tables are accessed along a trace: a file of row ids, or a
generated one of a hotness level (one_item, high, medium, low, random). Both models run in turns on the
same mini-batches, in inference mode, and their outputs are compared.

With --device cuda: the model of Jain et al. (MICRO'24) with 250 tables at every level of hotness and in their
mixes, eager and under torch.compile; see _cuda_dlrm.py.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

import recfuse
from _common import (
    Table,
    add_arguments,
    check_agreement,
    dashed,
    load_notes,
    milliseconds,
    positive,
    start,
    times,
    write_results,
)
from _cuda_dlrm import LEVELS, check_levels, run
from _dlrm_model import DLRM, MiniBatch, Staged, largest_differences
from _traces import table_traces
from recfuse import timing
from recfuse.data import traces

BASELINE, CANDIDATE = "nn.EmbeddingBag", "recfuse"
# Sums of float32 in another order; the last layer is a sigmoid.
TOLERANCE = 1e-4
# Different mini-batches to rotate through; more only cost memory.
DIFFERENT_BATCHES = 8


# Flags whose defaults depend on the device.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "arch_embedding_size": [500_000] * 8,
        "arch_sparse_feature_size": 64,
        "arch_mlp_bot": [13, 512, 256, 64],
        "arch_mlp_top": [256, 64, 1],
        "num_batches": 100,
        "trace": "medium",
    },
    "cuda": {
        "arch_embedding_size": [500_000],  # each of --tables
        "arch_sparse_feature_size": 128,
        "arch_mlp_bot": [1024, 512, 128, 128],
        "arch_mlp_top": [128, 64, 1],
        "num_batches": 21,
        "trace": ",".join(LEVELS),
    },
}


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    widths = {"type": dashed, "metavar": "N-N-..."}
    parser.add_argument(
        "--arch-embedding-size", help="rows of each table (default: 8 x 500000; see --tables)", **widths
    )
    parser.add_argument(
        "--arch-sparse-feature-size", type=positive, help="embedding dimension (default: 64; on a GPU 128)"
    )
    parser.add_argument(
        "--arch-mlp-bot", **widths,
        help="bottom MLP, from the dense features to the embedding dimension (default: 13-512-256-64; "
        "on a GPU 1024-512-128-128)",
    )  # fmt: skip
    parser.add_argument(
        "--arch-mlp-top", help="top MLP after its input (default: 256-64-1; on a GPU 128-64-1)", **widths
    )
    parser.add_argument("--mini-batch-size", type=positive, default=2048, help="default: 2048")
    parser.add_argument("--num-indices-per-lookup", type=positive, default=150, help="pooling (default: 150)")
    parser.add_argument(
        "--num-batches", type=positive, help="mini-batches to time (default: 100; on a GPU 21)"
    )
    parser.add_argument(
        "--trace", metavar="FILE|HOTNESS",
        help=f"row ids: a trace file, or one of {', '.join(traces.HOTNESS)} (default: medium). On a GPU "
        f"a list of hotness levels and mixes (default: {','.join(LEVELS)})",
    )  # fmt: skip
    parser.add_argument(
        "--tables", type=positive, default=250, help="on a GPU: how many tables (default: 250)"
    )
    parser.add_argument("--no-compile", action="store_true", help="on a GPU: leave torch.compile out")
    arguments = parser.parse_args()
    start(parser, arguments)
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.device == "cuda":
        if len(arguments.arch_embedding_size) == 1:
            arguments.arch_embedding_size *= arguments.tables
        check_levels(parser, arguments)
    if len(arguments.arch_mlp_bot) < 2 or arguments.arch_mlp_bot[-1] != arguments.arch_sparse_feature_size:
        parser.error(
            f"--arch-mlp-bot: found {'-'.join(map(str, arguments.arch_mlp_bot))}, needs at least two widths, "
            f"the last equal to --arch-sparse-feature-size {arguments.arch_sparse_feature_size}"
        )
    return parser, arguments


def make_batches(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rows: list[int]
) -> list[MiniBatch]:
    """Mini-batches whose row ids follow the trace; each table has its own, or starts elsewhere in it."""
    size, pooling = arguments.mini_batch_size, arguments.num_indices_per_lookup
    table_rows = table_traces(parser, arguments.trace, rows, arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    batches = []
    for number in range(min(arguments.num_batches, DIFFERENT_BATCHES)):
        bags = [traces.bags(row_ids, size, pooling, number) for row_ids in table_rows]
        indices, offsets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*bags, strict=True))
        dense = torch.rand(size, arguments.arch_mlp_bot[0], generator=generator)
        batches.append(MiniBatch(dense, offsets, indices))
    return batches


def tabulate(
    arguments: argparse.Namespace, rows: list[int], result: timing.Comparison, memory: dict[str, int]
) -> Table:
    """The table of stages, total and memory."""
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
    mega = {name: count / 1e6 for name, count in memory.items()}
    table.rows.append(
        [
            "memory of the model, MB",
            f"{mega[BASELINE]:.0f}",
            f"{mega[CANDIDATE]:.0f}",
            times(mega[BASELINE] / mega[CANDIDATE]),
        ]
    )
    return table


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of memory behind the model's parameters; memory that several share counts once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    if arguments.device == "cuda":
        run(parser, arguments, TOLERANCE)
        return
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
    table = tabulate(arguments, rows, result, memory)
    table.notes.append(
        f"Largest difference of the outputs {output_difference:.1e}, of the pooled embeddings "
        f"{embedding_difference:.1e} of the largest value, on {len(batches)} mini-batches."
    )
    table.notes.append(
        f"recfuse.swap: {len(report.replaced)} modules replaced, {len(report.fused)} lists of tables fused, "
        f"{len(report.left)} modules left."
    )
    table.notes += load_notes([result])
    table.show(arguments.markdown)
    results = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "ratio": {
            "total": result.ratio(CANDIDATE, BASELINE),
            **{
                stage: result[BASELINE].stages[stage].median / result[CANDIDATE].stages[stage].median
                for stage in result[BASELINE].stages
            },
        },
        "model_bytes": memory,
        "difference": {"outputs": output_difference, "embeddings_relative": embedding_difference},
        "measured": result.to_json(environment=False),
    }
    write_results(arguments.json, [table], results)
    check_agreement(parser, [output_difference, embedding_difference], TOLERANCE)


if __name__ == "__main__":
    main()
