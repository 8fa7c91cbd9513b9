"""Kernels compiled at run time and kept on disk: csrc/gpu/jit without a GPU."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.c_program import COMPILER
from support.cuda_program import ARCHS, HEADER, Program, nvrtc_folder

pytestmark = [pytest.mark.long, pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc, gcc or $CC)")]


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.cubin"))


def temporary_files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if ".tmp" in path.name)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_compiles_once(cuda_program: Program, tmp_path: Path, arch: str) -> None:
    first, second = (cuda_program.compile(tmp_path, arch) for _ in range(2))
    assert first["registers"] > 0 and first["spill"] == 0 and first["stack"] == 0 and first["shared"] == 128
    assert (first["cached"], second["cached"]) == (0, 1)
    assert (first["nvrtc"], second["nvrtc"]) == (1, 0), "a hit needs no compiler"
    for name in ("registers", "spill", "stack", "shared", "bytes", "path"):
        assert first[name] == second[name]
    assert entries(tmp_path) == [Path(first["path"])]
    assert temporary_files(tmp_path) == []


def test_the_report_describes_the_requested_kernel(cuda_program: Program, tmp_path: Path) -> None:
    kernel, other = (
        cuda_program.compile(tmp_path, source=("scale.cu", name)) for name in ("rf_scale", "rf_other")
    )
    assert (kernel["shared"], other["shared"]) == (128, 0)
    assert 0 < other["registers"] < kernel["registers"]
    unknown = cuda_program.compile(tmp_path, source=("scale.cu", "rf_scal"))
    assert [unknown[name] for name in ("registers", "spill", "stack", "shared")] == [-1] * 4


def test_spills_are_seen(cuda_program: Program, tmp_path: Path) -> None:
    values = "".join(f"float v{i} = data[{i} * n]; " for i in range(64))
    product = " * ".join(f"v{i}" for i in range(64))
    (cuda_program.kernels / "spill.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) rf_spill(float *data, int n) {\n'
        f"{values}\n__syncthreads();\ndata[n] = {product};\n"
        + "".join(f"data[{i} + n] = v{i}; " for i in range(64))
        + "}\n"
    )
    try:
        assert cuda_program.compile(tmp_path, source=("spill.cu", "rf_spill"))["spill"] > 0
    finally:
        (cuda_program.kernels / "spill.cu").unlink()


def test_an_error_holds_the_compilers_text(cuda_program: Program, tmp_path: Path) -> None:
    error = cuda_program.compile(tmp_path, defines="-DRF_FACTOR=banana")["error"]
    for words in (
        "CompileError",
        "scale.cu",
        "-arch=sm_80",
        "-DRF_FACTOR=banana",
        "NVRTC",
        '"banana" is undef',
    ):
        assert words in error
    assert "sm_42" in (error := cuda_program.compile(tmp_path, "sm_42")["error"]) and "-arch" in error
    error = cuda_program.compile(tmp_path, source=("absent.cu", "rf_scale"))["error"]
    assert str(cuda_program.kernels / "absent.cu") in error and "Install recfuse again" in error
    assert "too many options" in cuda_program.compile(tmp_path, defines="-DA " * 70)["error"]
    assert entries(tmp_path) == []


def test_another_kernel_is_another_entry(cuda_program: Program, tmp_path: Path) -> None:
    paths = [cuda_program.compile(tmp_path, arch, defines)["path"] for arch in ("sm_80", "sm_86")
             for defines in ("-DRF_FACTOR=1", "-DRF_FACTOR=3", "-DRF_FACTOR=3 -DRF_B")]  # fmt: skip
    header = cuda_program.kernels / "scale.cuh"
    try:
        header.write_text(HEADER + "\n")
        paths.append(cuda_program.compile(tmp_path, "sm_80", "-DRF_FACTOR=1")["path"])
    finally:
        header.write_text(HEADER)
    assert len(set(paths)) == len(paths) == len(entries(tmp_path)) == 7
    assert cuda_program.compile(tmp_path, "sm_86", "  -DRF_FACTOR=1  ")["cached"] == 1


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_in_its_head(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def another_format(path: Path) -> None:
    path.write_bytes(b"RFCUBIN0" + path.read_bytes()[8:])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("absent")


DAMAGES = (truncated, cut_in_its_head, longer, empty, another_format, a_folder, a_pipe, a_dead_link)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_made_again(cuda_program: Program, tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = Path(cuda_program.compile(tmp_path)["path"])
    whole = path.read_bytes()
    damage(path)
    again = cuda_program.compile(tmp_path)
    assert again["cached"] == 0 and again["path"] == str(path)
    assert path.read_bytes() == whole
    assert cuda_program.compile(tmp_path)["cached"] == 1


def test_every_flipped_bit_is_found(cuda_program: Program, tmp_path: Path) -> None:
    path = Path(cuda_program.compile(tmp_path)["path"])
    whole = path.read_bytes()
    for at in [*range(0, 56, 5), 60, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert cuda_program.compile(tmp_path, RECFUSE_JIT="off").get("cached") is None, f"byte {at}"
        assert not path.exists()


def test_an_entry_of_another_key_is_not_used(cuda_program: Program, tmp_path: Path) -> None:
    """Simulates two keys with equal hashes."""
    path, other = (Path(cuda_program.compile(tmp_path, arch)["path"]) for arch in ("sm_80", "sm_86"))
    shutil.copy(other, path)
    assert cuda_program.compile(tmp_path, "sm_80")["cached"] == 0
    assert (
        cuda_program.compile(tmp_path, "sm_80")["cached"]
        == cuda_program.compile(tmp_path, "sm_86")["cached"]
        == 1
    )


def test_a_folder_that_cannot_be_written_is_harmless(cuda_program: Program, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    folders = [file / "below", "/proc/recfuse", "/dev/null", tmp_path / ("x" * 300), tmp_path / ("x/" * 600)]
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        folders.append(closed)
    for folder in folders:
        found = cuda_program.compile(folder)
        assert found["cached"] == 0 and found["path"] == "" and found["registers"] > 0, folder


def of_a_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def of_everybody(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


HANDS = (of_a_group, of_everybody, of_another_user)


@pytest.mark.parametrize("give", HANDS, ids=lambda give: give.__name__)
def test_a_folder_writable_by_others_is_not_used(
    cuda_program: Program, tmp_path: Path, give: Callable[[Path], None]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    planted = Path(cuda_program.compile(cache)["path"])
    before = planted.read_bytes()
    give(cache)
    found = cuda_program.compile(cache)
    assert found["cached"] == 0 and found["path"] == "" and found["registers"] > 0
    error = cuda_program.compile(cache, RECFUSE_JIT="off")["error"]
    assert f"({cache}, which is not used: " in error and "plant code" in error
    assert entries(cache) == [planted] and planted.read_bytes() == before


@pytest.mark.parametrize("give", HANDS, ids=lambda give: give.__name__)
def test_an_entry_writable_by_others_is_not_used(
    cuda_program: Program, tmp_path: Path, give: Callable[[Path], None]
) -> None:
    path = Path(cuda_program.compile(tmp_path)["path"])
    give(path)
    assert "error" in cuda_program.compile(tmp_path, RECFUSE_JIT="off") and path.exists()
    assert cuda_program.compile(tmp_path)["cached"] == 0  # and replaces it
    assert cuda_program.compile(tmp_path)["cached"] == 1


def test_an_entry_that_is_a_link_is_not_used(cuda_program: Program, tmp_path: Path) -> None:
    path = Path(cuda_program.compile(tmp_path)["path"])
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    assert "error" in cuda_program.compile(tmp_path, RECFUSE_JIT="off")
    assert cuda_program.compile(tmp_path)["cached"] == 0 and not path.is_symlink()


def test_a_relative_folder_is_that_of_the_start(cuda_program: Program, tmp_path: Path) -> None:
    assert cuda_program.compile("kernels", cwd=tmp_path)["path"].startswith(f"{tmp_path}/kernels/")


def test_without_a_home_nothing_is_cached(cuda_program: Program) -> None:
    found = cuda_program.compile(None, HOME="", XDG_CACHE_HOME="")
    assert found["cached"] == 0 and found["path"] == ""


def test_a_limit_on_the_size_of_files_is_harmless(cuda_program: Program, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    found = cuda_program.compile(tmp_path, preexec_fn=limit)
    assert found["cached"] == 0 and found["path"] == ""
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_harmless(cuda_program: Program, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=4k tmpfs "$0" && "$@" && ls -A "$0"'
    command = ["unshare", "-m", "sh", "-c", script, str(tmp_path)]
    compile_it = [str(cuda_program.path), "compile", "scale.cu", "rf_scale", "sm_80", ""]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    done = subprocess.run(
        [*command, *compile_it], env=cuda_program.environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # so that the disk is empty
    assert "cached=0" in line and line.endswith("path=")


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_the_folder_is_made_for_its_owner_alone(cuda_program: Program, tmp_path: Path, variable: str) -> None:
    home = tmp_path / "home"
    found = cuda_program.compile(None, **{variable: str(home)})
    folder = home / ("recfuse" if variable == "XDG_CACHE_HOME" else ".cache/recfuse")
    assert Path(found["path"]).parent == folder
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_entries_go(cuda_program: Program, tmp_path: Path) -> None:
    paths = [Path(cuda_program.compile(tmp_path, defines=f"-DRF_FACTOR={i}")["path"]) for i in range(4)]
    for age, path in enumerate(paths):  # the first is the oldest
        os.utime(path, (1e9 + age, 1e9 + age))
    other = tmp_path / "notes.cubin"
    other.write_bytes(bytes(1 << 20))
    cuda_program.compile(tmp_path, defines="-DRF_FACTOR=0")  # a hit: it is the youngest now
    size = paths[0].stat().st_size
    cuda_program.run("trim", str(tmp_path), str(2 * size + 100), cache=tmp_path)
    assert entries(tmp_path) == sorted([paths[0], paths[3], other])
    cuda_program.run("trim", str(tmp_path), "1", cache=tmp_path)
    assert entries(tmp_path) == sorted([paths[0], other]), "the youngest stays"


def test_stale_temporary_files_go(cuda_program: Program, tmp_path: Path) -> None:
    name = "0" * 32 + "-nvrtc13.0.cubin.tmp"
    stale, young, other = (tmp_path / text for text in (f"{name}Stale0", f"{name}Young0", "x.tmpStale0"))
    for path in (stale, young, other):
        path.touch()
    for path in (stale, other):
        os.utime(path, (time.time() - 4000,) * 2)
    cuda_program.compile(tmp_path)
    assert temporary_files(tmp_path) == [young, other]


def test_compiling_can_be_forbidden(cuda_program: Program, tmp_path: Path) -> None:
    error = cuda_program.compile(tmp_path, "sm_90a", RECFUSE_JIT="off")["error"]
    for words in (
        "NotImplementedError",
        "rf_scale",
        "sm_90a",
        str(tmp_path),
        "recfuse compile",
        "RECFUSE_JIT",
    ):
        assert words in error
    cuda_program.compile(tmp_path, "sm_90a")
    assert cuda_program.compile(tmp_path, "sm_90a", RECFUSE_JIT="off")["cached"] == 1


def test_an_entry_of_another_compiler(cuda_program: Program, tmp_path: Path) -> None:
    """It is used only if this machine may not or cannot compile; the newest first."""
    path = Path(cuda_program.compile(tmp_path)["path"])
    assert "-nvrtc1" in path.name
    old, older = (path.with_name(path.name[:32] + f"-nvrtc{version}.cubin") for version in ("12.4", "12.1"))
    path.rename(old)
    older.write_bytes(b"damaged")
    os.utime(old, (1e9, 1e9))
    found = cuda_program.compile(tmp_path, RECFUSE_JIT="off")
    assert found["cached"] == 1 and found["path"] == str(old)
    assert not older.exists()
    assert cuda_program.compile(tmp_path)["cached"] == 0
    assert entries(tmp_path) == sorted([path, old])


def without_nvrtc(cuda_program: Program, folder: Path) -> Program:
    """Returns the program in a folder without NVRTC."""
    alone = object.__new__(Program)
    alone.packages, alone.driver = folder / "site-packages", cuda_program.driver
    shutil.copytree(cuda_program.path.parent, alone.packages / "recfuse")
    alone.path = alone.packages / "recfuse" / "test_cuda"
    alone.kernels = alone.path.with_name("kernels")
    return alone


def test_without_a_compiler(cuda_program: Program, tmp_path: Path) -> None:
    alone, cache = without_nvrtc(cuda_program, tmp_path), tmp_path / "cache"
    missing = alone.compile(cache, CUDA_HOME=str(tmp_path / "toolkit"), CUDA_PATH="")
    if "error" not in missing:
        pytest.skip("this machine has NVRTC on the loader's search path")
    places = [alone.packages / "nvidia/cu13/lib", alone.packages / "nvidia/cuda_nvrtc/lib"]
    for words in ("NotImplementedError", "NVRTC", "pip install nvidia-cuda-nvrtc", "the loader's search path",
                  str(tmp_path / "toolkit" / "lib64"), *map(str, places)):  # fmt: skip
        assert words in missing["error"]
    path = Path(cuda_program.compile(cache)["path"])
    path.rename(path.with_name(path.name[:32] + "-nvrtc12.4.cubin"))
    assert alone.compile(cache)["cached"] == 1


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"])
def test_nvrtc_of_a_toolkit_is_found(cuda_program: Program, tmp_path: Path, place: str) -> None:
    alone, folder = without_nvrtc(cuda_program, tmp_path), nvrtc_folder()
    assert folder is not None
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "lib64").symlink_to(folder)
    value = tmp_path / "toolkit" / ("lib64" if place == "LD_LIBRARY_PATH" else "")
    assert alone.compile(tmp_path / "cache", **{place: str(value)})["registers"] > 0


def test_an_nvrtc_that_does_not_load_gives_the_reason(cuda_program: Program, tmp_path: Path) -> None:
    alone = without_nvrtc(cuda_program, tmp_path)
    folder = alone.packages / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).write_text("no library")
    error = alone.compile(tmp_path / "cache")["error"]
    assert "NVRTC was found but does not load" in error and str(folder) in error


def test_threads_and_processes_at_once(cuda_program: Program, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cuda_program.run("compile_at_once", "sm_80", cache=tmp_path), range(8)))
    assert len(entries(tmp_path)) == 1
    assert temporary_files(tmp_path) == []
    assert cuda_program.compile(tmp_path, defines="-DRF_FACTOR=5")["cached"] == 1


def test_a_fork_while_threads_compile(cuda_program: Program, tmp_path: Path) -> None:
    cuda_program.run("fork_compile", cache=tmp_path)
    assert temporary_files(tmp_path) == []
