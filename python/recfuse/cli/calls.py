"""Options that describe calls, of `recfuse explain` and `recfuse compile`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recfuse import _C

if TYPE_CHECKING:
    from recfuse.perf.described import DescribedCall


def sizes(count: int, names: str) -> Any:
    """Returns a reader of that many positive integers between colons, for argparse."""

    def read(text: str) -> tuple[int, ...]:
        found = text.split(":")
        if len(found) != count or not all(part.isdecimal() and int(part) > 0 for part in found):
            raise argparse.ArgumentTypeError(f"{text!r} is not {names}, {count} integers from 1 on")
        return tuple(int(part) for part in found)

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of columns and IKBO."""
    linear, attention = "M:KU:KC:N", "HEADS:KV_HEADS:DIM:QUERIES:KEYS"
    parser.add_argument(
        "--columns",
        nargs="*",
        metavar="FILE",
        help="embedding columns of JSON files, as EmbeddingColumns.to_json writes them",
    )
    parser.add_argument(
        "--ikbo-linear",
        nargs="+",
        default=[],
        type=sizes(4, linear),
        metavar=linear,
        help="calls of recfuse.ikbo_linear: rows of out, rows of users' and candidates' inputs, columns",
    )
    parser.add_argument(
        "--ikbo-attention",
        nargs="+",
        default=[],
        type=sizes(5, attention),
        metavar=attention,
        help="calls of recfuse.ikbo_attention: heads, heads of keys, dim of a head, queries of a "
        "candidate, keys of a user",
    )
    parser.add_argument("--users", type=int, default=16, help="of IKBO calls (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=1024, help="of IKBO calls (default: %(default)s)")
    parser.add_argument(
        "--ikbo-dtype",
        choices=("float16", "bfloat16", "float32"),
        default="bfloat16",
        help="of IKBO calls (default: %(default)s)",
    )


def gpu_of(name: str) -> dict[str, Any]:
    """Returns the facts of a GPU. Prints a note where its architecture is not in the table of GPUs.

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


def described_calls(arguments: argparse.Namespace) -> Iterator[DescribedCall]:
    """The calls that columns' files and IKBO's sizes describe, at each --batch."""
    if not (arguments.columns or arguments.ikbo_linear or arguments.ikbo_attention):
        return
    import torch

    from recfuse.nn.columns import json
    from recfuse.perf import described

    for name in ("users", "candidates"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} is {getattr(arguments, name)}, must be >= 1")
    for path in arguments.columns or ():
        columns = json.read(path)
        for batch in arguments.batch:
            yield described.columns_call(columns, batch, training=bool(arguments.training))
    form = {
        "users": arguments.users,
        "candidates": arguments.candidates,
        "dtype": getattr(torch, arguments.ikbo_dtype),
    }
    for one in arguments.ikbo_linear:
        yield described.linear_call(*one, **form)
    for one in arguments.ikbo_attention:
        yield described.attention_call(*one, **form)
