"""Training steps: FusedEmbeddingBagCollection against a loop of torch's nn.EmbeddingBag, and one bag alone.

A step is zero_grad, the forward pass, backward from a given gradient of the output, and a step of plain SGD.
Both sides hold the same values, get the same batches, and take turns; after the first step their weights are
compared. Each shape with dense and with sparse gradients.

The bag alone has the shape of a text classifier: a few bags of many lookups, the mean of a large and of a
small vocabulary.
"""

from __future__ import annotations

import argparse

from common.settings import add_num_batches, comma_list, make_parser, positive, start
from training.steps import Shape, run


def sizes(text: str, count: int) -> tuple[int, ...]:
    """Positive integers joined by x; argparse.ArgumentTypeError where there are not `count`."""
    found = tuple(positive(part) for part in text.split("x"))
    if len(found) != count:
        raise argparse.ArgumentTypeError(f"found {text!r}, needs {count} integers joined by x")
    return found


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked."""
    parser = make_parser(__doc__, rounds=21)
    add_num_batches(parser)
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
    run(*parse_arguments())


if __name__ == "__main__":
    main()
