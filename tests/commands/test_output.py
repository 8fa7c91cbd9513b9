"""The command line when its output is closed, full or not read, and when it is interrupted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess

import pytest

from support.processes.fresh import command as python
from support.processes.fresh import run_python

TUNE = "tune --trace low --rows 90 --budget 0 --device cpu --dim 8 --batch 8 --pooling 5 --batches 2"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `recfuse` is the command."""
    line = f'set -o pipefail; recfuse() {{ {shlex.join(python())} -m recfuse "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("recfuse info >&-", 2, "recfuse: error: [Errno 9] standard output is closed\n"),
        ("recfuse info --json >/dev/full", 2, "recfuse info: error: [Errno 28] No space left on device\n"),
        (f"recfuse {TUNE} >/dev/full", 2, "recfuse tune: error: [Errno 28] No space left on device\n"),
        ("recfuse info 2>&- >&-", 2, ""),
        ("recfuse info 2>&- | grep -c 'instruction set'", 0, ""),
        ("recfuse tune --trace absent 2>&- | wc -c | grep -qx 0", 2, ""),
    ],
)
def test_output_that_nothing_takes_is_an_error_of_one_line(command: str, status: int, words: str) -> None:
    """For all commands; with standard error closed, messages do not go to standard output."""
    result = shell(command, PYTHONUNBUFFERED="")
    lines = [line for line in result.stderr.splitlines(keepends=True) if "warning: Not a quiet" not in line]
    assert (result.returncode, "".join(lines)) == (status, words), result.stdout


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    code = "import sys; from recfuse import cli; input(); sys.exit(cli.main(['info', '--json']))"
    process = subprocess.Popen(
        [*python(), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    errors = process.stderr.read()
    assert process.wait() == 141 and errors == b""


def test_an_interrupt_does_not_wait_for_the_compiler() -> None:
    """One kernel may take half a minute; here a stand-in takes a minute."""
    code = """
import signal, sys, time
from recfuse import _C, cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
def compile(*arguments):
    print("begun\\n", end="", flush=True)  # at once, as two threads do this
    time.sleep(60)
_C.kernel_compile = compile
sys.exit(cli.main(["compile", "--arch", "sm_90a", "--columns"]))
"""
    with subprocess.Popen(
        [*python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
            assert process.stderr.read() == "recfuse compile: interrupted\n"
        finally:
            process.kill()


def test_bars_are_for_terminals(tmp_path) -> None:
    """A trace that takes seconds to make: no line of standard error is of its bar."""
    code = """
import sys
from recfuse import traces
from recfuse._progress import hidden
from recfuse.passes.graph.progress import Progress
from recfuse.tuner.log import bar
assert hidden()
bars = [Progress("x", 3)._bar, bar(None, "x", total=3)]
assert all(bar.disable for bar in bars) and not bar(True, "x", total=3).disable
sys.stderr = None
assert hidden() and len(traces.generate("one_item", rows=10))
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
