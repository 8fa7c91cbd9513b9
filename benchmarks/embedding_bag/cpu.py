"""The comparison on the CPU: every dimension and hotness, on batches of one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.checks import check_agreement
from common.families import (
    BASELINE,
    OURS,
    TOLERANCE,
    compare,
    comparisons_of,
    mean_cells,
    spent_cells,
    worst_difference,
)
from common.peers import KINDS, InThreads, Part, fbgemm_missing, fbgemm_module, rebased
from common.report import Figure, load_notes
from common.table import Table, times
from embedding_bag import bench
from embedding_bag.setting import BagSetting
from recfuse.data import traces


@dataclass
class Batch:
    """A batch in the best form for each candidate; converted outside of the timed region."""

    indices: Tensor  # [bags * pooling] int64
    offsets: Tensor  # [bags + 1] int64
    parts: list[Part]  # of each thread's share of the bags: indices, offsets


def make_batches(trace: NDArray[np.int64], arguments: argparse.Namespace) -> list[Batch]:
    """Creates consecutive batches along the trace, which repeats."""
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
    """Returns the least bytes to move: each row in use once, indices and offsets once, the output once."""
    output = 4 * dim * (len(batch.offsets) - 1)
    return 4 * dim * len(batch.indices.unique()) + batch.indices.nbytes + batch.offsets.nbytes + output


def ratios_by_hotness(records: list[dict[str, Any]], dim: int, family: str) -> dict[str, float]:
    """Returns how many times faster than `family` for each hotness, at one dimension."""
    return {record["hotness"]: record["ratio"][family] for record in records if record["dim"] == dim}


def measure(setting: BagSetting, use_fbgemm: bool) -> list[dict[str, Any]]:
    """Every hotness at every dimension, in this order."""
    arguments, batches = setting.arguments, {}
    for hotness in tqdm(arguments.hotness, desc="traces", leave=False):
        trace = setting.medium if hotness == "medium" else None
        if trace is None:
            trace = traces.generate(hotness, rows=arguments.rows, seed=arguments.seed)
        batches[hotness] = make_batches(trace, arguments)
    torch.manual_seed(arguments.seed)
    records = []
    for dim in tqdm(arguments.dims, desc="dims", leave=False):
        weight = torch.randn(arguments.rows, dim)
        threads = len(next(iter(batches.values()))[0].parts)
        candidates = make_candidates(weight, threads, use_fbgemm)
        fbgemm = [name for name in candidates if name.startswith("fbgemm")]
        families = {BASELINE: [BASELINE], **({"fbgemm": fbgemm} if fbgemm else {})}
        for hotness, workload_batches in batches.items():
            least = sum(least_bytes(batch, dim) for batch in workload_batches) / len(workload_batches)
            comparison = compare(candidates, families, workload_batches, setting, least)
            records.append({"hotness": hotness, "dim": dim, **comparison})
    records.sort(key=lambda record: (arguments.hotness.index(record["hotness"]), record["dim"]))
    return records


def tabulate(records: list[dict[str, Any]], setting: BagSetting) -> list[Table]:
    """Returns the table of every dimension and hotness, and that of the geometric means."""
    arguments, bandwidth = setting.arguments, setting.copy_speed
    shape = (
        f"{arguments.rows:,} rows, batch {arguments.batch_size} x {arguments.num_indices_per_lookup}, "
        f"{torch.get_num_threads()} threads, {arguments.cache} caches"
    )
    comparisons, families = comparisons_of(records), list(records[0]["ratio"])
    each = Table(
        f"Single table, {shape}: ms (median ± IQR of {arguments.rounds})",
        ["hotness", "dim", *families, OURS, *(f"over {f}" for f in families), "least MB", "of ceiling"],
    )
    for record, result in zip(records, comparisons, strict=True):
        share = f"{record['least_bytes'] / 1e6:.1f}", f"{record['share_of_bandwidth']:.0%}"
        cells = [*spent_cells(record, result), *map(times, record["ratio"].values()), *share]
        each.rows.append([record["hotness"], str(record["dim"]), *cells])
    each.notes = [
        f"Ceiling: least MB at the read bandwidth of a large array, {bandwidth / 1e9:.1f} GB/s in this run; "
        "hot rows stay in caches, so there it is no bound that can be reached.",
        worst_difference(records),
        *load_notes(comparisons),
    ]
    means = Table("Geometric mean over dimensions", ["hotness", *(f"over {family}" for family in families)])
    for hotness in dict.fromkeys(record["hotness"] for record in records):
        hotness_records = [record for record in records if record["hotness"] == hotness]
        means.rows.append([hotness, *mean_cells(hotness_records)])
    return [each, means]


@bench.figure("main", on=["cpu"])
def figure_main(setting: BagSetting) -> Iterator[Figure]:
    """Every dimension and hotness, on batches of one table."""
    missing = fbgemm_missing()
    records = measure(setting, missing is None)
    tables = tabulate(records, setting)
    tables[0].notes += [missing] if missing else []
    dims = setting.arguments.dims
    panels = {
        f"recfuse over {family}": {f"dim {dim}": ratios_by_hotness(records, dim, family) for dim in dims}
        for family in records[0]["ratio"]
    }
    yield Figure(tables, panels, records, name="measured", plot="main")
    check_agreement(setting.parser, [record["relative_difference"] for record in records], TOLERANCE)
