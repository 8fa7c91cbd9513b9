"""The thermometer of plain language: it counts words of prose, not of code, in every area."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("words.py")
WORDS = runpy.run_path(str(SCRIPT))


def read(area: str, text: str) -> str:
    return " ".join(" ".join(WORDS["AREAS"][area][0](text)).split())


@pytest.mark.long
def test_a_table_of_every_area_is_printed():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    head, *rows = done.stdout.splitlines()
    assert all(kind in head for kind in WORDS["WORDS"])
    assert [row.partition("  ")[0] for row in rows] == [*WORDS["AREAS"], "all"]
    assert all(int(row[30:].split()[0].replace(",", "")) > 100 for row in rows)


@pytest.mark.parametrize(
    "area, text, prose",
    [
        ("C: csrc/core", 'int a; // first\nchar *b = "// no"; /* second\n third */', "first second third"),
        ("comments: python", "a = '# no'  # yes", "yes"),
        (
            "docstrings: python",
            '"""Module."""\ndef f():\n    """Yes.\n\n    >>> what\n    """\n',
            "Module. Yes.",
        ),
        ("pages: README, docs", "<!-- cell a b -->1<!-- end --> a\n```\nwhat\n```\nb", "1 a b"),
    ],
)
def test_prose_is_told_from_code(area, text, prose):
    assert read(area, text) == prose


def test_rates_are_per_1000_words():
    total, rates = WORDS["rates"]("What a call asks for, None or none. " * 10)
    assert total == 80
    assert rates["what"] == rates["ask"] == rates["none, one(s)"] == 125
    assert rates["must"] == 0


def test_one_as_a_noun_is_told_from_a_number():
    _, rates = WORDS["rates"]("One call of one, and one that waits. " * 10)
    assert (rates["none, one(s)"], rates["as nouns"]) == (375, 250)
