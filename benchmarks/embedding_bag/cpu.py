"""The comparison on the CPU: every dimension and hotness, on batches of one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.checks import check_agreement, largest_difference
from common.peers import KINDS, InThreads, Part, fbgemm_missing, fbgemm_module, rebased
from common.report import load_notes, plot_ratios, write_results
from common.table import Table, milliseconds, times
from recfuse import timing
from recfuse.data import traces


@dataclass
class Batch:
    """One batch in the form that each candidate likes best; cut outside of the timed region."""

    indices: Tensor  # [bags * pooling] int64
    offsets: Tensor  # [bags + 1] int64
    parts: list[Part]  # of each thread's share of the bags: indices, offsets


def make_batches(trace: NDArray[np.int64], arguments: argparse.Namespace) -> list[Batch]:
    """Batches one after another along the trace, which is repeated where it ends."""
    bags, pooling = arguments.batch_size, arguments.num_indices_per_lookup
    threads = min(torch.get_num_threads(), bags)
    cuts = [bags * share // threads for share in range(threads + 1)]
    batches = []
    for number in range(arguments.num_batches):
        indices, offsets = map(torch.from_numpy, traces.bags(trace, bags, pooling, number, True))
        parts = [rebased(indices, offsets, first, last) for first, last in pairwise(cuts)]
        batches.append(Batch(indices, offsets, parts))
    return batches


def make_candidates(weight: Tensor, threads: int, use_fbgemm: bool) -> dict[str, Callable[[Batch], Tensor]]:
    """Candidates by name. All hold the same values, each in a table of its own."""
    baseline = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum", include_last_offset=True)
    candidate = recfuse.nn.EmbeddingBag.from_pretrained(weight.clone(), mode="sum", include_last_offset=True)

    def run(module: torch.nn.Module, batch: Batch) -> Tensor:
        with torch.inference_mode():
            return module(batch.indices, batch.offsets)

    candidates: dict[str, Callable[[Batch], Tensor]] = {
        "recfuse": lambda batch: run(candidate, batch),
        "torch": lambda batch: run(baseline, batch),
    }
    for kind in KINDS if use_fbgemm else ():
        module = fbgemm_module(kind, [weight], torch.int64)
        threaded = InThreads([module] * threads, dim=0)
        candidates[f"fbgemm {kind}"] = lambda batch, run=module: run(batch.indices, batch.offsets)
        candidates[f"fbgemm {kind}, threads"] = lambda batch, run=threaded: run(batch.parts)
    return candidates


def least_bytes(batch: Batch, dim: int) -> int:
    """What must move at least: each row in use once, indices and offsets once, the output once."""
    output = 4 * dim * (len(batch.offsets) - 1)
    return 4 * dim * len(batch.indices.unique()) + batch.indices.nbytes + batch.offsets.nbytes + output


def measure(
    hotness: str,
    dim: int,
    batches: list[Batch],
    candidates: dict[str, Callable[[Batch], Tensor]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Everything about one dimension and hotness, as it goes into the JSON file."""
    with torch.no_grad():
        difference = largest_difference(candidates, batches[0], "torch")
        result = timing.compare(
            candidates, inputs=[(batch,) for batch in batches], rounds=arguments.rounds,
            cache=arguments.cache, progress=False,
        )  # fmt: skip
    bytes_ = sum(least_bytes(batch, dim) for batch in batches) / len(batches)
    fbgemm = [name for name in candidates if name.startswith("fbgemm")]
    fastest = {"torch": "torch", **({"fbgemm": result.fastest(fbgemm)} if fbgemm else {})}
    return {
        "hotness": hotness,
        "dim": dim,
        "least_bytes": bytes_,
        "relative_difference": difference,
        "fastest": fastest,
        "ratio": {family: result.ratio("recfuse", name) for family, name in fastest.items()},
        "measured": result.to_json(environment=False),
        "_comparison": result,
    }


