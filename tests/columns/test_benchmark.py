"""The benchmark of embedding columns: its GPU part on CPU tensors, its contestants, models, errors."""

from __future__ import annotations

import json
from importlib import import_module as module
from types import SimpleNamespace

import pytest
import torch

from support.gpu_benchmark import on_the_cpu

SMALL = [
    "--device",
    "cuda",
    "--columns",
    "2,3",
    "--models",
    "E",
    "--batches",
    "5,8",
    "--batch",
    "6",
    "--part",
    "400",
]
SMALL += [
    "--large-rows",
    "50",
    "--mixed",
    "15",
    "--rounds",
    "2",
    "--num-batches",
    "2",
    "--strings",
    "64",
    "--compiled-at",
    "1",
]
EAGER = {"torch", "torch, bags", "torch, similar columns joined", "collection after torch"}
OURS = {"recfuse", "recfuse, dict", "recfuse, XXH64"}


@pytest.fixture
def columns(monkeypatch):
    with on_the_cpu(monkeypatch, "embedding_columns", SMALL) as run:
        monkeypatch.setattr(module("embedding_columns.measure"), "copy_speed", lambda *_: 1e9)
        packing = module("recfuse.nn.columns.packing")
        for name in ("__call__", "at"):  # no GPU's memory
            pack = getattr(packing.Packer, name)
            monkeypatch.setattr(
                packing.Packer, name, lambda self, given, pin=False, pack=pack: pack(self, given)
            )
        yield run


def results(columns, folder, *options):
    path = folder / "columns.json"
    assert columns("--json", path, *options) == 0
    return json.loads(path.read_text())


def subject_of(kinds, seed=0):
    setting = SimpleNamespace(arguments=SimpleNamespace(seed=seed, num_batches=2), device=torch.device("cpu"))
    return module("embedding_columns.models").Subject("test", kinds, setting)


def test_models_have_the_published_sizes(columns):
    models = module("embedding_columns.models")
    for name, count, dims in (("E", 1000, 8120), ("F", 1200, 9672)):
        kinds = models.model_kinds(name, 2**23)
        assert sum(kind.count for kind in kinds) == count
        assert sum(kind.output_dim for kind in kinds) == dims
    assert len(models.BOUNDARIES) == 100 and models.BOUNDARIES[-1] == 495
    assert models.bucketize(1).rows == 101


def test_batches_are_as_the_page_says(columns):
    models = module("embedding_columns.models")
    subject = subject_of(models.model_kinds("E", 1000, part=100))
    first, second = subject.batches(300)
    assert first.size == 300 and not torch.equal(first.features[0], second.features[0])
    kinds = {kind.name: feature for kind, feature in zip(subject.columns, first.features, strict=True)}
    floats, integers = kinds["bucketize"], kinds["integer"]
    assert floats.dtype == torch.float32 and 0 <= floats.min() < 2 and 98 < floats.max() < 100
    assert set(integers.tolist()) == set(range(100)) or len(set(integers.tolist())) > 80
    assert kinds["string"].dtype == torch.int64 and kinds["string"].abs().max() > 2**60
    for name in ("strings", "large"):
        values, offsets = kinds[name]
        assert set(offsets.diff().tolist()) == set(range(1, 11)) and offsets[-1] == len(values)
    assert kinds["large"][0].max() < 1000


def test_every_form_gives_the_same_output(columns):
    forms, measure = module("embedding_columns.forms"), module("embedding_columns.measure")
    subject = subject_of(module("embedding_columns.models").model_kinds("F", 60, part=150))
    runs, batch = forms.Runs(subject), subject.batches(7)[0]
    for name in (*EAGER, *OURS, *forms.ABLATIONS):
        right = measure.right_output(subject, batch, hashed=name == forms.HASHED)
        torch.testing.assert_close(runs.make(name)(batch).double(), right, msg=name, atol=1e-5, rtol=1e-5)
    hashed, modulo = (measure.right_output(subject, batch, hashed) for hashed in (True, False))
    assert not torch.allclose(hashed, modulo)


