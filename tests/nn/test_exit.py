"""The end of processes that have used operators: a clean exit by every path."""

from __future__ import annotations

import os
import signal
import sys
import textwrap

import pytest
import torch

from recfuse.ops.device_threads import finish_device_threads
from support.processes.fresh import run_python

WORK = """
    import os, signal, sys, threading
    import torch
    import recfuse
    bags = recfuse.nn.FusedEmbeddingBagCollection([(50, 8)] * 4)
    given = torch.randint(0, 50, (4 * 64 * 3,)), torch.arange(0, 4 * 64 * 3 + 1, 3)
    def work():
        bags(*given).sum().backward()
    work()
"""
PATHS = {
    "end of the script": ("", 0),
    "exit status": ("sys.exit(3)", 3),
    "exception": ("raise KeyError('mine')", 1),
    "no cleanup": ("os._exit(4)", 4),
    "a thread at work": ("threading.Thread(target=work).start()", 0),
    "an exit in a forked child": ("pid = os.fork(); bags(*given); pid and os.waitpid(pid, 0)", 0),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "a backward pass in an exit handler": ("import atexit; atexit.register(work)", 0),
}


@pytest.mark.parametrize("name", PATHS)
def test_exits_are_clean(name: str) -> None:
    script, status = PATHS[name]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "FRESH_FINALIZES": "1"}
    done = run_python("-c", textwrap.dedent(WORK) + script, env=environment)
    assert done.returncode == status, done.stderr
    assert "mine" in done.stderr if status == 1 else done.stderr == ""


def test_without_a_gpu_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no backward pass was expected")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    finish_device_threads()
