"""The setting of a run of several ranks, and a part of its results."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from common.settings import Setting
from common.table import Table
from distributed.clocks import slowest

SHARE_OF_STEPS = 0.65  # of the seconds of a run


@dataclass
class Part:
    """A table, which replaces the table of this title, and the samples under a name."""

    name: str
    table: Table
    record: Any


class Ranks(Setting):
    """The command line of a rank, its device and the time that is left."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
        """Starts the time."""
        super().__init__(parser, arguments)
        self.begin, self.share = time.monotonic(), 1.0

    def is_late(self) -> bool:
        """Returns whether a rank's time is over, on all ranks alike."""
        spent = slowest(time.monotonic() - self.begin, self.device)
        return spent > self.arguments.seconds * self.share

    @property
    def clock_of_kernels(self) -> str:
        """A note on the rows of kernels."""
        clock = "time that the GPU is busy (torch.profiler)" if self.on_gpu else "time of the host"
        return f"lookup, update: calls of the compute kernels alone, {clock}"

    def release(self) -> None:
        """Returns the memory of models that are gone."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
