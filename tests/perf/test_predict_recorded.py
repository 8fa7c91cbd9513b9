"""Recorded measurements of an H100: the errors of predictions, which no change may make larger."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recfuse.perf.choosing import Chosen

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "performance_model" / "README.md"
MOST = {
    "active, Adam, Adagrad": 12.3,
    "active, named": 3.8,
    "active, named bfloat16": 11.0,
    "active, own sizes measured": 1.8,
    "active, random bfloat16": 13.1,
    "active, random float32": 7.7,
    "compiled kernels, number": 3.2,
    "compiled step": 39.6,
    "eager inference": 29.4,
    "eager training": 28.2,
    "graph, named": 6.3,
    "graph, named bfloat16": 16.1,
    "graph, own sizes measured": 1.9,
    "graph, random bfloat16": 15.1,
    "graph, random float32": 9.0,
    "kernels of 5 us and more": 13.3,
    "largest batch under a latency": 5.9,
    "peak memory, dense gradients, Adam": 0.9,
    "peak memory, dense gradients, SGD": 0.9,
    "peak memory, inference": 0.9,
    "peak memory, sparse gradients, Adam": 0.8,
    "peak memory, sparse gradients, SGD": 0.8,
    "peak memory, training": 1.5,
    "swap gain, eager": 96.1,
    "swap gain, graph": 55.1,
}  # percent: mean of the absolute errors
LEAST = {
    "80 % intervals hold, active": 77,
    "80 % intervals hold, eager": 77,
    "80 % intervals hold, graph": 74,
    "faster of eager and graph right": 99,
    "host- or device-bound right": 96,
    "latency within 8 % of its limit, eager": 99,
    "latency within 8 % of its limit, graph": 99,
    "shorter kernels within .5 us": 82,
    "swap faster or slower right, eager": 99,
    "swap faster or slower right, graph": 87,
}  # percent that is right


@pytest.fixture(scope="module")
def recorded() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("performance_model.recorded")


@pytest.fixture(scope="module")
def errors(recorded) -> dict[str, list[float]]:
    return recorded.errors(recorded.read(), Chosen(recorded.calibration()))


def test_the_record_is_small(recorded):
    assert recorded.RECORD.stat().st_size < 600_000


@pytest.mark.parametrize("name", MOST)
def test_errors_do_not_grow(errors, name):
    assert 100 * np.abs(errors[name]).mean() <= MOST[name]


@pytest.mark.parametrize("name", LEAST)
def test_shares_of_correct_predictions(errors, name):
    assert 100 * np.mean(errors[name]) >= LEAST[name]


def test_every_error_has_a_limit(errors):
    assert {name for name in errors if "measured again" not in name and "sum of" not in name} == {
        *MOST,
        *LEAST,
    }


def test_files_are_compared_instead_of_the_record(recorded, tmp_path):
    figures = importlib.import_module("performance_model.figures")
    record = {
        **recorded.read(),
        "swaps": [],
        "compiled": [],
        "memory": [],
        "limits": [],
        "sizes": [],
        "held": {},
    }
    record["targets"] = record["targets"][:3]
    steps, calibration = tmp_path / "steps.json", tmp_path / "calibration.json"
    steps.write_text(json.dumps(record))
    recorded.calibration().save(calibration)
    arguments = SimpleNamespace(measure=steps, calibrate=calibration)
    found = figures.figure_recorded(SimpleNamespace(arguments=arguments)).record
    expected = recorded.errors(record, Chosen(recorded.calibration()))
    assert {name: len(values) for name, values in found.items()} == {
        name: len(v) for name, v in expected.items()
    }
    assert found["active, named"] == pytest.approx(expected["active, named"])


def test_peaks_of_memory_are_those_of_the_gpu(recorded):
    traces = importlib.import_module("performance_model.traces")
    measured = {
        (one["model"], one["optimizer"], one["sizes"]["sparse"]): one for one in recorded.read()["memory"]
    }
    targets = {(one.name, one.optimizer, one.sizes.sparse): one for one in traces.memory_targets()}
    assert set(measured) == set(targets)
    for key, one in measured.items():
        peak = traces.of_target(targets[key], "H100")["peak"]
        assert peak == pytest.approx(one["memory"], rel=0.05), key
        assert peak == pytest.approx(one["peak"], rel=0.001), key


def test_the_report_of_the_papers_is_that_of_the_results(recorded):
    paper = importlib.import_module("paper")
    assert paper.PAGE.read_text() == paper.HEAD + paper.report().grid(words=True), (
        "python benchmarks/paper.py"
    )


def test_the_page_has_the_table(recorded, errors):
    assert recorded.table(errors) in PAGE.read_text(), (
        "python benchmarks/performance_model.py --recorded writes it"
    )


def test_other_estimators_err_more(recorded):
    pytest.importorskip("torchrec")
    baselines = importlib.import_module("performance_model.baselines")
    found = baselines.errors(recorded.read(), Chosen(recorded.calibration()))
    means = {name: 100 * np.abs(values).mean() for name, values in found.items()}
    for group, most in ("kernels of an inference step", 10.0), ("bags, forward", 7.7):
        own = means.pop(f"{group}: recfuse.predict")
        others = [value for name, value in means.items() if name.startswith(group)]
        assert own <= most and len(others) == 2 and own < min(others) / 5, (own, others)
    (roofline,) = (name for name in means if name.startswith("kernels") and name.endswith("roofline"))
    assert " | ".join(recorded.summary(found[roofline], roofline)) in PAGE.read_text()
