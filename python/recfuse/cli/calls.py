"""Options of several commands that describe calls, GPUs and quantities."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from typing import Any

from recfuse import _C
from recfuse._codes import CODES, DTYPE_NAMES, INTEGER_NAMES, MODES

TRAINING = ("gradients", "sgd", "adagrad", "rowwise_adagrad", "adam")
_LEAST = (("rows", 1), ("batch", 1), ("pooling", 0), ("dim", 1), ("users", 1), ("candidates", 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe calls."""

    def several(name: str, default: list[Any], help: str | None = None, **options: Any) -> None:
        parser.add_argument(name, nargs="+", default=default, help=help, **options)

    histories = "also lookups without pooling of --collection, in these layouts (default: all layouts for a "
    histories += "FusedEmbeddingCollection, none for other collections)"
    several("--plan", [], "plans that recfuse tune wrote", metavar="FILE")
    several("--collection", [], "collections or dicts of tables that torch.save wrote", metavar="FILE")
    several("--histories", [], histories, choices=CODES["history_layout"])
    several("--dim", [], "dims of a table: each describes calls of recfuse.embedding_bag", type=int)
    several("--dtype", ["float32"], "dtypes of the table (default: float32)", choices=DTYPE_NAMES)
    several("--mode", ["sum"], "modes of the table or of a dict of tables (default: sum)", choices=MODES)
    several("--index", ["int64"], "dtypes of indices and offsets (default: int64)", choices=INTEGER_NAMES)
    several("--batch", [2048], "bags or samples of a batch (default: 2048)", type=int)
    several("--pooling", [150], "mean number of lookups of a bag (default: 150)", type=int)
    parser.add_argument("--rows", type=int, default=500_000, help="rows of the table (default: %(default)s)")
    parser.add_argument(
        "--schedule", default="", help="schedule of the table (default: the kernel's default)"
    )
    parser.add_argument("--weighted", action="store_true", help="use per-sample weights (mode sum)")
    parser.add_argument("--padded", action="store_true", help="give the table a padding_idx")
    parser.add_argument("--unchecked", action="store_true", help='use bounds_check="off"')
    training = (
        "also training steps: with gradients for optimizers of torch (default), or with fused optimizers"
    )
    parser.add_argument("--training", nargs="*", choices=TRAINING, help=training)
    rounding = "round float16 and bfloat16 tables stochastically in --training"
    parser.add_argument("--stochastic-rounding", action="store_true", help=rounding)
    parser.add_argument(
        "--columns",
        nargs="*",
        metavar="FILE",
        help="JSON files of embedding columns that EmbeddingColumns.to_json wrote",
    )
    _add_ikbo(parser)


def _add_ikbo(parser: argparse.ArgumentParser) -> None:
    linear, attention = "M:KU:KC:N", "HEADS:KV_HEADS:DIM:QUERIES:KEYS"
    parser.add_argument(
        "--ikbo-linear",
        nargs="+",
        default=[],
        type=sizes(4, linear),
        metavar=linear,
        help="calls of recfuse.ikbo_linear: rows of the output, of a user's input and of a candidate's "
        "input, and columns",
    )
    parser.add_argument(
        "--ikbo-attention",
        nargs="+",
        default=[],
        type=sizes(5, attention),
        metavar=attention,
        help="calls of recfuse.ikbo_attention: query heads, key heads, dim of a head, queries of a "
        "candidate, keys of a user",
    )
    parser.add_argument("--users", type=int, default=16, help="users of IKBO calls (default: %(default)s)")
    candidates = "candidates of IKBO calls (default: %(default)s)"
    parser.add_argument("--candidates", type=int, default=1024, help=candidates)
    parser.add_argument(
        "--ikbo-dtype",
        choices=("float16", "bfloat16", "float32"),
        default="bfloat16",
        help="dtype of IKBO calls (default: %(default)s)",
    )


def quantity(text: str, units: Mapping[str, float], noun: str, examples: str) -> float:
    """Return the value of a positive number with a unit, such as "5ms"; ``units``: the value of each unit.

    Raises:
        argparse.ArgumentTypeError: the text is not such a quantity.
    """
    match = re.fullmatch(rf"\s*([0-9]*\.?[0-9]+)\s*({'|'.join(units)})\s*", text)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no {noun}; expected a text such as {examples}")
    return float(match[1]) * units[match[2]]


def sizes(count: int, names: str) -> Any:
    """Return a reader, for argparse, of ``count`` positive integers between colons."""

    def read(text: str) -> tuple[int, ...]:
        parts = text.split(":")
        if len(parts) != count or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}; expected {count} integers from 1 on")
        return tuple(int(part) for part in parts)

    return read


def check(arguments: argparse.Namespace, command: str) -> None:
    """Check the options, and complete --training.

    Raises ValueError for a size below its least value, for an option without its subject, and if
    no call is described.
    """
    for name, least in _LEAST:
        value = getattr(arguments, name)
        lowest = min(value, default=least) if isinstance(value, list) else value
        if lowest < least:
            raise ValueError(f"--{name} is {lowest}; expected >= {least}")
    training = arguments.training
    arguments.training = [] if training is None else training or ["gradients"]
    needs(arguments, ("dim",), "padded", "schedule")
    needs(arguments, ("dim", "collection"), "weighted")
    needs(arguments, ("collection",), "histories")
    needs(arguments, ("training",), "stochastic_rounding")
    trained = arguments.dim or arguments.plan or arguments.collection or arguments.columns
    if arguments.training and not trained:
        raise ValueError("--training needs --dim or --plan, whose tables are trained, and both are missing")
    described = trained or arguments.columns is not None or arguments.ikbo_linear or arguments.ikbo_attention
    if not described:
        raise ValueError(
            f"no call to {command} is named. Pass --plan FILE, or --dim with --dtype, --mode and --index, "
            "or --collection FILE, --columns FILE, --ikbo-linear or --ikbo-attention."
        )


def needs(arguments: argparse.Namespace, subjects: tuple[str, ...], *options: str) -> None:
    """Raise ValueError for an option without effect because none of its subjects is given."""
    if any(getattr(arguments, subject) for subject in subjects):
        return
    for option in options:
        if getattr(arguments, option):
            subject = " or ".join(f"--{name}" for name in subjects)
            raise ValueError(f"--{option.replace('_', '-')} needs {subject}, which is not given")


def gpu_of(name: str) -> dict[str, Any]:
    """Return the facts of a GPU. Prints a note if its architecture is not in the table of GPUs.

    Raises:
        ValueError: neither a known GPU nor an architecture.
    """
    gpu = _C.gpu(name)
    if gpu["arch"] not in {known["arch"] for known in _C.gpus()}:
        print(
            f"note: {gpu['arch']} is not in the table of GPUs; its GPU is described as {gpu['name']}",
            file=sys.stderr,
        )
    return gpu
