"""Builds of the package that tests look into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import recfuse

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "python" / "recfuse"


def copy_checkout(folder: Path) -> Path:
    """Copies this checkout, with the objects of earlier builds but without libraries."""
    copy = folder / "recfuse"
    unwanted = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "lib.*", "bdist.*")
    shutil.copytree(ROOT, copy, ignore=unwanted, symlinks=True)
    for built in copy.glob("python/recfuse/*.so"):
        built.unlink()
    return copy


def build(copy: Path, *targets: str, **environment: str) -> None:
    """Builds targets (bdist_wheel, sdist) into the folder `dist` of a copy, without isolation."""
    command = [sys.executable, "setup.py", "-q", *(word for name in targets for word in (name, "-d", "dist"))]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def wheel_name(machine: str, glibc: str = "[0-9]+") -> str:
    """Returns the pattern of the name of this version's wheel."""
    return rf"recfuse-{recfuse.__version__}-cp310-abi3-manylinux_2_{glibc}_{machine}\.whl"


def linked_files() -> set[str]:
    """Files that NVRTC and C programs read, relative to the package. A checkout has links to them."""
    patterns = (
        "kernels/**/*.cu*",
        "kernels/**/*_args.h",
        "kernels/**/device/*.h",
        "kernels/families.h",
        "kernels/families/*/*_family.h",
        "include/**/*.h",
    )
    return {str(path.relative_to(SOURCES)) for pattern in patterns for path in SOURCES.glob(pattern)}


def expected_files() -> set[str]:
    """The files of a wheel, apart from its metadata."""
    expected = {f"recfuse/{path.relative_to(SOURCES)}" for path in SOURCES.rglob("*.py")}
    expected |= {f"recfuse/{name}" for name in linked_files()}
    expected |= {f"recfuse/{path.relative_to(SOURCES)}" for path in SOURCES.glob("perf/calibrations/*.json")}
    expected |= {"recfuse/py.typed", "recfuse/_C.pyi", "recfuse/_C.abi3.so"}
    return expected | {"recfuse/librecfuse.so", "recfuse/librecfuse_core.so"}
