"""The tests that pytest selects: by default all but long ones, in processes too; of a named path all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import recfuse

pytest.importorskip("xdist")
pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TESTS = """import os, pytest

@pytest.mark.long
def test_long(): pass

def test_short(): print("in", os.environ.get("PYTEST_XDIST_WORKER", "this process"))
"""
CASES = (  # arguments, tests that pass, and whether processes run them
    ("", 1, True),
    ("-p no:xdist --all", 2, False),
    ("tests/test_it.py", 2, False),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with this one's configuration and two tests."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "support").symlink_to(ROOT / "tests" / "support")
    (folder / "tests" / "test_it.py").write_text(TESTS)
    return folder


@pytest.mark.parametrize(("arguments", "passed", "in_processes"), CASES, ids=lambda value: str(value))
def test_selection(project: Path, arguments: str, passed: int, in_processes: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_XDIST_AUTO_NUM_WORKERS"] = "1"  # a process for the two tests
    environment["PYTHONPATH"] = str(Path(recfuse.__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", *arguments.split()]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout
    assert ("in gw" in done.stdout, "in this process" in done.stdout) == (in_processes, not in_processes)
