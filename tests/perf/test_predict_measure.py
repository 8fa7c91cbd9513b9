"""`recfuse.predict(..., measure=True)` and `recfuse predict --measure`: end to end on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recfuse
from recfuse.cli import main
from recfuse.perf.calibrating.clock import DeviceClock
from recfuse.perf.calibrating.of_step import measure_calls, with_points
from recfuse.perf.calibrating.probes import Dlrm, Step
from recfuse.perf.calibration import Calibration
from recfuse.perf.prediction import Prediction
from recfuse.perf.tracing.kept_state import KeptState
from recfuse.perf.tracing.recorded_calls import CallRecorder, RecordedCall
from recfuse.perf.tracing.tracer import Tracer, run_traced

SIZES = Dlrm((13, 16), (2000, 1000, 300), 16, (8, 1), pooling=2)


@pytest.fixture(autouse=True)
def no_calibrations(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path / "cache"))
    yield


def step(optimizer: str | None, sparse: bool = True, batch: int = 32) -> Step:
    sizes = replace(SIZES, sparse=sparse)
    return Step(sizes.model(), [sizes.batch(batch)], optimizer)


def recorded(call: Any, training: bool = False) -> list[RecordedCall]:
    tracer = Tracer(None, training, KeptState())
    tracer.recorder = CallRecorder()
    run_traced(tracer, call)
    return [*tracer.recorder.calls.values()]


def unmeasured(prediction: Prediction) -> list[str | None]:
    return [one.operator.kind for one in prediction.times if one.operator.kind and not one.kernel.measured]


@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [(None, True), ("sgd", True), ("sgd", False), ("adam", False), ("adagrad", True), ("adagrad", False)],
)
def test_every_size_of_a_step_is_measured(optimizer, sparse):
    found = recfuse.predict(step(optimizer, sparse), gpu="cpu", training=optimizer is not None, measure=True)
    assert unmeasured(found) == [] and found.measured is not None
    assert f"measured {found.measured.count} of {found.measured.count} sizes of this step" in found.notes
    sizes = {(one.kind, one.sizes) for one in found.operators if one.kind}
    assert found.measured.count == len(sizes)
    again = recfuse.predict(
        step(optimizer, sparse), gpu="cpu", training=optimizer is not None, calibration=found.calibration
    )
    assert (
        again.active.seconds == pytest.approx(found.active.seconds) and again.peak_bytes == found.peak_bytes
    )


def test_times_are_those_of_the_operators():
    x, y = torch.rand(1 << 22), torch.rand(8)

    def both() -> None:
        torch.sin(x)
        torch.sin(y)

    long, short = recfuse.predict(both, gpu="cpu", measure=True).times
    clock = DeviceClock("cpu")
    us = min(clock.latency_us(lambda: torch.sin(x), 3) for _ in range(3))
    assert 0.3 * us < long.kernel.us < 3 * us
    assert short.kernel.us < 0.1 * long.kernel.us


def test_swapped_models_are_measured():
    model = SIZES.model()
    recfuse.swap(model)
    found = recfuse.predict(model, SIZES.batch(32)[:3], gpu="cpu", measure=True)
    assert unmeasured(found) == []
    assert any(kind.startswith("recfuse") for kind in found.calibration.points)


def test_nothing_changes():
    made = step("adam", sparse=False)
    made()
    before = {name: (one.clone(), one.grad.clone()) for name, one in made.model.named_parameters()}
    torch.manual_seed(3)
    recfuse.predict(made, gpu="cpu", training=True, measure=True)
    numbers = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(numbers, torch.rand(3))
    for name, one in made.model.named_parameters():
        assert torch.equal(one, before[name][0]) and torch.equal(one.grad, before[name][1])


def test_integers_are_not_written():
    counts, x = torch.zeros(4, dtype=torch.int64), torch.rand(4)

    def counted() -> Tensor:
        own = counts.clone()
        own.add_(1)
        return x.index_select(0, own)

    for call in recorded(counted):
        call.on(torch.device("cpu"))[0]()
    assert counts.tolist() == [0] * 4


def test_repeated_calls_read_the_same_rows():
    table, indices = nn.EmbeddingBag(100, 8, mode="sum"), torch.tensor([5, 5, 99, 5])
    (call,) = [
        one for one in recorded(lambda: table(indices, torch.tensor([0, 3]))) if one.kind.startswith("bag")
    ]
    pooled, *_ = call.on(torch.device("cpu"))[0]()
    assert pooled.shape == (2, 8)
    assert call.args[1].value.tolist() == [5, 5, 99, 5] and call.args[0].shape == (100, 8)


@pytest.mark.parametrize("include_last", [False, True])
def test_unknown_indices_are_uniform_and_valid(include_last):
    table = nn.EmbeddingBag(50, 8, mode="sum", include_last_offset=include_last)
    with FakeTensorMode():
        indices, offsets = torch.zeros(60, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    (call,) = [one for one in recorded(lambda: table(indices, offsets)) if one.kind.startswith("bag")]
    run, _ = call.on(torch.device("cpu"))
    closed = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))["args"].cell_contents
    rows, begins = closed[1], closed[2]
    assert rows.min() >= 0 and rows.max() < 50 and len(rows.unique()) > 20
    assert begins[0] == 0 and (begins.diff() >= 0).all() and begins[-1] == (60 if include_last else 51)
    run()


def test_operands_that_share_memory_share_it():
    x = torch.rand(4, 8, 16)
    (call,) = [one for one in recorded(lambda: torch.bmm(x, x.mT)) if one.kind.startswith("bmm")]
    run, _ = call.on(torch.device("cpu"))
    first, second = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))["args"].cell_contents
    assert first.data_ptr() == second.data_ptr() and second.stride() == x.mT.stride()


def test_calls_that_do_not_fit_are_noted():
    calls = recorded(lambda: (torch.rand(64).sin(), torch.rand(1 << 20).cos()))
    found = measure_calls("cpu", calls, most_bytes=1 << 20)
    assert set(found.too_large) >= {"cos"} and "too large to measure: cos" in found.note()
    assert 0 < found.points.count < found.sizes


def test_failing_operators_are_noted():
    (call,) = recorded(lambda: torch.rand(64).sin())[-1:]
    broken = replace(call, args=[replace(call.args[0], dtype=torch.bool, shape=(-1,))])
    found = measure_calls("cpu", [call, broken])
    assert found.points.count == 1 and found.note().endswith("cannot run alone: sin")


def test_interrupting_keeps_the_points(monkeypatch):
    calls = recorded(step("sgd"), training=True)
    samples, turns = DeviceClock.samples, iter(range(2))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(turns):
            raise KeyboardInterrupt
        return samples(*args, **kwargs)

    monkeypatch.setattr(DeviceClock, "samples", interrupted)
    found = measure_calls("cpu", calls)
    assert found.interrupted and 0 < found.points.count < found.sizes
    assert found.note().endswith("; interrupted")


def test_measured_points_replace_those_of_the_same_size():
    base, points = Calibration("cpu", "2.13"), Calibration("cpu", "2.13")
    for words, us in ((100, 9.0), (1000, 9.0)):
        base.add("pointwise_1", (words,), us, 1)
    points.add("pointwise_1", (100,), 2.0, 1)
    points.add("fill", (100,), 3.0, 1)
    merged = with_points(base, points)
    assert merged.points == {"pointwise_1": [[1000, 9.0, 1], [100, 2.0, 1]], "fill": [[100, 3.0, 1]]}
    assert base.count == 2


def test_measuring_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="gpu is A100, but this machine has no GPU"):
        recfuse.predict(step(None), gpu="a100", measure=True)


MODEL = """
from recfuse.perf.calibrating.probes import Dlrm
SIZES = Dlrm((13, 16), (2000, 300), 16, (8, 1), pooling=2)
def make(batch):
    return SIZES.model(), SIZES.batch(batch)[:3]
