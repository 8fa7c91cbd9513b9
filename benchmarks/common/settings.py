"""Settings of benchmarks: types of arguments, checks of paths, and the setting of a run."""

from __future__ import annotations

import argparse
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import NoReturn

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
        raise argparse.ArgumentTypeError(f"found {text!r}; expected an integer of at least 1")
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


def check_folder(parser: argparse.ArgumentParser, flag: str, path: Path | None) -> None:
    """End the program, before it measures, where a result file could not be written."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        parser.error(f"{flag} {path}: {path.parent} is no folder, or cannot be written")


def check_plot(parser: argparse.ArgumentParser, path: Path, flag: str) -> None:
    """End the program, before it measures, where a plot could not be drawn."""
    check_folder(parser, flag, path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        parser.error(
            f"{flag}: no module matplotlib ({error}). Install matplotlib, or the extra recfuse[bench]."
        )


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Ends the program with status 1: the benchmark ran and found an error."""
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
        """Calls have CUDA graphs."""
        return self.device.type == "cuda"

    @cached_property
    def copy_speed(self) -> float:
        """Bytes a second of a large copy, read and written together; on the CPU: read of a large array."""
        return copy_speed(self.device) if self.on_gpu else timing.read_bandwidth()

    def release(self) -> None:
        """Returns unused memory to the GPU."""
        if self.on_gpu:
            torch.cuda.empty_cache()
