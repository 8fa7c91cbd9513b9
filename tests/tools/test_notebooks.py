"""The notebooks run from top to bottom, and are stored with their outputs."""

import base64
import importlib
import json
import re
import struct
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SAYS = {
    "columns": [
        *(
            r"5 columns, output \(4, 49\)",
            "the same results as ReferenceColumns",
            "'tags': the index is 123456",
        ),
        *("equal after reading: True", r"columns\[2\] \('tags'\).*'median'", "200 columns, batch 256"),
        *("x the speed of torch by column", "million strings a second", "stay on the host: user"),
    ],
    "ikbo": ["256 candidates of 4 users", "by the path '", "x the speed of gathered"],
    "predict": [
        *("inference on H100", r"2048: fastest \w+ +limited by the \w+", r"graph +batch +\d+, .* limited by"),
        *(r"ms eager, limited by the", r"slowest \d+ us, mean"),
    ],
    "quickstart": [
        *(
            "26 tables in one call, by apply_emb",
            "x the speed of nn.EmbeddingBag",
            "x the speed of loop and cat",
        ),
        *(
            "outputs identical|the same outputs",
            "the same results: ",
            r"indices\[70\] is 50000",
            "1 restored, 0 left",
        ),
    ],
    "tune_your_model": ["the same results", "x the speed of torch", "schedule: ", "moved:\n  True"],
}
PLOTS = {"columns": 1, "ikbo": 1, "predict": 2, "quickstart": 2, "tune_your_model": 2}
WITHOUT_TIMES = ("predict",)
MACHINE = re.compile(r"/(?:home|root|work|tmp|usr|Users|mnt)/|localhost|site-packages")


@pytest.fixture
def render(monkeypatch):
    for needed in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("render")


def cells(path):
    return json.loads(path.read_text())["cells"]


def check(name, outputs):
    """Checks the outputs of a notebook, here and in its file."""
    text = "".join("".join(output.get("text", "")) for output in outputs)
    for expected in SAYS[name]:
        assert re.search(expected, text), expected
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS[name]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(render, path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")  # restored after the test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # if other processes run, two threads wait for each other
    notebook = render.executed(path, tmp_path)
    render.nbformat.validate(notebook)
    check(path.stem, render.outputs(notebook))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    check(path.stem, outputs)
    kept = json.dumps(outputs)
    measures = path.stem not in WITHOUT_TIMES
    assert ("measured on a quiet machine" in kept) == measures and "Not a quiet machine" not in kept
    assert not any(output.get("name") == "stderr" for output in outputs)
    without_images = [
        {
            **output,
            "data": {kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"},
        }
        for output in outputs
    ]
    assert MACHINE.search(json.dumps(without_images)) is None
    assert path.stat().st_size < 400_000
    for output in outputs:
        if image := output.get("data", {}).get("image/png"):
            width, height = struct.unpack(">II", base64.b64decode("".join(image))[16:24])
            assert 500 < width < 1400 and 250 < height < 700


@pytest.mark.parametrize(
    "busy, options, runs, kept",
    [([True, False], [], 2, True), ([True] * 3, [], 3, False), ([True] * 3, ["--anyway"], 3, True)],
)
def test_a_disturbed_notebook_is_executed_again(
    render, monkeypatch, tmp_path, capsys, busy, options, runs, kept
):
    path, left = tmp_path / "a.ipynb", list(busy)
    path.write_text("as it was")

    def executed(path, folder):
        cell = render.nbformat.v4.new_code_cell("1")
        text = "Not a quiet machine: other" if left.pop(0) else "quiet"
        cell.outputs = [render.nbformat.v4.new_output("stream", text=text)]
        return render.nbformat.v4.new_notebook(cells=[cell])

    monkeypatch.setattr(render, "NOTEBOOKS", [path])
    monkeypatch.setattr(render, "executed", executed)
    monkeypatch.setattr("sys.argv", ["render.py", "--tries", "3", *options])
    if kept:
        render.main()
        assert ("says that it was disturbed" in capsys.readouterr().out) == bool(options)
    else:
        with pytest.raises(SystemExit):
            render.main()
        assert "other processes disturbed them: a.ipynb" in capsys.readouterr().err
    assert len(busy) - len(left) == runs and (path.read_text() == "as it was") != kept


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == set(SAYS) == set(PLOTS)