"""


def test_the_command_measures_and_writes(tmp_path, capsys):
    path, output, facts = tmp_path / "measured_model.py", tmp_path / "points.json", tmp_path / "facts.json"
    path.write_text(MODEL)
    words = ["predict", f"{path}:make", "--batch", "16", "32", "--swap", "--slo", "1s"]
    files = ["--output", str(output), "--json", str(facts)]
    assert main([*words, "--measure", "--device", "cpu", *files]) == 0
    out = capsys.readouterr().out
    assert out.count("note: measured ") == 2 and "largest batch under 1000 ms" in out
    found = Calibration.load(output)
    assert found.is_cpu and any(kind.startswith("recfuse") for kind in found.points)
    words = ["predict", f"{path}:make", "--batch", "32", "--gpu", "cpu", "--swap"]
    again = tmp_path / "again.json"
    assert main([*words, "--calibration", str(output), "--json", str(again)]) == 0
    measured, predicted = json.loads(facts.read_text())[3], json.loads(again.read_text())[1]
    assert measured["swapped"] and measured["active_seconds"] == predicted["active_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "--device", "cpu", "--gpu", "h100"], "the device here is the CPU; expected cpu"),
        (["--measure", "--device", "cpu", "--gpu", "cpu", "h100"], "measures one device, and --gpu names 2"),
        (["--output", "points.json"], "--output is given without --measure"),
    ],
)
def test_bad_options(tmp_path, capsys, words, message):
    path = tmp_path / "measured_model.py"
    path.write_text(MODEL)
    with pytest.raises(SystemExit):
        main(["predict", f"{path}:make", *words])
    assert message in capsys.readouterr().err
