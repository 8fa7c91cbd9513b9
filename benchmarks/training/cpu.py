"""The comparison on the CPU: steps of equal tables and of one bag, with plain SGD."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import recfuse
from common.checks import check_agreement, difference, largest
from common.report import Figure, Report, load_notes
from common.settings import Setting
from common.table import Table, milliseconds, times
from recfuse import timing
from training.convergence import figure_convergence
from training.sides import LOOP, PLAIN, RECFUSE

LEARNING_RATE = 0.01
LEAST_SAMPLE = 2e-3  # seconds: shorter steps are averaged


@dataclass(frozen=True)
class Shape:
    """Equal tables, and a batch of each."""

    tables: int
    batch: int  # bags of a table
    lookups: int  # of a bag
    rows: int
    dim: int

    def __str__(self) -> str:
        """As in the table."""
        return f"{self.tables} x {self.batch} x {self.lookups}, {self.rows:,} x {self.dim}"


@dataclass
class Batch:
    """One batch in the form that each side takes; cut outside of the timed region."""

    indices: list[Tensor]  # a table each: [batch * lookups] int64
    offsets: Tensor  # [batch]
    all_indices: Tensor
    all_offsets: Tensor  # [tables * batch + 1]
    grad: Tensor  # [batch, tables * dim], of the output


def make_batch(shape: Shape, device: str) -> Batch:
    """Uniform indices."""
    count = shape.batch * shape.lookups
    indices = [torch.randint(shape.rows, (count,), device=device) for _ in range(shape.tables)]
    return Batch(
        indices,
        torch.arange(0, count, shape.lookups, device=device),
        torch.cat(indices),
        torch.arange(0, shape.tables * count + 1, shape.lookups, device=device),
        torch.randn(shape.batch, shape.tables * shape.dim, device=device),
    )


@dataclass
class Side:
    """One of those that are compared."""

    step: Callable[[Batch], None]
    weights: Callable[[], Tensor]  # of all tables, [tables * rows, dim]


Optimizers = Callable[[torch.nn.Module], torch.optim.Optimizer]


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's own."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def fused_sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """recfuse's, which updates in the backward pass."""
    return recfuse.optim.SGD(module, lr=LEARNING_RATE)


def make_side(
    forward: Callable[[Batch], Tensor],
    module: torch.nn.Module,
    weights: Callable[[], Tensor],
    optimizers: Optimizers,
) -> Side:
    """A side whose module is trained by SGD."""
    optimizer = optimizers(module)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        forward(batch).backward(batch.grad)
        optimizer.step()

    return Side(step, weights)


def make_bags(
    shape: Shape,
    mode: str,
    sparse: bool,
    arguments: argparse.Namespace,
    kind: type[torch.nn.EmbeddingBag] = torch.nn.EmbeddingBag,
) -> torch.nn.ModuleList:
    """Equal tables, the same for every side."""
    torch.manual_seed(arguments.seed)
    bags = [
        kind(shape.rows, shape.dim, mode=mode, sparse=sparse, device=arguments.device)
        for _ in range(shape.tables)
    ]
    return torch.nn.ModuleList(bags)


def make_loop(shape: Shape, sparse: bool, arguments: argparse.Namespace) -> Side:
    """A loop over torch's modules."""
    bags = make_bags(shape, "sum", sparse, arguments)

    def forward(batch: Batch) -> Tensor:
        pooled = [bag(indices, batch.offsets) for bag, indices in zip(bags, batch.indices, strict=True)]
        return torch.cat(pooled, 1)

    return make_side(forward, bags, lambda: torch.cat([bag.weight.detach() for bag in bags]), sgd)


def make_collection(
    shape: Shape, sparse: bool, arguments: argparse.Namespace, optimizers: Optimizers
) -> Side:
    """The same tables as a collection."""
    bags = make_bags(shape, "sum", sparse, arguments)
    fused = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)
    return make_side(
        lambda batch: fused(batch.all_indices, batch.all_offsets),
        fused,
        lambda: torch.cat([table.weight.detach() for table in fused.tables.values()]),
        optimizers,
    )


