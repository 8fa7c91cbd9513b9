"""The program of tests/c/cuda: csrc/gpu and families called from C, with NVRTC or a driver without a GPU."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.c_program import PLAIN, ROOT, build_program, flags_of, make_once

OWN = ("test_cuda", "test_driver", "test_fused", "test_fused_map", "test_fused_kept", "test_ikbo_linear")
OWN += (
    "test_backward",
    "test_fused_lower",
    "fused_case",
    "allocator",
    "program",
    "test_columns",
    "test_staging",
)
CPU_ALONE = ("huge_pages", "isa", "tasks")  # files of csrc/core that GPU code does not use
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")

KERNEL = """#include "scale.cuh"
extern "C" __global__ void rf_other(float *data) { data[threadIdx.x] = 1; }
extern "C" __global__ void rf_scale(float *data) {
    __shared__ float shared[32];
    shared[threadIdx.x % 32] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = scaled(shared[31 - threadIdx.x % 32]);
}
"""
HEADER = """#ifndef RF_FACTOR
#define RF_FACTOR 2
#endif
__device__ inline float scaled(float value) { return RF_FACTOR * value; }
"""


def nvrtc_folder() -> Path | None:
    """Returns the folder of NVRTC in the package nvidia-cuda-nvrtc, or in torch's CUDA build."""
    folders = (
        Path(root) / name for root in sys.path for name in ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
    )
    return next((folder for folder in folders if list(folder.glob("libnvrtc.so.1[23]"))), None)


def empty_kernels() -> Path:
    """Creates the package's folder of kernels, with all names and empty bodies: compiled in milliseconds."""

    def make(folder: Path) -> None:
        for source in (ROOT / "csrc").rglob("*.cu"):
            definitions = source.read_text().split("__global__")[1:]
            entries = [re.search(r"\brf_\w+(?=\()", definition) for definition in definitions]
            empty = folder / source.relative_to(ROOT / "csrc")
            empty.parent.mkdir(parents=True, exist_ok=True)
            empty.write_text(
                "".join(f'extern "C" __global__ void {entry[0]}() {{}}\n' for entry in entries if entry)
            )

    return make_once(["empty kernels"], "", make)


class Program:
    """One build of the program, in the layout of an installed package."""

    def __init__(self, folder: Path, kind: str) -> None:
        flags = PLAIN if kind == "plain" else flags_of(kind)
        self.packages = folder / "site-packages"
        self.path = self.packages / "recfuse" / "test_cuda"
        self.kernels = self.path.with_name("kernels")
        self.kernels.mkdir(parents=True)
        (self.kernels / "scale.cu").write_text(KERNEL)
        (self.kernels / "scale.cuh").write_text(HEADER)
        (self.kernels / "notes.txt").write_text("no header")
        runtime = [path for room in ("gpu", "families") for path in ROOT.glob(f"csrc/{room}/**/*.c")]
        runtime = [path for path in runtime if not {"cpu", "torch", "python", "tensors"} & set(path.parts)]
        runtime = [path for path in runtime if not path.stem.endswith("_cpu")]
        runtime += [path for path in ROOT.glob("csrc/core/*.c") if path.stem not in CPU_ALONE]
        own = [ROOT / "tests/c/cuda" / f"{name}.c" for name in OWN]
        shared = [ROOT / "tests/c/check.c", ROOT / "tests/c/elements.c"]
        shutil.copy2(build_program([*own, *shared, *runtime], flags), self.path)
        self.driver = folder / "driver"
        self.driver.mkdir()
        fake = [ROOT / "tests/c/cuda" / name for name in ("fake_cuda.c", "fake_cuda_rest.c")]
        driver = build_program(fake, [*PLAIN, "-fPIC"], last=["-shared"])
        shutil.copy2(driver, self.driver / "libcuda.so.1")

    def beside_own_kernels(self) -> Program:
        """Returns the same build in its own folder, with the kernels of the package."""
        return self._beside(ROOT / "csrc", "own")

    def beside_empty_kernels(self) -> Program:
        """Returns the same with empty kernels of these names: the fake driver runs no code."""
        return self._beside(empty_kernels(), "empty")

    def _beside(self, kernels: Path, name: str) -> Program:
        other = copy.copy(self)
        other.path = self.packages / name / self.path.name
        other.kernels = other.path.with_name("kernels")
        if not other.path.exists():
            other.path.parent.mkdir()
            shutil.copy2(self.path, other.path)
            other.kernels.symlink_to(kernels)
            other.path.with_name("include").symlink_to(ROOT / "include")
        return other

    def add_nvrtc(self) -> None:
        """Adds NVRTC as a package would."""
        folder = nvrtc_folder()
        if folder is None:
            reason = "no NVRTC here; pip install '.[test]' brings it"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        link = self.packages / "nvidia" / "cu13" / "lib"
        if not link.exists():
            link.parent.mkdir(parents=True)
            link.symlink_to(folder)

    def environment(self, cache: Path | str | None, **extra: str) -> dict[str, str]:
        """Returns this process's environment without variables that lead to another cache or CUDA."""
        drop = ("RECFUSE_", "CUDA_", "XDG_CACHE_HOME", "LD_LIBRARY_PATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        if cache is not None:
            kept["RECFUSE_CACHE_DIR"] = str(cache)
        return {**kept, **extra}

    def run(self, *arguments: str, cache: Path | str | None, gpu: bool = False, **extra: Any) -> str:
        """Runs a command, which must succeed; returns its output. Arguments in capitals are environment
        variables."""
        variables = {name: extra.pop(name) for name in list(extra) if name.isupper()}
        if gpu:
            variables["LD_LIBRARY_PATH"] = str(self.driver)
        done = subprocess.run(
            [str(self.path), *arguments],
            env=self.environment(cache, **variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            **{"timeout": 300, **extra},
        )
        assert done.returncode == 0, f"{done.returncode}: {done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def compile(self, cache: Path | str | None, arch: str = "sm_80", defines: str = "", **extra: Any) -> dict:
        """Compiles rf_scale; returns its properties, or {"error": text}."""
        file, entry = extra.pop("source", ("scale.cu", "rf_scale"))
        text = self.run("compile", file, entry, arch, defines, cache=cache, **extra)
        if not text.startswith("nvrtc="):
            return {"error": text}
        pairs = (item.split("=", 1) for item in text.split())
        return {name: value if name == "path" else float(value) for name, value in pairs}


Build = Callable[[str], Program]


@pytest.fixture(scope="session")
def cuda_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds the program once for each kind: "plain" or a key of SANITIZERS."""
    built: dict[str, Program] = {}

    def build_kind(kind: str) -> Program:
        if kind not in built:
            built[kind] = Program(tmp_path_factory.mktemp(f"cuda_{kind}"), kind)
        return built[kind]

    return build_kind


@pytest.fixture
def cuda_program(cuda_build: Build) -> Program:
    """The plain program, with NVRTC."""
    found = cuda_build("plain")
    found.add_nvrtc()
    return found
