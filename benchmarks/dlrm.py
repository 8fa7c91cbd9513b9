"""A DLRM with nn.EmbeddingBag and the same model after recfuse.swap: times by stage, ratios, memory.

Flags are named as in facebookresearch/dlrm. Tables are accessed along a trace: a file of row ids, or a
generated one of a hotness level (one_item, high, medium, low, random). Both models run in turns on the
same mini-batches, in inference mode, and their outputs are compared.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

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
from _dlrm_model import DLRM
from _traces import table_traces
from recfuse import timing, traces

BASELINE, CANDIDATE = "nn.EmbeddingBag", "recfuse"
# Sums of float32 in another order; the last layer is a sigmoid.
TOLERANCE = 1e-4
# Different mini-batches to rotate through; more only cost memory.
DIFFERENT_BATCHES = 8


@dataclass
class MiniBatch:
    """Inputs of one call, as facebookresearch/dlrm names them."""

    dense_x: Tensor  # [batch, dense features] float32
    lS_o: Tensor  # [tables, batch] int64
    lS_i: Tensor  # [tables, batch * lookups] int64


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    widths = {"type": dashed, "metavar": "N-N-..."}
    parser.add_argument(
        "--arch-embedding-size",
        default=[500_000] * 8,
        help="rows of each table (default: 8 x 500000)",
        **widths,
    )
    parser.add_argument(
        "--arch-sparse-feature-size", type=positive, default=64, help="embedding dimension (default: 64)"
    )
    parser.add_argument(
        "--arch-mlp-bot", default=[13, 512, 256, 64], **widths,
        help="bottom MLP, from the dense features to the embedding dimension (default: 13-512-256-64)",
    )  # fmt: skip
    parser.add_argument(
        "--arch-mlp-top", default=[256, 64, 1], help="top MLP after its input (default: 256-64-1)", **widths
    )
    parser.add_argument("--mini-batch-size", type=positive, default=2048, help="default: 2048")
    parser.add_argument("--num-indices-per-lookup", type=positive, default=150, help="pooling (default: 150)")
    parser.add_argument(
        "--num-batches", type=positive, default=100, help="mini-batches to time (default: 100)"
    )
    parser.add_argument(
        "--trace", default="medium", metavar="FILE|HOTNESS",
        help=f"row ids: a trace file, or one of {', '.join(traces.HOTNESS)} (default: medium)",
    )  # fmt: skip
    arguments = parser.parse_args()
    start(parser, arguments)
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


def staged_call(model: DLRM, batch: MiniBatch) -> timing.Stages:
    """What DLRM.forward does, with the seconds that each stage took."""
    stages = timing.Stages()
    with torch.inference_mode():
        with stages("bottom MLP"):
            x = model.apply_mlp(batch.dense_x, model.bot_l)
        with stages("embeddings"):
            ly = model.apply_emb(batch.lS_o, batch.lS_i, model.emb_l, model.v_W_l)
        with stages("interaction"):
            z = model.interact_features(x, ly)
        with stages("top MLP"):
            model.apply_mlp(z, model.top_l)
    return stages


def largest_difference(models: dict[str, DLRM], batches: list[MiniBatch]) -> tuple[float, float]:
    """Largest differences: of the outputs, and of the pooled embeddings relative to the largest value."""
    outputs, embeddings = [torch.zeros(())], [torch.zeros(())]
    with torch.inference_mode():
        for batch in tqdm(batches, desc="checking outputs", leave=False):
            first, second = (model(batch.dense_x, batch.lS_o, batch.lS_i) for model in models.values())
            outputs.append((first - second).abs().max())
            for one, other in zip(
                *(
                    model.apply_emb(batch.lS_o, batch.lS_i, model.emb_l, model.v_W_l)
                    for model in models.values()
                ),
                strict=True,
            ):
                embeddings.append((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
    # torch's max keeps a NaN, Python's may lose it.
    return torch.stack(outputs).max().item(), torch.stack(embeddings).max().item()


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
    rows = arguments.arch_embedding_size
    torch.manual_seed(arguments.seed)
    batches = make_batches(parser, arguments, rows)
    baseline = DLRM(
        rows, arguments.arch_sparse_feature_size, arguments.arch_mlp_bot, arguments.arch_mlp_top
    ).eval()
    swapped = copy.deepcopy(baseline)
    report = recfuse.swap(swapped)
    models = {BASELINE: baseline, CANDIDATE: swapped}
    output_difference, embedding_difference = largest_difference(models, batches)
    result = timing.compare(
        {name: lambda batch, model=model: staged_call(model, batch) for name, model in models.items()},
        inputs=[(batch,) for batch in batches], rounds=arguments.num_batches,
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
