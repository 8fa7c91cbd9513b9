import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from recfuse import _clock, info, timing


def test_candidates_take_turns_in_a_rotating_order_on_the_same_inputs():
    calls = []
    candidates = {name: lambda number, name=name: calls.append((name, number)) for name in "abc"}
    result = timing.compare(candidates, inputs=[(n,) for n in range(4)], rounds=3)
    warm_up, measured = calls[:6], calls[6:]
    assert {name for name, _ in warm_up} == set("abc")
    # Each turn: an untimed call on the previous input, then the timed call.
    assert measured == [
        (name, number % 4)
        for round_, order in enumerate(["abc", "bca", "cab"])
        for name in order
        for number in (round_ - 1, round_)
    ]
    assert all(len(result[name].samples) == 3 for name in "abc")
    assert (result.inputs, result.calls, result.cache) == (4, 1, "warm")


def test_cold_caches_are_swept_before_every_call(monkeypatch):
    events = []
    monkeypatch.setattr(timing, "_sweeper", lambda device: lambda: events.append("sweep"))
    timing.compare({"a": lambda: events.append("a")}, rounds=2, cache="cold")
    assert events == ["sweep", "a"] * 4


def test_the_undo_of_a_candidate_runs_after_each_sample():
    events = []
    timing.compare({"a": lambda: events.append("a")}, rounds=2, after=lambda: events.append("after"))
    assert events == ["a", "a", "after"] * 3


def test_sweeper_reads_more_than_the_last_level_cache():
    assert timing._sweeper("cpu").__self__.nbytes >= 2 * info.last_level_cache_bytes()


class HostStandIn:
    """A host's clock that calls advance."""

    immediate = True

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def mark(self):
        return self.now

    def finish(self):
        pass

    def seconds(self, start, end):
        return end - start


@pytest.fixture
def host(monkeypatch):
    standin = HostStandIn()
    monkeypatch.setattr(timing, "clock", lambda device: standin)
    return standin


def test_the_faster_of_two_has_the_greater_ratio(host):
    result = timing.compare({"slow": lambda: host.sleep(0.5), "fast": lambda: host.sleep(0.125)}, rounds=5)
    assert (result.ratio("fast", "slow"), result.ratio("slow", "fast")) == (4, 0.25)
    assert result.fastest(["slow", "fast"]) == "fast"
    assert result["slow"].samples == [0.5] * 5


def test_short_calls_are_averaged_up_to_the_least_time(host):
    result = timing.compare({"a": lambda: host.sleep(0.125)}, rounds=2, min_time=1.0)
    assert result.calls == 8
    assert result["a"].samples == [0.125] * 2  # the mean of its calls, not their sum


def test_the_hosts_clock_advances():
    clock = _clock.clock("cpu")
    start = clock.mark()
    time.sleep(0.002)
    assert clock.seconds(start, clock.mark()) >= 0.002


def test_median_and_spread():
    samples = timing.Timing("a", [5.0, 1.0, 2.0, 4.0, 3.0])
    assert (samples.median, samples.iqr) == (3.0, 2.0)
    assert timing.Timing("a", [7.0]).iqr == 0.0


def test_stages_of_timed_calls_are_kept(host):
    def call():
        stages = timing.Stages()
        with stages("wait"):
            host.sleep(0.5)
        with stages("rest"):
            pass
        return stages

    result = timing.compare({"a": call}, rounds=4)
    stages = result["a"].stages
    assert list(stages) == ["wait", "rest"]
    assert len(stages["wait"].samples) == 4
    assert (stages["rest"].median, stages["wait"].median, result["a"].median) == (0.0, 0.5, 0.5)


class DeviceStandIn:
    """A device that executes work in order, with a duration for every kind of work."""

    immediate = False

    def __init__(self):
        self.asked, self.finished = [], 0

    def run(self, name, seconds):
        self.asked.append((name, seconds))

    def mark(self):
        return len(self.asked)

    def finish(self):
        self.finished = len(self.asked)

    def seconds(self, start, end):
        assert end <= self.finished, "read before the device has passed the mark"
        return sum(seconds for _, seconds in self.asked[start:end])


