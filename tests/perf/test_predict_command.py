"""`recfuse predict` and `recfuse.swap(predict=...)`: output, files, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import recfuse
from recfuse.cli import main
from recfuse.perf.calibrating.probes import Dlrm

MODEL = """
from recfuse.perf.calibrating.probes import Dlrm, Step
SIZES = Dlrm((13, 16), (2_000_000, 1000, 300), 16, (8, 1), pooling=2)
def make(batch):
    return SIZES.model(), SIZES.batch(batch)[:3]
def train(batch):
    return Step(SIZES.model(), [SIZES.batch(batch)], "sgd")
def nothing(batch):
    return 3
number = 4
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "predicted_model.py"
    path.write_text(MODEL)
    return path


def test_batches_swap_limit_and_files(model, tmp_path, capsys):
    files = {name: str(tmp_path / f"{name}.json") for name in ("json", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert main(["predict", f"{model}:make", "--batch", "64", "256", "--gpu", "h100", "a100", "--swap",
                 "--slo", "900us", *options]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("batch 64: inference on H100") == 1 and out.count("inference on A100") == 2
    assert "scaled from H100 by data sheet" in out and out.count("after recfuse.swap, predicted on") == 4
    assert out.count("largest batch under 0.9 ms:") == 2
    assert max(len(line) for line in out.split("\n") if not line.startswith("batch")) <= 160
    records = json.loads(Path(files["json"]).read_text())
    assert len(records) == 2 * (2 * 2 + 3)
    for one in records[-3:]:
        assert one["by"] in ("latency", "memory", "batch") and one["seconds"] > 0
    trace = json.loads(Path(files["trace"]).read_text())["traceEvents"]
    rows = {event["tid"] for event in trace if event["ph"] == "X"}
    assert len(rows) == 2 and all(event["dur"] >= 0 for event in trace if event["ph"] == "X")


@pytest.mark.parametrize("flag", ("--recorded", "--beside"))
def test_events_of_a_profiler_go_into_the_trace(flag, model, tmp_path, capsys):
    recorded, out = tmp_path / "recorded.json", tmp_path / "out.json"
    event = {"ph": "X", "name": "measured", "ts": 1000.0, "dur": 2.0, "pid": 1, "tid": 1}
    recorded.write_text(json.dumps({"traceEvents": [event]}))
    options = ["--batch", "64", "--gpu", "h100", "--trace", str(out), flag, str(recorded)]
    assert main(["predict", f"{model}:make", *options]) == 0
    assert ("--beside is a deprecated name. Use --recorded." in capsys.readouterr().err) == (
        flag == "--beside"
    )
    first, *others = json.loads(out.read_text())["traceEvents"]
    assert first == event and min(one["ts"] for one in others if "ts" in one) >= 1000.0


def test_training_steps(model, capsys):
    assert main(["predict", f"{model}:train", "--training", "--batch", "32", "--gpu", "h200"]) == 0
    assert "training step on H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}:nothing"], "make(2048) returns a int; expected (model, inputs)"),
        (["{}:number"], "has no function 'number'"),
        (["{}:other"], "has no function 'other'"),
        (["missing.py:make"], "missing.py is no file"),
        (["no_module_of_this:make"], "no module 'no_module_of_this'"),
        (["{}"], "is no FILE:FUNCTION"),
        ([], "FILE:FUNCTION is missing. Pass"),
        (["{}:make", "--batch", "0"], "--batch is 0; expected >= 1"),
        (["{}:make", "--gpu", "h101"], "gpu is 'h101'; expected A100"),
        (["{}:make", "--calibration", "{}"], "is not JSON"),
        (["--calibrate", "--device", "tpu"], "--device is 'tpu'; expected cpu or cuda"),
    ],
)
def test_bad_input_is_one_line(model, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["predict", *(word.format(model) for word in words)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_invalid_durations_are_refused(model, capsys):
    with pytest.raises(SystemExit):
        main(["predict", f"{model}:make", "--slo", "5 minutes"])
    assert "'5 minutes' is no duration" in capsys.readouterr().err


def test_swap_reports_the_gain():
    sizes = Dlrm((13, 16), (500,) * 40, 16, (8, 1), pooling=2)
    torch.manual_seed(0)
    model = sizes.model()
    report = recfuse.swap(model, check=[sizes.batch(512)[:3]], predict="H100")
    assert report.gain is not None and len(report.fused) == 1
    assert report.gain.ratios.keys() == {"eager", "compiled", "graph"}
    low, high = report.gain.interval("graph")
    assert low < report.gain.ratios["graph"] < high and report.gain.ratios["graph"] > 1
    assert "predicted on H100" in str(report)
    with pytest.raises(ValueError, match=r"Pass check=\[batch\]"):
        recfuse.swap(model, predict=True)


def test_fake_weights_are_swapped():
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = Dlrm((13, 16), (10_000, 2000), 16, (8, 1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sizes.model()
    assert len(recfuse.swap(model).fused) == 1
    found = recfuse.predict(model, sizes.batch(64)[:3], gpu="H100")
    assert [one.kind for one in found.operators].count("recfuse_fused_embedding_bag") == 1
