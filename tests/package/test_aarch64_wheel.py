"""The wheel that a cross-compiler builds for aarch64 on x86-64: names, contents, and a C program with it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.c_program import CROSS_COMPILER, EMULATOR
from support.processes.wheels import ROOT, build, copy_checkout, expected_files, wheel_name

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() == "aarch64", reason="aarch64 builds its wheel itself"),
    pytest.mark.skipif(CROSS_COMPILER is None, reason="no aarch64-linux-gnu-gcc: gcc-aarch64-linux-gnu"),
]
LIBRARIES = ("librecfuse.so", "librecfuse_core.so", "_C.abi3.so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setup.py with CC and nothing else set. The compiler is told to compile quickly."""
    pytest.importorskip("setuptools", "77")
    copy = copy_checkout(tmp_path_factory.mktemp("aarch64"))
    assert CROSS_COMPILER is not None
    quick = copy.parent / "quick-gcc"
    quick.write_text(f'#!/bin/sh\nexec {CROSS_COMPILER} "$@" -DRF_ONE_KERNEL=1 -O1\n')
    quick.chmod(0o755)
    build(copy, "bdist_wheel", CC=str(quick))
    (wheel,) = (copy / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def package(wheel: Path) -> Path:
    """The folder of the package, which pip installs in an empty environment of the wheel's platform."""
    pytest.importorskip("pip")
    folder = wheel.parent / "installed"
    *_, platform_tag = wheel.stem.split("-")
    place = ["--target", folder, "--platform", platform_tag, "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, *place, wheel], check=True)
    return folder / "recfuse"


def test_name_and_tag(wheel: Path) -> None:
    assert re.fullmatch(wheel_name("aarch64"), wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        tag = wheel.stem.partition("-")[2].partition("-")[2]
        assert f"Tag: {tag}" in archive.read(name).decode().splitlines()


def test_contents_are_those_of_every_wheel(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected_files()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_are_for_aarch64_and_the_glibc_of_the_tag(name: str, wheel: Path, package: Path) -> None:
    command = ["readelf", "-hVW", str(package / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"Machine: +AArch64", text)
    versions = [int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", text)]
    named = re.fullmatch(wheel_name("aarch64", "([0-9]+)"), wheel.name)
    assert named and 17 <= max(versions) <= int(named[1])


@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user)")
def test_a_program_pools_with_the_core_library(package: Path, tmp_path: Path) -> None:
    """examples/serving/pool.c, with the headers and the library of the wheel, in the emulator."""
    assert CROSS_COMPILER is not None and EMULATOR is not None
    program = tmp_path / "pool"
    link = [f"-L{package}", "-lrecfuse_core", f"-Wl,-rpath,{package}"]
    source = ROOT / "examples" / "serving" / "pool.c"
    command = [CROSS_COMPILER, "-std=c99", str(source), "-o", str(program), f"-I{package / 'include'}", *link]
    subprocess.run(command, check=True)
    loader = ["-L", "/usr/aarch64-linux-gnu"]  # the folder of this machine's glibc for aarch64, in Debian
    done = subprocess.run([EMULATOR, *loader, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *bags, error = done.stdout.splitlines()
    assert first.endswith(", neon")
    assert bags == ["101 202 303 404 ", "0 0 0 0 ", "21 42 63 84 "]
    assert "indices[1] is 2" in error
