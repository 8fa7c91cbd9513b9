"""Ranks of a process group: forks of one process that has imported torch, and TorchRec if it is installed."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# Importing them takes four seconds of a core, which each rank would spend.
IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
IMPORTED += ["fbgemm_gpu", "torchrec", "recfuse.torchrec"]


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Calls function(rank, *arguments) in `world` processes; raises if one fails."""
    multiprocessing.set_forkserver_preload(IMPORTED)  # read when the first rank starts
    mp.start_processes(_rank, (function, arguments), world, start_method="forkserver")


def _rank(rank: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Excludes the imported modules from garbage collection and from walks over the heap, which sharding
    makes: they are a million objects."""
    gc.freeze()
    function(rank, *arguments)
