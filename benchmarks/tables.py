"""Writes the tables of the pages from the files in results/; with --check, lists the pages that differ.

A page marks each generated text, up to the next <!-- end -->:

  <!-- table FILE TITLE [columns=A;B] [rows=REGEX] [number=N] -->   the table whose title begins with TITLE
  <!-- overview NAME -->                                          a join of several (common/overviews.py)
  <!-- runs FILE... -->                                           machine, versions, commit and command
  <!-- cell FILE TITLE ROW COLUMN -->                             a figure in a sentence: that of one cell
  <!-- least|most FILE TITLE COLUMN [rows=REGEX] -->              the least or the most of a column

FILE is in results/; for an overview FILE is "overview" and TITLE its name. Words with spaces are quoted. For
a cell with several figures `part=N` selects the Nth. ROW is a row's first cell, or its first two.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from common.overviews import OVERVIEWS, WORDED
from common.results import RESULTS, find_table, read_runs, select
from common.table import Table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]
MARK = re.compile(r"(<!-- (table|overview|runs|cell|least|most) (.*?) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"\d[\d,.]*(?:e-\d+)?[x%]?")
OPTIONS = {"columns", "rows", "number", "part"}


def described(name: str) -> str:
    """A line on each run of a result file."""
    lines = []
    for run in read_runs(RESULTS / name):
        about = run["environment"]
        versions = [f"torch {about['torch']}", *([f"FBGEMM {about['fbgemm']}"] if about["fbgemm"] else [])]
        machine = about.get("gpu") or f"{about['cores']} cores of {about['cpu']}"
        lines.append(
            f"- `results/{name}`: {machine}, {', '.join(versions)}, {about['time'][:10]}, commit "
            f"{about['commit'][:7]}: `{about['command']}`"
        )
    # The runs of one file differ only in their subject: the first stands for all.
    return lines[0] + (f" and {len(lines) - 1} runs like it" if lines[1:] else "") + "\n"


def generated(kind: str, words: list[str]) -> str:
    """Returns the text of a mark; ValueError if there is no such table or figure."""
    if kind == "runs":
        return "".join(map(described, words))
    if kind == "overview":
        (name,) = words
        if name not in OVERVIEWS:
            raise ValueError(f"overview is {name!r}; expected {', '.join(OVERVIEWS)}")
        return OVERVIEWS[name]().grid(words=name in WORDED)
    options = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
    file, title, *rest = (word for word in words if not re.match(r"\w+=", word))
    if unknown := set(options) - OPTIONS:
        raise ValueError(f"options are {sorted(unknown)}; expected {', '.join(sorted(OPTIONS))}")
    number = int(options.get("number", 1))
    table = OVERVIEWS[title]() if file == "overview" else find_table(file, title, number)
    if kind != "table":
        return figure(table, kind, rest, options.get("rows", ""), int(options.get("part", 1)))
    columns = options["columns"].split(";") if "columns" in options else None
    return select(table, columns, options.get("rows", "")).grid()


def figure(table: Table, kind: str, words: list[str], rows: str, part: int) -> str:
    """Returns a figure of a table: of a cell, or the least or the most of a column."""
    *row, column = words
    select(table, [column])  # raises if there is no such column
    number = list(table.columns).index(column)
    named = f"^{re.escape(row[0])}$" if row else rows
    cells = [
        line[number]
        for line in table.rows
        if re.search(named, " ".join(line[:2])) or (row and re.search(named, line[0]))
    ]
    figures_found = [figures[part - 1] for cell in cells if len(figures := FIGURE.findall(cell)) >= part]
    if not figures_found or (kind == "cell" and (len(figures_found) > 1 or len(row) != 1)):
        raise ValueError(
            f"{table.title!r} has {len(figures_found)} figures for {kind} {words}, rows {rows!r}"
        )
    pick = max if kind == "most" else min
    return pick(figures_found, key=lambda text: float(text.rstrip("x%").replace(",", "")))


def rewritten(text: str) -> str:
    """Returns a page with the tables of the results."""
    return MARK.sub(lambda m: m[1] + generated(m[2], shlex.split(m[3])) + m[5], text)


def main() -> None:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page differs")
    check, differing = parser.parse_args().check, []
    for page in PAGES:
        text = page.read_text()
        try:
            rewritten_text = rewritten(text)
        except ValueError as error:
            parser.error(f"{page.relative_to(ROOT)}: {error}")
        if rewritten_text != text:
            differing.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(rewritten_text)
    if differing:
        print(f"{'differ from the results' if check else 'written'}: {', '.join(differing)}")
    raise SystemExit(bool(check and differing))


if __name__ == "__main__":
    main()
