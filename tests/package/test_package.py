"""The contents of a build of the package, the needs of its libraries, and the cost of its import."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import recfuse
from support.processes.fresh import run_python
from support.processes.wheels import ROOT, build, copy_checkout, expected_files, linked_files, wheel_name

pytestmark = pytest.mark.long

PACKAGE = Path(recfuse.__file__).parent
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")


class Builds(NamedTuple):
    """The files of a release."""

    sources: set[str]  # files of the checkout that it was built from
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Of a copy of this checkout, without isolation; objects of earlier builds are reused."""
    pytest.importorskip("setuptools", "77")
    copy = copy_checkout(tmp_path_factory.mktemp("wheel"))
    sources = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    build(copy, "bdist_wheel", "sdist")
    (wheel,), (sdist,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    return Builds(sources, wheel, sdist)


@pytest.fixture(scope="session")
def wheel(builds: Builds) -> Path:
    return builds.wheel


def test_wheel_is_for_every_python_from_3_10(wheel: Path) -> None:
    """And for the oldest glibc that has all functions, as far as a wheel can name it."""
    name = re.fullmatch(wheel_name(platform.machine(), "([0-9]+)"), wheel.name)
    assert name, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        texts = [archive.read(f"recfuse/{library}") for library in ("librecfuse.so", "_C.abi3.so")]
    needed = [int(minor) for text in texts for minor in re.findall(rb"GLIBC_2\.(\d+)", text)]
    assert int(name[1]) == max(needed)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected_files()


def test_wheel_holds_all_included_headers(wheel: Path) -> None:
    """A kernel includes files of the folder `kernels`, and of `include` where a name begins with recfuse/."""
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            name for name in archive.namelist() if name.startswith(("recfuse/kernels/", "recfuse/include/"))
        }
        endings = (".cu", ".cuh", "_args.h", "_codes.h", "/device/codes.h", "_family.h", "families.h")
        kernels = [name for name in sources if name.endswith(endings)]
        for name in kernels:
            included = re.findall(r'#include "([^"]+)"', archive.read(name).decode())
            folders = ["include" if other.startswith("recfuse/") else "kernels" for other in included]
            assert {
                f"recfuse/{folder}/{other}" for folder, other in zip(folders, included, strict=True)
            } <= sources
    assert len(kernels) > 50


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (entry_name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        metadata, entries = archive.read(metadata_name).decode(), archive.read(entry_name).decode()
    lines = metadata.splitlines()
    assert "License-Expression: BSD-3-Clause" in lines
    assert "Requires-Python: >=3.10" in lines
    assert {line for line in lines if line.startswith("Requires-Dist") and "extra" not in line} == {
        f"Requires-Dist: {requirement}" for requirement in ("torch>=2.11", "numpy>=2", "tqdm", "rich")
    }
    assert {"Provides-Extra: test", "Provides-Extra: bench", "Provides-Extra: dev"} <= set(lines)
    assert "recfuse = recfuse.cli:main" in entries
    assert "Author: recfuse contributors" in lines
    classifiers = {line.partition(": ")[2] for line in lines if line.startswith("Classifier: ")}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} <= classifiers
    assert {f"Environment :: GPU :: NVIDIA CUDA :: {major}" for major in (12, 13)} <= classifiers


def test_wheel_has_no_other_metadata(wheel: Path) -> None:
    names = {name.partition(".dist-info/")[2] for name in zipfile.ZipFile(wheel).namelist()} - {""}
    listed = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt"}
    assert names == listed | {"licenses/LICENSE"}


