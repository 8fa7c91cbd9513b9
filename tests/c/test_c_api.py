"""The C API called from C, without torch and without Python, once for each instruction set of this CPU.

With the installed library; and compiled together with the CPU core under the address and undefined-behaviour
sanitizers and under the thread sanitizer. For NEON on other machines with a cross-compiler and an emulator,
if available.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from pathlib import Path

import pytest

import recfuse
from support.c_program import COMPILER, CROSS_COMPILER, EMULATOR, PLAIN, ROOT, build_program, flags_of, run

# Requirements of each instruction set, in the terms of /proc/cpuinfo.
CPU_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "scalar": set(),
}

INTERNAL = ("test_ikbo_attention.c", "test_workers.c")  # their four tests need the source
TESTS = 38

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]


def isa_flags() -> dict[str, list[str]]:
    """The compiler flags of the files of each instruction set: setup.py's own."""
    spec = importlib.util.spec_from_file_location("recfuse_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ISA_FLAGS


def build_installed() -> Path:
    """The program with the installed library and all its copies of kernels, but without the tests of
    functions that the library does not export."""
    tests = [path for path in sources() if path.is_relative_to(ROOT / "tests") and path.name not in INTERNAL]
    folder = Path(recfuse.__file__).parent
    last = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lrecfuse_core", "-lm"]
    return build_program(tests, [*PLAIN, "-DRF_INSTALLED=1"], last=last)


def build(kind: str) -> Path:
    """The program: "address" or "thread". The most expensive checks of undefined behaviour, those
    of pointers, cover only the code that all instruction sets share, and the address sanitizer covers
    it too. Kernels are functions of their constants; all copies run in the installed library."""
    # For workers that watch, however few cores there are.
    flags = [*flags_of(kind), "-DRF_LEAST_CORES=1", "-DRF_ONE_KERNEL=1"]
    without = "-fno-sanitize=null,alignment,object-size,pointer-overflow"
    kernels = [*flags, without] if kind == "address" else [*PLAIN, "-DRF_ONE_KERNEL=1"]
    own = {ending: [*kernels, *more] for ending, more in isa_flags().items()}
    return build_program(sources(), flags, own)


def sources() -> list[Path]:
    patterns = ("tests/c/*.c", "tests/c/cpu/**/*.c", "csrc/core/[!bf]*.c", "csrc/core/threads/*.c")
    families = ("**/cpu/*.c", "*/*_cpu.c", "**/check_*.c", "embedding_columns/program/*.c")
    patterns += tuple(f"csrc/families/{files}" for files in families)
    return [source for pattern in patterns for source in ROOT.glob(pattern)]


def missing_flags(isa: str) -> set[str]:
    """Returns the missing features of this CPU for an instruction set, as far as Linux reports them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return CPU_FLAGS[isa] - set(next((line for line in lines if line.startswith("flags")), "").split())


def skip_unless_cpu_has(isa: str) -> None:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        if isa != "scalar":
            pytest.skip(f"{isa} is for x86-64; this is {platform.machine()}")
        return
    missing = missing_flags(isa)
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")


def expect_success(done: subprocess.CompletedProcess[str], isa: str, tests: int = TESTS) -> None:
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert f"isa {isa}, {tests} tests, 0 failed checks" in done.stdout, done.stdout


@pytest.mark.parametrize("isa", CPU_FLAGS)
def test_values_and_errors(isa: str) -> None:
    skip_unless_cpu_has(isa)
    done = run([build_installed(), "--rounds", "100"], RECFUSE_CPU_ISA=isa)
    expect_success(done, isa, TESTS - 4)


@pytest.mark.parametrize("isa", CPU_FLAGS)
def test_address_sanitizer(isa: str) -> None:
    skip_unless_cpu_has(isa)
    expect_success(run([build("address"), "--rounds", "30"], RECFUSE_CPU_ISA=isa), isa)


def test_thread_sanitizer() -> None:
    """The data races of the scheduler and of the first use; the kernels of one instruction set are enough."""
    tests = ["first_use", "embedding_bag_repeats", "fused_embedding_bag_reuse", "threads"]
    tests += ["fused_backward_random", "fused_backward_repeats", "embedding_columns_repeats"]
    tests += ["embedding_columns_started", "workers"]
    done = run([build("thread"), "--rounds", "20", *tests], RECFUSE_CPU_ISA="scalar")
    expect_success(done, "scalar", len(tests))


def test_unknown_isa_is_ignored() -> None:
    program = build_installed()
    default, unknown = (run([program, "first_use"], RECFUSE_CPU_ISA=isa) for isa in ("", "mmx"))
    assert default.returncode == unknown.returncode == 0, default.stderr + unknown.stderr
    assert default.stdout == unknown.stdout


@pytest.mark.skipif(platform.machine() != "aarch64", reason=f"this is {platform.machine()}, not aarch64")
def test_neon_here() -> None:
    done = run([build_installed(), "--rounds", "200"], RECFUSE_CPU_ISA="neon")
    expect_success(done, "neon", TESTS - 4)
    expect_success(run([build("address"), "--rounds", "200"], RECFUSE_CPU_ISA="neon"), "neon")


@pytest.mark.skipif(
    CROSS_COMPILER is None or EMULATOR is None,
    reason="needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user)",
)
def test_neon_emulated() -> None:
    assert CROSS_COMPILER is not None and EMULATOR is not None
    flags = [*PLAIN, "-DRF_ONE_KERNEL=1"]
    program = build_program(sources(), flags, last=["-static", "-lm"], compiler=CROSS_COMPILER)
    expect_success(run([EMULATOR, program, "--rounds", "25"], RECFUSE_CPU_ISA="neon"), "neon")
    # All but the products of dims and types and the threads, which take ten times as long as the others.
    tests = ["embedding_bag_random", "embedding_bag_exact", "embedding_bag_errors"]
    tests += ["fused_embedding_bag_random", "fused_backward_random", "fused_backward_errors"]
    done = run([EMULATOR, program, "--rounds", "10", *tests], RECFUSE_CPU_ISA="scalar")
    expect_success(done, "scalar", len(tests))
