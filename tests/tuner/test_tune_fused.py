"""The tuner of collections, on a GPU modelled by formulas; one file because all of it runs on that."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

import recfuse
from recfuse import _C
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.ops.schedules import FusedSchedule
from recfuse.tuner.collection import local_stage, search
from recfuse.tuner.collection.candidates import _LONGEST_SLOT, classes_of, mixtures, units_of
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from support.modelled_gpu import (
    BEST_WARPS,
    COLUMNS,
    POOL,
    STAGED,
    FakeGPU,
    best_rows,
    calls,
    collection_of,
    install,
)

WARPS = search._WARPS


@pytest.fixture
def device(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def collection():
    return collection_of()


def tune(collection, budget=60.0, batches=None, **options):
    given = calls(collection) if batches is None else batches
    return recfuse.tune(collection, given, budget, progress=False, **options)


def us_of(device, collection, rows, warps):
    bench = FusedBench(FusedProblem.of(collection, calls(collection)))
    noise, device.noise = device.noise, 0.0
    us = bench.seconds(rows[None], warps, 1, [0, 1, 2])[0, 0] * 1e6
    device.noise = noise
    return us


@pytest.mark.parametrize("noise", (0.0, 0.003, 0.03))
def test_the_search_finds_the_best_schedules_and_occupancy(device, collection, noise):
    device.noise = noise
    plan = tune(collection)
    assert plan.warps == BEST_WARPS
    best = us_of(device, collection, best_rows(device, collection), BEST_WARPS)
    assert us_of(device, collection, plan.rows(), plan.warps) < 1.02 * best
    assert plan.speedup > 1.2 and plan.default_us > plan.best_us > 0
    one_hot = {plan.schedules[plan.schedule_of[feature]] for feature in range(0, 24, 3)}
    columns = "kind=columns threads=1 distance=1 split=1"
    told = [one for one in plan.decisions if one.step == f"local {BEST_WARPS}" and columns in one.candidate]
    assert len(told) == 2 and all(one.kept and "4 of 4 features" in one.why for one in told)
    assert one_hot == {columns} or noise == 0.03  # 0.2% of a launch: less than such noise
    assert plan.expected[:3] == [16, -1, plan.expected[2]] and 16 * 20 <= plan.expected[2] < 16 * 40
    assert {one.warps for one in plan.occupancies if one.tuned_us} == set(WARPS)


def test_tables_that_are_staged_by_default_may_stay_so(device, collection, monkeypatch):
    """Some features are much faster so, and the others by schedules of their own."""
    staged, direct = [2, 5, 8], device.cost

    def cost(call, feature, row, lookups):
        return direct(call, feature, row, lookups) * (0.2 if feature in staged and row[0] == 0 else 1)

    monkeypatch.setattr(device, "cost", cost)
    monkeypatch.setattr(FusedBench, "staged", lambda bench: staged)
    plan = tune(collection)
    assert plan.warps == BEST_WARPS and plan.speedup > 1.2
    assert all((plan.rows()[feature, :-1] == 0).all() == (feature in staged) for feature in (2, 4, 5, 7, 8))
    tried = [
        one.candidate for one in plan.decisions if one.step == "global" and "3 tables staged" in one.candidate
    ]
    assert f"tuned, {BEST_WARPS} warps, 3 tables staged" in tried


def test_the_tuner_knows_default_staging(device):
    few, many = collection_of((8,), 3, 64), collection_of((8,), 450, 64)
    for one, found in ((few, []), (many, list(range(450)))):
        indices, offsets = calls(one, 1, rows=64, bags=40)[0]
        problem = FusedProblem.of(one, [(indices[:0], offsets * 0), (indices, offsets)])
        long = [feature for feature in found if feature % 3 and feature != 1]
        assert FusedBench(problem).staged() == long


def test_every_decision_is_told(device, collection):
    plan = tune(collection)
    steps = list(dict.fromkeys(one.step for one in plan.decisions))
    assert steps[0] == "occupancy" and steps[-1] == "confirm"
    assert {f"local {warps}" for warps in WARPS} <= set(steps[: steps.index("global")])
    assert all(one.why for one in plan.decisions) and len(plan.decisions) < 300
    text = str(plan)
    assert "24, 2 kinds of tables" in text and f"warps an SM  {BEST_WARPS}" in text and "kind=columns" in text


def test_schedules_are_the_same_again_and_threads_end(device, collection):
    first, second = (tune(collection, seed=3).rows().tolist() for _ in range(2))
    assert first == second
    assert not [one for one in threading.enumerate() if one.name.startswith("recfuse-compile")]


def test_without_time_the_defaults_are_measured_all_the_same(device, collection):
    plan = tune(collection, budget=0)
    assert plan.schedules == [""] and plan.warps == 0 and plan.default_us == plan.best_us > 0
    assert not device.timed and {warps for warps, _ in device.raced} == {0}
    assert any("budget is spent" in one.why for one in plan.decisions)
    assert plan.expected[1] == -1 and min(plan.expected[2:]) >= 16


def test_a_short_budget_uses_finished_measurements(device, collection, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    device.compile_s = 0.1
    plan = tune(collection, budget=2.0)
    assert plan.seconds < 4
    assert any("budget is spent" in one.why for one in plan.decisions)
    assert 1 <= len({one.warps for one in plan.occupancies if one.tuned_us}) < len(WARPS)


def test_finished_measurements_are_reused(device, collection, tmp_path):
    path = tmp_path / "tuning.json"
    first = tune(collection, resume=path)
    count = len(device.timed)
    assert count and len(json.loads(path.read_text())["occupancies"]) == len(WARPS)
    second = tune(collection, resume=path)
    assert len(device.timed) == count
    assert sum(one.why == "taken from an earlier run" for one in second.decisions) == len(WARPS)
    assert first.warps == second.warps
    other = tune(collection, batches=calls(collection, seed=1), resume=path)
    assert len(device.timed) > count
    assert other.decisions[0].why == "belongs to another search: started again"
    assert [one.name for one in tmp_path.iterdir()] == ["tuning.json"]


def test_a_stopped_search_resumes(device, collection, tmp_path, monkeypatch):
    path, measure = tmp_path / "tuning.json", device.measure

    def stop(*arguments):
        if arguments[-1] and arguments[5] == 24:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(_C, "fused_embedding_bag_measure", stop)
    with pytest.raises(KeyboardInterrupt):
        tune(collection, resume=path)
    for thread in threading.enumerate():  # an interrupt does not wait for running compilations
        if thread.name.startswith("recfuse-compile"):
            thread.join(timeout=60)
    assert not [one for one in threading.enumerate() if one.name.startswith("recfuse-compile")]
    kept = json.loads(path.read_text())["occupancies"]
    assert str(BEST_WARPS) in kept and "24" not in kept
    monkeypatch.setattr(_C, "fused_embedding_bag_measure", measure)
    device.timed.clear()
    assert tune(collection, resume=path).warps == BEST_WARPS
    assert {str(warps) for warps, _ in device.timed}.isdisjoint(kept)


@pytest.mark.parametrize(
    "damage",
    (
        lambda record: record["schedules"].update(of="0*3"),
        lambda record: record["schedules"].update(of="99*24"),
        lambda record: record.pop("schedules"),
        lambda record: record["groups"].append({"name": "x"}),
    ),
)
def test_damaged_measurements_are_made_again(device, collection, tmp_path, damage):
    path = tmp_path / "tuning.json"
    tune(collection, resume=path)
    whole = json.loads(path.read_text())
    damage(whole["occupancies"][str(BEST_WARPS)])
    path.write_text(json.dumps(whole))
    device.timed.clear()
    plan = tune(collection, resume=path)
    assert {warps for warps, _ in device.timed} == {BEST_WARPS}
    assert any("not resumed, damaged" in one.why for one in plan.decisions)


@pytest.mark.parametrize("text", ("hello", "[]", '{"recfuse_plan": 1}'))
def test_a_file_of_something_else_is_not_overwritten(device, collection, tmp_path, text):
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no finished measurements"):
        tune(collection, resume=path)
    assert path.read_text() == text


def test_spills_are_reported_and_measured(device, collection, monkeypatch):
    device.spilling = lambda row, warps: row[2] >= 4 and (warps or 32) >= BEST_WARPS
    cost = FakeGPU.cost

    def slower(self, call, feature, row, lookups):
        return cost(self, call, feature, row, lookups) * (2 if row[2] >= 4 else 1)

    monkeypatch.setattr(FakeGPU, "cost", slower)
    plan = tune(collection)
    told = {one.step for one in plan.decisions if "some candidates spill" in one.why}
    assert told == {f"local {warps}" for warps in WARPS if warps >= BEST_WARPS} and plan.warps == BEST_WARPS
    assert not any(device.spilling(row, plan.warps) for row in plan.rows())


def test_kernels_that_do_not_compile_or_run_are_passed_over(device, collection):
    best, second, third = sorted(WARPS, key=lambda warps: abs(np.log2(warps / BEST_WARPS)))[:3]
    device.broken_to_compile = lambda row, warps: row[0] == STAGED and warps == second
    device.broken_to_run = lambda row, warps: warps == best
    plan = tune(collection)
    whys = {one.why for one in plan.decisions}
    assert "does not compile: recfuse.fused_embedding_bag: broken" in whys
    assert "does not run: does not launch" in whys
    assert plan.warps == third and plan.speedup > 1.2


def test_a_default_that_does_not_compile_is_the_users_to_see(device, collection):
    device.broken_to_compile = lambda row, warps: True
    with pytest.raises(ValueError, match="broken"):
        tune(collection)


def test_gains_of_less_than_a_percent_are_ignored(device, collection, monkeypatch):
    monkeypatch.setattr(FakeGPU, "cost", lambda self, call, feature, row, lookups: float(lookups))
    monkeypatch.setattr(search, "_WARPS", (32,))
    plan = tune(collection)
    assert plan.schedules == [""] and plan.warps == 0 and plan.speedup == 1.0


def test_refinement_measures_the_whole_launch(device, collection, monkeypatch):
    """Misleading cycles: the local stage prefers one row in flight, the whole kernel four."""
    measure = device.measure

    def misled(*arguments):
        found = measure(*arguments)
        sets, timed = arguments[4], arguments[-1]
        return np.where(sets[:, :, 2] == 1, 0.5, 1.0) * found if timed else found

    monkeypatch.setattr(_C, "fused_embedding_bag_measure", misled)
    monkeypatch.setattr(local_stage, "_RANKED", 40)
    plan = tune(collection)
    tried = [one for one in plan.decisions if one.step.startswith("refine")]
    assert any(one.kept for one in tried) and any("as the best so far" in one.why for one in tried)
    best = us_of(device, collection, best_rows(device, collection), BEST_WARPS)
    assert us_of(device, collection, plan.rows(), plan.warps) < 1.05 * best


def test_a_kernel_has_no_more_schedules_than_it_can(device, collection, monkeypatch):
    monkeypatch.setattr(local_stage, "_MOST_CHOSEN", 2)
    plan = tune(collection)
    assert any("a kernel has at most 2" in one.why for one in plan.decisions)
    assert plan.speedup > 1.0


def test_classes_and_candidates(device):
    rows = 4 * _LONGEST_SLOT  # the most of a bag that four slots may have
    tables = [Table(2 * rows, 16), Table(50, 16, mode="mean"), Table(200, 16), Table(200, 6), Table(9, 16)]
    mixed = FusedEmbeddingBagCollection(tables)
    lengths = torch.tensor([[rows, rows], [1, 1], [1, 1], [30, 30], [0, 0]])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)))
    batch = (torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets)
    problem = FusedProblem.of(mixed, [batch])
    assert problem.alignment(0) == (16, 8) and problem.alignment(3)[0] == 8
    classes = {one.name: one for one in classes_of(problem, FusedBench(problem))}
    names = ["16 float32 sum store 8", "6 float32 sum align 8 store 8", "16 float32 mean store 8"]
    assert list(classes) == names
    first = classes[names[0]]
    assert first.features == [0, 2] and str(FusedSchedule.of_row(first.candidates[0])) == ""
    long, short = ([tuple(first.candidates[place]) for place in own] for own in first.allowed)
    assert (COLUMNS, 1, 1, 1, 0) in short and (COLUMNS, 1, 1, 1, 0) not in long
    assert {row[1] for row in short if row[0] == POOL} == {4}
    assert {row[1] for row in long if row[0] == POOL and row[3] == 1} == {16, 32}
    assert {row[3] for row in long if row[0] == POOL} == {1, 2}
    assert [any(row[0] == STAGED for row in own) for own in (long, short)] == [True, False]
    deep = [[row for row in first.at(warps)[0] if first.candidates[row, 2] == 16] for warps in WARPS]
    assert not deep[0] and deep[-1]


@pytest.mark.parametrize("most", (8, 48))
def test_all_candidates_are_mixed_evenly(device, collection, most):
    problem = FusedProblem.of(collection, calls(collection))
    classes = classes_of(problem, FusedBench(problem))
    kernels = units_of(classes, 16, most)
    seen: dict[str, set[tuple[int, int]]] = {one.name: set() for one in classes}
    for units in kernels:
        assert sum(unit.variants for unit in units) <= most
        sets, taken = mixtures(units, problem.defaults(), 0)
        assert (sets[:, :, -1] == problem.expected_sixteenths).all()
        assert not sets[:, 1, :-1].any() and (taken[:, 1] == -1).all()  # always empty
        for unit in units:
            for feature, places in zip(unit.own.features, unit.choices, strict=True):
                assert set(taken[:, feature]) == set(places)
                seen[unit.own.name] |= {(feature, place) for place in places}
                for number in range(len(sets)):
                    wanted = unit.own.candidates[taken[number, feature], :-1]
                    assert (sets[number, feature, :-1] == wanted).all()
            long = [feature for feature in unit.own.features if feature % 3 and feature != 1]
            widest = max(map(len, unit.choices))
            assert len(set(taken[0, long])) >= min(len(long), widest) // 2
    for own in classes:
        wanted = {(f, place) for f, places in zip(own.features, own.at(16), strict=True) for place in places}
        assert seen[own.name] == wanted


def test_parts_of_a_class_are_compared_by_the_default():
    nan = np.nan
    parts = [np.array([[[10.0, 8.0, nan]]]), np.array([[[20.0, nan, 12.0]]])]
    merged = local_stage._merged(parts)
    assert merged[0, 0].tolist() == pytest.approx([15.0, 12.0, 9.0])


def test_a_features_own_choice_must_be_worth_it():
    cost = np.array([10.0, 9.9, 9.0, np.nan])
    assert local_stage._own_choice(cost, 1, 0.03) == 2
    assert local_stage._own_choice(cost, 1, 0.2) == 1
    assert local_stage._own_choice(cost, 3, 0.2) == 2
    assert local_stage._own_choice(np.full(4, np.nan), 1, 0.2) == 0


def test_per_sample_weights_reach_the_device_as_float32(device, collection):
    batches = [(*batch, torch.rand(batch[0].numel(), dtype=torch.float16)) for batch in calls(collection)]
    bench = FusedBench(FusedProblem.of(collection, batches))
    assert bench.problem.form.weighted and bench._weights[0].dtype == torch.float32
    assert bench._batches[0][6] == bench._weights[0].data_ptr()
    device.weighted = True
    assert bench.kernel("sm_90a", bench.problem.defaults()[None], 0, False)()["registers"] == 64


def test_batches_are_chosen_from_small_to_large(device, collection):
    batches = [calls(collection, number=1, bags=bags)[0] for bags in (9, 3, 5, 7, 1)]
    problem = FusedProblem.of(collection, batches)
    assert problem.some_batches(3) == [4, 2, 0] and sorted(problem.some_batches(9)) == [0, 1, 2, 3, 4]
    assert problem.bags == 5
    empty = torch.zeros(24 * 4 + 1, dtype=torch.int32)
    problem = FusedProblem.of(collection, [(empty[:0], empty), *batches])
    assert problem.some_batches(3) == [5, 3, 1]


def bad(change):
    return lambda collection: change(calls(collection))


@pytest.mark.parametrize(
    ("batches", "kind", "words"),
    (
        (lambda c: [], ValueError, "batches is empty"),
        (lambda c: [torch.zeros(3)], TypeError, "batches[0] is a Tensor"),
        (bad(lambda b: [(b[0][0], b[0][1][:-1])]), ValueError, "[features * bags + 1] with 24 features"),
        (bad(lambda b: [(b[0][0].float(), b[0][1])]), TypeError, "torch.float32 indices"),
        (bad(lambda b: [(b[0][0][:-1], b[0][1])]), ValueError, "expected offsets that rise from 0"),
        (bad(lambda b: [(b[0][0], b[0][1].flip(0))]), ValueError, "expected offsets that rise from 0"),
        (bad(lambda b: [(*b[0], torch.ones(3))]), ValueError, "per_sample_weights [3]"),
        (bad(lambda b: [b[0], (b[1][0].long(), b[1][1])]), ValueError, "expected batches of one form"),
        (bad(lambda b: [(b[0][0] + 200, b[0][1])]), IndexError, "200"),
        (lambda c: [(torch.zeros(0, dtype=torch.int32), torch.zeros(25, dtype=torch.int32))], ValueError,
         "expected lookups to time"),
    ),
)  # fmt: skip
def test_bad_batches(device, collection, batches, kind, words):
    with pytest.raises(kind) as raised:
        tune(collection, batches=batches(collection))
    assert words in str(raised.value)


def test_bad_arguments(device, collection):
    with pytest.raises(ValueError, match="budget_s is -1"):
        tune(collection, budget=-1)
    with pytest.raises(ValueError, match="pin is True"):
        tune(collection, pin=True)
    with pytest.raises(ValueError, match="expected None for a single table"):
        recfuse.tune(recfuse.nn.EmbeddingBag(5, 2), [torch.tensor([[1]])], 0, resume="x")


def test_on_the_cpu_there_is_nothing_to_tune(collection):
    with pytest.raises(NotImplementedError, match=r"on the CPU.*nothing to tune.*collection\.cuda\(\)"):
        recfuse.tune(collection, calls(collection))
    meta = FusedEmbeddingBagCollection([(5, 4)], device="meta")
    with pytest.raises(NotImplementedError, match="no fused kernel for this collection on meta"):
        recfuse.tune(meta, [(torch.tensor([1]), torch.tensor([0, 1]))])
