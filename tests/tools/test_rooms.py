"""Directions of imports between the rooms of the package, inside functions and for type checkers too."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "recfuse"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

# The imports that each room may have besides itself; a module outside of the rooms is a room. In the whole
# package, "recfuse" means only `__init__`: it may import all, and nothing imports it.
LEAVES = {"errors", "_codes", "_arguments", "_files", "_progress", "_storage"}
BELOW = {
    "errors": set(),
    "_codes": set(),
    "_library": set(),
    "_clock": set(),
    "_storage": set(),
    "_lowering": set(),
    "_arguments": {"errors", "_storage"},
    "_files": {"errors"},
    "_progress": set(),
    "info": {"_library"},
    "timing": {"_clock", "_progress", "info"},
    "data": LEAVES,
    "ops": {*LEAVES, "_library"},
    "nn": {*LEAVES, "_library", "data", "ops"},
    "optim": {*LEAVES, "ops", "nn"},
    "torchrec": {"errors", "_codes", "nn", "optim", "ops", "perf"},
    "distributed": {*LEAVES, "_library", "data", "nn", "ops", "perf"},
    "passes": {*LEAVES, "data", "ops", "nn", "optim", "perf"},
    "plan": {*LEAVES, "_library", "_clock", "info", "data", "ops", "nn"},
    "tuner": {*LEAVES, "_clock", "_lowering", "info", "timing", "data", "ops", "nn", "plan"},
    "perf": {*LEAVES, "_lowering", "ops", "nn", "optim", "plan", "tuner"},
    "cli": {*LEAVES, "_library", "_lowering", "info", "timing", "data", "ops", "nn", "passes"}
    | {"plan", "tuner", "perf"},
    "__main__": {"cli"},
}
# Arrows that are still to be turned round; each is taken from here when it is.
UNFINISHED: set[tuple[str, str]] = set()


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for alias in node.names:
                within = f"{node.module}.{alias.name}"
                if within in MODULES:
                    yield within
                elif node.module in MODULES and within != "recfuse._C":
                    yield str(node.module)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


ARROWS = sorted({(module, target) for module, path in MODULES.items() for target in imported(path)})


def test_every_room_is_in_the_table():
    assert {room(module) for module in MODULES} == {*BELOW, "recfuse"}
    assert not [name for name, below in BELOW.items() if not below <= set(BELOW)]


def test_imports_go_down():
    wrong = {
        arrow
        for arrow in ARROWS
        if room(arrow[0]) not in ("recfuse", room(arrow[1])) and room(arrow[1]) not in BELOW[room(arrow[0])]
    }
    assert not wrong - UNFINISHED, sorted(wrong - UNFINISHED)


def test_no_import_cycle():
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target in ARROWS:
        if module != "recfuse" and (module, target) not in UNFINISHED:
            graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_listed_exceptions_still_exist():
    assert not UNFINISHED - set(ARROWS)
