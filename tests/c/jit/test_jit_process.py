"""Compiling in a process with signals of its own, with all files open, with little memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.c_program import COMPILER
from support.cuda_program import Program, nvrtc_folder
from support.processes.fresh import run_python

pytestmark = pytest.mark.long

needs_nvrtc = pytest.mark.skipif(
    nvrtc_folder() is None, reason="no NVRTC here; pip install '.[test]' brings it"
)

START = """
import os, resource, signal, sys, threading, time
from recfuse import _C
done, sent, received = threading.Event(), [], []
def compile_kernels():
    try:
        for keep in range(4):
            options = f"-DRF_INDEX=rf_i64 -DRF_KEEP={keep}"
            _C.kernel_compile("sm_80", "families/pin_rows/pin_rows.cu", "rf_pin_rows", options)
    finally:
        done.set()
def send(number):
    while not done.is_set():
        os.kill(os.getpid(), number)
        sent.append(number)
        time.sleep(0.002)
"""


def run(script: str, cache: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RECFUSE_")}
    paths = {
        "RECFUSE_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return run_python("-c", START + script, env={**kept, **paths})


@needs_nvrtc
@pytest.mark.parametrize("in_a_thread", (False, True))
def test_a_programs_handlers_stay_while_a_process_first_compiles(in_a_thread: bool, tmp_path: Path) -> None:
    """NVRTC's own handlers, in its first compilation, end the process."""
    done = run(
        f"""
def handle(number, frame):
    received.append(number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handle)
both = [threading.Thread(target=send, args=(number,)) for number in (signal.SIGINT, signal.SIGTERM)]
compiling = threading.Thread(target=compile_kernels)
for thread in both:
    thread.start()
if {in_a_thread}:
    compiling.start()
    compiling.join()
else:
    compile_kernels()
for thread in both:
    thread.join()
assert all(signal.getsignal(number) is handle for number in (signal.SIGINT, signal.SIGTERM))
assert len(sent) > 10 and set(received) == set(sent)
print("fine")
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@needs_nvrtc
def test_an_interrupt_of_the_first_compilation_is_pythons(tmp_path: Path) -> None:
    done = run(
        """
def interrupt(number, frame):
    signal.signal(number, signal.SIG_IGN)  # one exception, however many signals
    signal.default_int_handler(number, frame)
def send_to_compiler():
    while "libnvrtc.so" not in open("/proc/self/maps").read() and not done.is_set():
        time.sleep(0.001)
    send(signal.SIGINT)
signal.signal(signal.SIGINT, interrupt)
threading.Thread(target=send_to_compiler).start()
try:
    compile_kernels()
except KeyboardInterrupt:
    print("interrupted")
finally:
    print("finally")
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\nfinally\n"), done.stderr


@needs_nvrtc
def test_a_signal_without_a_handler_ends_the_process_as_ever(tmp_path: Path) -> None:
    done = run("threading.Thread(target=send, args=(signal.SIGTERM,)).start()\ncompile_kernels()\n", tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr


@needs_nvrtc
def test_too_many_open_files_are_no_broken_package(tmp_path: Path) -> None:
    done = run(
        """
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    compile_kernels()
except RuntimeError as error:
    text = f"{type(error).__name__}: {error}"
for file in files:
    os.close(file)
assert "Too many open files" in text and "ulimit -n" in text, text
assert "install" not in text and not text.startswith("InternalError"), text
compile_kernels()
print("fine")
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")
def test_too_little_memory_is_no_broken_package(cuda_program: Program, tmp_path: Path) -> None:
    source = cuda_program.kernels / "large.cu"
    with source.open("wb") as file:
        file.truncate(60 << 20)
    try:
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (50 << 20, 50 << 20))  # noqa: E731
        error = cuda_program.compile(tmp_path, source=("large.cu", "rf_scale"), preexec_fn=limit)["error"]
    finally:
        source.unlink()
    assert "MemoryError" in error and "no memory to read" in error and "install" not in error
