"""Plans: saved and read back, refused if damaged, applied, and compared with the present state."""

from __future__ import annotations

import pytest
import torch

import recfuse
from recfuse import Plan
from recfuse.data.table import batches_of, hotness
from recfuse.nn import EmbeddingBag
from recfuse.plan.report import Decision
from recfuse.plan.table import Pinned
from support.bag_plan import at, batches, plan_for


@pytest.fixture
def module():
    return EmbeddingBag(100, 4, mode="sum")


@pytest.fixture
def path(tmp_path, module):
    where = tmp_path / "plan.json"
    plan_for(module).save(where)
    return where


@pytest.mark.parametrize("pinned", (None, Pinned(10, 0.5, "abc")))
@pytest.mark.parametrize("floor", (None, 8.0))
def test_saved_plans_load(tmp_path, module, pinned, floor):
    plan = plan_for(module, pinned=pinned, floor_us=floor, hottest=torch.arange(10))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.hottest is None
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    assert loaded.distance == 4 and loaded.speedup == 2.0


def test_a_save_that_fails_leaves_the_file_as_it_was(path, module):
    before = path.read_text()
    with pytest.raises(ValueError):
        plan_for(module, best_us=float("nan")).save(path)
    assert path.read_text() == before
    assert [one.name for one in path.parent.iterdir()] == ["plan.json"]
    with pytest.raises(OSError):
        plan_for(module).save(path.parent / "absent" / "plan.json")


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (at("recfuse_plan", value=2), "format 2; expected 1 to 1. Update recfuse"),
        (at("recfuse_plan", drop=True), 'has no number under "recfuse_plan"; expected a plan'),
        (at("kind", value="fused"), "a plan for 'fused'"),
        (at("schedule", drop=True), "schedule is missing"),
        (at("schedule", value="station=moon"), "station is 'moon'; expected none"),
        (at("schedule", value="distance=4 distance=8"), "'distance=8' is unknown or given twice"),
        (at("schedule", value="distance=-1"), "distance is '-1'; expected a whole number"),
        (at("table", "rows", value="100"), "table.rows is '100'; expected int"),
        (at("table", "rows", value=True), "table.rows is True; expected int"),
        (at("table", value=[]), "table is []; expected an object"),
        (at("trace", "sha256", drop=True), "trace.sha256 is missing"),
        (at("best_us", value=None), "best_us is None; expected float"),
        (at("floor_us", value="8"), "floor_us is '8'; expected float | null"),
        (at("pinned", value={"rows": 3}), "pinned.l2_fraction is missing"),
        (at("decisions", value={}), "decisions is {}; expected a list"),
        (at("decisions", 1, "kept", value=1), "decisions[1].kept is 1; expected bool"),
    ),
)
def test_a_damaged_file_is_refused_by_name_and_key(path, change, words):
    change(path)
    with pytest.raises(ValueError) as raised:
        Plan.load(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_files_without_a_json_object_are_refused(path):
    for text in ("{", "[1]", "3", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json"):
            Plan.load(path)


def test_apply_sets_the_schedule_and_nothing_in_the_state(module):
    before = list(module.state_dict())
    plan_for(module, schedule="distance=4").apply(module)
    assert module.schedule == "distance=4" and module.pinned is None
    assert list(module.state_dict()) == before
    assert EmbeddingBag(3, 2).schedule == ""


def test_apply_pins_the_rows_of_this_process_or_of_a_trace(module):
    pinned = Pinned(3, 0.25, "abc")
    plan_for(module, pinned=pinned, hottest=torch.tensor([7, 8, 9])).apply(module)
    assert module.pinned.rows.tolist() == [7, 8, 9] and module.pinned.l2_fraction == 0.25
    plan_for(module, pinned=pinned).apply(module, trace=[5, 5, 2])
    assert module.pinned.rows.tolist() == [5, 2] and not module.pinned.active
    with pytest.raises(ValueError, match=r"does not hold\. Pass trace="):
        plan_for(module, pinned=pinned).apply(module)
    assert module.pinned.rows.tolist() == [5, 2]


def test_apply_refuses_other_modules_and_warns_of_another_table(module):
    with pytest.raises(TypeError, match=r"Call recfuse\.swap to convert"):
        plan_for(module).apply(torch.nn.EmbeddingBag(100, 4))
    with pytest.warns(UserWarning, match="rows was 100, is 50, and mode was sum, is max"):
        plan_for(module).apply(EmbeddingBag(50, 4, mode="max"))


def test_matches_lists_the_differences(module):
    plan = plan_for(module)
    assert plan.matches(module)
    assert plan.matches(module).reasons == []
    other = EmbeddingBag(100, 4, mode="sum", padding_idx=3, dtype=torch.float16)
    assert plan.matches(other).reasons == ["dtype was float32, is float16", "padded was False, is True"]
    assert not plan.matches(other)


@pytest.mark.parametrize(
    ("now", "words"),
    (
        (batches(seed=1), None),
        (batches(hot=5), "were of different rows"),
        ([(torch.arange(100) // 50 * 99, torch.arange(0, 100, 10))], "hottest tenth"),
        ([(torch.randint(0, 100, (1000,)), torch.arange(0, 1000, 10))], "had 100 lookups, has 1,000"),
    ),
)
def test_drift(module, now, words):
    drift = plan_for(module).drift(now)
    assert drift.moved == (words is not None)
    assert words is None or any(words in reason for reason in drift.reasons)
    assert drift.before != drift.now


def test_the_report_tells_the_whole_story(module):
    text = str(plan_for(module, pinned=Pinned(1234, 0.5, "abc")))
    for words in (
        "2.00x",
        "station=register distance=4 warps=32",
        "1,234 rows",
        "spills 8 bytes",
        "100 x 4 float32",
        "3 batches of 100 lookups",
        "each byte once at copy speed 8.00 µs (80%)",
        "default 20.00 µs, plan 10.00 µs: 2.00x as fast",
    ):
        assert words in text
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_the_report_names_the_winner_above_and_below_the_table(module):
    schedule = "station=register distance=4 warps=32"
    decisions = [
        Decision("prefetch", schedule, 10.0, True, "the fastest"),
        Decision("confirm", schedule, 10.0, True, "2.000x as fast as the defaults"),
        Decision("confirm", "", 20.0, False, "the defaults"),
    ]
    lines = str(plan_for(module, schedule=schedule, decisions=decisions)).split("\n")
    won = f"{schedule}: 2.00x as fast as the defaults (10.00 µs a batch, the defaults 20.00 µs)"
    assert lines[0].split(maxsplit=1) == ["winner", won]
    assert lines[-1] == f"winner: {won}"
    results = [line.split("│")[4].strip() for line in lines if line.startswith("│")]
    assert results == ["kept", "won", ""]
    pinned = str(plan_for(module, schedule="", pinned=Pinned(1234, 0.5, "abc")))
    assert "winner: the hottest 1,234 rows pinned in L2: 2.00x as fast" in pinned
    stayed = str(plan_for(module, schedule="", best_us=20.0)).split("\n")
    assert stayed[-1] == "winner: the defaults: no candidate is faster by more than 1 %"


@pytest.mark.parametrize("kind", ("cpu", "cuda"))
def test_the_plot_marks_the_winner(module, kind):
    pytest.importorskip("matplotlib")
    plan = plan_for(module)
    object.__setattr__(plan.device, "type", kind)
    axes = plan.plot().axes
    assert len(axes) == (2 if kind == "cuda" else 1)
    (star,) = [line for line in axes[0].lines if line.get_marker() == "*"]
    assert list(star.get_xdata()) == [4] and list(star.get_ydata()) == [10.0]
    plan_for(module, schedule="", decisions=[]).plot()


def test_batches_in_every_form():
    square = torch.arange(6).reshape(2, 3)
    offsets = torch.tensor([0, 3])
    for form in (
        square,
        (square,),
        [square.reshape(-1), offsets],
        (square.reshape(-1), offsets, torch.rand(6)),
    ):
        (batch,) = batches_of([form])
        assert (
            batch.indices.tolist() == list(range(6)) and batch.offsets.tolist() == [0, 3] and batch.bags == 2
        )
    assert batches_of([(square.reshape(-1), offsets)], include_last_offset=True)[0].bags == 1
    for wrong in ([], ["x"], [()], [(square, offsets)], [torch.arange(3)], [(square, None, 3)]):
        with pytest.raises((TypeError, ValueError), match="recfuse: batches"):
            batches_of(wrong)


def test_hotness():
    found = hotness(batches_of([torch.tensor([[0, 0, 0, 1]]), torch.tensor([[2, 3], [4, 5]])]))
    assert (found.batches, found.lookups, found.bags, found.pooling) == (2, 4.0, 1.5, 4 / 1.5)
    assert (found.unique_share, found.rows_in_use) == (0.75, 6)
    assert found.coverage == (0.75 + 0.25) / 2
    assert hotness(batches_of([torch.empty(2, 0, dtype=torch.int64)])).unique_share == 0.0


def test_names_are_there_at_first_use():
    assert recfuse.Plan is Plan
    assert callable(recfuse.tune)
    assert {"Plan", "tune", "check", "pin_rows", "unpin", "PinnedRows"} <= set(dir(recfuse)) & set(
        recfuse.__all__
    )