def make_bag(
    shape: Shape,
    sparse: bool,
    arguments: argparse.Namespace,
    kind: type[torch.nn.EmbeddingBag],
    optimizers: Optimizers,
) -> Side:
    """One table alone."""
    bag = make_bags(shape, "mean", sparse, arguments, kind)[0]
    return make_side(
        lambda batch: bag(batch.indices[0], batch.offsets),
        bag,
        lambda: bag.weight.detach().clone(),
        optimizers,
    )


def make_sides(shape: Shape, sparse: bool, alone: bool, arguments: argparse.Namespace) -> dict[str, Side]:
    """By name; a fused optimizer leaves no gradient, so it is compared with sparse ones."""
    settings = shape, sparse, arguments
    if alone:
        sides = {
            LOOP: make_bag(*settings, torch.nn.EmbeddingBag, sgd),
            PLAIN: make_bag(*settings, recfuse.nn.EmbeddingBag, sgd),
        }
        if sparse:
            sides[RECFUSE] = make_bag(*settings, recfuse.nn.EmbeddingBag, fused_sgd)
        return sides
    sides = {LOOP: make_loop(*settings), PLAIN: make_collection(*settings, sgd)}
    if sparse:
        sides[RECFUSE] = make_collection(*settings, fused_sgd)
    return sides


def measure(shape: Shape, sparse: bool, alone: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one shape, as it goes into the JSON file."""
    sides = make_sides(shape, sparse, alone, arguments)
    torch.manual_seed(arguments.seed + 1)
    batches = [make_batch(shape, arguments.device) for _ in range(arguments.num_batches)]
    before = sides[LOOP].weights()
    for side in sides.values():
        side.step(batches[0])
    changes = {name: side.weights() - before for name, side in sides.items()}
    error = largest(difference(found, changes[LOOP]) for found in changes.values())
    del before, changes
    result = timing.compare(
        {name: side.step for name, side in sides.items()}, inputs=[(batch,) for batch in batches],
        rounds=arguments.rounds, min_time=LEAST_SAMPLE, device=arguments.device, progress=False,
    )  # fmt: skip
    return {
        **asdict(shape),
        "sparse": sparse,
        "alone": alone,
        "relative_difference": error,
        "ratios": {name: result.ratio(name, LOOP) for name in sides if name != LOOP},
        "measured": result.to_json(environment=False),
        "_name": str(shape),
        "_comparison": result,
    }


def tabulate(records: list[dict[str, Any]], arguments: argparse.Namespace) -> list[Table]:
    """The table of every shape, and that of the geometric means and the least."""
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    ours = PLAIN, RECFUSE
    each = Table(
        f"A training step with SGD on {arguments.device}{threads}: ms (median ± IQR of {arguments.rounds})",
        ["tables x batch x lookups, size of a table", "gradients", LOOP, PLAIN, "times faster", RECFUSE,
         "times faster than torch"],
    )  # fmt: skip
    comparisons = [record.pop("_comparison") for record in records]
    for record, result in zip(records, comparisons, strict=True):
        name = ("one bag: " if record["alone"] else "") + record.pop("_name")
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


def figure_steps(setting: Setting) -> Figure:
    """Every shape, with dense and with sparse gradients."""
    arguments = setting.arguments
    cases = [
        (shape, sparse, alone)
        for alone, shapes in ((False, arguments.shapes), (True, arguments.alone))
        for shape in shapes
        for sparse in (False, True)
    ]
    records = [measure(*case, arguments) for case in tqdm(cases, desc="shapes", leave=False)]
    return Figure(tabulate(records, arguments), {}, records)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Measure the figures that were asked for."""
    report, setting = Report(arguments), Setting(parser, arguments)
    for name in arguments.figures:
        if name == "convergence":
            report.add_figure(name, figure_convergence(setting), f"training_{name}")
            continue
        figure = figure_steps(setting)
        report.add_figure("measured", figure, "training")
        check_agreement(parser, [record["relative_difference"] for record in figure.record], 1e-3)
