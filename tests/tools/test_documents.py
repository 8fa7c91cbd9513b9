"""README and the pages of docs: they are short, their examples run, their figures are the result files'."""

import importlib
import linecache
import re
import shlex
from pathlib import Path

import pytest
import torch

from recfuse import cli

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOST_WORDS = 1200
HEADLINES = sorted((ROOT / "benchmarks").glob("*/README.md"))
OTHERS = {"serving.md", "training.md"}  # tested with their subjects
NEEDS_NO_GPU = {"explain.md", "predicting.md"}  # pages whose commands run on any machine
EXAMPLES = [page for page in (README, *DOCS) if BLOCK.search(page.read_text()) and page.name not in OTHERS]
HEADINGS = ["When it wins, and when not", "Shapes", "Errors", "Figures", "Source"]
FAMILIES = sorted(set(re.findall(r"^\| \[`\w+`\]\((docs/\w+\.md)\)", README.read_text(), re.MULTILINE)))

# A measured figure is a number with a unit of time, speed, memory or comparison, or a number with a fraction.
# Versions are not.
VERSION = re.compile(
    r"(?:torch|FBGEMM|C?Python|capability|CUDA)(?: >=| from)? \d+(?:\.\d+)*(?: (?:and|or) \d+\.\d+)?"
)
TIMES, UNIT = "x|%", r"times|%|[µumn]?s|seconds?|minutes?|hours?|[TG]?FLOP/s|[GMKT]i?B(?:/s)?|gigabytes?"
FIGURE = re.compile(
    rf"(?<![\w.,^])(?:\d+(?:,\d{{3}})*(?:\.\d+)?(?:{TIMES}|\s(?:{UNIT}))(?![\w-])|\d+\.\d+(?![\w.]))"
)
CONSTANTS = {  # of the code, not measured: page, text, its file, and its form there
    ("docs/columns.md", "64 MiB"): ("python/recfuse/nn/columns/json.py", "MOST_BYTES = 64 << 20"),
    ("docs/predicting.md", "80 %"): ("python/recfuse/perf/models/regimes.py", "QUANTILE_80 = 1.2816"),
    ("docs/tuning.md", "1 %"): ("python/recfuse/tuner/__init__.py", "more than 1 % faster"),
    ("docs/tuning.md", "128 MiB"): (
        "csrc/gpu/launches/description.c",
        "MOST_BYTES = INT64_C(128) << 20;",
    ),
}


def name(path):
    return path.relative_to(ROOT).as_posix()


def marks_of(page):
    """The marks of a page's examples: inductor compiles those of passes.md by a C++ compiler."""
    return [pytest.mark.long] if page.name == "passes.md" else []


