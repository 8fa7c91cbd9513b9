"""A family's host code with the GPU of tests/c/warps/gpu.c, whose kernels run on the host."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from support.backward.simulated import CPP_COMPILER, ROOMS
from support.c_program import COMPILER, FLAGS, ROOT, make_once


def build_simulator(name: str, sources: Iterable[Path]) -> ctypes.CDLL:
    """Links sources of a family with the room of launches and the simulated driver; the library is begun."""
    room = ROOT / "csrc/gpu/launches"
    files = [
        *sources,
        *(path for path in sorted(room.glob("*.c")) if path.name != "explain.c"),
        ROOT / "csrc/gpu/tune/occupancy.c",
        ROOT / "csrc/core/status.c",
        ROOT / "tests/c/warps/gpu.c",
    ]

    def build(path: Path) -> None:
        command = [COMPILER, *FLAGS, "-O1", "-fPIC", "-shared", *files, "-ldl", "-lm", "-o", path]
        subprocess.run([str(part) for part in command], check=True)

    loaded = ctypes.CDLL(str(make_once([name], ".so", build)))
    command = [CPP_COMPILER, "-x", "c++", "-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [*(f"-I{ROOT / room}" for room in ROOMS), ROOT / "tests/c/warps/kernel.cu"]
    folder = tempfile.mkdtemp(dir=os.environ["RECFUSE_TEST_SESSION"])
    words = shlex.join(str(part) for part in command)
    loaded.gpu_begin(words.encode(), folder.encode(), ctypes.c_uint64(1))
    loaded.gpu_error.restype = ctypes.c_bool
    loaded.rf_last_error.restype = ctypes.c_char_p
    return loaded
