"""A clean exit of processes that have run a backward pass on a GPU.

Autograd runs the nodes of a GPU in a thread of that GPU. ``backward()`` returns when the last node has run,
which may be before that thread has released it. The release of a tensor that Python knows takes the GIL.
Before Python 3.14, a thread that takes the GIL while the interpreter ends is terminated inside a C++
destructor, which aborts the process ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

_process = os.getpid()
_leaves: list[Tensor] = []  # references that keep threads of autograd from releasing the last reference


def finish_device_threads() -> None:
    """Wait until each GPU's thread of autograd has released the nodes of earlier backward passes.

    Runs a further backward pass on each GPU that the process uses: the thread begins it after it has released
    the previous node. Does nothing if no backward pass has run on a GPU, or in a forked process. Never
    raises.
    """
    if os.getpid() != _process or not torch.cuda.is_initialized():
        return
    with contextlib.suppress(Exception):  # an earlier error of a kernel must not make the exit fail
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        if not any(name.startswith("pt_autograd") for name in names):
            return
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):
                leaf = torch.zeros((), device=f"cuda:{device}", requires_grad=True)
                _leaves.append(leaf)
                (leaf * 2).backward()


atexit.register(finish_device_threads)
