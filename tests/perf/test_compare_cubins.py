"""`compare_cubins.py`: which kernels it compiles, and which differences it reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import recfuse
from tools import compare_cubins
from tools.compare_cubins import differences, digest, kernels

ROOT = Path(__file__).resolve().parents[2]


def test_default_calls_launch_every_kernel_file() -> None:
    listed = kernels(["H100"], "float16")
    files = {kernel[1] for call in listed.values() for kernel in call}
    sources = {path.relative_to(ROOT / "csrc").as_posix() for path in (ROOT / "csrc").rglob("*.cu")}
    assert sources - files == {"families/pin_rows/pin_rows.cu"}  # no explained call launches it


def test_differences_name_calls_and_kernels() -> None:
    first, second = ["sm_80", "a.cu", "rf_a", "-DX=1", "1234"], ["sm_80", "b.cu", "rf_b", "", "5678"]
    moved = ["sm_80", "folder/a.cu", "rf_a", "-DY=1", "1234"]
    assert differences({"call": [first, second]}, {"call": [moved, second]}) == []
    (line,) = differences({"call": [first]}, {"call": [[*first[:-1], "4321"]]})
    assert line.startswith("call: a.cu rf_a -DX=1")
    assert differences({"call": [first, second]}, {"call": [first]}) == ["call: 2 kernels before, 1 after"]
    assert differences({}, {"call": [first]}) == ["call: 0 kernels before, 1 after"]


def test_digests_are_those_of_machine_code(kernel_cache: Path) -> None:
    (kernel,) = kernels(["A100"], "embedding_bag sum float32")["embedding_bag sum float32 on A100"]
    *same, defines = kernel
    assert digest(kernel) == digest((*same, defines + " -DRF_UNUSED=1"))
    assert digest(kernel) != digest((*same, defines.replace("-DRF_DIM=64", "-DRF_DIM=32")))


def test_a_checkout_equals_itself(kernel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(Path(recfuse.__file__).parents[1])  # built in place or installed
    command = [sys.executable, ROOT / "tests/tools/compare_cubins.py", tmp_path, tmp_path]
    options = ["--gpu", "A100", "--only", "embedding_bag sum float32", "--cache", kernel_cache]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "1 calls, 1 kernels, 0 differences"


def test_no_call_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels(["A100"], "no such call") == {}
    monkeypatch.setattr(compare_cubins, "recorded", lambda checkout, arguments, cache: {})
    monkeypatch.setattr(sys, "argv", ["compare_cubins.py", "old", "new", "--only", "no such call"])
    assert compare_cubins.main() == 1
