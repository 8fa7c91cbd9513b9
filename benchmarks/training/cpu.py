"""The comparison on the CPU: steps of equal tables and of one bag, with plain SGD."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import recfuse
from common.batches import Batch
from common.checks import check_agreement, difference, largest
from common.families import comparisons_of
from common.report import Figure, load_notes
from common.settings import Setting
from common.table import Table, milliseconds, times
from recfuse import timing
from training import bench
from training.sides import LOOP, PLAIN, RECFUSE, Side, bags_side, collection_side

LEARNING_RATE = 0.01
LEAST_SAMPLE = 2e-3  # seconds: shorter steps are averaged


@dataclass(frozen=True)
class Shape:
    """Equal tables, and a batch of each."""

    tables: int
    batch: int  # bags of a table
    lookups: int  # per bag
    rows: int
    dim: int

    def __str__(self) -> str:
        """Returns the form in tables."""
        return f"{self.tables} x {self.batch} x {self.lookups}, {self.rows:,} x {self.dim}"


def make_batch(shape: Shape, device: torch.device) -> Batch:
    """Uniform indices."""
    count = shape.batch * shape.lookups
    indices = torch.randint(shape.rows, (shape.tables * count,), device=device)
    return Batch(
        indices,
        torch.arange(0, len(indices) + 1, shape.lookups, device=device),
        np.full(shape.tables, count),
        shape.batch,
        grad=torch.randn(shape.batch, shape.tables * shape.dim, device=device),
    )


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's own."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def fused_sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """recfuse's, which updates in the backward pass."""
    if isinstance(module, torch.nn.ModuleList):
        (module,) = module  # one bag
    return recfuse.optim.SGD(module, lr=LEARNING_RATE)


def make_sides(shape: Shape, sparse: bool, alone: bool, setting: Setting) -> dict[str, Side]:
    """Creates the sides by name. A fused optimizer leaves no gradient, so it is compared with sparse
    gradients."""

    def make_bags(kind: type[torch.nn.EmbeddingBag]) -> list[torch.nn.EmbeddingBag]:
        torch.manual_seed(setting.arguments.seed)
        options = {"mode": "mean" if alone else "sum", "sparse": sparse, "device": setting.device}
        return [kind(shape.rows, shape.dim, **options) for _ in range(shape.tables)]

    def ours(optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> Side:
        if alone:
            return bags_side(make_bags(recfuse.nn.EmbeddingBag), optimizer)
        bags = make_bags(torch.nn.EmbeddingBag)
        collection = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)
        return collection_side(collection, optimizer)

    sides = {LOOP: bags_side(make_bags(torch.nn.EmbeddingBag), sgd), PLAIN: ours(sgd)}
    return sides | ({RECFUSE: ours(fused_sgd)} if sparse else {})


def measure(shape: Shape, sparse: bool, alone: bool, setting: Setting) -> dict[str, Any]:
    """Measures one shape; returns its record for the JSON file."""
    arguments = setting.arguments
    sides = make_sides(shape, sparse, alone, setting)
    torch.manual_seed(arguments.seed + 1)
    batches = [make_batch(shape, setting.device) for _ in range(arguments.num_batches)]
    before = torch.cat(sides[LOOP].tables)
    for side in sides.values():
        side.step(batches[0])
    changes = {name: torch.cat(side.tables) - before for name, side in sides.items()}
    error = largest(difference(change, changes[LOOP]) for change in changes.values())
    del before, changes
    result = timing.compare(
        {name: side.step for name, side in sides.items()}, inputs=[(batch,) for batch in batches],
        rounds=arguments.rounds, min_time=LEAST_SAMPLE, device=setting.device, progress=False,
    )  # fmt: skip
    return {
        **asdict(shape),
        "sparse": sparse,
        "alone": alone,
        "relative_difference": error,
        "ratios": {name: result.ratio(name, LOOP) for name in sides if name != LOOP},
        "measured": result.to_json(environment=False),
        "comparison": result,
    }


def tabulate(records: list[dict[str, Any]], arguments: argparse.Namespace) -> list[Table]:
    """Returns the table of every shape, and that of the geometric means and the least."""
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    ours = PLAIN, RECFUSE
    each = Table(
        f"A training step with SGD on {arguments.device}{threads}: ms (median ± IQR of {arguments.rounds})",
        ["tables x batch x lookups, size of a table", "gradients", LOOP, PLAIN, "times faster", RECFUSE,
         "times faster than torch"],
    )  # fmt: skip
    comparisons = comparisons_of(records)
    for record, result in zip(records, comparisons, strict=True):
        shape = Shape(*(record[field.name] for field in fields(Shape)))
        name = f"one bag: {shape}" if record["alone"] else str(shape)
        cells = [milliseconds(result[LOOP])]
        for side in ours:
            there = side in result.timings
            cells += [milliseconds(result[side]) if there else "-", times(record["ratios"].get(side))]
        each.rows.append([name, "sparse" if record["sparse"] else "dense", *cells])
    worst = max(record["relative_difference"] for record in records)
    each.notes = [f"Largest difference between two first steps: {worst:.1e} of the largest change."]
    each.notes += load_notes(comparisons)
    means = Table("How many times faster than torch", ["", "geometric mean", "least"])
    for name, alone in (("collections", False), ("one bag", True)):
        for side in ours:
            ratios = [
                record["ratios"][side]
                for record in records
                if record["alone"] == alone and side in record["ratios"]
            ]
            if ratios:
                cells = [times(geometric_mean(ratios)), times(min(ratios))]
                means.rows.append([f"{name}: {side}", *cells])
    return [each, means]


@bench.figure("steps", on=["cpu"])
def figure_steps(setting: Setting) -> Iterator[Figure]:
    """Every shape, with dense and with sparse gradients."""
    arguments = setting.arguments
    cases = [
        (shape, sparse, alone)
        for alone, shapes in ((False, arguments.shapes), (True, arguments.alone))
        for shape in shapes
        for sparse in (False, True)
    ]
    records = [measure(*case, setting) for case in tqdm(cases, desc="shapes", leave=False)]
    yield Figure(tabulate(records, arguments), {}, records, name="measured")
    check_agreement(setting.parser, [record["relative_difference"] for record in records], 1e-3)
