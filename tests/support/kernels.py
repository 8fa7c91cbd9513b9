"""Numbers of types and poolings, and compiling kernels: of a lowered call, and of a file by nvcc."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recfuse import _C
from recfuse._lowering import compile_kernels, kernel_of
from recfuse.tuner.compile import compile_launches

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc"
ARCHS = ("sm_80", "sm_90a", "sm_100")
FLOAT32, FLOAT16, BFLOAT16 = range(3)
INT32, INT64 = range(2)
SUM, MEAN, MAX = range(3)
NVRTC = _C.jit_status()


def compile_bag(*arguments: Any) -> dict[str, Any]:
    """Compiles the kernel of `_C.embedding_bag_lower(*arguments)`; with the shared memory of a block."""
    launches, complete = _C.embedding_bag_lower(*arguments)
    report = compile_launches(launches, schedule=complete)
    return {**report, "shared_bytes": report["shared_bytes"] + launches[-1]["dynamic_shared"]}


def compile_fused(*arguments: Any) -> dict[str, Any]:
    """Compiles the kernels of `_C.fused_embedding_bag_lower(*arguments)`.

    Returns the report of the first, the kernel without staged tables, with the number of classes. The staged
    kernel is limited to 64 registers by its 1,024 threads, and may spill.
    """
    launches, classes = _C.fused_embedding_bag_lower(*arguments)
    return {**compile_kernels(launches)[kernel_of(launches[0])], "classes": classes}


def nvcc() -> str | None:
    """Returns the compiler of a toolkit, if any."""
    folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    toolkits = [Path(folder) for folder in folders if folder] + sorted(Path("/usr/local").glob("cuda*"))
    places = (shutil.which("nvcc"), *(shutil.which("nvcc", path=str(one / "bin")) for one in toolkits))
    return next((place for place in places if place), None)


def standalone(source: str, arch: str, defines: dict[str, str], folder: Path) -> str:
    """Compiles a kernel's file to a cubin by nvcc; returns its output."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("no nvcc here (PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda*)")
    options = [f"-D{name}={value}" for name, value in defines.items()]
    command = [
        compiler,
        "-cubin",
        f"-arch={arch}",
        "-std=c++17",
        f"-I{KERNELS}",
        f"-I{KERNELS.parent / 'include'}",
        "-Werror",
        "all-warnings",
        *options,
    ]
    done = subprocess.run(
        [*command, "-Xptxas", "-v", str(KERNELS / source), "-o", str(folder / "out.cubin")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if done.returncode != 0 and ("host compiler" in output or "unsupported GNU version" in output):
        pytest.skip(f"nvcc finds no host compiler that it takes: {output.splitlines()[0]}")
    assert done.returncode == 0, output
    return output


def disassembler() -> str:
    """Returns the path of nvdisasm; skips without it."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if file.name == "nvdisasm"]
    if not found:
        pytest.skip("no nvdisasm here; pip install '.[test]' brings it")
    return found[0]


def pipelined(source: str, defines: dict[str, str], folder: Path) -> str:
    """The machine code of a kernel for sm_90a, in which nothing is spilled and no product waits for the last
    (the compiler's notes C75xx and C76xx)."""
    log = standalone(source, "sm_90a", defines, folder)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
    assert re.search(r"C75\d\d|C76\d\d", log) is None, log
    command = [disassembler(), "-c", str(folder / "out.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_log(file: str, arch: str, defines: str, folder: Path = KERNELS) -> str:
    """Returns NVRTC's report for a kernel; fails if it does not compile."""
    ctypes.CDLL(NVRTC["builtins"], ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(NVRTC["nvrtc"])
    program = ctypes.c_void_p()
    roots = folder, folder.parent / "include"
    headers = {
        header.relative_to(root).as_posix().encode(): header.read_bytes()
        for root in roots
        for ending in ("cuh", "h")
        for header in sorted(root.rglob(f"*.{ending}"))
    }
    texts = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*headers)
    text = (folder / file).read_bytes()
    made = ctypes.byref(program), text, file.encode(), len(headers), texts, names
    assert nvrtcs(nvrtc.nvrtcCreateProgram, *made) == 0
    options = [f"-arch={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v", *defines.split()]
    if (NVRTC["major"], NVRTC["minor"]) >= (12, 9):
        options.append("--no-cache")  # for cached kernels it reports nothing
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtcs(nvrtc.nvrtcCompileProgram, program, len(options), given)
    size = ctypes.c_size_t()
    nvrtcs(nvrtc.nvrtcGetProgramLogSize, program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    nvrtcs(nvrtc.nvrtcGetProgramLog, program, log)
    nvrtcs(nvrtc.nvrtcDestroyProgram, ctypes.byref(program))
    assert status == 0, log.value.decode()
    return log.value.decode()


def nvrtcs(function: ctypes._CFuncPtr, *arguments: object) -> int:
    """Calls a function of NVRTC."""
    function.restype = ctypes.c_int
    return int(function(*arguments))
