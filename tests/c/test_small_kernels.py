"""Kernels without a compile entry of their own, through NVRTC for three architectures: no GPU needed."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest

from recfuse import _C

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
NVRTC = _C.jit_status()

pytestmark = pytest.mark.skipif(
    NVRTC["nvrtc"] is None and "CI" not in os.environ, reason=f"no NVRTC: {NVRTC['missing']}"
)

INTEGERS = ("int", "rf_i64")
VARIANTS = [
    *(
        ("pin_rows/pin_rows.cu", f"-DRF_INDEX={index} -DRF_KEEP={keep}")
        for index in INTEGERS
        for keep in (0, 1)
    ),
    *(
        ("fused_embedding_bag/partition/map.cu", f"-DRF_OFFSET={offset} -DRF_BLOCK=1024")
        for offset in INTEGERS
    ),
    *(  # a vector of many elements, and of one
        ("ikbo_linear/broadcast_add.cu", f"-DRF_DTYPE={dtype} -DRF_VECTOR={vector} -DRF_INDEX={index}")
        for dtype, vector, index in ((0, 16, "int"), (1, 16, "rf_i64"), (2, 2, "int"), (3, 16, "rf_i64"))
    ),
    *(("ikbo_attention/packed/packed.cu", f"-DRF_VECTOR={vector}") for vector in (2, 4, 8, 16)),
]


def compile_log(file: str, arch: str, defines: str) -> str:
    """What the compiler says; fails where it does not compile."""
    ctypes.CDLL(NVRTC["builtins"], ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(NVRTC["nvrtc"])
    program = ctypes.c_void_p()
    headers = sorted([*KERNELS.rglob("*.cuh"), *KERNELS.rglob("*.h")])
    texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers))
    names = (ctypes.c_char_p * len(headers))(
        *(header.relative_to(KERNELS).as_posix().encode() for header in headers)
    )
    text = (KERNELS / file).read_bytes()
    made = ctypes.byref(program), text, file.encode(), len(headers), texts, names
    assert nvrtcs(nvrtc.nvrtcCreateProgram, *made) == 0
    options = [f"-arch={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v", *defines.split()]
    if (NVRTC["major"], NVRTC["minor"]) >= (12, 9):
        options.append("--no-cache")  # what it has compiled before it does not report on
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


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100"))
@pytest.mark.parametrize(("file", "defines"), VARIANTS)
def test_without_spills(file: str, defines: str, arch: str) -> None:
    log = compile_log(file, arch, defines)
    assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}  # of each kernel in the file


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KERNELS", tmp_path)
    (tmp_path / "common.cuh").write_text("")
    (tmp_path / "wrong.cu").write_text("__global__ void wrong() { undeclared(); }")
    with pytest.raises(AssertionError, match="undeclared"):
        compile_log("wrong.cu", "sm_90a", "")
