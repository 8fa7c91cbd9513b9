"""Chooses the kernels of a process of TorchRec's tests, and bounds the time that a rank waits for others.

``sitecustomize`` of the folder that ``tests/distributed/against_torchrec.py`` makes imports this module, so
that it also takes part in the processes that TorchRec's tests start.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup

WAIT = timedelta(seconds=60)


def _bounded() -> None:
    """Gives process groups a timeout, for ranks whose peer has failed."""
    begin = dist.init_process_group

    @functools.wraps(begin)
    def bounded(*arguments: Any, **named: Any) -> Any:
        return begin(*arguments, **{"timeout": WAIT, **named})

    dist.init_process_group = dist.distributed_c10d.init_process_group = bounded


def _recorded(path: str) -> None:
    """Appends a letter to a file for each kernel that a lookup makes: r of recfuse's, f of another."""
    create = GroupedPooledEmbeddingsLookup._create_embedding_kernel

    @functools.wraps(create)
    def recorded(*arguments: Any, **named: Any) -> Any:
        kernel = create(*arguments, **named)
        with open(path, "a") as record:
            record.write("r" if type(kernel).__module__.startswith("recfuse") else "f")
        return kernel

    GroupedPooledEmbeddingsLookup._create_embedding_kernel = recorded


_bounded()
if os.environ["SUITE_KERNELS"] == "recfuse":
    import recfuse.torchrec

    recfuse.torchrec.enable()
_recorded(os.environ["SUITE_RECORD"])
