"""A whole DLRM on a GPU: figures 13 and 14 of Jain et al. (MICRO'24), with nn.EmbeddingBag and recfuse.

All candidates share one set of weights, 64 GB at the default size: a copy of the model shares its parameters,
recfuse.swap of the copy packs its tables, and the tables of the first model become views of them. "compiled":
each stage separately by torch.compile, so that stages can be timed; "graph": a call as a CUDA graph, without
the host's time.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import recfuse
from common.checks import check_agreement
from common.registry import Flag
from common.report import Figure, load_notes
from common.settings import Setting, comma_list
from common.table import Table, milliseconds, times
from common.traces import MIXES, mix_levels
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

LEVELS = (*traces.HOTNESS, *MIXES)
COMPILED, CANDIDATE_COMPILED = f"{BASELINE} compiled", f"{CANDIDATE} compiled"
# Tables share generated traces, each from another start; the rows that they name are every table's own.
DIFFERENT_TRACES = 8
DIFFERENT_BATCHES = 2
# 250 tables have 31,000 products of pooled embeddings: their rounding, 1e-6 of the largest, has grown a
# hundredfold when it reaches the sigmoid. The embeddings themselves are held to the tolerance of rounding.
OUTPUT_TOLERANCE = 1e-2


MOST_TABLES = 250  # in the paper


def default_tables(arguments: argparse.Namespace, free: int) -> int:
    """Returns the paper's 250 tables, or as many as `free` bytes of the GPU's memory hold."""
    table = 4 * arguments.arch_embedding_size[0] * arguments.arch_sparse_feature_size
    lookups = arguments.mini_batch_size * arguments.num_indices_per_lookup
    # A table exists twice while it is packed; plus int64 indices and the outputs of stages, with a margin.
    pooled = 4 * arguments.mini_batch_size * arguments.arch_sparse_feature_size
    each = 2 * table + 8 * lookups * DIFFERENT_BATCHES + 16 * pooled
    reserve = 2 << 30  # the context, workspaces, compiled code
    return max(1, min(MOST_TABLES, (free - reserve) // each))


def check_levels(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where --trace is no list of hotness levels and mixes."""
    arguments.trace = comma_list(arguments.trace)
    Flag("--trace", comma_list, None, "", allowed=LEVELS).check(parser, arguments.trace)
    if len(set(arguments.arch_embedding_size)) > 1:
        parser.error(
            "--arch-embedding-size: tables differ in their rows; expected equal tables with --device cuda"
        )


def make_model(arguments: argparse.Namespace) -> DLRM:
    """Creates the model, with weights generated on the device."""
    with torch.device(arguments.device):
        return DLRM(
            arguments.arch_embedding_size,
            arguments.arch_sparse_feature_size,
            arguments.arch_mlp_bot,
            arguments.arch_mlp_top,
        ).eval()


