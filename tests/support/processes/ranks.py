"""Ranks of a process group: forks of one process that has imported torch, and TorchRec if it is installed.

They use gloo, or with RANK_TESTS=nccl in the environment a GPU each.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ON_GPUS = os.environ.get("RANK_TESTS") == "nccl"
NOT_RUN = "not run: another case has failed"
DEADLINE = 390.0  # seconds, fewer than a test has, after which a rank prints its stack and ends
# Importing them takes four seconds of a core, which each rank would spend.
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.testing",
]
IMPORTED += ["fbgemm_gpu", "torchrec", "recfuse.torchrec", "recfuse.distributed"]
Cases = Mapping[str, Callable[[], Any]]


def start_ranks(
    function: Callable[..., None], arguments: tuple[Any, ...], world: int, join: bool = True
) -> mp.ProcessContext | None:
    """Calls function(rank, *arguments) in `world` processes, and waits for them if `join` is true.
    Raises if one of them fails."""
    multiprocessing.set_forkserver_preload(IMPORTED)  # read when the first rank starts
    # A process that has used CUDA cannot be forked.
    method = "spawn" if ON_GPUS else "forkserver"
    return mp.start_processes(_rank, (function, arguments), world, join=join, start_method=method)


def run_cases(world: int, cases: Callable[[], Cases], wait: float = 60.0) -> dict[str, list[Any]]:
    """Runs each case on all ranks of a new group. Returns, by name, each rank's result, or its traceback.

    The cases after a failing case do not run. ``wait``: the group's timeout in seconds.
    """
    if ON_GPUS and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(_run_cases, (world, free_port(), cases, folder, wait), world)
        ranks = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]
    names = dict.fromkeys(name for results in ranks for name in results)
    return {name: [results.get(name, NOT_RUN) for results in ranks] for name in names}


def check(results: Mapping[str, list[Any]], name: str) -> list[Any]:
    """The results of a case; fails with the traceback of the rank that has failed."""
    assert name in results, "not run: a case before it has failed"
    failures = [(rank, text) for rank, text in enumerate(results[name]) if isinstance(text, Failure)]
    # First the rank that has failed itself: the others fail because it has left.
    failures.sort(key=lambda failure: "gloo/transport" in failure[1] or "Timed out" in failure[1])
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures[:1])
    assert NOT_RUN not in results[name]
    return results[name]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def join_group(rank: int, world: int, port: int, wait: float) -> None:
    """Makes this process a rank of a new group on this host."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", timeout=timedelta(seconds=wait))


class Failure(str):
    """The traceback of a case that has failed."""


def _rank(rank: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    # Excludes the imported modules from garbage collection and from walks over the heap, which sharding
    # makes: they are a million objects.
    gc.freeze()
    function(rank, *arguments)


def _run_cases(
    rank: int, world: int, port: int, cases: Callable[[], Cases], folder: str, wait: float
) -> None:
    join_group(rank, world, port, wait)
    results: dict[str, Any] = {}
    for name, case in cases().items():
        try:
            results[name] = case()
        except Exception:
            results[name] = Failure(traceback.format_exc())
            break  # the other ranks wait for this rank, and fail too
    if "RANK_TIMES" in os.environ:
        print(f"rank {rank} of {world}: {time.process_time():.1f} s", flush=True)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
