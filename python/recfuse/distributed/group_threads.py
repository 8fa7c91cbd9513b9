"""A clean exit of processes that have used gloo.

gloo's threads release the tensors of a collective after it has ended. The release of a tensor that Python
knows takes the GIL. Before Python 3.14, a thread that takes the GIL while the interpreter ends is terminated
inside a C++ destructor, which aborts the process ("terminate called without an active exception"), and
torchrun reports a failure. Models hold their group, so ``destroy_process_group`` does not end the threads.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_INTERVAL, _LIMIT = 0.002, 2.0  # seconds
_process = os.getpid()


def finish_group_threads() -> None:
    """Wait, without the GIL, until gloo's threads wait for work. Does nothing in a forked process."""
    if os.getpid() != _process:
        return
    with contextlib.suppress(OSError):  # not Linux
        before, end = None, time.monotonic() + _LIMIT
        while (now := _activity()) and time.monotonic() < end:
            if now == before and all(state == "S" for state, _ in now.values()):
                return
            before = now
            time.sleep(_INTERVAL)


def _activity() -> dict[str, tuple[str, str]]:
    """Return the state and the run time of each of gloo's threads."""
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            if (task / "comm").read_text().startswith(_NAME):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                threads[task.name] = state, (task / "schedstat").read_text()
    return threads


atexit.register(finish_group_threads)
