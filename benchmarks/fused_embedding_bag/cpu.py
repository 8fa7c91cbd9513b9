"""The comparison on the CPU: models A to E, batches of one size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.checks import check_agreement
from common.families import (
    OURS,
    TOLERANCE,
    compare,
    comparisons_of,
    mean_cells,
    spent_cells,
    worst_difference,
)
from common.peers import KINDS, InThreads, Part, balanced_cuts, fbgemm_missing, fbgemm_module, rebased
from common.report import Figure, load_notes
from common.table import Table, times
from fused_embedding_bag import bench
from fused_embedding_bag.setting import FusedSetting
from recfuse.data import workloads

FAMILIES = {"torch": "nn.EmbeddingBag", "fbgemm": "FBGEMM", "threads": "FBGEMM, a thread each"}


@dataclass
class Batch:
    """A batch in the best form for each candidate; converted outside of the timed region."""

    indices: Tensor  # [lookups] int32
    offsets: Tensor  # [features * size + 1] int32
    features: list[Part]  # of each feature: indices, offsets [size]
    parts: list[Part]  # of each thread's share of the features: indices, offsets


def make_batches(
    model: workloads.Model, size: int, count: int, seed: int, threads: int
) -> tuple[list[Batch], list[int]]:
    """`count` batches, and where the features are cut into shares of about equal bytes."""
    raw = [
        (torch.from_numpy(indices), torch.from_numpy(offsets))
        for indices, offsets in (model.batch(size, seed + 1 + number) for number in range(count))
    ]
    ends = raw[0][1][::size].long()
    cuts = balanced_cuts(ends.diff() * torch.tensor(model.dims), threads)
    batches = []
    for indices, offsets in raw:
        features = [
            rebased(indices, offsets, feature * size, (feature + 1) * size)
            for feature in range(model.features)
        ]
        batches.append(
            Batch(
                indices,
                offsets,
                [(rows, starts[:-1].contiguous()) for rows, starts in features],
                [rebased(indices, offsets, a * size, b * size) for a, b in pairwise(cuts)],
            )
        )
    return batches, cuts


def least_bytes(model: workloads.Model, batch: Batch, size: int) -> int:
    """Returns the least bytes to move: each row in use once, indices and offsets once, the output once."""
    unique = 0
    for (indices, _), dim in zip(batch.features, model.dims, strict=True):
        unique += 4 * dim * len(indices.unique())
    return unique + batch.indices.nbytes + batch.offsets.nbytes + 4 * size * model.output_dim


def make_candidates(
    model: workloads.Model, cuts: list[int], use_fbgemm: bool
) -> tuple[dict[str, Callable[[Batch], Tensor]], dict[str, list[str]]]:
    """Candidates by name, and the names of each family."""
    torch.manual_seed(model.seed)
    bags = [
        torch.nn.EmbeddingBag(rows, dim, mode="sum") for rows, dim in zip(model.rows, model.dims, strict=True)
    ]
    weights = [bag.weight.detach() for bag in bags]
    # The collection takes over its tables: it gets copies.
    fused = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(copy.deepcopy(bags))

    def run_recfuse(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return fused(batch.indices, batch.offsets)

    def run_torch(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return torch.cat([bag(*part) for bag, part in zip(bags, batch.features, strict=True)], 1)

    candidates: dict[str, Callable[[Batch], Tensor]] = {"recfuse": run_recfuse, "torch": run_torch}
    families = {"torch": ["torch"]}
    for kind in KINDS if use_fbgemm else ():
        whole = fbgemm_module(kind, weights, torch.int32)
        shares = [fbgemm_module(kind, weights[a:b], torch.int32) for a, b in pairwise(cuts)]
        threaded = InThreads(shares, dim=1)
        candidates[f"fbgemm {kind}"] = lambda batch, run=whole: run(batch.indices, batch.offsets)
        candidates[f"fbgemm {kind}, a thread each"] = lambda batch, run=threaded: run(batch.parts)
        families.setdefault("fbgemm", []).append(f"fbgemm {kind}")
        families.setdefault("threads", []).append(f"fbgemm {kind}, a thread each")
    return candidates, families


def measure(name: str, setting: FusedSetting, use_fbgemm: bool) -> dict[str, Any]:
    """Measures one model; returns its record for the JSON file."""
    arguments = setting.arguments
    model = workloads.model(name, seed=arguments.seed)
    size, threads = arguments.batch_size, torch.get_num_threads()
    batches, cuts = make_batches(model, size, arguments.num_batches, arguments.seed, threads)
    candidates, families = make_candidates(model, cuts, use_fbgemm)
    least = sum(least_bytes(model, batch, size) for batch in batches) / len(batches)
    return {
        "model": name,
        "features": model.features,
        "lookups": sum(len(batch.indices) for batch in batches) / len(batches),
        "table_bytes": model.weight_bytes,
        **compare(candidates, families, batches, setting, least),
    }


@bench.figure("models", on=["cpu"])
def figure_models(setting: FusedSetting) -> Iterator[Figure]:
    """Times and ratios, a row a model."""
    arguments, missing = setting.arguments, fbgemm_missing()
    records = [
        measure(name, setting, missing is None) for name in tqdm(arguments.models, desc="models", leave=False)
    ]
    comparisons, families = comparisons_of(records), list(records[0]["ratio"])
    named = [FAMILIES[family] for family in families]
    spent = Table(
        f"Fused embedding bags, batch {arguments.batch_size}, {torch.get_num_threads()} threads, "
        f"{arguments.cache} caches: ms (median ± IQR of {arguments.rounds})",
        ["model", *named, OURS],
    )
    ratios = Table("Speed of recfuse over each peer", ["model", *named, "least MB", "share of GB/s read"])
    for record, result in zip(records, comparisons, strict=True):
        spent.rows.append([record["model"], *spent_cells(record, result)])
        share, bandwidth = record["share_of_bandwidth"], record["read_bandwidth_bytes_per_s"]
        cells = f"{record['least_bytes'] / 1e6:.0f}", f"{share:.0%} of {bandwidth / 1e9:.0f}"
        ratios.rows.append([record["model"], *map(times, record["ratio"].values()), *cells])
    ratios.rows.append(["geometric mean", *mean_cells(records), "", ""])
    spent.notes.append(worst_difference(records))
    for family in families[1:]:
        chosen = ", ".join(f"{r['model']} {r['fastest'][family].split()[1].rstrip(',')}" for r in records)
        spent.notes.append(f"{FAMILIES[family]}: the faster of its two modules: {chosen}.")
    spent.notes += [*load_notes(comparisons), *([missing] if missing else [])]
    series = {
        f"over {FAMILIES[family]}": {record["model"]: record["ratio"][family] for record in records}
        for family in families
    }
    yield Figure([spent, ratios], {f"recfuse, batch {arguments.batch_size}": series}, records)
    check_agreement(setting.parser, [record["relative_difference"] for record in records], TOLERANCE)
