"""The benchmark of histories: all figures of a GPU, run on CPU tensors."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import recfuse
from support.gpu_benchmark import on_the_cpu

pytest.importorskip("torchrec", reason="torchrec is not installed (the test extra's peers are optional)")


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the GPU's figures on the CPU; returns the exit status."""
    with on_the_cpu(monkeypatch, "sequences", ["--device", "cuda", "--quick", "--rounds", "2"]) as run:
        setting = importlib.import_module("common.settings").Setting
        monkeypatch.setattr(setting, "copy_speed", 1e9)
        monkeypatch.setattr(setting, "on_gpu", True)
        monkeypatch.setattr(setting, "release", lambda self: None)
        yield run


def test_every_figure_runs(sequences: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "sequences.json"
    assert sequences("group", "lookups", "training", "host", "models", "--json", target) == 0
    record = json.loads(target.read_text())
    for layout in ("padded", "joined", "jagged"):
        errors = record["group"][layout]["relative_error"]
        assert set(errors) == {"torch", "TorchRec", "recfuse"} and not any(errors.values())
    assert set(record["training"]) == {"SGD", "Adam"}
    assert "TorchRec, swapped" in record["host 26"]
    for model in ("DIN", "HSTU"):
        errors = record["models"][model]["relative_error"]
        assert set(errors) == {"TorchRec", "swapped"} and not any(errors.values())
    assert "FBGEMM is left out" in capsys.readouterr().out


def test_a_wrong_output_ends_the_run(sequences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = importlib.import_module("sequences.sides")
    right = sides.padded_by_torch
    monkeypatch.setattr(sides, "padded_by_torch", lambda *given: right(*given) + 1)
    assert sequences("group") == 1


@pytest.mark.parametrize("name", ("DIN", "HSTU"))
def test_swapped_models_train_alike(sequences: Any, name: str) -> None:
    """Outputs are identical, and so are losses of steps with Adagrad."""
    models = importlib.import_module("sequences.models")
    torch.manual_seed(0)
    theirs = models.MODELS[name](50, 4, 6)
    ours = copy.deepcopy(theirs)
    batch = models.model_batch(50, 5, 9, torch.device("cpu"))
    pairs = [(model, torch.optim.Adagrad(model.parameters(), lr=0.1)) for model in (theirs, ours)]
    assert len(recfuse.swap(ours, optimizers=[pairs[1][1]]).fused) == 1
    assert torch.equal(ours(batch), theirs(batch))
    losses = []
    for model, optimizer in pairs:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
