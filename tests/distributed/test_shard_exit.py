"""A process that has used gloo ends without an abort, although gloo's threads release tensors late."""

from __future__ import annotations

import os
import sys

import pytest
import torch.distributed as dist

from support.processes.fresh import run_python
from support.processes.ranks import free_port

SCRIPT = """
    import threading, weakref
    import torch
    import torch.distributed as dist
    {imported}
    dist.init_process_group("gloo")
    group = dist.group.WORLD  # as a model holds it
    main, released = threading.get_ident(), threading.Event()
    matrix = torch.rand(600, 600)

    def at_release():
        if threading.get_ident() != main and not released.is_set():
            released.set()
            for _ in range(40):
                torch.mm(matrix, matrix)  # without the GIL

    while not released.is_set():
        tensor = torch.ones(1000)
        weakref.finalize(tensor, at_release).atexit = False
        work = dist.all_reduce(tensor, async_op=True)
        del tensor, work
        released.wait(0.01)
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform != "linux", reason="needs gloo on Linux")
@pytest.mark.parametrize("imported", (True, False))
def test_the_threads_of_gloo_finish_before_the_interpreter(imported):
    lines = SCRIPT.format(imported="import recfuse.distributed" if imported else "").splitlines()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **group, "PYTHONPATH": paths, "FRESH_FINALIZES": "1"}
    done = run_python("-c", "\n".join(line[4:] for line in lines), env=environment)
    if imported:
        assert done.returncode == 0, done.stderr
    elif sys.version_info < (3, 14):  # otherwise recfuse's wait is superfluous
        assert "terminate called without an active exception" in done.stderr
