"""The C API called from C: tests/c and the CPU core compiled together, without torch and without Python.

Plain, under the address and undefined-behaviour sanitizers and under the thread sanitizer, once for each
instruction set of this CPU; for NEON on other machines with a cross-compiler and an emulator where there are.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.c_program import COMPILER, ROOT, SANITIZERS, WARNINGS, run, skip_unless_links

CROSS_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
# What each instruction set needs, in the words of /proc/cpuinfo.
CPU_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "scalar": set(),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")


def isa_flags() -> dict[str, list[str]]:
    """The compiler flags of the files of each instruction set: setup.py's own."""
    spec = importlib.util.spec_from_file_location("recfuse_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ISA_FLAGS


def compile_test_api(
    folder: Path, compiler: str, flags: list[str], file_flags: dict[str, list[str]], link: list[str]
) -> Path:
    """Compiles every file to an object, two at a time, and links them; returns the program."""
    sources = [
        *ROOT.glob("tests/c/*.c"),
        *ROOT.glob("tests/c/cpu/*.c"),
        *ROOT.glob("csrc/cpu/**/*.c"),
        *ROOT.glob("csrc/base/[sv]*.c"),
    ]
    includes = [f"-I{ROOT / name}" for name in ("include", "csrc", "tests/c")]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        extra = next((more for suffix, more in file_flags.items() if source.name.endswith(suffix)), [])
        done = run([compiler, *WARNINGS, *flags, *includes, *extra, "-c", source, "-o", target])
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "test_api"
    done = run([compiler, *WARNINGS, *flags, *link, *objects, "-lm", "-o", program])
    assert done.returncode == 0, done.stderr
    return program


Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles the program once for each kind: "plain" or a key of SANITIZERS."""
    built: dict[str, Path] = {}

    def build_kind(kind: str) -> Path:
        if kind not in built:
            folder = tmp_path_factory.mktemp(kind)
            flags = ["-O2"] if kind == "plain" else ["-O1", "-g", *SANITIZERS[kind]]
            assert COMPILER is not None
            if kind != "plain":
                skip_unless_links(folder, COMPILER, flags)
            built[kind] = compile_test_api(folder, COMPILER, flags, isa_flags(), [])
        return built[kind]

    return build_kind


def skip_unless_cpu_has(isa: str) -> None:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        if isa != "scalar":
            pytest.skip(f"{isa} is for x86-64; this is {platform.machine()}")
        return
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    missing = CPU_FLAGS[isa] - set(line.split())
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")


def expect_success(done: subprocess.CompletedProcess[str], isa: str, tests: int = 16) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert f"isa {isa}, {tests} tests, 0 failed checks" in done.stdout, done.stdout


@pytest.mark.parametrize("isa", CPU_FLAGS)
def test_values_and_errors(build: Build, isa: str) -> None:
    skip_unless_cpu_has(isa)
    expect_success(run([build("plain"), "--rounds", "1000"], RECFUSE_CPU_ISA=isa), isa)


@pytest.mark.parametrize("isa", CPU_FLAGS)
def test_address_sanitizer(build: Build, isa: str) -> None:
    skip_unless_cpu_has(isa)
    expect_success(run([build("address"), "--rounds", "200"], RECFUSE_CPU_ISA=isa), isa)


def test_thread_sanitizer(build: Build) -> None:
    """The data races of the scheduler and of the first use; the kernels of one instruction set are enough."""
    tests = ["first_use", "embedding_bag_repeats", "fused_embedding_bag_reuse", "threads"]
    tests += ["fused_backward_random", "fused_backward_repeats"]
    done = run([build("thread"), "--rounds", "40", *tests], RECFUSE_CPU_ISA="scalar")
    expect_success(done, "scalar", len(tests))


def test_unknown_isa_is_ignored(build: Build) -> None:
    program = build("plain")
    default, unknown = (run([program, "first_use"], RECFUSE_CPU_ISA=isa) for isa in ("", "mmx"))
    assert default.returncode == unknown.returncode == 0, default.stderr + unknown.stderr
    assert default.stdout == unknown.stdout


@pytest.mark.skipif(platform.machine() != "aarch64", reason=f"this is {platform.machine()}, not aarch64")
@pytest.mark.parametrize("kind", ["plain", "address"])
def test_neon_here(build: Build, kind: str) -> None:
    expect_success(run([build(kind), "--rounds", "200"], RECFUSE_CPU_ISA="neon"), "neon")


@pytest.mark.skipif(
    CROSS_COMPILER is None or EMULATOR is None,
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user)",
)
def test_neon_emulated(tmp_path: Path) -> None:
    assert CROSS_COMPILER is not None and EMULATOR is not None
    program = compile_test_api(tmp_path, CROSS_COMPILER, ["-O2"], {}, ["-static"])
    for isa in ("neon", "scalar"):
        expect_success(run([EMULATOR, program, "--rounds", "60"], RECFUSE_CPU_ISA=isa), isa)