def test_the_least_bytes_count_rows_in_use_once(columns):
    models = module("embedding_columns.models")
    subject = subject_of([models.bucketize(2)])
    batch = models.Batch(
        3, [torch.tensor([1.0, 2.0, 9.0]), torch.tensor([7.0, 7.0, 7.0])], torch.zeros(3, 32)
    )
    assert subject.least_bytes(batch) == 2 * 3 * 4 + (2 + 1) * 8 * 4 + 3 * 2 * 8 * 4


@pytest.mark.long
def test_every_figure_runs(columns, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figures = "micro,mixed,models,ablations,strings,transfers,host_tables"
    record = results(columns, tmp_path, "--figures", figures, "--plots", tmp_path)
    assert [point["subject"] for point in record["micro"]] == ["2 columns", "3 columns"]
    assert set(record["micro"][0]["us"]) == EAGER | {"recfuse", "recfuse, dict"}
    assert set(record["mixed"]["us"]) == (EAGER | OURS) - {"collection after torch"}
    columns_alone, whole = record["models"]
    assert [point["size"] for point in columns_alone["points"]] == [5, 8]
    assert set(columns_alone["points"][0]["us"]) == EAGER | OURS
    assert "recfuse" in whole["points"][1]["us"] and "torch, bags" not in whole["points"][1]["us"]
    assert [point["subject"] for point in record["ablations"]] == ["1,000 bucketize", "E"]
    assert [point["subject"] for point in record["transfers"]] == ["3 bucketize", "E"]
    parts = [(point["model"], point["part"]) for point in record["host_tables"]]
    assert parts == [("E", "columns"), ("E", "whole model")]
    assert record["read_bandwidth_bytes_per_s"] == 1e9  # the value of the CPU
    for plot in ("columns_micro.png", "columns_models.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    text = " ".join(capsys.readouterr().out.split())
    assert "E, whole model: µs as called, host included" not in text  # the CPU has no graphs
    assert "Million strings a second" in text and "µs for the strings of a batch of 6" in text


@pytest.mark.long
def test_ready_counts_in_new_processes(columns, tmp_path):
    record = results(columns, tmp_path, "--figures", "ready", "--contestants", "torch;recfuse")
    (ready,) = record["ready"]
    assert ready["form"] == "recfuse" and ready["columns"] == 3
    for process in ("cold", "warm"):
        assert ready[process]["compiled"] == 0
        assert 0 < ready[process]["construction_s"] < 60 and 0 < ready[process]["first_call_s"] < 60


def test_the_limit_is_the_least_bytes_at_copy_speed(columns, tmp_path):
    point = results(columns, tmp_path, "--figures", "micro", "--columns", "2")["micro"][0]
    assert point["limit_us"] == pytest.approx(point["least_bytes"] / 1e9 * 1e6)
    assert max(point["relative_error"].values()) < 1e-5


def test_a_wrong_output_ends_the_run(columns, monkeypatch, capsys):
    forms = module("embedding_columns.forms")
    right = forms.ByHand.__call__
    monkeypatch.setattr(forms.ByHand, "__call__", lambda self, inputs: right(self, inputs) * 1.001)
    assert columns("--figures", "micro") == 1
    assert "2 columns, batch 6, torch, similar columns joined: the outputs differ" in capsys.readouterr().err


def test_an_element_that_is_not_written_ends_the_run(columns, monkeypatch, capsys):
    forms = module("embedding_columns.forms")
    right = forms.ByHand.__call__

    def unwritten(self, inputs):
        output = right(self, inputs)
        output[3, 4] = float("nan")
        return output

    monkeypatch.setattr(forms.ByHand, "__call__", unwritten)
    assert columns("--figures", "models") == 1
    assert "by nan" in capsys.readouterr().err


def test_a_trial_run_on_the_cpu(columns, tmp_path, monkeypatch):
    """The measurements of --quick, without the compiler, which is too slow for a test."""
    options = ["--device", "cpu", "--quick", "--figures", "micro,strings", "--contestants", "torch;recfuse"]
    record = results(columns, tmp_path, *options)
    assert record["arguments"]["part"] == "400" and record["arguments"]["num_batches"] == "2"
    assert set(record["micro"][0]["us"]) == {"torch", "recfuse"}
