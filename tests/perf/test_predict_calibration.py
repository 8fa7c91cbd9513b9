"""Calibrations: files, merging, scaling by data sheet, resuming a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import recfuse
from recfuse.perf.calibrating.run import Calibrator
from recfuse.perf.calibration import Calibration, available, cache_folder
from recfuse.perf.choosing import choose
from recfuse.perf.models.kernels import KernelModel
from recfuse.perf.tracing.operators import Operator

INPUTS = (torch.randint(1000, (4096,)), torch.arange(0, 4096, 8))


def small() -> Calibration:
    found = Calibration("H100", "2.11")
    for words in (1000, 10_000, 100_000, 1_000_000):
        found.add("pointwise_1", (words,), 1 + words / 1e5, 1)
    found.probes.append(({"relu|inference": 4, "(call)|inference": 1}, 30.0))
    found.groups.append("others float32")
    return found


def test_a_file_keeps_everything(tmp_path):
    path = tmp_path / "one.json"
    small().save(path)
    found = Calibration.load(path)
    assert found.points == small().points and found.groups == small().groups
    assert [(dict(counts), us) for counts, us in found.probes] == [(dict(c), us) for c, us in small().probes]


def test_merging():
    merged = small().merge(small())
    assert merged.count == 8 and len(merged.probes) == 2
    with pytest.raises(
        ValueError, match=r"the first calibration is of H100 and torch 2\.11, the second of A100"
    ):
        small().merge(Calibration("A100", "2.11"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no calibration"),
        ('{"recfuse_calibration": 99}', "has version 99, this recfuse reads up to 1"),
        ('{"recfuse_calibration": 1, "gpu": "H100"}', "is damaged or cut"),
    ],
)
def test_invalid_files_are_refused(tmp_path, text, message):
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize("row", [[1000, -1.0, 1], [1000, 1.0], [0, 1.0, 1]])
def test_invalid_points_are_refused(tmp_path, row):
    path = tmp_path / "one.json"
    small().save(path)
    record = json.loads(path.read_text())
    record["points"]["pointwise_1"].append(row)
    path.write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match="points of 'pointwise_1' have another form; expected rows of 3 positive numbers"
    ):
        Calibration.load(path)


def test_a_measured_size_is_returned_as_measured():
    model = KernelModel(small().points)
    operator = Operator("relu", "inference", "pointwise_1", (10_000,))
    assert model.time(operator).us == pytest.approx(1.1) and model.time(operator).measured
    assert not model.time(operator, exact=False).measured
    between = Operator("relu", "inference", "pointwise_1", (300_000,))
    assert 2.5 < model.time(between).us < 5.5 and model.time(between).inside
    beyond = model.time(Operator("relu", "inference", "pointwise_1", (1_000_000_000,)))
    assert not beyond.inside and beyond.us > 1000


def test_kinds_without_points_are_noted():
    model = KernelModel(small().points)
    found = model.time(Operator("cumsum", "inference", "bag", (100, 1, 64, 100)))
    assert not found.known and model.missing == {"bag": 1}


def test_scaled_calibrations_are_noted():
    table = torch.nn.EmbeddingBag(1000, 64, mode="sum")
    h100, h200 = (recfuse.predict(table, INPUTS, gpu=gpu) for gpu in ("H100", "H200"))
    assert h200.active.seconds < h100.active.seconds
    assert any("scaled from H100 by data sheet" in note for note in h200.notes)

    def width(one):
        return one.active.high / one.active.low

    assert width(h200) > width(h100)


def test_no_calibration_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"gpu is cpu, which has no calibration; expected H100.*--calibrate --device cpu"
    ):
        choose("cpu")


def test_shipped_calibration_is_small_and_complete():
    path = available()["H100", "2.11"]
    found = Calibration.load(path)
    assert path.stat().st_size < 400_000 and found.count > 10_000 and len(found.probes) > 50
    assert cache_folder() != path.parent


def test_a_run_is_resumed(tmp_path):
    path = tmp_path / "cpu.json"
    first = Calibrator("cpu", path, tiny=True, seconds=0.0)
    first.run()
    assert not path.exists()  # no time for a group
    first = Calibrator("cpu", path, tiny=True)
    plan = first.plan()
    for group in list(plan)[:2]:
        plan[group]()
        first.calibration.groups.append(group)
    first.calibration.save(path)
    second = Calibrator("cpu", path, tiny=True)
    assert (
        second.calibration.groups == list(plan)[:2]
        and second.calibration.count == first.calibration.count > 10
    )
    found = recfuse.predict(torch.nn.Linear(8, 8), torch.randn(4, 8), gpu="cpu", calibration=path)
    assert found.graph is None and found.eager.seconds > 0
    with pytest.raises(ValueError, match="expected both of a CPU or both of a GPU"):
        choose("H100", path)


def test_a_file_of_another_device_is_refused(tmp_path):
    path = tmp_path / "h100.json"
    small().save(path)
    with pytest.raises(ValueError, match="Give another --calibration FILE"):
        Calibrator("cpu", Path(path), tiny=True)


def test_factors_at_the_edge_apply_beyond_the_measured_sizes():
    points = [[words, 2 + words / 1e3 * (1 + words / 1e6), 1] for words in (10_000, 30_000, 100_000, 300_000)]
    model = KernelModel({"pointwise_1": points}).kinds["pointwise_1"]
    edge, far = np.log2([[300_000.0]]), np.log2([[30_000_000.0]])
    (_, *_), (us, _, _, inside) = model.at(edge[0], exact=False), model.at(far[0], exact=False)
    assert not inside
    factor = np.log(us) - model.base(far[0])
    assert factor == pytest.approx(
        np.log(model.at(edge[0] + 1e-9, exact=False)[0]) - model.base(edge[0]), abs=0.02
    )


def test_coalesce_takes_longer_with_a_hot_row():
    kernels = choose("H100").calibration.kernels
    times = [
        kernels.time(Operator("coalesce", "optimizer", "coalesce", (60_000, 64, 20_000, hottest))).us
        for hottest in (8, 2000, 20_000)
    ]
    assert times[0] < times[1] < times[2] and times[2] > 5 * times[0]
