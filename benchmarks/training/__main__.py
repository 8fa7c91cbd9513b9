"""Training steps: FusedEmbeddingBagCollection against a loop of torch's nn.EmbeddingBag, and one bag alone.

A step is zero_grad, the forward pass, backward from a given gradient of the output, and a step of the
optimizer. All sides hold the same values, get the same batches, and take turns; what the first step changes
is compared.

On the CPU: plain SGD. Each shape with dense and with sparse gradients; with sparse ones also by
recfuse.optim.SGD, whose updates happen in the backward pass. The bag alone has the shape of a text
classifier: a few bags of many lookups, the mean of a large and of a small vocabulary.

With --device cuda: RecFlex's models A and D, MLPerf's tables and dynamicemb's case, with SGD, row-wise
Adagrad and Adam, beside torch's loop and FBGEMM, whole and by stage, with the bytes that a step needs at
least.

The figure convergence learns a task of Criteo's shape by torch's optimizers and by recfuse's, and compares
the losses of all steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.settings import (
    add_num_batches,
    check_choices,
    check_plot,
    comma_list,
    make_parser,
    positive,
    start,
)
from training import cpu, gpu
from training.cpu import Shape

FIGURES = ("steps", "host", "convergence")
DEFAULT_FIGURES = {"cpu": ["steps"], "cuda": ["steps", "host"]}


def sizes(text: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Positive integers joined by x, as many as one of `counts`; argparse.ArgumentTypeError else."""
    found = tuple(positive(part) for part in text.split("x"))
    if len(found) not in counts:
        needed = " or ".join(map(str, counts))
        raise argparse.ArgumentTypeError(f"found {text!r}, needs {needed} integers joined by x")
    return found


def shape_of(text: str, rows: int, dim: int) -> Shape:
    """Equal tables: tables x bags x lookups, and the rows of a table where they are not `rows`."""
    tables, bags, lookups, *own = sizes(text, (3, 4))
    return Shape(tables, bags, lookups, own[0] if own else rows, dim)


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=21)
    add_num_batches(parser)
    parser.add_argument(
        "--figures", type=comma_list,
        help=f"what to measure, of {', '.join(FIGURES)} (default: steps; on a GPU, which alone has host, "
        "steps,host)",
    )  # fmt: skip
    parser.add_argument("--steps", type=positive, default=1000, help="of convergence (default: 1000)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write each figure as a PNG")
    group = parser.add_argument_group("only on the CPU")
    group.add_argument(
        "--shapes",
        type=comma_list,
        default="26x128x1,26x2048x1,26x512x20,26x512x20x100000,500x256x1",
        help="tables x bags x lookups of a bag (x rows of a table), commas between (default: %(default)s)",
    )
    group.add_argument("--rows", type=positive, default=10_000, help="of a table (default: 10000)")
    group.add_argument("--dim", type=positive, default=64, help="default: 64")
    group.add_argument("--bag", default="8x60", help="bags x lookups of the bag alone (default: 8x60)")
    group.add_argument(
        "--bag-rows", type=comma_list, default="95811,1000", help="its rows (default: %(default)s)"
    )
    gpu.add_arguments(parser)
    arguments = parser.parse_args()
    start(parser, arguments)
    if arguments.figures is None:
        arguments.figures = DEFAULT_FIGURES[arguments.device]
    figures = FIGURES if arguments.device == "cuda" else [name for name in FIGURES if name != "host"]
    check_choices(parser, {"--figures": (arguments.figures, figures)})
    check_plot(parser, arguments.plots and arguments.plots / "figure.png", "--plots")
    if arguments.device == "cuda":
        gpu.check_arguments(parser, arguments)
        return parser, arguments
    try:
        arguments.shapes = [shape_of(shape, arguments.rows, arguments.dim) for shape in arguments.shapes]
        arguments.alone = [
            Shape(1, *sizes(arguments.bag, (2,)), positive(rows), arguments.dim)
            for rows in arguments.bag_rows
        ]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--shapes, --bag, --bag-rows: {error}")
    if not arguments.shapes + arguments.alone:
        parser.error("--shapes and --bag-rows are both empty; one shape is needed")
    return parser, arguments


def main() -> None:
    """Run the benchmark."""
    parser, arguments = parse_arguments()
    room = gpu if arguments.device == "cuda" else cpu
    room.run(parser, arguments)


if __name__ == "__main__":
    main()
