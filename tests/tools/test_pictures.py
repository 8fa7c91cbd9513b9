"""The pictures of the pages are drawn from the present result files, by one command."""

import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 200_000


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("pictures")


@pytest.fixture
def plots(pictures):
    return importlib.import_module("common.plots")


def kept_digest(path):
    """Returns the digest of a picture's data, from its file."""
    return re.search(rb"(?:Description\0|<dc:description>)([0-9a-f]{32})", path.read_bytes())[1].decode()


@pytest.fixture
def digests(pictures, plots, monkeypatch, tmp_path):
    """Returns digests of the present data of pictures, by path; nothing is drawn."""

    def of(paths):
        found = {}

        class Stop(Exception):
            pass

        for path in paths:

            def keep(data, path=path):
                found[path] = plain(data)
                raise Stop

            with monkeypatch.context() as patched:
                patched.setattr(plots, "digest", keep)
                with pytest.raises(Stop):
                    pictures.PICTURES[path](tmp_path / Path(path).name)
        return found

    plain = plots.digest
    return of


def test_every_picture_is_there_and_small(pictures):
    files = {*ROOT.glob("benchmarks/results/**/*.png"), *ROOT.glob("docs/**/*.svg")}
    assert set(pictures.PICTURES) == {path.relative_to(ROOT).as_posix() for path in files}
    assert {path.name: size for path in files if (size := path.stat().st_size) > MOST_BYTES} == {}


def test_pictures_match_the_results(pictures, digests):
    today = digests(pictures.PICTURES)
    old = [path for path, digest in today.items() if kept_digest(ROOT / path) != digest]
    assert old == [], "run python benchmarks/pictures.py"


def test_another_result_is_another_picture(pictures, plots, digests, monkeypatch, tmp_path):
    path = "benchmarks/results/h200/main.png"
    bags = importlib.import_module("drawings.bags")
    before = digests([path])[path]
    table = bags.find_table(bags.MAIN, "us a table as a CUDA graph")
    row = list(table.rows[0])
    row[-1] = row[table.columns.index("recfuse")] = "1.00 ± 0.00"
    changed = type(table)(table.title, table.columns, [row, *table.rows[1:]])
    monkeypatch.setattr(bags, "find_table", lambda *arguments: changed)
    assert digests([path])[path] != before
    pictures.PICTURES[path](tmp_path / "main.png")
    assert kept_digest(tmp_path / "main.png") != before


def test_the_command_draws_the_selected_pictures(pictures, monkeypatch, tmp_path, capsys):
    (tmp_path / "docs/pictures").mkdir(parents=True)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pictures.py", "one_call"])
    pictures.main()
    assert (tmp_path / "docs/pictures/one_call.svg").read_text().startswith("<?xml")
    assert "drawn: docs/pictures/one_call.svg" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pictures.py", "nothing"])
    with pytest.raises(SystemExit):
        pictures.main()
    assert "names are nothing; expected a part of" in capsys.readouterr().err


def test_the_rooms_of_the_code_are_drawn_in_their_order(pictures):
    schematics = importlib.import_module("drawings.schematics")
    assert schematics.reduced({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}
    levels = schematics.level(schematics.library_edges())
    assert levels["include"] < levels["core"] < levels["driver"] < levels["jit"] < levels["launches"]
    assert levels["driver"] < levels["torch"]  # which includes no family
