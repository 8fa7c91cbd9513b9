"""Compiler flags of C tests, and programs that a session of tests compiles once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread"]
FLAGS += [f"-I{ROOT / name}" for name in ("include", "csrc", "tests/c", "tests/c/cuda")]
PLAIN = ["-Og"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread"],
}


def run(command: Iterable[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def make_once(command: Sequence[str | Path], suffix: str, make: Callable[[Path], object]) -> Path:
    """Returns the file that a command creates, in the folder that all processes of the session share. Its
    name is a hash of the command. The first process calls `make` with a path to write; the others wait
    for it."""
    key = hashlib.sha256("\0".join(map(str, command)).encode()).hexdigest()[:32]
    path = Path(os.environ["RECFUSE_TEST_SESSION"]) / f"{key}{suffix}"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            make(part)
            part.rename(path)
    return path


def _made_by(command: Sequence[str | Path], suffix: str) -> Path:
    def make(path: Path) -> None:
        done = run([*command, "-o", path])
        assert done.returncode == 0, done.stderr

    return make_once(command, suffix, make)


def build_program(
    sources: Sequence[Path],
    flags: list[str],
    own: dict[str, list[str]] | None = None,
    last: Sequence[str] = ("-ldl", "-lm"),
    compiler: str | None = COMPILER,
) -> Path:
    """Compiles every file, two at a time, and links the objects; returns the program. `own`: flags of
    files whose names have this suffix, instead of `flags`; `last`: of the linker. Programs share
    objects compiled from the same file with the same flags."""
    assert compiler is not None

    def compile_one(source: Path) -> Path:
        flags_of_it = next((of for ending, of in (own or {}).items() if source.name.endswith(ending)), flags)
        return _made_by([compiler, *FLAGS, *flags_of_it, "-c", source], ".o")

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    return _made_by([compiler, *flags, "-pthread", *objects, *last], "")


def flags_of(kind: str) -> list[str]:
    """Returns the flags of a key of SANITIZERS; skips if an empty program with them does not run."""
    # The least optimization: all checks stay, and the kernels compile in two thirds of the time of -O1. With
    # lines, but without variables, which are not needed.
    flags = ["-Og", "-g1", *SANITIZERS[kind]]
    assert COMPILER is not None
    if kind == "address" and "Free Software Foundation" in run([COMPILER, "--version"]).stdout:
        # Calls in the place of code at each access: the kernels compile in three quarters of the time.
        flags += ["--param", "asan-instrumentation-with-call-threshold=0"]
    empty = make_once(["empty"], ".c", lambda path: path.write_text("int main(void) { return 0; }\n"))
    try:
        done = run([_made_by([COMPILER, *flags, empty], "")])
        reason = (done.stderr or "it crashes") if done.returncode else ""
    except AssertionError as error:
        reason = str(error) or "it does not link"
    if reason:
        pytest.skip(f"no working sanitizer here: {reason.strip()[:200]}")
    return flags