def prose(text, tables):
    """Returns a page without code, targets of links, and text generated from the result files."""
    text = tables.MARK.sub(" ", text)
    text = re.sub(r"^```.*?^```", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", text)


def unsourced(text, tables):
    """Figures that stand in the text itself."""
    return FIGURE.findall(VERSION.sub(" ", prose(text, tables)))


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= MOST_WORDS, "move topics to a page of docs"


@pytest.mark.parametrize("page", [README, *DOCS], ids=name)
def test_figures_come_from_result_files(page, tables):
    allowed = {text for (of, text) in CONSTANTS if of == name(page)}
    found = [figure for figure in unsourced(page.read_text(), tables) if figure not in allowed]
    assert found == [], (
        "take them from a result file: <!-- cell FILE TITLE ROW COLUMN --> (benchmarks/tables.py)"
    )


@pytest.mark.parametrize("page", HEADLINES, ids=name)
def test_headlines_of_the_benchmarks_come_from_result_files(page, tables):
    """Text in **bold** on a page is a claim; other figures of its text are notes on its tables."""
    claims = re.findall(r"\*\*(.+?)\*\*", prose(page.read_text(), tables), re.DOTALL)
    assert [claim for claim in claims if FIGURE.search(VERSION.sub(" ", claim))] == []


@pytest.mark.parametrize("page, text", CONSTANTS, ids=str)
def test_constants_are_those_of_the_code(page, text):
    file, written = CONSTANTS[page, text]
    assert text in (ROOT / page).read_text() and written in (ROOT / file).read_text()


@pytest.mark.parametrize(
    "text, figures",
    [
        ("It is 3.5 times faster, on torch 2.11 and CUDA 13.0.", ["3.5 times"]),
        ("It takes 12 µs, 4 GB or 20 % of `7 ms`, for 26 tables of 512 rows.", ["12 µs", "4 GB", "20 %"]),
        (
            "<!-- cell dlrm.json DLRM total ratio -->1.37x<!-- end --> and 1.4x of [2.0](a/3.0x.md)",
            ["1.4x", "2.0"],
        ),
        ("```\n5 ms\n```\nHeads of 128, compute capability 9.0, float32, sm_90a, 8192^3, Python 3.10.", []),
    ],
)
def test_a_figure_without_a_source_is_found(text, figures, tables):
    assert unsourced(text, tables) == figures


def test_a_cell_is_written_and_compared(tables):
    mark = "<!-- cell dlrm.json DLRM total ratio -->{}<!-- end -->"
    (right,) = tables.MARK.findall(tables.rewritten(mark.format("9.99x")))
    table = tables.find_table("dlrm.json", "DLRM")
    assert right[3] == dict((row[0], row[-1]) for row in table.rows)["total"] != "9.99x"
    bag = 'embedding_bag.json "Geometric mean over dimensions" "over torch"'
    column = [float(row[1].rstrip("x")) for row in tables.find_table("embedding_bag.json", "Geometric").rows]
    for kind, pick in (("least", min), ("most", max)):
        (found,) = tables.MARK.findall(tables.rewritten(f"<!-- {kind} {bag} --><!-- end -->"))
        assert float(found[3].rstrip("x")) == pick(column)


@pytest.mark.parametrize(
    "words", ["total speed", "totals ratio", "total ratio part=2", "ratio", "total ratio extra"]
)
def test_a_missing_cell_is_reported(words, tables):
    with pytest.raises(ValueError, match="DLRM"):
        tables.rewritten(f"<!-- cell dlrm.json DLRM {words} --><!-- end -->")


@pytest.mark.parametrize("page", [README, *DOCS], ids=name)
def test_no_line_begins_with_a_figure_of_a_result_file(page):
    """Markdown takes a line that begins with a comment for HTML."""
    assert not re.search(r"^\s*<!-- (cell|least|most) ", page.read_text(), flags=re.MULTILINE)


def test_every_operator_has_a_page():
    assert len(FAMILIES) >= 4


@pytest.mark.parametrize("page", FAMILIES)
def test_a_page_of_an_operator_has_every_section(page):
    headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert [heading for heading in headings if heading in HEADINGS] == HEADINGS


def commands(page):
    """The arguments of each `recfuse` command of a page."""
    shell = "\n".join(block for kind, block in FENCED.findall(page.read_text()) if kind in ("", "bash"))
    return [shlex.split(line) for line in re.findall(r"^recfuse (.*?)(?: +#.*)?$", shell, re.MULTILINE)]


@pytest.mark.parametrize("page", [README, *DOCS], ids=name)
def test_commands_of_a_page_have_these_options(page):
    parser = cli._parser()
    for command in commands(page):
        parser.parse_args(command)


def run_examples(page):
    """Runs the examples of a page in this folder, as one program; returns its names."""
    names = {"__name__": "page"}
    for number, example in enumerate(BLOCK.findall(page.read_text())):
        if file := re.match(r"# (\w+\.py)\n", example):
            Path(file[1]).write_text(example)
        file = f"{page.name}, example {number}"  # with its source, like a cell of a notebook
        linecache.cache[file] = len(example), None, example.splitlines(keepends=True), file
        exec(compile(example, file, "exec"), names)
    return names


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in DOCS if page.name in NEEDS_NO_GPU], ids=name)
def test_the_commands_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_examples(page)
    assert len(commands(page)) >= 3
    for command in commands(page):
        assert cli.main(command) == 0


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks_of(page), id=name(page)) for page in EXAMPLES]
)
def test_the_examples_of_a_page_run(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    if "torchrec" in text and page != README:
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    names = run_examples(page)
    printed = capsys.readouterr().out
    for said in re.findall(r'print\(.*# .*"(.*)"$', text, flags=re.MULTILINE):
        assert said in printed
    if "same" in names:
        torch.testing.assert_close(names["out"], names["same"])