def tabulate(records: list[dict[str, Any]], arguments: argparse.Namespace, bandwidth: float) -> list[Table]:
    """The table of every dimension and hotness, and that of the geometric means."""
    setting = (
        f"{arguments.rows:,} rows, batch {arguments.batch_size} x {arguments.num_indices_per_lookup}, "
        f"{torch.get_num_threads()} threads, {arguments.cache} caches"
    )
    families = list(records[0]["ratio"])
    each = Table(
        f"Single table, {setting}: ms (median ± IQR of {arguments.rounds})",
        ["hotness", "dim", *families, "recfuse", *(f"over {f}" for f in families), "least MB", "of ceiling"],
    )
    comparisons = [record.pop("_comparison") for record in records]
    for record, result in zip(records, comparisons, strict=True):
        record["share_of_bandwidth"] = record["least_bytes"] / result["recfuse"].median / bandwidth
        candidates = [record["fastest"][family] for family in families] + ["recfuse"]
        each.rows.append(
            [record["hotness"], str(record["dim"]), *(milliseconds(result[name]) for name in candidates)]
            + [times(record["ratio"][family]) for family in families]
            + [f"{record['least_bytes'] / 1e6:.1f}", f"{record['share_of_bandwidth']:.0%}"]
        )
    worst = max(record["relative_difference"] for record in records)
    each.notes = [
        f"Ceiling: least MB at the read bandwidth of a large array, {bandwidth / 1e9:.1f} GB/s in this run; "
        "hot rows stay in caches, so there it is no bound that can be reached.",
        f"Largest difference between any two outputs: {worst:.1e} of the largest value.",
    ]
    each.notes += load_notes(comparisons)
    means = Table("Geometric mean over dimensions", ["hotness", *(f"over {family}" for family in families)])
    for hotness in dict.fromkeys(record["hotness"] for record in records):
        ratios = [record["ratio"] for record in records if record["hotness"] == hotness]
        means.rows.append(
            [
                hotness,
                *(times(geometric_mean(ratio[family] for ratio in ratios)) for family in families),
            ]
        )
    return [each, means]


def ratios_by_hotness(records: list[dict[str, Any]], dim: int, family: str) -> dict[str, float]:
    """How many times faster than `family` for each hotness, at one dimension."""
    return {record["hotness"]: record["ratio"][family] for record in records if record["dim"] == dim}


def run(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, medium: NDArray[np.int64] | None
) -> None:
    """Run the comparison. `medium`: a trace to use in place of the generated one."""
    missing = fbgemm_missing()
    batches = {}
    for hotness in tqdm(arguments.hotness, desc="traces", leave=False):
        trace = medium if hotness == "medium" else None
        if trace is None:
            trace = traces.generate(hotness, rows=arguments.rows, seed=arguments.seed)
        batches[hotness] = make_batches(trace, arguments)
    torch.manual_seed(arguments.seed)
    bandwidth, records = timing.read_bandwidth(), []
    with tqdm(total=len(arguments.dims) * len(batches), desc="dims x hotness", leave=False) as bar:
        for dim in arguments.dims:
            weight = torch.randn(arguments.rows, dim)
            threads = len(next(iter(batches.values()))[0].parts)
            candidates = make_candidates(weight, threads, missing is None)
            for hotness in arguments.hotness:
                records.append(measure(hotness, dim, batches[hotness], candidates, arguments))
                bar.update()
    bandwidth = max(bandwidth, timing.read_bandwidth())
    records.sort(key=lambda record: (arguments.hotness.index(record["hotness"]), record["dim"]))
    tables = tabulate(records, arguments, bandwidth)
    tables[0].notes += [missing] if missing else []
    for table in tables:
        table.show(arguments.markdown)
    write_results(arguments.json, tables, {"read_bandwidth_bytes_per_s": bandwidth, "measured": records})
    if arguments.plot:
        panels = {
            f"recfuse over {family}": {
                f"dim {dim}": ratios_by_hotness(records, dim, family) for dim in arguments.dims
            }
            for family in records[0]["ratio"]
        }
        plot_ratios(arguments.plot, panels, title="One table: times faster than each peer")
    check_agreement(parser, [record["relative_difference"] for record in records], 1e-5)
