"""Types: the stub matches the module in C, and checkers know the public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recfuse
from recfuse import _C

STUB = ast.parse(Path(recfuse.__file__).with_name("_C.pyi").read_text())
FUNCTIONS = {node.name: node.args for node in STUB.body if isinstance(node, ast.FunctionDef)}


def test_the_stub_has_the_functions_of_the_module():
    assert sorted(FUNCTIONS) == [name for name in dir(_C) if not name.startswith("_")]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_have_the_arguments_of_the_stub(name):
    given = FUNCTIONS[name]
    most = len(given.posonlyargs)
    assert not given.args and not given.kwonlyargs
    for count in {most + 1, most - len(given.defaults) - 1} - {-1}:
        with pytest.raises(TypeError, match=re.escape(f"({count} given)")):
            getattr(_C, name)(*[None] * count)


def test_the_stub_has_the_keys_of_a_record():
    (record,) = (node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == "JitStatus")
    keys = {node.target.id for node in record.body if isinstance(node, ast.AnnAssign)}
    assert keys == set(_C.jit_status())


@pytest.mark.long
def test_a_checker_knows_the_types_of_public_names():
    pytest.importorskip("mypy")
    root = Path(__file__).parents[2]
    settings, names = (root / "tests" / "typing" / file for file in ("mypy.ini", "public_names.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", settings, names]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