def test_sdist_holds_sources_and_documents_and_no_measurements(builds: Builds) -> None:
    with tarfile.open(builds.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in files if ".egg-info/" in name}
    root = {"setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", ".clang-format", "LICENSE"}
    root |= {"build_rules.py", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    folders = ("benchmarks/", "csrc/", "docs/", "examples/", "include/", "python/", "tests/")
    expected = root | {name for name in builds.sources if name.startswith(folders)}
    expected |= {f"python/recfuse/{name}" for name in linked_files()}
    expected -= {name for name in expected if name.endswith((".so", ".pyc"))}
    measured = {name for name in expected if name.startswith("benchmarks/") and name.endswith(".json")}
    assert measured and not measured & files  # megabytes that the repository keeps
    expected -= measured | {name for name in expected if ".egg-info/" in name}
    assert files - made == expected
    assert {"csrc/torch/torch_abi.h", "include/recfuse.h", "python/recfuse/_C.pyi"} <= expected
    assert builds.sdist.stat().st_size < 8 << 20


def test_building_needs_neither_torch_nor_cuda() -> None:
    requires = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires
    assert set(re.findall(r'"([a-z]+)', requires[1])) == {"setuptools", "wheel", "numpy"}
    assert not re.search(r"^\s*(from|import) torch", (ROOT / "setup.py").read_text(), re.MULTILINE)


def dynamic_section(library: Path, tag: str) -> list[str]:
    """Values of one tag of an ELF file's dynamic section."""
    command = ["readelf", "-dW", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


@needs_readelf
@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("librecfuse.so", {"libtorch_cpu.so"}),
        ("librecfuse_core.so", set()),
        ("_C.abi3.so", {"librecfuse.so"}),
    ],
)
def test_libraries_need_only_the_system(name: str, also: set[str]) -> None:
    needed = dynamic_section(PACKAGE / name, "NEEDED")
    system = re.compile(r"lib(c|m|pthread|dl)\.so\.\d+|ld-linux-.*")
    assert {entry for entry in needed if not system.fullmatch(entry)} == also


@needs_readelf
def test_run_path_is_relative() -> None:
    assert dynamic_section(PACKAGE / "librecfuse.so", "RUNPATH") == ["$ORIGIN/../torch/lib"]
    assert dynamic_section(PACKAGE / "_C.abi3.so", "RUNPATH") == ["$ORIGIN"]
    assert dynamic_section(PACKAGE / "librecfuse_core.so", "RUNPATH") == []
    for name in ("librecfuse.so", "librecfuse_core.so"):
        assert dynamic_section(PACKAGE / name, "SONAME") == [name]


@needs_readelf
def test_the_library_stays_loaded() -> None:
    command = ["readelf", "-dW", recfuse.library_path()]
    assert "NODELETE" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to list symbols with")
def test_the_module_has_no_second_copy_of_the_library() -> None:
    def defined(name: str) -> set[str]:
        command = ["nm", "--defined-only", str(PACKAGE / name)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return {line.split()[-1] for line in lines if line.split()[1] in "TtBbDd" and "rf_" in line}

    assert {"rf_version", "rf__fail", "rf__jit_kernel"} <= defined("librecfuse.so")
    assert not defined("librecfuse.so") & defined("_C.abi3.so")


def test_import_loads_only_operators_and_modules() -> None:
    """In addition to torch, the standard library and numpy; tools are imported at their first use."""
    script = """if True:
        import sys, numpy, torch
        before = set(sys.modules)
        import recfuse
        print(*sorted(set(sys.modules) - before))
        tools = {"cli", "info", "timing", "traces", "tuner", "workloads"}
        assert tools - {"tuner"} <= set(dir(recfuse))
        assert recfuse.traces is sys.modules["recfuse.data.traces"]
        import recfuse.passes.swap
        from recfuse.passes.swap import swap
        assert recfuse.swap is swap
    """
    done = run_python("-c", script, check=True)
    loaded = done.stdout.split()
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"recfuse", "numpy"}
    tools = ("cli", "data.traces", "data.workloads", "info", "perf", "plan", "timing", "tuner")
    assert [name for name in loaded if name.startswith(tuple(f"recfuse.{tool}" for tool in tools))] == []


@pytest.mark.parametrize("problem", ["missing", "no library"])
def test_a_library_that_does_not_load_is_explained(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.so"
    if problem == "no library":
        path.write_text("no ELF file")
    monkeypatch.setenv("RECFUSE_LIBRARY", str(path))
    assert recfuse.library_path() == str(path)
    done = run_python("-c", "import recfuse")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: recfuse: {path} (named by RECFUSE_LIBRARY)")
    assert ("unset RECFUSE_LIBRARY" if problem == "missing" else "torch >= 2.11") in last
