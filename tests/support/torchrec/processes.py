"""Functions run in several processes of one group, with their results."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.processes.ranks import run_ranks

ON_GPUS = os.environ.get("TORCHREC_TESTS") == "nccl"  # a GPU for each rank
TIMEOUT = timedelta(seconds=60)  # if another rank has failed


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def run_cases(world: int, cases: Callable[[], Mapping[str, Callable[[], Any]]]) -> dict[str, list[Any]]:
    """Runs each case on all ranks of a new group. Returns, by name, each rank's result, or its traceback.

    The cases after a failing case do not run.
    """
    if ON_GPUS and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_process, (world, free_port(), cases, folder), world)
        ranks = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]
    names = dict.fromkeys(name for found in ranks for name in found)
    return {name: [found.get(name, "not run: another case has failed") for found in ranks] for name in names}


def _process(
    rank: int,
    world: int,
    port: int,
    cases: Callable[[], Mapping[str, Callable[[], Any]]],
    folder: str,
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
    )
    torch.set_num_threads(1)
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", timeout=TIMEOUT)
    found = {}
    for name, case in cases().items():
        try:
            found[name] = case()
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other ranks wait for this rank, and fail too
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def check(results: Mapping[str, list[Any]], name: str) -> list[Any]:
    """The results of a case; fails with the traceback of the rank that has failed."""
    assert name in results, "not run: a case before it has failed"
    for rank, result in enumerate(results[name]):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    return results[name]
