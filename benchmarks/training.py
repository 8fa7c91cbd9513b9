"""Training steps: FusedEmbeddingBagCollection against a loop of torch's nn.EmbeddingBag, and one bag alone.

A step is zero_grad, the forward pass, backward from a given gradient of the output, and a step of plain SGD.
Both sides hold the same values, get the same batches, and take turns; after the first step their weights are
compared. Each shape with dense and with sparse gradients.

The bag alone has the shape of a text classifier: a few bags of many lookups, the mean of a large and of a
small vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import recfuse
from _common import (
    Table,
    add_arguments,
    check_agreement,
    comma_list,
    load_notes,
    milliseconds,
    positive,
    start,
    times,
    write_results,
)
from recfuse import timing

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
    """One of the two that are compared."""

    step: Callable[[Batch], None]
    weights: Callable[[], Tensor]  # of all tables, [tables * rows, dim]


def make_side(
    forward: Callable[[Batch], Tensor], module: torch.nn.Module, weights: Callable[[], Tensor]
) -> Side:
    """A side whose module is trained by SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

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

    return make_side(forward, bags, lambda: torch.cat([bag.weight.detach() for bag in bags]))


def make_collection(shape: Shape, sparse: bool, arguments: argparse.Namespace) -> Side:
    """The same tables as a collection."""
    bags = make_bags(shape, "sum", sparse, arguments)
    fused = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags)
    return make_side(
        lambda batch: fused(batch.all_indices, batch.all_offsets),
        fused,
        lambda: torch.cat([table.weight.detach() for table in fused.tables.values()]),
    )


def make_bag(
    shape: Shape, sparse: bool, arguments: argparse.Namespace, kind: type[torch.nn.EmbeddingBag]
) -> Side:
    """One table alone."""
    bag = make_bags(shape, "mean", sparse, arguments, kind)[0]
    return make_side(
        lambda batch: bag(batch.indices[0], batch.offsets), bag, lambda: bag.weight.detach().clone()
    )


def measure(shape: Shape, sparse: bool, alone: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one shape, as it goes into the JSON file."""
    if alone:
        sides = {
            "torch": make_bag(shape, sparse, arguments, torch.nn.EmbeddingBag),
            "recfuse": make_bag(shape, sparse, arguments, recfuse.nn.EmbeddingBag),
        }
    else:
        sides = {
            "torch": make_loop(shape, sparse, arguments),
            "recfuse": make_collection(shape, sparse, arguments),
        }
    torch.manual_seed(arguments.seed + 1)
    batches = [make_batch(shape, arguments.device) for _ in range(arguments.num_batches)]
    before = sides["torch"].weights()
    for side in sides.values():
        side.step(batches[0])
    expected, found = (sides[name].weights() - before for name in ("torch", "recfuse"))
    difference = (expected - found).abs().max() / expected.abs().max().clamp(min=1e-30)
    del before, expected, found
    result = timing.compare(
        {name: side.step for name, side in sides.items()}, inputs=[(batch,) for batch in batches],
        rounds=arguments.rounds, min_time=LEAST_SAMPLE, device=arguments.device, progress=False,
    )  # fmt: skip
    return {
        **asdict(shape),
        "sparse": sparse,
        "alone": alone,
        "relative_difference": difference.item(),
        "ratio": result.ratio("recfuse", "torch"),
        "measured": result.to_json(environment=False),
        "_name": str(shape),
        "_comparison": result,
    }


def tabulate(records: list[dict[str, Any]], arguments: argparse.Namespace) -> list[Table]:
    """The table of every shape, and that of the geometric means and the least."""
    threads = f", {torch.get_num_threads()} threads" if arguments.device == "cpu" else ""
    each = Table(
        f"A training step with SGD on {arguments.device}{threads}: ms (median ± IQR of {arguments.rounds})",
        ["tables x batch x lookups, size of a table", "gradients", "torch", "recfuse", "ratio"],
    )
    comparisons = [record.pop("_comparison") for record in records]
    for record, result in zip(records, comparisons, strict=True):
        name = ("one bag: " if record["alone"] else "") + record.pop("_name")
        each.rows.append(
            [
                name,
                "sparse" if record["sparse"] else "dense",
                *(milliseconds(result[side]) for side in ("torch", "recfuse")),
                times(record["ratio"]),
            ]
        )
    worst = max(record["relative_difference"] for record in records)
    each.notes = [f"Largest difference between two first steps: {worst:.1e} of the largest change."]
    each.notes += load_notes(comparisons)
    means = Table("recfuse is faster", ["", "geometric mean", "least"])
    for name, alone in (("collections", False), ("one bag", True)):
        ratios = [record["ratio"] for record in records if record["alone"] == alone]
        if ratios:
            means.rows.append([name, times(timing.geometric_mean(ratios)), times(min(ratios))])
    return [each, means]


def sizes(text: str, count: int) -> tuple[int, ...]:
    """Positive integers joined by x; argparse.ArgumentTypeError where there are not `count`."""
    found = tuple(positive(part) for part in text.split("x"))
    if len(found) != count:
        raise argparse.ArgumentTypeError(f"found {text!r}, needs {count} integers joined by x")
    return found


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, rounds=21)
    parser.add_argument(
        "--num-batches", type=positive, default=4, help="batches to rotate through (default: 4)"
    )
    parser.add_argument(
        "--shapes",
        type=comma_list,
        default="26x128x1,26x2048x1,26x512x20,500x256x1",
        help="tables x bags x lookups of a bag, with commas between (default: %(default)s)",
    )
    parser.add_argument("--rows", type=positive, default=10_000, help="of a table (default: 10000)")
    parser.add_argument("--dim", type=positive, default=64, help="default: 64")
    parser.add_argument("--bag", default="8x60", help="bags x lookups of the bag alone (default: 8x60)")
    parser.add_argument(
        "--bag-rows", type=comma_list, default="95811,1000", help="its rows (default: %(default)s)"
    )
    arguments = parser.parse_args()
    start(parser, arguments)
    try:
        arguments.shapes = [
            Shape(*sizes(shape, 3), arguments.rows, arguments.dim) for shape in arguments.shapes
        ]
        arguments.alone = [
            Shape(1, *sizes(arguments.bag, 2), positive(rows), arguments.dim) for rows in arguments.bag_rows
        ]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--shapes, --bag, --bag-rows: {error}")
    if not arguments.shapes + arguments.alone:
        parser.error("--shapes and --bag-rows are both empty; one shape is needed")
    return parser, arguments


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    cases = [
        (shape, sparse, alone)
        for alone, shapes in ((False, arguments.shapes), (True, arguments.alone))
        for shape in shapes
        for sparse in (False, True)
    ]
    records = [measure(*case, arguments) for case in tqdm(cases, desc="shapes", leave=False)]
    tables = tabulate(records, arguments)
    for table in tables:
        table.show(arguments.markdown)
    write_results(arguments.json, tables, {"measured": records}, arguments.device)
    check_agreement(parser, [record["relative_difference"] for record in records], 1e-3)


if __name__ == "__main__":
    main()
