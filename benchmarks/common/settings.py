"""The command lines of the benchmarks: types of arguments, shared flags and their checks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from common.ceilings import copy_speed
from recfuse import timing


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, needs an integer of at least 1")
    return value


def dashed(text: str) -> list[int]:
    """An argparse type: positive integers joined by dashes, such as 512-256-64."""
    return [positive(part) for part in text.split("-")]


def comma_list(text: str) -> list[str]:
    """An argparse type: names or numbers joined by commas, such as A,B,C."""
    return [part.strip() for part in text.split(",") if part.strip()]


def integers(text: str) -> list[int]:
    """A comma list of positive integers."""
    return [positive(part) for part in comma_list(text)]


def make_parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has; `--rounds` only where a default is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--threads", type=positive, help="threads of every candidate (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every sample")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--seed", type=int, default=0, help="of tables and inputs (default: 0)")
    if rounds is not None:
        text = f"samples of each candidate (default: {rounds})"
        parser.add_argument("--rounds", type=positive, default=rounds, help=text)
    return parser


def add_num_batches(parser: argparse.ArgumentParser) -> None:
    """Add `--num-batches`."""
    text = "batches to rotate through (default: 4)"
    parser.add_argument("--num-batches", type=positive, default=4, help=text)


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmarks that compare one operator with its peers."""
    add_num_batches(parser)
    parser.add_argument("--cache", choices=["warm", "cold"], default="warm", help="default: warm")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the ratios as a PNG")


def start(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Check the shared flags and apply them; ends the program where one cannot be met."""
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no GPU; run with --device cpu")
    if arguments.seed < 0:
        parser.error(f"--seed: found {arguments.seed}, needs an integer of at least 0")
    check_folder(parser, "--json", arguments.json)
    check_plot(parser, getattr(arguments, "plot", None))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)


def check_folder(parser: argparse.ArgumentParser, flag: str, path: Path | None) -> None:
    """End the program, before it measures, where a result file could not be written."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        parser.error(f"{flag} {path}: {path.parent} is not a folder that can be written to")


def check_plot(parser: argparse.ArgumentParser, path: Path | None, flag: str = "--plot") -> None:
    """End the program, before it measures, where a plot could not be drawn."""
    check_folder(parser, flag, path)
    if path is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            parser.error(f"{flag}: {error}; pip install matplotlib, which the extra recfuse[bench] brings")


def check_choices(
    parser: argparse.ArgumentParser, choices: Mapping[str, tuple[Sequence[str], Collection[str]]]
) -> None:
    """End the program where a flag's list is empty or holds an unknown name; flag -> (given, allowed)."""
    for flag, (given, allowed) in choices.items():
        if not given or set(given) - set(allowed):
            parser.error(f"{flag}: found {','.join(given)!r}, allowed are {', '.join(allowed)}")


def any_of(given: Collection[Any]) -> tuple[list[str], list[str]]:
    """For :func:`check_choices`, where all but an empty list will do."""
    return list(map(str, given)), list(map(str, given))


def apply_defaults(
    arguments: argparse.Namespace, defaults: Mapping[str, Any], quick_lists: Mapping[str, int]
) -> None:
    """What was not given; of lists in ``quick_lists`` as many with --quick."""
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            short = quick_lists.get(name) if arguments.quick else None
            setattr(arguments, name, value[:short] if isinstance(value, list) else value)


def apply_quick(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, quick: Mapping[str, Any]
) -> None:
    """Give the arguments that were left at their defaults the values of a trial run."""
    for name, value in quick.items():
        if arguments.quick and getattr(arguments, name) == parser.get_default(name):
            setattr(arguments, name, value)


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the program with status 1: the benchmark ran and found something wrong."""
    print(f"{parser.prog}: {message}", file=sys.stderr)
    raise SystemExit(1)


class Setting:
    """The command line, and the device that it names."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """`arguments`: the benchmark's."""
        self.parser, self.arguments = parser, arguments
        self.device = torch.device(arguments.device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def on_gpu(self) -> bool:
        """Whether calls have CUDA graphs."""
        return self.device.type == "cuda"

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second of a large copy, read and written together; on the CPU: read of a large array."""
        return copy_speed(self.device) if self.on_gpu else timing.read_bandwidth()

    def release(self) -> None:
        """Give the GPU's unused memory back."""
        if self.on_gpu:
            torch.cuda.empty_cache()
