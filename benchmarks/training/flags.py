"""The command line of the benchmark."""

from __future__ import annotations

import argparse

from common.settings import comma_list, positive
from training import bench
from training.cpu import Shape
from training.lookups import make_subject
from training.sides import NAMES, OPTIMIZERS, RECFUSE

SUBJECTS = ["A-512", "D-512", "mlperf-2048", "mlperf-16384", "dynamicemb-104857"]
SHAPES = ["26x128x1", "26x2048x1", "26x512x20", "26x512x20x100000", "500x256x1"]
USUAL = ["sgd", "rowwise_adagrad", "adam"]


def subjects(text: str) -> list[str]:
    """An argparse type: subjects, NAME-BATCH SIZE."""
    names = comma_list(text)
    for name in names:
        try:
            make_subject(name, 0, 1, 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def sizes(text: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Positive integers joined by x, as many as one of `counts`; otherwise argparse.ArgumentTypeError."""
    numbers = tuple(positive(part) for part in text.split("x"))
    if len(numbers) not in counts:
        needed = " or ".join(map(str, counts))
        raise argparse.ArgumentTypeError(f"found {text!r}; expected {needed} integers joined by x")
    return numbers


def shape_of(text: str, rows: int, dim: int) -> Shape:
    """Equal tables: tables x bags x lookups, and the rows of a table where they are not `rows`."""
    tables, bags, lookups, *own = sizes(text, (3, 4))
    return Shape(tables, bags, lookups, own[0] if own else rows, dim)


flag = bench.flag
# fmt: off
flag("--num-batches", positive, 4, "batches to rotate through", quick=2)
flag("--steps", positive, 1000, "of convergence", quick=50)
cpu, gpu = {"on": "cpu"}, {"on": "cuda"}
flag("--shapes", comma_list, SHAPES, "tables x bags x lookups of a bag (x rows of a table)", quick=1,
     may_be_empty=True, **cpu)
flag("--rows", positive, 10_000, "of a table", **cpu)
flag("--dim", positive, 64, "columns", **cpu)
flag("--bag", str, "8x60", "bags x lookups of the bag alone", **cpu)
flag("--bag-rows", comma_list, ["95811", "1000"], "its rows", quick=1, may_be_empty=True, **cpu)
flag("--subjects", subjects, SUBJECTS, "NAME-BATCH SIZE", quick=["D-512", "mlperf-2048"], **gpu)
flag("--optimizers", comma_list, USUAL, "optimizers", allowed=OPTIMIZERS, **gpu)
flag("--sides", comma_list, list(NAMES), "sides", allowed=NAMES, **gpu)
flag("--rows-cap", positive, 4_000_000, "most rows of mlperf's tables", **gpu)
flag("--dynamicemb-rows", positive, 8_000_000, "rows of dynamicemb's tables, or as many as fit", **gpu)
# fmt: on


@bench.check
def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Shapes on the CPU, sides on a GPU."""
    if arguments.device == "cuda":
        if RECFUSE not in arguments.sides:
            parser.error(f"--sides: {RECFUSE} is missing")
        return
    try:
        arguments.shapes = [shape_of(shape, arguments.rows, arguments.dim) for shape in arguments.shapes]
        alone = sizes(arguments.bag, (2,))
        arguments.alone = [Shape(1, *alone, positive(rows), arguments.dim) for rows in arguments.bag_rows]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--shapes --bag --bag-rows: {error}")
    if not arguments.shapes + arguments.alone:
        parser.error("--shapes and --bag-rows are both empty; expected at least a shape")
