"""The pages of the benchmarks: their tables are those of the result files, their links lead somewhere."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted(BENCHMARKS.glob("**/*.md"))
DOCS = sorted((ROOT / "docs").glob("**/*.md"))  # one a topic
WRITTEN_APART = {"benchmarks/PAPERS.md", "benchmarks/performance_model/README.md"}  # by their own scripts
SHORT = [*(page for page in PAGES if page.name == "README.md"), *DOCS]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


@pytest.fixture
def run(tables, monkeypatch):
    """Runs tables.py; returns its exit status."""

    def run_tables(*options):
        monkeypatch.setattr(sys, "argv", ["tables.py", *options])
        with pytest.raises(SystemExit) as stopped:
            tables.main()
        return stopped.value.code

    return run_tables


def test_pages_and_results_agree(tables, run, capsys):
    assert run("--check") == 0, f"{capsys.readouterr().out}: run python benchmarks/tables.py"
    marked = {name(page): len(tables.MARK.findall(page.read_text())) for page in tables.PAGES}
    assert set(marked) == {"README.md", *map(name, PAGES), *map(name, DOCS)}
    assert min(marked[page] for page in ("README.md", *map(name, PAGES)) if page not in WRITTEN_APART) > 0


HEAD = re.compile(r"^\|(.*)\|\n\|[ :|-]+\|$", re.MULTILINE)


def heads(text):
    """The names of columns, of each table."""
    return [[column.strip() for column in head.split("|")] for head in HEAD.findall(text)]


@pytest.mark.parametrize("page", [README, *PAGES, *DOCS], ids=name)
def test_columns_of_a_table_have_different_names(page):
    text = page.read_text()
    found = heads(text)
    assert len(found) == len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE))
    assert [columns for columns in found if len(set(columns)) != len(columns)] == []


def test_a_table_with_two_columns_of_one_name_is_refused(tables):
    with pytest.raises(ValueError, match=r"'E' has columns \['', 'us', 'us'\]; expected different names"):
        tables.Table("E", ["", "us", "us"])


def test_a_differing_figure_is_found_and_rewritten(tables, run, monkeypatch, tmp_path, capsys):
    page, right = tmp_path / "page.md", (BENCHMARKS / "dlrm" / "README.md").read_text()
    page.write_text(right.replace("3.9x", "4.9x"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", [page])
    assert run("--check") == 1 and "4.9x" in page.read_text()
    assert "differ from the results: page.md" in capsys.readouterr().out
    assert run() == 0 and page.read_text() == right


@pytest.mark.parametrize(
    "mark, message",
    [
        ("overview fast", "overview is 'fast'; expected first, fused"),
        ("table nothing.json Any", "nothing.json: is no result file"),
        ('table dlrm.json "No such table"', "has no table 1 whose title begins with 'No such table'"),
        ("table dlrm.json DLRM columns=speed", "expected ['speed']"),
        ("table dlrm.json DLRM color=red", "options are ['color']"),
        ("runs ../README.md", "README.md: is no result file"),
    ],
)
def test_a_mark_without_target_is_reported(tables, mark, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tables.rewritten(f"<!-- {mark} -->\n<!-- end -->\n")


@pytest.mark.parametrize("page", SHORT, ids=name)
def test_a_page_is_short(page):
    assert page.read_text().count("\n") <= 120, "move records to NOTES.md, or a topic to a page of its own"


def anchors(page):
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *PAGES, *DOCS], ids=name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_plot_is_shown_and_every_result_file_has_its_command():
    text = "".join(page.read_text() for page in PAGES)
    shown = {
        name((page.parent / link).resolve())
        for page in (README, *DOCS, *PAGES)
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    drawn = {*BENCHMARKS.glob("results/**/*.png"), *ROOT.glob("docs/**/*.svg")}
    assert shown == set(map(name, drawn))
    named = set(re.findall(r"^- `(results/\S+)`: ", text, flags=re.MULTILINE))
    assert named == {path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.glob("results/**/*.json")}
