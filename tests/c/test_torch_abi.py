"""The hand-written prototypes of csrc/torch/torch_abi.h against the installed torch.

torch's headers state for each function the first version that has it: with TORCH_TARGET_VERSION set they
declare exactly the functions of that version. So one compilation against them checks types and versions, for
any installed torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import recfuse

ROOT = Path(__file__).resolve().parents[2]
ABI = ROOT / "csrc" / "torch" / "torch_abi.h"
TORCH = Path(torch.__file__).parent
CXX = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
OLDEST, NEWER = (2, 11), (2, 13)
INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])

HEADERS = "#include <torch/csrc/stable/c/shim.h>\n"
HOLDS = """
#include <type_traits>
#define RF__TORCH_LISTS_ONLY
#include "{abi}"
#define HOLDS(result, name, parameters) \\
    static_assert(std::is_same_v<decltype(name), result parameters>, #name);
#define HOLDS_DTYPE(name) HOLDS(int32_t, aoti_torch_dtype_##name, (void))
"""
OLDEST_LISTS = "RF__TORCH_LIST(HOLDS)\nRF__TORCH_DTYPE_LIST(HOLDS_DTYPE)\n"
NEWER_LIST = "RF__TORCH_NEWER_LIST(HOLDS)\n"

needs_cxx = pytest.mark.skipif(CXX is None, reason="no C++ compiler to read torch's headers with")


def compile_errors(folder: Path, lists: str, target: tuple[int, int], abi: Path = ABI) -> str:
    """Returns the C++ compiler's errors for `lists` against torch's headers for version `target`; ""
    without any."""
    source = folder / "abi.cpp"
    source.write_text(HEADERS + HOLDS.format(abi=abi) + lists)
    command = [
        str(CXX), "-std=c++20", "-fsyntax-only", f"-I{TORCH / 'include'}",
        f"-DTORCH_TARGET_VERSION=0x{target[0]:02x}{target[1]:02x}000000000000", str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 or "error" in done.stderr, done.stderr
    return done.stderr if done.returncode else ""


def names(list_name: str) -> set[str]:
    """The functions in one list of torch_abi.h."""
    body = re.search(rf"#define {list_name}\(X\)((?:.*\\\n)*.*\n)", ABI.read_text())
    assert body, f"{list_name} is not in {ABI}"
    if list_name == "RF__TORCH_DTYPE_LIST":
        return {f"aoti_torch_dtype_{name}" for name in re.findall(r"X\((\w+)\)", body[1])}
    return set(re.findall(r"\bX\([\w *]+?,\s*(\w+),", body[1]))


CUDA_HEADER = "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>\n"


@pytest.mark.skipif(CXX is None, reason="no C++ compiler to read torch's headers with")
@pytest.mark.parametrize("wrong", [False, True])
def test_prototypes_of_functions_found_at_run_time(tmp_path: Path, wrong: bool) -> None:
    """Functions of libtorch_cuda, whose header exists without it too."""
    text = HOLDS.format(abi=ABI) + "RF__TORCH_CUDA_LIST(HOLDS)\n"
    if wrong:
        text = text.replace("result parameters>", "long parameters>")
    source = tmp_path / "cuda.cpp"
    source.write_text(CUDA_HEADER + text)
    command = [str(CXX), "-std=c++20", "-fsyntax-only", f"-I{TORCH / 'include'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode != 0) == wrong, done.stderr
    assert not wrong or "aoti_torch_cuda__efficient_attention_forward" in done.stderr, done.stderr


REQUIRED = names("RF__TORCH_LIST") | names("RF__TORCH_DTYPE_LIST")
OPTIONAL = names("RF__TORCH_NEWER_LIST")


def test_the_lists_are_read_whole() -> None:
    assert {"torch_library_impl", "aoti_torch_check", "aoti_torch_dtype_float32"} <= REQUIRED
    assert "torch_delete_stable_ivalue" in OPTIONAL


@needs_cxx
def test_prototypes_are_those_of_the_oldest_torch(tmp_path: Path) -> None:
    assert compile_errors(tmp_path, OLDEST_LISTS, OLDEST) == ""


@needs_cxx
@pytest.mark.skipif(INSTALLED < NEWER, reason="the headers of this torch have none of them")
def test_newer_prototypes(tmp_path: Path) -> None:
    assert compile_errors(tmp_path, NEWER_LIST, NEWER) == ""


@needs_cxx
def test_newer_functions_are_not_in_the_oldest_torch(tmp_path: Path) -> None:
    errors = compile_errors(tmp_path, NEWER_LIST, OLDEST)
    assert all(name in errors for name in OPTIONAL)


@needs_cxx
def test_every_wrong_prototype_is_found(tmp_path: Path) -> None:
    """With one more parameter each, all lines of the list are refused: the check above covers each."""
    prototype = re.compile(r"(\bX\([\w *]+?,\s*\w+,[\s\\]*\()(void\))?")
    wrong = prototype.sub(lambda found: f"{found[1]}long extra{')' if found[2] else ', '}", ABI.read_text())
    abi = tmp_path / "torch_abi.h"
    abi.write_text(wrong)
    errors = compile_errors(tmp_path, "RF__TORCH_LIST(HOLDS)\n", OLDEST, abi)
    refused = {name for name in REQUIRED if re.search(rf"static.assert.*\b{name}\b", errors)}
    assert refused == names("RF__TORCH_LIST")


def test_the_installed_torch_exports_every_function() -> None:
    library = ctypes.CDLL(str(TORCH / "lib" / "libtorch_cpu.so"))
    assert sorted(name for name in REQUIRED if not hasattr(library, name)) == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to list symbols with")
def test_undefined_symbols_are_the_listed_functions() -> None:
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", recfuse.library_path()], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    symbols = {line.split()[-1].split("@")[0]: line.split()[-2] for line in lines}
    of_torch = {name for name in symbols if name.startswith(("torch_", "aoti_"))}
    assert of_torch == REQUIRED | OPTIONAL
    assert {name for name in OPTIONAL | {"_ZdlPv", "_Znwm"} if symbols[name] != "w"} == set(), "must be weak"
    assert {name for name in symbols if name.startswith("_Z")} == {"_ZdlPv", "_Znwm"}, "C++ symbols"
