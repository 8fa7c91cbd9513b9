"""What NVRTC says of a source."""

from __future__ import annotations

import ctypes

import pytest

from recfuse import info


def compiler_log(source, options):
    """What NVRTC says of a source; skips where there is no NVRTC."""
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