def swapped_copy(model: DLRM) -> tuple[DLRM, recfuse.SwapReport]:
    """Returns the same model on recfuse with packed weights; the first model's become views of them."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    swapped = copy.deepcopy(model, shared)
    return swapped, recfuse.swap(swapped)


def make_batches(arguments: argparse.Namespace, level: str) -> list[MiniBatch]:
    """Creates mini-batches at a level of hotness, or of a mix."""
    device, tables = arguments.device, len(arguments.arch_embedding_size)
    size = arguments.mini_batch_size * arguments.num_indices_per_lookup
    levels = mix_levels(level, tables) if level in MIXES else [level] * tables
    sources = {name: _sources(arguments, name, min(tables, DIFFERENT_TRACES)) for name in sorted(set(levels))}
    generator = torch.Generator(device).manual_seed(arguments.seed)
    offsets = torch.arange(arguments.mini_batch_size, device=device) * arguments.num_indices_per_lookup
    positions = torch.arange(size, device=device)
    batches = []
    for number in range(DIFFERENT_BATCHES):
        rows = []
        for table, name in enumerate(levels):
            trace = sources[name][table % len(sources[name])]
            # Tables that share a trace start at positions spread over it.
            first = table * len(trace) // tables + number * size
            rows.append(trace[(positions + first) % len(trace)])
        dense = torch.rand(
            arguments.mini_batch_size, arguments.arch_mlp_bot[0], device=device, generator=generator
        )
        batches.append(MiniBatch(dense, offsets.expand(tables, -1), torch.stack(rows)))
    return batches


def _sources(arguments: argparse.Namespace, hotness: str, count: int) -> list[Tensor]:
    rows = arguments.arch_embedding_size[0]
    generated = (traces.generate(hotness, rows=rows, seed=arguments.seed + number) for number in range(count))
    return [torch.from_numpy(trace).to(arguments.device) for trace in generated]


def make_candidates(arguments: argparse.Namespace, baseline: DLRM, swapped: DLRM) -> dict[str, Staged]:
    """Both models, as they are and compiled."""
    candidates = {BASELINE: Staged(baseline, arguments.device), CANDIDATE: Staged(swapped, arguments.device)}
    if not arguments.no_compile:
        compiled = functools.partial(torch.compile, dynamic=False)
        candidates[COMPILED] = Staged(baseline, arguments.device, compiled)
        candidates[CANDIDATE_COMPILED] = Staged(swapped, arguments.device, compiled)
    return candidates


def measure(
    arguments: argparse.Namespace, level: str, candidates: dict[str, Staged]
) -> tuple[timing.Comparison, tuple[float, float]]:
    """Times all candidates at a level; also returns the differences of their outputs."""
    batches = make_batches(arguments, level)
    differences = largest_differences(candidates, batches, BASELINE, arguments.device)
    timed: dict[str, Callable[[int], Any]] = {
        name: lambda number, staged=staged: staged(batches[number]) for name, staged in candidates.items()
    }
    for name in (BASELINE, CANDIDATE):
        graphs = [
            timing.graphed(functools.partial(_whole, candidates[name], batch), arguments.device)
            for batch in batches
        ]
        timed[f"{name} graph"] = lambda number, graphs=graphs: graphs[number]()
    result = timing.compare(
        timed, inputs=[(number,) for number in range(len(batches))], rounds=arguments.num_batches,
        device=arguments.device, label=f"DLRM {level}",
    )  # fmt: skip
    return result, differences


@torch.inference_mode()
def _whole(staged: Staged, batch: MiniBatch) -> Tensor:
    """A call without marks between the stages, which a graph cannot contain."""
    return staged.forward(batch, timing.Stages("cpu"))


def tabulate(arguments: argparse.Namespace, results: dict[str, timing.Comparison]) -> list[Table]:
    """Tabulates whole calls, and the stages of the two eager models."""
    tables = len(arguments.arch_embedding_size)
    setting = (
        f"{tables} tables x {arguments.arch_embedding_size[0]:,} x {arguments.arch_sparse_feature_size}, "
        f"batch {arguments.mini_batch_size} x {arguments.num_indices_per_lookup}"
    )
    names = list(next(iter(results.values())).timings)
    pairs = [(CANDIDATE, BASELINE), (f"{CANDIDATE} graph", f"{BASELINE} graph")]
    if COMPILED in names:
        pairs += [(CANDIDATE, COMPILED), (CANDIDATE_COMPILED, COMPILED)]
    spread = f"median ± IQR of {arguments.num_batches}"
    whole = Table(f"DLRM (figure 13), {setting}: ms ({spread})", ["trace", *names])
    faster = Table("How many times faster", ["trace", *(f"{ours} over {theirs}" for ours, theirs in pairs)])
    columns = [f"{stage}, {name}" for stage in _stages(results) for name in (BASELINE, CANDIDATE)]
    columns += ["embeddings faster", *(f"embeddings' share, {name}" for name in (BASELINE, CANDIDATE))]
    stages = Table(f"Stages (figure 14): ms ({spread})", ["trace", *columns])
    for level, result in results.items():
        whole.rows.append([level, *(milliseconds(result[name]) for name in names)])
        faster.rows.append([level, *(times(result.ratio(ours, theirs)) for ours, theirs in pairs)])
        both = [result[name] for name in (BASELINE, CANDIDATE)]
        pooled = [timing_.stages["embeddings"].median for timing_ in both]
        shares = [f"{part / timing_.median:.0%}" for part, timing_ in zip(pooled, both, strict=True)]
        cells = [milliseconds(timing_.stages[stage]) for stage in _stages(results) for timing_ in both]
        stages.rows.append([level, *cells, times(pooled[0] / pooled[1]), *shares])
    return [whole, faster, stages]


def _stages(results: dict[str, timing.Comparison]) -> list[str]:
    return list(next(iter(results.values()))[BASELINE].stages)


@bench.figure("inference", on=["cuda"])
def figure_inference(setting: Setting) -> Iterator[Figure]:
    """Every level of hotness and mix."""
    arguments = setting.arguments
    torch.manual_seed(arguments.seed)
    baseline = make_model(arguments)
    swapped, report = swapped_copy(baseline)
    candidates = make_candidates(arguments, baseline, swapped)
    results, differences = {}, {}
    for level in arguments.trace:
        results[level], differences[level] = measure(arguments, level, candidates)
        yield from measured(results, differences)
        outputs, embeddings = differences[level]
        check_agreement(setting.parser, [embeddings], TOLERANCE)
        check_agreement(setting.parser, [outputs], OUTPUT_TOLERANCE)
    worst = [max(pair) for pair in zip(*differences.values(), strict=True)]
    tables = tabulate(arguments, results)
    tables[0].notes += [
        f"Largest difference of the outputs {worst[0]:.1e}, of the pooled embeddings {worst[1]:.1e} of the "
        f"largest value. {swap_note(report)}",
        *load_notes(results.values()),
    ]
    yield Figure(tables, {}, differences, name="differences")
    print(verdict(results, CANDIDATE, BASELINE, AGAINST, worst))


def measured(results: dict[str, timing.Comparison], differences: dict[str, Any]) -> Iterator[Figure]:
    """Yields the figure of the levels measured so far."""
    yield Figure([], {}, differences, name="differences")
    plain = {name: result.to_json(environment=False) for name, result in results.items()}
    yield Figure([], {}, plain, name="measured")
