"""Print how often words that plain prose avoids occur: per 1,000 words of comments, docstrings and pages.

A thermometer, not a limit: the rates of zstd and libuv are below 1 for every word but "only" and "must".
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# After "one" as a noun: punctuation, or a word that begins no noun phrase.
FOLLOWS = "of|that|which|who|whose|is|was|has|had|may|in|with|for|to|on|by|from|and|or|than|as|where"
NOUN = rf"\s*[.,;:)\]]|\s+(?:{FOLLOWS})\b"
WORDS = {
    "what": "what|whatever",
    "none, one(s)": "none|one|ones",
    "as nouns": f"none|ones|one(?={NOUN})",
    "behind, ahead, beside": "behind|ahead|beside",
    "who, nobody": "who|whom|whoever|nobody",
    "ask": "ask|asks|asked|asking",
    "only": "only",
    "must": "must",
}
C_TOKEN = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|/\*(.*?)\*/|//([^\n]*)", re.DOTALL)
CODE = re.compile(r"``[^`]*``|`[^`\n]*`|\]\([^)]*\)|:\w+:`[^`]*`")
PAGE_CODE = re.compile(
    r"^```.*?^```|<!-- (?:table|overview|runs) .*?<!-- end -->|<!--.*?-->", re.DOTALL | re.MULTILINE
)


def c_comments(text: str) -> Iterator[str]:
    """Yields the comments of a C or CUDA file."""
    for match in C_TOKEN.finditer(text):
        yield match[1] or match[2] or ""


def python_comments(text: str) -> Iterator[str]:
    """Yields the comments of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")


def docstrings(text: str) -> Iterator[str]:
    """Yields the docstrings of a Python file, without their examples."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", ast.get_docstring(node) or "", flags=re.MULTILINE)


def page(text: str) -> Iterator[str]:
    """Yields the prose of a page: no code, and no tables that a result file fills."""
    yield PAGE_CODE.sub(" ", text)


AREAS: dict[str, tuple[Callable[[str], Iterator[str]], tuple[str, ...]]] = {
    "C: include": (c_comments, ("include/**/*.h",)),
    "C: csrc/core": (c_comments, ("csrc/core/**/*.[ch]",)),
    "C: csrc/gpu": (c_comments, ("csrc/gpu/**/*.[ch]", "csrc/gpu/**/*.cu*")),
    "C: csrc/families": (c_comments, ("csrc/families/**/*.[ch]",)),
    "CUDA: csrc/families": (c_comments, ("csrc/families/**/*.cu*",)),
    "C: csrc/torch, csrc/python": (c_comments, ("csrc/torch/**/*.[ch]", "csrc/python/**/*.[ch]")),
    "docstrings: python": (docstrings, ("python/recfuse/**/*.py*",)),
    "comments: python": (python_comments, ("python/recfuse/**/*.py*",)),
    "docstrings: tests": (docstrings, ("tests/**/*.py",)),
    "comments: tests": (python_comments, ("tests/**/*.py",)),
    "C: tests": (c_comments, ("tests/**/*.[ch]", "tests/**/*.cu*")),
    "docstrings: benchmarks": (docstrings, ("benchmarks/**/*.py",)),
    "comments: benchmarks": (python_comments, ("benchmarks/**/*.py",)),
    "pages: README, docs": (page, ("README.md", "CONTRIBUTING.md", "docs/*.md")),
    "pages: CHANGELOG": (page, ("CHANGELOG.md",)),
    "pages: benchmarks": (page, ("benchmarks/**/*.md",)),
}


def prose(root: Path, area: str) -> str:
    """Returns the text of an area, without code."""
    read, patterns = AREAS[area]
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)})
    paths = [path for path in paths if path.suffix != ".pyc"]
    return CODE.sub(" ", "\n".join(text for path in paths for text in read(path.read_text())))


def rates(text: str) -> tuple[int, dict[str, float]]:
    """Returns the number of words, and how many of each kind of :data:`WORDS` stand among 1,000."""
    total = len(re.findall(r"[A-Za-z][\w'-]*", text))
    # A capital letter inside a sentence is Python's None, not the word.
    text = re.sub(r"(?<=[\w,;(] )None\b", "", text)
    found = {kind: len(re.findall(rf"\b(?:{words})\b", text, re.IGNORECASE)) for kind, words in WORDS.items()}
    return total, {kind: 1000 * count / max(total, 1) for kind, count in found.items()}


def main() -> None:
    """Prints a table with a row for each area and one for all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the project's folder")
    root = parser.parse_args().root
    texts = {area: prose(root, area) for area in AREAS}
    width = max(map(len, texts))
    print(" " * width, f"{'words':>8}", *(f"{kind:>{max(6, len(kind))}}" for kind in WORDS), sep="  ")
    for area, text in [*texts.items(), ("all", "\n".join(texts.values()))]:
        total, per_1000 = rates(text)
        cells = (f"{rate:>{max(6, len(kind))}.1f}" for kind, rate in per_1000.items())
        print(f"{area:<{width}}", f"{total:>8,}", *cells, sep="  ")


if __name__ == "__main__":
    main()
