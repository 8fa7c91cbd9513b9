"""The baseline of the fused benchmark that tunes each feature separately, on a GPU modelled by formulas."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from recfuse.tuner.collection.problem import FusedProblem
from support.modelled_gpu import best_rows, calls, collection_of, install

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def device(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def collection():
    return collection_of()


@pytest.fixture
def separate(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("fused_embedding_bag.separate")
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    return module


def test_each_feature_alone(device, collection, separate):
    chosen = separate.tune_separately(collection, calls(collection), progress=False, features=[0, 2, 13])
    assert chosen.dtype == torch.int32 and chosen.shape == (24, 5)
    best = best_rows(device, collection)
    for feature in (0, 2):
        assert chosen[feature].tolist() == best[feature].tolist()
    assert not chosen[5, :-1].any() and chosen[5, -1] == best[5, -1]
    assert not device.timed


def test_one_feature_of_a_problem(device, collection, separate):
    batches = calls(collection)
    alone = separate.alone(FusedProblem.of(collection, batches), 2)
    (indices, offsets), bags = batches[0], 8
    part = offsets[2 * bags : 3 * bags + 1]
    assert torch.equal(alone.batches[0].indices, indices[part[0] : part[-1]])
    assert torch.equal(alone.batches[0].offsets, part - part[0])
    assert alone.batches[0].host_offsets.tolist() == (part - part[0]).tolist()
    assert alone.features.shape == (1, 7) and alone.features[0, 6] == 0 and alone.output_dim == 16
