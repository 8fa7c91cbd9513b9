"""Codes are written once: in lists of the public headers, from which C, kernels and Python take them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import recfuse
from recfuse import _codes
from recfuse.nn.columns.specs import POOLINGS, Pooling
from recfuse.ops.ikbo_linear import Activation

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = sorted(ROOT.glob("include/**/*.h"))
C_FILES = sorted([*PUBLIC, *ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("csrc/**/*.cu*")])


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# The codes of the public headers: a list of entries `X(RF_CODE, "text")` is an enum.
CODES = {code for path in PUBLIC for code in re.findall(r"\bX\((RF_\w+), \"", path.read_text())}
TEXTS = [texts[not texts[0] :] for texts in recfuse._C.codes().values()]  # without those of defaults
STRING = re.compile(r'"((?:\\.|[^"\\\n])*)"')


def repeats(texts: list[object]) -> bool:
    """Whether texts have those of a whole list of codes, side by side and in its order."""
    return any(
        tuple(texts[at : at + len(known)]) == known
        for known in TEXTS
        if len(known) > 2
        for at in range(len(texts))
    )


def test_each_code_is_written_once_in_c() -> None:
    """Kernels include the lists of the public headers; names of codes come from the same lists."""
    assert len(CODES) > 40
    number = re.compile(rf"(?:#\s*define\s+({'|'.join(CODES)})\b|\b({'|'.join(CODES)})\s*=\s*\d)")
    for path in C_FILES:
        text = path.read_text()
        assert number.findall(text) == [], name(path)
        assert path in PUBLIC or not repeats(STRING.findall(text)), f"{name(path)}: expand the list of codes"
    assert repeats(["", "sum", "mean", "max"]) and not repeats(["sum", "max"])


def test_each_code_is_written_once_in_python() -> None:
    """Python takes codes from recfuse._codes.CODES; a type Literal[...] has texts for type checkers alone."""
    for path in ROOT.glob("python/**/*.py"):
        literals = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                literals |= {id(node.slice)} if node.value.id == "Literal" else set()
            elif isinstance(node, ast.Tuple | ast.List) and id(node) not in literals:
                texts = [element.value for element in node.elts if isinstance(element, ast.Constant)]
                assert not repeats(texts), f"{name(path)}:{node.lineno}: take the texts from CODES"
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                is_range = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "range"
                assert not is_range, f"{name(path)}:{node.lineno}: numbers codes again"


def test_rows_of_records_are_written_by_names() -> None:
    """Python takes the fields of C's records, and their number, from recfuse._codes.Record."""
    records = recfuse._C.records()
    widths = "|".join(sorted({str(len(fields)) for fields in records.values()}))
    number = re.compile(rf"(?:view|reshape)\(-1, (?:{widths})\)|empty\(\(1, (?:{widths})\)")
    assert len(records) >= 5 and number.search("rows.reshape(-1, 7)")
    for path in ROOT.glob("python/**/*.py"):
        assert number.findall(path.read_text()) == [], name(path)
    row = _codes.COLUMN_STEP.row(b=3, operation=1, a=2)
    assert row == (1, 2, 3) and _codes.COLUMN_INVALID == {"error": -2, "drop": -1}
    with pytest.raises(KeyError):
        _codes.COLUMN_STEP.row(operation=1, a=2)


def test_types_have_the_texts_of_the_codes() -> None:
    assert get_args(_codes.DType) == _codes.DTYPE_NAMES
    assert get_args(_codes.Integer) == _codes.INTEGER_NAMES
    assert get_args(_codes.Mode) == _codes.MODES
    assert get_args(Pooling) == POOLINGS
    assert get_args(Activation) == _codes.CODES["activation"]


# A model of a kernel takes the bytes of an element as a number, and a file of another library has its own.
ITEM_SIZES = ("perf/models/", "perf/tracing/", "perf/placing/", "data/traces/")
ROWS_BY_HAND = re.compile(
    r"(?:\bdim|_dim|shape\[1\]|stride\(0\))\)?\s*\*\s*[\w.]*(?:itemsize|element_size\(\))"
    r"|(?:itemsize|element_size\(\))\s*\*\s*[\w.]*(?:\bdim\b|_dim\b|shape\[1\]|stride\(0\))"
)


def test_bytes_of_rows_come_from_one_function_in_python() -> None:
    package = ROOT / "python" / "recfuse"
    found = {
        path.relative_to(package).as_posix(): ROWS_BY_HAND.findall(path.read_text())
        for path in package.rglob("*.py")
    }
    hits = [path for path, by_hand in found.items() if by_hand and not path.startswith(ITEM_SIZES)]
    assert hits == ["_codes.py"]
    for example in "table.dim * dtype.itemsize", "weight.shape[1] * weight.element_size()":
        assert ROWS_BY_HAND.search(example)
    assert ROWS_BY_HAND.search("weight.element_size() * module.embedding_dim")
