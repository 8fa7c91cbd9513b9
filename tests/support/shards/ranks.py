"""Functions run on several ranks with gloo, or with SHARD_TESTS=nccl in the environment a GPU each.

A server process imports torch once, and ranks are its forks.
"""

from __future__ import annotations

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

ON_GPUS = os.environ.get("SHARD_TESTS") == "nccl"
DEVICE = "cuda" if ON_GPUS else "cpu"
NOT_RUN = "not run: another case has failed"
MANY = max(min(3, torch.cuda.device_count()), 2) if ON_GPUS else 3  # ranks of most cases
Cases = Mapping[str, Callable[[], Any]]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def run_ranks(world: int, cases: Callable[[], Cases], wait: float = 60.0) -> dict[str, list[Any]]:
    """Runs each case on all ranks of a new group. Returns, by name, each rank's result, or its traceback.

    The cases after a failing case do not run. ``wait``: the group's timeout in seconds.
    """
    if ON_GPUS and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    method = "spawn" if ON_GPUS else "forkserver"
    if not ON_GPUS:
        multiprocessing.set_forkserver_preload(["torch", "recfuse.distributed", "support.shards.preload"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (world, free_port(), cases, folder, wait), world, start_method=method)
        ranks = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]
    names = dict.fromkeys(name for found in ranks for name in found)
    return {name: [found.get(name, NOT_RUN) for found in ranks] for name in names}


def begin(rank: int, world: int, port: int, wait: float) -> None:
    """Makes this process a rank of a new group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    gc.freeze()  # searches for holders of Parameters then skip the objects of imports
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", timeout=timedelta(seconds=wait))


def _process(rank: int, world: int, port: int, cases: Callable[[], Cases], folder: str, wait: float) -> None:
    begin(rank, world, port, wait)
    found: dict[str, Any] = {}
    for name, case in cases().items():
        try:
            found[name] = case()
        except Exception:
            found[name] = Failure(traceback.format_exc())
            break  # the other ranks wait for this rank, and fail too
    if "SHARD_TIMES" in os.environ:
        print(f"rank {rank} of {world}: {time.process_time():.1f} s", flush=True)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


class Failure(str):
    """The traceback of a case that has failed."""


def check(results: Mapping[str, list[Any]], name: str) -> list[Any]:
    """The results of a case; fails with the traceback of the rank that has failed."""
    assert name in results, "not run: a case before it has failed"
    failures = [(rank, text) for rank, text in enumerate(results[name]) if isinstance(text, Failure)]
    # First the rank that has failed itself: the others fail because it has left.
    failures.sort(key=lambda failure: "gloo/transport" in failure[1] or "Timed out" in failure[1])
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures[:1])
    assert NOT_RUN not in results[name]
    return results[name]


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error of a call, which must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
