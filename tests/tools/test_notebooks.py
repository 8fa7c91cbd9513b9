"""The notebooks run from top to bottom, and are kept without what they print."""

import os
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kept = [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert kept == [], "clear the outputs before a commit"

    # It runs in a folder of its own, where relative places to import from mean nothing.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry))
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    text = "".join(output.get("text", "") for output in shown)
    assert "indices[70] is 500000" in text
    assert "the same results" in text and "times as fast, by the path '" in text
    assert "attention of recfuse is" in text
    assert list(tmp_path.iterdir()) == []


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["embedding_bag"]
