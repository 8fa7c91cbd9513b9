"""The tuner: unchanged on the CPU, on a GPU modelled by formulas."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import recfuse
from recfuse import _C
from recfuse.data import traces
from recfuse.data.table import hotness
from recfuse.nn import EmbeddingBag
from recfuse.ops.schedules import Schedule
from recfuse.tuner.compile import Compiler, compile_all
from recfuse.tuner.log import Log
from recfuse.tuner.native import alignment, power_of_two
from recfuse.tuner.table import candidates, cpu, gpu, measure, steps
from recfuse.tuner.table.measure import race
from recfuse.tuner.table.problem import Problem

DEFAULTS = Schedule("register", 8, 64, 512, 32, 1, 128)


def calls(hotness="medium", rows=2000, number=3, batch=64, pooling=16):
    trace = traces.generate(hotness, rows=rows)
    return [
        tuple(torch.from_numpy(one) for one in traces.bags(trace, batch, pooling, at)) for at in range(number)
    ]


class FakeGPU:
    """A device on which a formula gives the time of a schedule; lowering completes its open fields."""

    def __init__(self):
        self.best = Schedule("shared", 12, 128, 256, 48, 4, 64)
        self.pinning = 1.0  # factor on the time when rows are pinned
        self.short = 70.0  # microseconds of several bags a warp
        self.failing = "nothing"  # text in the schedules that do not run
        self.asked: list[str] = []
        self.timed: list[str] = []
        self.l2 = 32 << 10
        self.noise = np.random.default_rng(0)

    def lower(self, arch, dim, stride, align, *rest):
        dtype, index, offset, pooling, weighted, padded, check, lookups, bags, text, rows = rest
        assert (arch, dim, stride, align) == ("sm_90a", 32, 32, 16)
        assert (dtype, index, offset, pooling, weighted, padded, check) == (0, 1, 1, 0, False, False, True)
        assert (lookups, bags) == (1024, 64) and rows >= 100
        given = Schedule.parse(text)
        if given.bags is not None:
            assert given == Schedule(block=given.block, bags=given.bags)
            self.asked.append(text)
            return self.launches(arch, text, spills=0), text
        fields = {name: getattr(given, name) or getattr(DEFAULTS, name) for name in Schedule.__annotations__}
        if given.station == "none":
            fields["distance"] = 1
        whole = Schedule(**fields)
        if whole.station == "l1":
            raise ValueError("recfuse.embedding_bag: schedule: no l1 today\nlog")
        self.asked.append(text)
        spills = 8 if whole.distance * whole.warps > 1000 else 0
        return self.launches(arch, str(whole), spills), str(whole)

    @staticmethod
    def launches(arch, schedule, spills):
        fill = {"gpu": {"arch": arch}, "file": None, "kernel": "fill", "defines": ""}
        return [fill, {**fill, "file": "bag.cu", "kernel": schedule, "defines": str(spills)}]

    def compile(self, arch, file, kernel, defines):
        assert (arch, file) == ("sm_90a", "bag.cu") and Schedule.parse(kernel)
        return {"registers": 40, "spill_bytes": int(defines)}

    def us(self, text):
        one, us = Schedule.parse(text or str(DEFAULTS)), 50.0
        if one.bags is not None:
            return self.short * (1 + 0.05 * abs(np.log2(one.bags / 8)))
        us *= 1.0 if one.station == self.best.station else 1.15
        for name in ("distance", "threads", "block", "warps", "parts", "segment"):
            us *= 1 + 0.05 * abs(np.log2(getattr(one, name) / getattr(self.best, name)))
        return us

    def measure(self, device, stream, table, batches, pooling, padding, check, schedules, rounds, pinned):
        assert (device, stream, pooling, padding, check) == (0, 77, 0, -1, True)
        assert len(table) == 5 and len(batches[0]) == 9 and all(len(one) == 9 for one in batches)
        if broken := [text for text in schedules if self.failing in text]:
            raise RuntimeError(f"does not launch: {broken[0]}")
        self.timed += schedules
        factor = 1.0 if pinned is None else self.pinning
        times = np.array([[self.us(text) * factor * 1e-6] * rounds for text in schedules])
        return times * self.noise.normal(1, 0.001, times.shape)


@pytest.fixture
def device(monkeypatch):
    fake = FakeGPU()
    monkeypatch.setattr(_C, "embedding_bag_lower", fake.lower, raising=False)
    monkeypatch.setattr(_C, "kernel_compile", fake.compile)
    monkeypatch.setattr(_C, "embedding_bag_measure", fake.measure, raising=False)
    properties = SimpleNamespace(
        L2_cache_size=fake.l2, max_threads_per_multi_processor=2048, multi_processor_count=132,
        regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=228 << 10,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(gpu, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(gpu, "unpin", lambda weight: None)
    return fake


def search(budget=60.0, pin=None, seed=0, batches=None, rows=2000, predict=False):
    problem = Problem.of(EmbeddingBag(rows, 32, mode="sum"), batches or calls(rows=rows))
    trace = hotness(problem.batches)
    deadline = time.monotonic() + budget
    return gpu.search(problem, trace, deadline, progress=False, pin=pin, seed=seed, predict=predict)


def steps_of(found):
    return list(dict.fromkeys(one.step for one in found.decisions))


def test_the_search_finds_the_best_and_records_its_decisions(device):
    found = search()
    won = Schedule.parse(found.schedule)
    assert (won.station, won.distance, won.parts, won.segment) == ("shared", 12, 4, 64)
    assert found.best_us < 1.1 * 50 and found.best_us < found.default_us
    assert found.default_us == pytest.approx(device.us(""), rel=0.01)
    assert steps_of(found) == [
        "default", "floor", "short bags", "occupancy", "prefetch", "threads", "parts", "neighbours",
        "pinning", "confirm",
    ]  # fmt: skip
    assert found.decisions[0].candidate == "" and str(DEFAULTS) in found.decisions[0].why
    assert all(one.why for one in found.decisions)
    assert found.floor_us > 0 and "TB/s" in found.decisions[1].why


def test_a_prediction_leaves_out_two_thirds(device):
    whole, found = search(), search(predict=True)
    assert steps_of(found) == steps_of(whole)
    left = {one.step: one for one in found.decisions if "the model ranks" in one.why}
    assert set(left) == {"occupancy", "prefetch"} and not any(one.kept for one in left.values())
    assert left["prefetch"].candidate.endswith(" candidates")
    timed, of_whole = (
        sum(one.step in left and one.us is not None for one in search.decisions) for search in (found, whole)
    )
    assert 0 < timed < 0.45 * of_whole
    assert not any("the model ranks" in one.why for one in whole.decisions)


def test_short_bags_can_win(device):
    device.short = 20.0
    won = Schedule.parse(search().schedule)
    assert won.bags == 8 and won == Schedule(block=won.block, bags=8)


@pytest.mark.parametrize("seed", (0, 1))
def test_no_candidate_is_compiled_twice_and_a_slow_one_is_dropped_early(device, seed):
    found = search(seed=seed)
    assert len(device.asked) == len(set(device.asked)) > 100
    slow = [one for one in found.decisions if one.us is not None and one.why.endswith("3 rounds")]
    assert slow and all(float(one.why.partition("x")[0]) < 1 / 1.29 for one in slow)
    won, again = (Schedule.parse(one) for one in (found.schedule, search(seed=seed + 2).schedule))
    assert won.but(warps=None) == again.but(warps=None)


def test_spills_and_errors_cannot_win(device):
    device.best = Schedule("l1", 32, 64, 512, 64, 1, 128)
    device.failing = "station=local distance=4"
    found = search()
    whys = [one.why for one in found.decisions]
    assert any("spills 8 bytes with 40 registers" in why for why in whys)
    assert any(why == "does not compile: recfuse.embedding_bag: schedule: no l1 today" for why in whys)
    assert any(why.startswith("does not run: does not launch") for why in whys)
    assert Schedule.parse(found.schedule).station != "l1"


def test_the_default_stays_where_nothing_beats_it(device):
    device.best = DEFAULTS
    found = search()
    assert found.schedule == "" and found.best_us == found.default_us
    assert found.decisions[-1].kept


def test_gains_of_less_than_a_percent_are_ignored(device, monkeypatch):
    device.best = DEFAULTS.but(block=256)
    monkeypatch.setattr(FakeGPU, "us", lambda self, text: 49.7 if "block=256" in text else 50.0)
    found = search()
    assert found.schedule == ""
    assert found.decisions[-1].why == "the defaults: the gain is too small"


def test_nothing_is_swept_at_the_floor(device, monkeypatch):
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e8)
    found = search(pin=False)
    assert steps_of(found) == ["default", "floor", "pinning", "confirm"]
    assert "no schedule can be faster" in found.decisions[1].why


def test_rows_that_fit_in_l2_have_no_floor_and_are_not_swept_in_parts(device):
    found = search(rows=100, batches=calls(rows=100))
    assert found.floor_us is None and "fit in L2" in found.decisions[1].why
    assert "parts" not in steps_of(found)
    (pinning,) = [one for one in found.decisions if one.step == "pinning"]
    assert pinning.why == "L2 holds all rows in use by itself"


@pytest.mark.parametrize(("factor", "won"), ((0.8, True), (1.2, False), (0.995, False)))
def test_pinning_has_to_pay_for_its_refreshes(device, factor, won):
    device.pinning = factor
    found = search(batches=calls("high", rows=20_000), rows=20_000)
    tried = [one for one in found.decisions if one.step == "pinning"]
    assert len(tried) == 3 and any(one.kept for one in tried) == won
    assert (found.pinned is not None) == won
    if won:
        assert len(found.hottest) == found.pinned.rows == device.l2 * found.pinned.l2_fraction // 128
        lookups = torch.cat([indices for indices, _ in calls("high", rows=20_000)]).numpy()
        assert found.hottest[0] == traces.hottest(lookups, 1)[0]


def test_pinning_is_tried_as_asked(device):
    uniform = calls("random", rows=20_000, number=1)
    whys = {
        pin: [
            one.why
            for one in search(pin=pin, batches=uniform, rows=20_000).decisions
            if one.step == "pinning"
        ]
        for pin in (None, True, False)
    }
    assert "no rows stay hot" in whys[None][0]
    assert len(whys[True]) == 3 and "refreshes included" in whys[True][0]
    assert whys[False] == ["disabled by pin=False"]


def test_without_time_the_defaults_are_measured_all_the_same(device):
    found = search(budget=0)
    assert found.schedule == "" and found.default_us > 0
    assert set(device.timed) == {""}
    assert any("budget is spent" in one.why for one in found.decisions)


def test_a_default_that_does_not_compile_is_the_users_to_see(device, monkeypatch):
    def missing(*arguments):
        raise NotImplementedError("recfuse: no NVRTC; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(_C, "kernel_compile", missing)
    with pytest.raises(NotImplementedError, match="pip install"):
        search()


def test_a_race_drops_slow_candidates_and_returns_failed_ones_separately():
    def times(names, rounds):
        if any("broken" in name for name in names):
            raise RuntimeError("no")
        return np.array([[{"a": 1.0, "b": 1.05, "c": 1.2, "d": 2.0}[name]] * rounds for name in names])

    results, errors = race(times, ["d", "broken", "c", "b", "a"], time.monotonic() + 60)
    assert {name: result.rounds for name, result in results.items()} == {"a": 17, "b": 17, "c": 8, "d": 3}
    assert results["b"].us == pytest.approx(1.05e6)
    assert errors == {"broken": "no"}
    results, _ = race(times, ["a", "b"], time.monotonic() - 1)
    assert results["a"].rounds == 3
    for names in (["broken"], ["broken", "broken too"]):
        with pytest.raises(RuntimeError, match="no"):
            race(times, names, time.monotonic() + 60)


@pytest.mark.parametrize("error", (None, KeyboardInterrupt))
def test_compiling_ends_its_threads(monkeypatch, error):
    begun = []

    def slow(number):
        begun.append(number)
        time.sleep(0.02)
        if number == 3:
            raise ValueError("three")
        return {"schedule": str(number)}

    if error is not None:
        result, waited = Compiler.result, []

        def interrupt(compiler, name):
            waited.append(name)
            if len(waited) > 1:
                raise error
            return result(compiler, name)

        monkeypatch.setattr(Compiler, "result", interrupt)
        with pytest.raises(error):
            compile_all({number: partial(slow, number) for number in range(100)})
        for thread in threading.enumerate():  # an interrupt does not wait for running compilations
            if thread.name.startswith("recfuse-compile"):
                thread.join(timeout=60)
        assert len(begun) < 100
    else:
        results = compile_all({number: partial(slow, number) for number in range(8)})
        assert isinstance(results.pop(3), ValueError)
        assert results == {number: {"schedule": str(number)} for number in range(8) if number != 3}
        assert compile_all({1: partial(slow, 1)}, deadline=time.monotonic() - 1) == {}
    assert not [one for one in threading.enumerate() if one.name.startswith("recfuse-compile")]


def test_candidates_are_different_and_possible():
    problem = Problem.of(EmbeddingBag(2000, 32, mode="sum"), calls())
    best = [DEFAULTS, DEFAULTS.but(station="local")]
    for found in (
        candidates.occupancies(48),
        candidates.prefetches([32, 48, 32]),
        candidates.shapes(problem, best),
        candidates.sweeps(best),
        candidates.neighbours(Schedule("register", 1, 1024, 1024, 64, 16, 256), 64),
        candidates.neighbours(DEFAULTS.but(warps=None), 64),
    ):
        assert len(found) == len(set(found)) > 0
        for one in found:
            assert Schedule.parse(str(one)) == one
            assert (one.warps or 1) <= 64 and (one.threads or 1) <= (one.block or 1024) <= 1024
    assert {one.threads for one in candidates.shapes(problem, best)} == {8, 16, 32, 64, 128}
    plain = DEFAULTS.but(station="none", distance=1)
    assert {one.distance for one in candidates.neighbours(plain, 64)} == {1}
    assert {one.station for one in candidates.prefetches([None])} == {"register", "shared", "local", "l1"}
    assert max(one.warps or 0 for one in candidates.occupancies(48)) == 48


@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
def test_on_the_cpu_the_distance_is_tuned(mode):
    module = EmbeddingBag(5000, 16, mode=mode, padding_idx=0)
    plan = recfuse.tune(module, calls(rows=5000), budget_s=20)
    assert plan.device.type == "cpu" and plan.matches(module)
    assert plan.seconds < 25 and plan.pinned is None
    assert plan.schedule == "" or plan.distance >= 1
    timed = {one.candidate for one in plan.decisions if one.step == "prefetch"}
    assert {"distance=1", "distance=64", ""} <= timed
    assert module.schedule == ""


def test_on_the_cpu_the_default_is_measured_without_time():
    plan = recfuse.tune(torch.nn.EmbeddingBag(100, 4), [torch.randint(0, 100, (5, 3))], budget_s=0)
    assert plan.schedule == "" and plan.default_us == plan.best_us > 0
    assert [one.step for one in plan.decisions] == ["default", "confirm"]


def test_the_best_distance_is_chosen_on_the_cpu(monkeypatch):
    monkeypatch.setattr(
        cpu, "_compare", lambda problem, distances, *_, **__: {one: 50.0 + abs(one - 24) for one in distances}
    )
    plan = recfuse.tune(EmbeddingBag(2000, 8), calls(), budget_s=30)
    assert plan.schedule == "distance=24" and plan.speedup == 1.5
    assert [one.kept for one in plan.decisions if one.step == "confirm"] == [True, False]
    # Above 1 is faster: the default (-1) takes 75 µs, a distance of 64 takes 90 µs.
    timed = [one for one in plan.decisions if one.step in ("prefetch", "confirm")]
    ratios = {one.candidate: float(one.why.partition("x")[0]) for one in timed if "x as fast" in one.why}
    assert ratios["distance=24"] == 1.5 and ratios["distance=1"] == pytest.approx(75 / 73, abs=0.005)
    assert ratios[""] == 1 and min(ratios.values()) == pytest.approx(75 / 90, abs=0.005)
    assert str(plan).split("\n")[-1].startswith("winner: distance=24: 1.50x as fast as the defaults")


def test_on_the_cpu_the_default_wins_where_nothing_is_faster(monkeypatch):
    monkeypatch.setattr(
        cpu, "_compare", lambda problem, distances, *_, **__: {one: 50.0 + one + 1 for one in distances}
    )
    plan = recfuse.tune(EmbeddingBag(2000, 8), calls(), budget_s=30)
    (won,) = [one for one in plan.decisions if one.step == "confirm"]
    assert plan.schedule == "" and won.candidate == "" and won.kept
    assert "│ won " in str(plan)


def test_per_sample_weights_and_last_offsets():
    module = EmbeddingBag(50, 8, mode="sum", include_last_offset=True)
    batch = (torch.randint(0, 50, (12,)), torch.tensor([0, 4, 9]), torch.rand(12))
    plan = recfuse.tune(module, [batch], budget_s=0)
    assert plan.table.weighted and plan.trace.bags == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    (
        ((torch.nn.Linear(2, 2), []), TypeError, "module is a Linear"),
        ((EmbeddingBag(5, 2), []), ValueError, "batches is empty"),
        ((EmbeddingBag(5, 2), [torch.tensor([[7]])]), IndexError, "7"),
        (
            (EmbeddingBag(5, 2), [torch.empty(2, 0, dtype=torch.int64)]),
            ValueError,
            "expected lookups to time",
        ),
        ((EmbeddingBag(5, 2), [torch.tensor([[1]])], -1.0), ValueError, "budget_s is -1.0"),
        ((EmbeddingBag(5, 2), [torch.tensor([[1]])], float("nan")), ValueError, "budget_s is nan"),
        ((EmbeddingBag(5, 2, dtype=torch.float64), [torch.tensor([[1]])]), NotImplementedError, "float64"),
        ((EmbeddingBag(5, 2, device="meta"), [torch.tensor([[1]])]), NotImplementedError, "meta"),
    ),
)
def test_bad_arguments(arguments, kind, words):
    with pytest.raises(kind, match=words):
        recfuse.tune(*arguments)


def test_alignment_and_powers():
    def of(weight):
        return Problem(weight, "sum", -1, []).alignment

    assert [of(torch.empty(3, dim)) for dim in (1, 2, 3, 4, 6, 64)] == [4, 8, 4, 16, 8, 16]
    assert of(torch.empty(3, 65)[:, :64]) == 4
    assert of(torch.empty(3, 3, dtype=torch.float16)) == 2
    assert alignment(24, 48) == 8
    assert [power_of_two(least) for least in (0, 1, 2, 3, 5, 8)] == [1, 1, 2, 4, 8, 8]


def test_the_bench_gives_addresses_that_live(device):
    problem = Problem.of(
        EmbeddingBag(50, 32, mode="sum", dtype=torch.float16),
        [
            (torch.randint(0, 50, (6,)), torch.tensor([0, 2]), torch.rand(6, dtype=torch.float16)),
            torch.tensor([[1]]),
        ],
    )
    bench = measure.Bench(problem)
    first, second = bench._batches
    assert first[1:3] == (6, 1) and first[4:7] == (2, 1, False) and first[7] != 0
    assert second[7] == 0 and first[8] == second[8] == bench._output.data_ptr()
    assert bench._weights[0].dtype == torch.float32 and bench._table[1:] == (50, 32, 32, 1)
    assert steps.Search(problem, "sm_90a", 0, None, 0).best == ""


def test_a_schedule_is_confirmed_without_the_pinning_that_failed(monkeypatch):
    state = Log()
    state.best, state.us = "distance=4", {"": 10.0}
    state.bench = SimpleNamespace(measure=lambda schedules, rounds: np.array([[8e-6], [10e-6]]))
    monkeypatch.setattr(gpu, "_in_turns", lambda *_: (11.0, 10.0))
    found = gpu._confirm(state, None, SimpleNamespace(), torch.arange(3))
    assert (found.schedule, found.pinned) == ("distance=4", None)
    assert [(one.candidate, one.kept) for one in state.decisions] == [
        ("distance=4", False), ("", True), ("distance=4", True), ("", False),
    ]  # fmt: skip