@pytest.fixture
def device(monkeypatch):
    standin = DeviceStandIn()
    monkeypatch.setattr(timing, "clock", lambda device: standin)
    monkeypatch.setattr(timing, "_sweeper", lambda device: lambda: standin.run("sweep", 100.0))
    return standin


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_sample_on_a_device_holds_its_calls_and_nothing_else(device, cache):
    candidates = {name: lambda name=name: device.run(name, 0.25) for name in "ab"}
    result = timing.compare(candidates, rounds=3, min_time=0.5, cache=cache)
    assert result.calls == 2
    assert result["a"].samples == result["b"].samples == [0.25] * 3
    names = [name for name, _ in device.asked]
    if cache == "cold":
        assert names[1::2].count("a") == names[1::2].count("b") and set(names[::2]) == {"sweep"}
    else:
        assert names[-6:] == ["a"] * 3 + ["b"] * 3  # back to back, an untimed call before each sample


def test_stages_on_a_device_are_read_when_it_has_finished(device):
    stages = timing.Stages()
    for name, seconds in (("one", 1.0), ("two", 2.0), ("one", 4.0)):
        with stages(name):
            device.run(name, seconds)
    assert stages == {}
    assert stages.read() == {"one": 5.0, "two": 2.0}
    assert stages.read() == {"one": 5.0, "two": 2.0}  # nothing is added twice


def test_without_a_gpu_a_graph_is_the_call_itself():
    def call():
        return 7

    assert timing.graphed(call, "cpu") is call
    assert _clock.describe("cpu") == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_graphs_and_the_record_of_a_gpu():
    x = torch.ones(1 << 24, device="cuda")
    replay = timing.graphed(lambda: x * 2, "cuda")
    assert replay().sum().item() == 2 * x.numel()
    x.fill_(3)
    assert replay()[0].item() == 6
    candidates = {"eager": lambda: x * 2, "graph": replay, "more": lambda: [x * 2 for _ in range(20)]}
    for cache in ("warm", "cold"):
        result = timing.compare(candidates, rounds=5, cache=cache, device="cuda", min_time=1e-3)
        assert result.ratio("eager", "more") > 5
        assert result.environment["gpu"] == torch.cuda.get_device_name()


def test_json_holds_every_sample_and_the_environment():
    record = json.loads(
        json.dumps(timing.compare({"a": lambda: None, "b": lambda: None}, rounds=3).to_json())
    )
    assert len(record["timings"]["b"]["samples_s"]) == 3
    for key in ("recfuse", "torch", "numpy", "python", "cpu", "isa", "threads", "commit", "command", "time"):
        assert key in record["environment"]
    assert "environment" not in timing.compare({"a": lambda: None}, rounds=1).to_json(environment=False)


@pytest.mark.parametrize(
    "candidates, options",
    [({}, {}), ({"a": int}, {"rounds": 0}), ({"a": int}, {"inputs": []}), ({"a": int}, {"cache": "tepid"})],
)
def test_bad_arguments_are_named(candidates, options):
    with pytest.raises(ValueError, match=r"timing\.compare: found"):
        timing.compare(candidates, **options)


def test_an_exception_of_a_candidate_passes_through():
    with pytest.raises(ZeroDivisionError):
        timing.compare({"a": lambda: 1 / 0})


def test_the_load_of_other_processes_is_measured(monkeypatch, tmp_path):
    """All processes' time, less its own, over the time that passes."""
    monkeypatch.setattr(info, "STAT", tmp_path / "stat")
    walls, own = iter([10.0, 14.0]), iter([1.0, 3.0])
    hand = SimpleNamespace(perf_counter=lambda: next(walls), process_time=lambda: next(own))
    monkeypatch.setattr(timing, "time", hand)
    jiffies = os.sysconf("SC_CLK_TCK")

    calls = []

    def busy():
        calls.append(None)
        info.STAT.write_text(f"cpu {(100 + 4 * len(calls)) * jiffies} 0 0 9 9 0 0 0 0 0\ncpu0 1\n")

    busy()
    result = timing.compare({"a": busy}, rounds=1)  # a sample follows a call that is not timed
    assert result.other_load == (2 * 4 - 2) / 4


def test_load_is_unknown_where_the_system_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(info, "STAT", tmp_path / "absent")
    assert timing.compare({"a": lambda: None}, rounds=1).other_load is None


@pytest.mark.parametrize("limit, shown", [(0.0, True), (1e9, False)])
def test_a_bar_is_shown_for_long_runs_only(monkeypatch, capsys, limit, shown):
    monkeypatch.setattr(timing, "PROGRESS_AFTER", limit)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # there is no bar elsewhere
    timing.compare({"a": lambda: None}, rounds=2, label="a long run")
    assert ("a long run" in capsys.readouterr().err) == shown


def test_read_bandwidth_is_plausible():
    assert 1e8 < timing.read_bandwidth(size=64 << 20, rounds=3) < 1e13
