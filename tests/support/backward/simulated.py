"""Kernels whose block of threads runs on the host: tests/c/warps, compiled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.c_program import ROOT, make_once

CPP_COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
ROOMS = ("tests/c/warps", "tests/c/warps/host", "csrc", "include")


def simulated(file: str, **defines: Any) -> ctypes.CDLL:
    """The kernels of a file of tests/c/warps."""
    options = [f"-D{name}={value}" for name, value in defines.items()]

    def build(path: Path) -> None:
        command = [CPP_COMPILER, "-x", "c++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC"]
        command += [
            "-Wno-unknown-pragmas",
            "-Wno-unused-parameter",
            "-fvisibility=hidden",
            "-shared",
            *options,
        ]
        command += [*(f"-I{ROOT / room}" for room in ROOMS), f"tests/c/warps/{file}", "-o", path]
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True)

    return ctypes.CDLL(str(make_once([f"{file} on the host", *options], ".so", build)))
