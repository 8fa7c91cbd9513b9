"""GPU parts of benchmarks without a GPU: run on CPU tensors, and NVRTC's reports of their kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from recfuse import info

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> Iterator[Callable[..., Any]]:
    """Yields a function that runs ``name``.py with ``options`` and its arguments, and returns the exit
    status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench, points = import_module(name).bench, import_module("common.points")
    bench.load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(points.MODES, "with pauses", points.Mode(1e-3, 1e-6))
    # Not triton itself: torch._dynamo and its caches remember for the whole process that there is none.
    for family in ("ikbo_linear", "ikbo_attention"):
        monkeypatch.setitem(sys.modules, f"{family}.triton_peer", None)  # their kernels look for a GPU
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small wait for each other's threads else

    def run(*more: Any) -> Any:
        try:
            parser, arguments = bench.parse([*options, *map(str, more)])
            arguments.device = "cpu"
            bench.run(parser, arguments, "cuda")
        except SystemExit as stopped:
            return stopped.code
        return 0

    try:
        yield run
    finally:
        torch.set_num_threads(threads)


def compiler_log(source, options):
    """Returns NVRTC's report for a source; skips without NVRTC."""
    found = [info.cuda()["libraries"][name]["found"] for name in ("libnvrtc-builtins", "libnvrtc")]
    if None in found:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    nvrtc = [ctypes.CDLL(path) for path in found][1]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gather.cu", 0, None, None) == 0
    encoded = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    return log.value.decode()
