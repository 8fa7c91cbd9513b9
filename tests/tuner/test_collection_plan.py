"""Plans of collections: saved and read back, refused if damaged, applied, and compared with the present
state; and the commands that create and use them."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch

import recfuse
from recfuse import _C, CollectionPlan, Plan, cli
from recfuse.data.collection import jagged_batches, mean_lengths, trace_of
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, FusedEmbeddingBagList
from recfuse.nn.collection_view import view_of
from recfuse.ops.schedules import FusedSchedule, expectations
from recfuse.plan.features import (
    CallForm,
    FeatureTable,
    of_runs,
    runs,
    tables_of,
)
from support.bag_plan import at
from support.bag_plan import plan_for as table_plan_for
from support.collection_plan import batches, collection_of, plan_for


@pytest.fixture
def collection():
    return collection_of()


@pytest.fixture
def path(tmp_path, collection):
    where = tmp_path / "plan.json"
    plan_for(collection).save(where)
    return where


def test_saved_plans_load_by_either_class(path, collection):
    plan = plan_for(collection)
    assert Plan.load(path) == CollectionPlan.load(path) == plan
    record = json.loads(path.read_text())
    assert (record["kind"], record["schedule_of"]) == ("fused_embedding_bag", "2*2 1*2 0")
    assert record["table_of"] == "0*2 1*3" and record["expected"] == "16 -1 160 320 480"
    assert len(path.read_text()) < 4000
    assert plan.features == 5 and plan.speedup == 1.25


def test_rows_are_as_the_operator_takes_them(collection):
    rows = plan_for(collection).rows()
    assert rows.dtype == np.int32 and rows.shape == (5, 5)
    assert rows[0].tolist() == [2, 0, 0, 0, 16]
    assert rows[2].tolist() == [1, 16, 4, 1, 160] and rows[4].tolist() == [0, 0, 0, 0, 480]


def test_a_single_tables_plan_is_not_a_collections(path, tmp_path):
    table_plan_for(EmbeddingBag(100, 4, mode="sum")).save(tmp_path / "single.json")
    assert isinstance(Plan.load(tmp_path / "single.json"), Plan)
    with pytest.raises(ValueError, match="a plan for 'embedding_bag'"):
        CollectionPlan.load(tmp_path / "single.json")


def test_a_save_that_fails_leaves_the_file_as_it_was(path, collection):
    before = path.read_text()
    with pytest.raises(ValueError):
        plan_for(collection, best_us=float("nan")).save(path)
    assert path.read_text() == before and [one.name for one in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (at("recfuse_plan", value=2), "format 2; expected 1 to 1. Update recfuse"),
        (at("kind", value="fused"), "a plan for 'fused'"),
        (at("schedules", drop=True), "schedules is missing"),
        (at("schedules", value="x"), "schedules is 'x'; expected a list"),
        (at("schedules", 1, value=3), "schedules[1] is 3; expected str"),
        (at("schedules", 1, value="kind=moon"), "schedules[1]: "),
        (at("schedule_of", value=[1]), "schedule_of is [1]; expected a str"),
        (at("schedule_of", value="2*2 1*2 x"), "schedule_of has 'x'"),
        (at("schedule_of", value="2*2 1*2 3"), "schedule_of has 3; expected [0, 3)"),
        (at("schedule_of", value="2*2 1*2 -1"), "schedule_of has -1; expected [0, 3)"),
        (at("schedule_of", value="2*2"), "schedule_of has 2 features, table_of has 5"),
        (at("schedule_of", value="0*99999999"), "for 100,000 features at most"),
        (at("schedule_of", value="0*0"), "schedule_of has '0*0'"),
        (at("table_of", drop=True), "table_of is missing"),
        (at("table_of", value="0*5 9"), "schedule_of has 5 features, table_of has 6"),
        (at("table_of", value="0*4 9"), "table_of has 9; expected [0, 2)"),
        (at("expected", value="16 -2 160 320 480"), "expected has -2"),
        (at("expected", value="16 -1 160 320 4800000000"), "expected has 4800000000"),
        (at("warps", value=65), "warps is 65; expected 0 to 64"),
        (at("warps", value=True), "warps is True; expected int"),
        (at("tables", 0, "dim", value="4"), "tables[0].dim is '4'; expected int"),
        (at("tables", 0, value=3), "tables[0] is 3; expected an object"),
        (at("form", "weighted", value=0), "form.weighted is 0; expected bool"),
        (at("trace", "bags", drop=True), "trace.bags is missing"),
        (
            at("occupancies", 0, "tuned_us", value="1"),
            "occupancies[0].tuned_us is '1'; expected float | null",
        ),
        (at("decisions", 1, "kept", value=1), "decisions[1].kept is 1; expected bool"),
    ),
)
def test_a_damaged_file_is_refused_by_name_and_key(path, change, words):
    change(path)
    with pytest.raises(ValueError) as raised:
        Plan.load(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_runs():
    assert runs([]) == "" and of_runs("", "x") == []
    for values in ([3], [3, 3], [-1, -1, 0, 5, 5, 5]):
        assert of_runs(runs(values), "x") == values


def test_texts_of_rows():
    rows = [(0, 0, 0, 0, 7), (1, 16, 8, 2, 0), (2, 0, 0, 0, -1), (3, 0, 4, 0, 0)]
    texts = ["", "kind=pool threads=16 distance=8 split=2", "kind=columns", "kind=staged distance=4"]
    assert [str(FusedSchedule.of_row(row)) for row in rows] == texts
    assert [FusedSchedule.parse(text).row()[:4] for text in texts] == [row[:4] for row in rows]
    assert FusedSchedule.parse("kind=pool station=register split=2").row() == (
        1,
        0,
        0,
        2,
        0,
    )  # of version 0.1
    with pytest.raises(ValueError, match="'station=l1' is unknown or given twice"):
        FusedSchedule.parse("station=l1")


def test_apply_changes_calls_and_not_the_state_dict(collection, monkeypatch):
    seen = []
    monkeypatch.setattr(type(collection), "set_plan", lambda self, *given: seen.append(given), raising=False)
    before = list(collection.state_dict())
    plan = plan_for(collection)
    plan.apply(collection)
    ((schedules, warps),) = seen
    assert schedules.dtype == torch.int32 and schedules.tolist() == plan.rows().tolist() and warps == 40
    assert collection.plan is plan and list(collection.state_dict()) == before


def test_apply_to_something_else(collection, monkeypatch):
    monkeypatch.setattr(type(collection), "set_plan", lambda self, *given: None, raising=False)
    plan = plan_for(collection)
    with pytest.raises(TypeError, match="module is a Linear"):
        plan.apply(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"the plan has 5 features, the collection has 1\. Tune again"):
        plan.apply(FusedEmbeddingBagCollection([(5, 4)]))
    other = FusedEmbeddingBagCollection([(50, 4)] * 4 + [(50, 16)])
    with pytest.raises(ValueError, match="feature 2 was of dim 8 in float32, is of dim 4"):
        plan.apply(other)
    rows = FusedEmbeddingBagCollection([(50, 4), (51, 4), (100, 8), (100, 8), (100, 8)])
    with pytest.warns(UserWarning, match=r"rows of feature 1 was 50, is 51 \(4 features differ\)"):
        plan.apply(rows)


def test_matches(collection):
    plan = plan_for(collection)
    assert plan.matches(collection)
    assert plan.matches(FusedEmbeddingBagCollection([(5, 4)])).reasons == ["features was 5, is 1"]
    same = FusedEmbeddingBagList(
        [EmbeddingBag(50, 4, mode="sum") for _ in range(2)]
        + [EmbeddingBag(100, 8, mode="mean", padding_idx=0) for _ in range(3)]
    )
    assert plan.matches(same)
    object.__setattr__(plan.device, "name", "another")
    assert plan.matches(collection).reasons[0].startswith("device name was another, is ")


@pytest.mark.parametrize(
    ("now", "words"),
    (
        (batches(seed=1), None),
        (batches(lengths=(1, 0, 10, 20, 36)), None),
        (batches(lengths=(4, 0, 10, 20, 30)), None),  # a hundredth of the bytes
        (batches(lengths=(1, 0, 10, 20, 60)), "bags of 1 features, with 66"),
        (batches(lengths=(1, 40, 10, 20, 30)), "bags of 1 features, with 24"),
        (batches(bags=20, hot=100), "a batch had 10 bags a feature, has 20"),
        (batches(hot=5), "of the bytes of a batch were of different rows"),
    ),
)
def test_drift(collection, now, words):
    drift = plan_for(collection).drift(now)
    assert drift.moved == (words is not None) == bool(drift.reasons)
    assert words is None or any(words in reason for reason in drift.reasons)
    assert drift.before != drift.now or words is None


def test_statistics_of_batches():
    tables = [FeatureTable(10, 4, "float32", "sum", False), FeatureTable(10, 8, "float16", "sum", False)]
    one = (torch.tensor([0, 0, 1, 9, 9]), torch.tensor([0, 1, 3, 4, 5]))
    other = (torch.tensor([3, 3], dtype=torch.int32), torch.tensor([0, 2, 2], dtype=torch.int32))
    given = jagged_batches([one, other], 2)
    trace = trace_of(given, tables)
    assert (trace.batches, trace.bags, trace.lookups) == (2, 1.5, 3.5)
    assert trace.unique_share == pytest.approx(((2 + 1) / 5 + 1 / 2) / 2)
    assert mean_lengths(given, 2).tolist() == [5 / 3, 2 / 3]
    assert expectations(np.array([0, 0.001, 1.5, 1e12])).tolist() == [-1, 1, 24, 2**31 - 1]
    empty = jagged_batches([(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))], 2)
    assert trace_of(empty, tables).unique_share == 0 and mean_lengths(empty, 2).tolist() == [0, 0]


def test_the_report_tells_the_whole_story(collection):
    text = str(plan_for(collection))
    for words in (
        "default 200.00 µs, plan 160.00 µs: 1.250x as fast",
        "warps an SM  40",
        "5, 2 kinds of tables, 400 rows, 32 columns; int64 indices, int64 offsets",
        "3 batches of 610 lookups",
        "8 float32 mean: 2 x kind=pool threads=16",
        "8 float32 mean: 1 x default",
        "schedules without a plan, 64 registers",
    ):
        assert words in text
    assert text.split("\n")[-1] == (
        "winner: 2 schedules and the default, 40 warps an SM: 1.25x as fast as the defaults "
        "(160.00 µs a batch, the defaults 200.00 µs)"
    )
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_the_plot_has_bars_of_classes_and_a_curve_of_occupancies(collection):
    pytest.importorskip("matplotlib")
    bars, curve = plan_for(collection).plot().axes
    assert [one.get_text() for one in bars.get_xticklabels()] == ["4 float32 sum", "8 float32 mean"]
    assert sum(patch.get_height() for patch in bars.patches) == 5
    (star,) = [line for line in curve.lines if line.get_marker() == "*"]
    assert list(star.get_xdata()) == [40] and list(star.get_ydata()) == [160.0]
    plan_for(collection, warps=0, occupancies=[], schedules=[""], schedule_of=[0] * 5).plot()


def compiled_by(monkeypatch):
    asked = []

    def compile(*kernel):
        asked.append(kernel[:4])
        return {
            "registers": 64, "spill_bytes": 0, "cubin_bytes": 12345, "cached": False, "seconds": 0.5,
            "path": "here", "shared_bytes": 0,
        }  # fmt: skip

    monkeypatch.setattr(_C, "kernel_compile", compile)
    return asked


def test_compile_takes_a_collections_plan(capsys, monkeypatch, tmp_path, collection):
    asked = compiled_by(monkeypatch)
    plan = plan_for(collection, form=CallForm("int32", "int64", False))
    object.__setattr__(plan.device, "type", "cuda")
    plan.save(tmp_path / "plan.json")
    assert cli.main(["compile", "--arch", "sm_90a", "--plan", str(tmp_path / "plan.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    with pytest.warns(UserWarning, match="device type was cuda"):
        plan.apply(collection)
    indices = torch.zeros(61 * 10, dtype=torch.int32)
    call = collection, indices, batches()[0][1]
    own = recfuse.explain(*call, gpu="H100").kernels()
    assert own and set(own) <= set(asked)
    mapping = {one.replace("-DRF_CALLERS_MAPPING=0", "-DRF_CALLERS_MAPPING=1") for *_, one in own}
    assert mapping <= {defines for *_, defines in asked}
    assert sum("12,345 bytes, compiled, 0.50 s" in line for line in lines) == len(lines) == len(set(asked))
    assert sum("with a mapping" in line for line in lines) >= 1


def test_compile_refuses_calls_without_a_kernel(capsys, monkeypatch, tmp_path, collection):
    compiled_by(monkeypatch)
    plan = plan_for(collection)
    plan.save(tmp_path / "plan.json")
    for change, words in (
        (lambda plan: None, "the plan is for the CPU"),
        (lambda plan: object.__setattr__(plan.device, "type", "cuda"), None),
        (lambda plan: object.__setattr__(plan.tables[0], "dtype", "float64"), "tables[0].dtype is 'float64'"),
    ):
        change(plan)
        plan.save(tmp_path / "plan.json")
        arguments = ["compile", "--arch", "sm_90a", "--plan", str(tmp_path / "plan.json")]
        if words is None:
            assert cli.main(arguments) == 0
            continue
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert words in capsys.readouterr().err


@pytest.fixture
def tuned(monkeypatch):
    """Records the arguments of `recfuse.tune` in the command."""
    asked = []

    def tune(module, batches, budget, **options):
        asked.append((module, batches, budget, options))
        return plan_for(collection_of())

    monkeypatch.setattr("recfuse.tuner.tune", tune)
    return asked


def test_tune_takes_a_collection_from_files(tuned, tmp_path, collection, capsys):
    plan_for(collection).apply(collection)
    torch.save(collection, tmp_path / "c.pt")
    torch.save(batches(), tmp_path / "b.pt")
    files = ["--collection", str(tmp_path / "c.pt"), "--batches", str(tmp_path / "b.pt")]
    out = tmp_path / "plan.json"
    options = ["--device", "cpu", "--budget", "7", "--resume", "r.json", "--out", str(out)]
    assert cli.main(["tune", *files, *options]) == 0
    ((module, given, budget, passed),) = tuned
    assert tables_of(view_of(module, "")) == tables_of(view_of(collection, "")) and budget == 7.0
    assert passed == {"pin": None, "seed": 0, "resume": "r.json", "predict": False} and len(given) == 3
    assert isinstance(Plan.load(out), CollectionPlan) and "1.250x" in capsys.readouterr().out


def test_tune_takes_the_tensors_of_a_state(tuned, tmp_path):
    state = OrderedDict([("a.weight", torch.zeros(5, 4)), ("bias", torch.zeros(3)), ("b", torch.zeros(6, 8))])
    torch.save(state, tmp_path / "c.pt")
    torch.save(batches(), tmp_path / "b.pt")
    files = ["--collection", str(tmp_path / "c.pt"), "--batches", str(tmp_path / "b.pt")]
    assert cli.main(["tune", *files, "--device", "cpu", "--mode", "mean"]) == 0
    module = tuned[0][0]
    assert module.feature_names == ["a_weight", "b"] and tuned[0][2] is None
    assert [(one.rows, one.dim, one.mode) for one in tables_of(view_of(module, ""))] == [
        (5, 4, "mean"),
        (6, 8, "mean"),
    ]


def test_tune_takes_a_workload(tuned):
    options = ["--device", "cpu", "--batches", "2", "--index", "int32", "--dtype", "float16"]
    assert cli.main(["tune", "--workload", "D", *options]) == 0
    module, given, _, _ = tuned[0]
    own = tables_of(view_of(module, ""))
    assert len(own) == 1000 and {one.dim for one in own} == {8} and own[0].dtype == "float16"
    sizes = [(offsets.numel() - 1) // 1000 for _, offsets in given]
    assert sizes == recfuse.workloads.batch_sizes(2, 1).tolist() and given[0][0].dtype == torch.int32


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["--workload", "Z"], "name is 'Z'"),
        (["--workload", "A", "--batches", "x"], "--batches is x; expected >= 1"),
        (["--collection", "absent.pt"], "--batches is None; expected with --collection a file"),
        (["--collection", "absent.pt", "--batches", __file__], "absent.pt"),
        (["--collection", __file__, "--batches", __file__], "which torch.load does not read"),
    ),
)
def test_errors_of_tuning_are_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", "--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and words in error and error.count("\n") == 1


def test_a_file_of_something_else_is_not_a_collection(capsys, tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    torch.save([1], tmp_path / "b.pt")
    for name, words in (("a.pt", "a dict without a tensor"), ("b.pt", "holds a list; expected a Module or")):
        with pytest.raises(SystemExit):
            arguments = ["--collection", str(tmp_path / name), "--batches", str(tmp_path / "b.pt")]
            cli.main(["tune", "--device", "cpu", *arguments])
        assert words in capsys.readouterr().err


def test_a_file_of_another_class_names_the_class(capsys, tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    torch.save(batches(), tmp_path / "b.pt")
    with pytest.raises(SystemExit):
        files = ["--collection", str(tmp_path / "a.pt"), "--batches", str(tmp_path / "b.pt")]
        cli.main(["tune", "--device", "cpu", *files])
    error = capsys.readouterr().err
    assert "holds a torch.nn.modules.linear.Linear; expected only tensors or collections" in error


def test_tune_takes_a_list_from_a_file(tuned, tmp_path):
    made = FusedEmbeddingBagList([EmbeddingBag(50, 4, mode="sum"), EmbeddingBag(60, 8, mode="sum")])
    given = [([torch.tensor([0])] * 2, [torch.tensor([1]), torch.tensor([2, 3])])]
    made.calibrate(given)
    torch.save(made, tmp_path / "c.pt")
    torch.save(given, tmp_path / "b.pt")
    files = ["--collection", str(tmp_path / "c.pt"), "--batches", str(tmp_path / "b.pt")]
    assert cli.main(["tune", *files, "--device", "cpu"]) == 0
    ((module, batches, _, _),) = tuned
    assert tables_of(view_of(module, "")) == tables_of(view_of(made, "")) and torch.equal(
        module.schedules, made.schedules
    )
    assert module._lookups_of(batches[0], "here").indices.tolist() == [1, 2, 3]


def test_names_are_there_at_first_use():
    assert recfuse.CollectionPlan is CollectionPlan
    assert "CollectionPlan" in set(dir(recfuse)) & set(recfuse.__all__)
