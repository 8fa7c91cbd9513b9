"""The hand-declared prototypes, structs and numbers of csrc/gpu/driver/cuda_abi.h against CUDA's own headers.

cuda.h comes with a toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda*) or a wheel, nvrtc.h with either too.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.c_program import COMPILER
from support.cuda_program import nvrtc_folder

ROOT = Path(__file__).resolve().parents[2]
ABI = ROOT / "csrc" / "gpu" / "driver" / "cuda_abi.h"

# The types of cuda_abi.h by their names in CUDA's headers.
CUDA_TYPES = """
#define __CUDA_API_VERSION_INTERNAL /* old and new versions of each function, under their own names */
#include <cuda.h>
typedef CUresult rf__cu_result;
typedef CUdevice rf__cu_device;
typedef CUdevice_attribute rf__cu_device_attribute;
typedef CUfunction_attribute rf__cu_function_attribute;
typedef CUstreamCaptureStatus rf__cu_capture_status;
typedef CUstreamCaptureMode rf__cu_capture_mode;
typedef CUpointer_attribute rf__cu_pointer_attribute;
typedef CUdeviceptr rf__cu_pointer;
typedef CUcontext rf__cu_context;
typedef CUmodule rf__cu_module;
typedef CUfunction rf__cu_function;
typedef CUstream rf__cu_stream;
typedef CUevent rf__cu_event;
typedef CUlaunchConfig rf__cu_launch_config;
typedef CUtensorMap rf__cu_tensor_map;
typedef CUtensorMapDataType rf__cu_tensor_type;
typedef CUtensorMapInterleave rf__cu_tensor_interleave;
typedef CUtensorMapSwizzle rf__cu_tensor_swizzle;
typedef CUtensorMapL2promotion rf__cu_tensor_promotion;
typedef CUtensorMapFloatOOBfill rf__cu_tensor_fill;
"""
NVRTC_TYPES = """
#include <nvrtc.h>
typedef nvrtcResult rf__nvrtc_result;
typedef nvrtcProgram rf__nvrtc_program;
"""
HOLDS = """
#define RF__CUDA_LISTS_ONLY
#include "{abi}"
#define HOLDS(result, name, parameters) \\
    _Static_assert(__builtin_types_compatible_p(__typeof__(name), result parameters), "wrong: " #name);
"""
NUMBERS = """
#include <cuda.h>
#define RF__CUDA_LISTS_ONLY
#include "{abi}"
#define NUMBER(name, number) _Static_assert(CU_##name == number, "wrong: " #name);
#define RESULT(name, number) _Static_assert(CUDA_##name == number, "wrong: " #name);
#define HOST_MEMORY(name, number) _Static_assert(CU_MEMHOSTALLOC_##name == number, "wrong: " #name);
RF__CU_NUMBER_LIST(NUMBER)
RF__CU_RESULT_LIST(RESULT)
RF__CU_HOST_MEMORY_LIST(HOST_MEMORY)
"""
# Both sets of declarations in one file: sizes of types that cuda_abi.h renames, and the layout of structs.
LAYOUT = """
#include <cuda.h>
#include <nvrtc.h>
#include "{abi}"
#define SAME(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), "wrong: " #ours);
#define PLACE(ours, member, theirs, other) \\
    _Static_assert(offsetof(ours, member) == offsetof(theirs, other), "wrong: " #member);
SAME(rf__cu_result, CUresult)
SAME(rf__cu_device, CUdevice)
SAME(rf__cu_device_attribute, CUdevice_attribute)
SAME(rf__cu_function_attribute, CUfunction_attribute)
SAME(rf__cu_capture_status, CUstreamCaptureStatus)
SAME(rf__cu_capture_mode, CUstreamCaptureMode)
SAME(rf__cu_pointer, CUdeviceptr)
SAME(rf__nvrtc_result, nvrtcResult)
SAME(rf__cu_launch_attribute, CUlaunchAttribute)
SAME(rf__cu_launch_config, CUlaunchConfig)
SAME(rf__cu_tensor_map, CUtensorMap)
_Static_assert(_Alignof(rf__cu_tensor_map) >= _Alignof(CUtensorMap), "wrong: rf__cu_tensor_map");
SAME(rf__cu_tensor_type, CUtensorMapDataType)
SAME(rf__cu_tensor_interleave, CUtensorMapInterleave)
SAME(rf__cu_tensor_swizzle, CUtensorMapSwizzle)
SAME(rf__cu_tensor_promotion, CUtensorMapL2promotion)
SAME(rf__cu_tensor_fill, CUtensorMapFloatOOBfill)
PLACE(rf__cu_launch_attribute, id, CUlaunchAttribute, id)
PLACE(rf__cu_launch_attribute, value, CUlaunchAttribute, value)
PLACE(rf__cu_launch_attribute, value.programmatic_stream_serialization, CUlaunchAttribute,
      value.programmaticStreamSerializationAllowed)
PLACE(rf__cu_launch_attribute, value.cooperative, CUlaunchAttribute, value.cooperative)
PLACE(rf__cu_launch_attribute, value.cluster, CUlaunchAttribute, value.clusterDim)
PLACE(rf__cu_launch_config, grid, CUlaunchConfig, gridDimX)
PLACE(rf__cu_launch_config, block, CUlaunchConfig, blockDimX)
PLACE(rf__cu_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes)
PLACE(rf__cu_launch_config, stream, CUlaunchConfig, hStream)
PLACE(rf__cu_launch_config, attributes, CUlaunchConfig, attrs)
PLACE(rf__cu_launch_config, n_attributes, CUlaunchConfig, numAttrs)
"""


def header_folders() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include"
    yield from sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    for root in map(Path, sys.path):
        yield from (root / name for name in ("nvidia/cu13/include", "nvidia/cuda_runtime/include"))
        yield root / "nvidia/cuda_nvrtc/include"


def folder_of(header: str) -> Path | None:
    return next((folder for folder in header_folders() if (folder / header).is_file()), None)


CUDA_H, NVRTC_H = folder_of("cuda.h"), folder_of("nvrtc.h")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to read CUDA's headers with")
needs_cuda_h = pytest.mark.skipif(CUDA_H is None, reason="no cuda.h here")
needs_nvrtc_h = pytest.mark.skipif(NVRTC_H is None, reason="no nvrtc.h here")


def compile_errors(text: str, abi: Path = ABI) -> str:
    """Returns the compiler's errors for `text` together with CUDA's headers; "" without any."""
    folders = [f"-I{folder}" for folder in (CUDA_H, NVRTC_H, ROOT / "csrc") if folder is not None]
    done = subprocess.run(
        [str(COMPILER), "-std=gnu11", "-fsyntax-only", "-fmax-errors=0", *folders, "-x", "c", "-"],
        input=text.replace("{abi}", str(abi)),
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else ""


def names(list_name: str) -> set[str]:
    """The functions in one list of cuda_abi.h."""
    body = re.search(rf"#define {list_name}\(X\)((?:.*\\\n)*.*\n)", ABI.read_text())
    assert body, f"{list_name} is not in {ABI}"
    return set(re.findall(r"\bX\([\w *]+?,\s*(\w+),", body[1]))


CUDA_NAMES, NVRTC_NAMES = names("RF__CUDA_LIST"), names("RF__NVRTC_LIST")


def test_the_lists_are_read_whole() -> None:
    assert {"cuInit", "cuModuleLoadData", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"} <= CUDA_NAMES
    assert {"nvrtcCreateProgram", "nvrtcGetProgramLog"} <= NVRTC_NAMES


def test_every_function_is_called() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*.c"))
    called = set(re.findall(r"(?:->|functions\.)((?:cu|nvrtc)[A-Z]\w*)\(", text))
    assert called == CUDA_NAMES | NVRTC_NAMES


@needs_cuda_h
def test_prototypes_of_the_driver() -> None:
    assert compile_errors(CUDA_TYPES + HOLDS + "RF__CUDA_LIST(HOLDS)\n") == ""


@needs_nvrtc_h
def test_prototypes_of_nvrtc() -> None:
    assert compile_errors(NVRTC_TYPES + HOLDS + "RF__NVRTC_LIST(HOLDS)\n") == ""


@needs_cuda_h
def test_numbers() -> None:
    assert compile_errors(NUMBERS) == ""


@needs_cuda_h
@needs_nvrtc_h
def test_layouts() -> None:
    assert compile_errors(LAYOUT) == ""


def wrong_prototypes(folder: Path) -> Path:
    """cuda_abi.h with one more parameter in each function."""
    prototype = re.compile(r"(\bX\([\w *]+?,\s*\w+,[\s\\]*\()(void\))?")
    wrong = prototype.sub(lambda found: f"{found[1]}long extra{')' if found[2] else ', '}", ABI.read_text())
    path = folder / "cuda_abi.h"
    path.write_text(wrong)
    return path


@needs_cuda_h
@needs_nvrtc_h
def test_every_wrong_prototype_is_found(tmp_path: Path) -> None:
    abi = wrong_prototypes(tmp_path)
    errors = compile_errors(CUDA_TYPES + HOLDS + "RF__CUDA_LIST(HOLDS)\n", abi)
    errors += compile_errors(NVRTC_TYPES + HOLDS + "RF__NVRTC_LIST(HOLDS)\n", abi)
    refused = set(re.findall(r'"wrong: (\w+)"', errors))
    assert refused == CUDA_NAMES | NVRTC_NAMES


@needs_cuda_h
def test_every_wrong_number_is_found(tmp_path: Path) -> None:
    abi, text = tmp_path / "cuda_abi.h", ABI.read_text()
    number = re.compile(r"(X\([A-Z]\w+, )(\d+)\)")
    abi.write_text(number.sub(lambda found: f"{found[1]}{int(found[2]) + 1})", text))
    assert compile_errors(NUMBERS, abi).count('"wrong: ') == len(number.findall(text)) > 20


@pytest.mark.skipif(nvrtc_folder() is None, reason="no NVRTC here")
def test_the_installed_nvrtc_exports_every_function() -> None:
    folder = nvrtc_folder()
    assert folder is not None
    library = ctypes.CDLL(str(next(iter(sorted(folder.glob("libnvrtc.so.1[23]"))))))
    assert sorted(name for name in NVRTC_NAMES if not hasattr(library, name)) == []


def test_an_installed_driver_exports_every_function() -> None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no driver here")
    assert sorted(name for name in CUDA_NAMES if not hasattr(library, name)) == []
