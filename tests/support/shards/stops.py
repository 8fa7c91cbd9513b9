"""Ranks that stop in the middle of a step, and the error of the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from support.processes.ranks import join_group
from support.shards.checkpoints import samples
from support.shards.models import collection, loss_of, plans

TIMEOUT = 5.0


def stop(rank: int, world: int, port: int, how: str, folder: str) -> None:
    """A step of a rank; the last rank is killed, raises in its backward pass, or stops calling."""
    from recfuse.distributed import shard

    join_group(rank, world, port, TIMEOUT)
    tables = collection()
    shard(tables, plan=plans(world)["rows"])
    started = time.monotonic()
    text = "no error"
    try:
        for step in range(3):
            odd = rank == world - 1 and step == 1
            if odd and how == "stops":
                time.sleep(4 * TIMEOUT)
                os._exit(0)
            loss = loss_of(tables(*samples(step, rank, world)[:2]))
            if odd and how == "killed":
                os.kill(os.getpid(), 9)
            if odd and how == "raises":
                torch._assert(False, "an error of the model")
            loss.backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (Path(folder) / str(rank)).write_text(f"{time.monotonic() - started}\n{text}")
    os._exit(0)
