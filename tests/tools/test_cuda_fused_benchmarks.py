"""The flow of the GPU benchmark of fused collections, on CPU tensors and tiny models: all but the GPU."""

import importlib
import json
import os
import re
import sys
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
import torch

import recfuse
from recfuse import _C
from recfuse.data import workloads
from support.gpu_benchmark import compiler_log, on_the_cpu

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FIGURES = [
    "models", "sizes", "half", "skewed", "equal", "features", "one_hot", "end_to_end", "host", "tuning",
    "11", "12", "13", "occupancy", "per_feature",
]  # fmt: skip
TINY = [
    "--device", "cuda", "--models", "A,D", "--batch-sizes", "6,3", "--num-batches", "2", "--rounds", "2",
    "--repeats", "2", "--test-batches", "3", "--tuning-batches", "3", "--hotness", "medium,random",
    "--equal-tables", "3", "--equal-rows", "50", "--equal-dim", "8", "--equal-bags", "4",
    "--equal-pooling", "5", "--one-hot-rows", "20", "--one-hot-dims", "4,8", "--one-hot-batches", "3,5",
    "--tail-size", "20", "--mutations", "2", "--skewed", "D-zipf1.0",
]  # fmt: skip
KERNEL = {"file": "fused.cu", "kernel": "rf_fused", "defines": ""}  # of a lowered call
PEERS_ON_CPU = {"torch", "padded", "one warp a bag"}
OURS = {"recfuse", "recfuse unstaged", "recfuse tuned", "recfuse unchecked"}


def module(name):
    return importlib.import_module(name)


def tiny_model(name, seed=0):
    """Two or three groups, one of them without a bound."""
    if not re.fullmatch(r"[A-F](-zipf[\d.]+)?(-rows\d+)?", name):
        raise ValueError(f"name is {name!r}")
    groups = [
        workloads.Group("one-hot", 3, 20, 1),
        workloads.Group("multi-hot", 2, 30, 4, 3, 9, 0.5),
        workloads.Group("multi-hot", 1, 30, 4, 3, 9, 0.0),
    ]
    dims = [4, 8, 4, 16, 8, 4]
    if name == "A":
        groups.append(workloads.Group("one-side", 2, 40, 5, 2, coverage=0.5))
        dims += [4, 32]
    return workloads.Model(
        name=name, seed=seed, skew=0.0, groups=tuple(groups),
        rows=tuple(group.rows for group in groups for _ in range(group.features)), dims=tuple(dims),
        group_of=tuple(number for number, group in enumerate(groups) for _ in range(group.features)),
    )  # fmt: skip


class FakePlan:
    """A plan without effect."""

    def apply(self, collection):
        rows = torch.zeros(len(collection.feature_dims), 5, dtype=torch.int32)
        rows[:, -1] = 16
        collection.set_plan(rows, 32)
        collection.plan = self

    def save(self, path):
        path.write_text("a plan")

    def __str__(self):
        return "the report of a plan"


def fake_map(described, offsets, sms, stages):
    """A mapping with two tasks for each feature, followed by a tile."""
    features = len(described[1])
    bags = (len(offsets) - 1) // features
    head = [1, 2 * features, 1, 0, 0, bags, features, 77]
    tasks = [
        [feature, half * (bags // 2), bags if half else bags // 2, 0, 0, 1 << 16, 0, 0]
        for feature in range(features)
        for half in (0, 1)
    ]
    return np.array([head, *tasks, *[[5] * 8] * 8], np.int32)


def fake_measure(device, stream, call, batches, sets, warps, rounds, timed):
    """Every schedule takes a second more than the one before."""
    assert sets.shape[1:] == (len(call[1]), 5) and all(len(batch) == 9 for batch in batches)
    return np.arange(1.0, len(sets) + 1)[:, None] * np.ones(rounds)


@pytest.fixture
def fused(monkeypatch):
    """Runs fused_embedding_bag.py's GPU part on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "fused_embedding_bag", TINY) as run:
        install(monkeypatch)
        yield run


def install(monkeypatch):
    """The replacement of a GPU."""
    peers, tuning = module("fused_embedding_bag.runs"), module("fused_embedding_bag.tuning")
    ceiling, setting = module("fused_embedding_bag.limits"), module("fused_embedding_bag.setting")
    monkeypatch.setattr(torch, "compile", lambda **options: lambda call: call)
    monkeypatch.setattr(workloads, "model", tiny_model)
    speed = cached_property(lambda self: 1e9)
    speed.__set_name__(None, "copy_speed")
    monkeypatch.setattr(setting.FusedSetting, "copy_speed", speed)
    monkeypatch.setattr(ceiling, "gather", lambda shape, table, rows, checksum=None, every=0: table[rows])
    monkeypatch.setattr(module("common.ceilings"), "gather", ceiling.gather)
    monkeypatch.setattr(ceiling, "SHAPES", ceiling.SHAPES[:2])
    monkeypatch.setattr(module("common.ceilings"), "SHAPES", ceiling.SHAPES)
    monkeypatch.setattr(
        module("fused_embedding_bag.candidates"),
        "one_warp_run",
        lambda subject, dtype: peers.loop_run(subject.tables(dtype)),
    )
    monkeypatch.setattr(module("fused_embedding_bag.ablations"), "WARPS", (8, 64))
    monkeypatch.setattr(
        module("fused_embedding_bag.ablations"), "separately", lambda subject, made: zeros(subject)
    )
    monkeypatch.setattr(module("fused_embedding_bag.native"), "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(tuning, "apart", lambda call, *arguments: call(*arguments))
    monkeypatch.setattr(recfuse, "tune", lambda collection, batches, budget_s: FakePlan(), raising=False)
    for name, fake in {
        "describe": lambda call, schedules, warps: (call, schedules, warps),
        "map": fake_map,
        "measure": fake_measure,
        "lower": lambda arch, *arguments: ([{"gpu": {"arch": arch}, **KERNEL}], 1),
        "candidates": lambda call, feature: [(0, 0, 0, 0, 0), (1, 4, 2, 1, 0), (1, 8, 2, 1, 0)],
    }.items():
        monkeypatch.setattr(_C, f"fused_embedding_bag_{name}", fake, raising=False)
    report = {"registers": 40, "spill_bytes": 0, "cached": False}
    monkeypatch.setattr(_C, "kernel_compile", lambda *kernel: dict(report))
    # The CPU's wheel of FBGEMM has no GPU module to offer.
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_table_batched_embeddings_ops_inference", None)


def zeros(subject):
    return np.zeros((subject.features, 5), np.int32)


def results(fused, tmp_path, *options):
    target = tmp_path / "fused.json"
    assert fused("--json", target, *options) == 0
    return json.loads(target.read_text())


def test_every_figure_runs(fused, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ["--figures", "all", "--plots", tmp_path, "--plans", tmp_path / "plans", "--markdown"]
    record = results(fused, tmp_path, *options)
    output = capsys.readouterr().out
    assert set(FIGURES) | {"half sizes", "read_bandwidth_bytes_per_s"} <= set(record)
    plotted = {path.stem.removeprefix("fused_") for path in tmp_path.glob("*.png")}
    assert plotted == {*FIGURES, "half_sizes"} - {"host", "tuning", "per_feature", "features", "one_hot"}
    assert {path.name for path in (tmp_path / "plans").iterdir()} >= {"A-float32.json", "D-float16.json"}
    assert "FBGEMM is left out" in output and "torch.compile is left out: 8 features" in output


def test_the_main_table_has_limits_and_ratios(fused, tmp_path, capsys):
    record = results(fused, tmp_path, "--figures", "models", "--compile", "6", "--markdown")["models"]
    assert list(record) == ["A 6", "A 3", "D 6", "D 3"]
    for label, entry in record.items():
        names = PEERS_ON_CPU | OURS | ({"torch.compile"} if "D" in label else set())
        assert set(entry["relative_error"]) == names
        assert {*names, *(f"{name}, eager" for name in names)} == set(entry["us"])
        assert max(entry["relative_error"].values()) < 1e-5
        limit = entry["limit"]
        assert 0 < limit["unique_bytes"] <= limit["gathered_bytes"]
        assert limit["limit_s"] == max(limit["copy_s"], limit["gather_s"])
        assert limit["copy_s"] == pytest.approx((limit["unique_bytes"] + limit["other_bytes"]) / 1e9)
        assert entry["plan"] == "the report of a plan" and entry["tuning_s"] >= 0
    output = capsys.readouterr().out
    assert "| geometric mean | recfuse |" in output and "over one warp a bag" in output
    assert "A: torch.compile is left out: 8 features" in output and "D: torch.compile" not in output


def test_the_bytes_of_a_limit_are_those_of_the_batch(fused, monkeypatch):
    setting = made_setting(monkeypatch)
    subject, ceiling = setting.subject("A"), module("fused_embedding_bag.limits")
    for dtype in (torch.float32, torch.float16):
        batches = subject.batches(6)
        limit = ceiling.Ceilings(1e9).limit(subject, dtype, batches)
        unique = gathered = 0
        for batch in batches:
            for table, (rows, _) in zip(subject.tables(dtype), batch.parts, strict=True):
                width = table.shape[1] * table.element_size()
                unique, gathered = unique + len(rows.unique()) * width, gathered + len(rows) * width
        assert (limit.unique_bytes, limit.gathered_bytes) == (unique / 2, gathered / 2)
        streams = ceiling._Streams(subject, dtype, batches)
        for row_bytes in streams.row_sizes:
            table, indices = streams.gathered(row_bytes)
            assert table.shape[1] * table.element_size() == max(row_bytes, 16)
            rows = [
                values[indices]
                for batch in batches
                for values, (indices, _) in zip(subject.tables(dtype), batch.parts, strict=True)
                if values.shape[1] * values.element_size() == row_bytes
            ]
            if row_bytes >= 16:
                assert torch.equal(table[indices], torch.cat(rows))


def made_setting(monkeypatch, *options):
    """The subject of a run."""
    parser, arguments = module("fused_embedding_bag").bench.parse([*TINY, *options])
    arguments.device = "cpu"
    return module("fused_embedding_bag.setting").FusedSetting(parser, arguments)


def test_a_stream_keeps_every_batch_s_time(fused, tmp_path, capsys):
    record = results(fused, tmp_path, "--figures", "sizes", "--markdown")["sizes"]
    assert list(record) == ["A", "D"]
    for entry in record.values():
        assert len(entry["sizes"]) == len(entry["lookups"]) == 3
        assert set(entry["streams"]) == {"one warp a bag", *OURS}
        for stream in entry["streams"].values():
            assert np.array(stream["device_s"]).shape == (2, 3) and len(stream["called_s"]) == 2
        ratios = entry["ratios"]["recfuse over one warp a bag"]
        assert ratios["geometric_mean"] == pytest.approx(geometric_mean(ratios["each"]))
    assert "3 batches of the published sizes" in capsys.readouterr().out


def test_batches_for_the_tuner_are_not_those_that_are_timed(fused, monkeypatch):
    subject = made_setting(monkeypatch).subject("A")
    tuning, test = subject.tuning_batches, subject.test_batches
    assert [batch.size for batch in tuning] == workloads.batch_sizes(3, 0).tolist()
    assert [batch.size for batch in test] == workloads.batch_sizes(3, 1).tolist()
    assert not any(torch.equal(one.indices, other.indices) for one in tuning for other in test)


def test_padding_gives_the_same_sums(fused, monkeypatch):
    subject = made_setting(monkeypatch).subject("A")
    assert subject.bounds == [1, 1, 1, 9, 9, 9, None, None]
    ids = module("fused_embedding_bag.runs").padded_indices(
        torch.tensor([4, 5, 6], dtype=torch.int32), torch.tensor([0, 0, 2], dtype=torch.int32), 3, 9
    )
    assert ids.tolist() == [[9, 9, 9], [4, 5, 9], [6, 9, 9]] and ids.dtype == torch.int32


def test_a_wrong_output_ends_the_run(fused, monkeypatch, capsys):
    candidates = module("fused_embedding_bag.candidates")
    right = candidates.loop_run
    monkeypatch.setattr(candidates, "loop_run", lambda tables: lambda batch: right(tables)(batch) * 1.001)
    assert fused("--figures", "models") == 1
    assert "A 6, torch: the outputs differ from sums in float64 by 1.0e-03" in capsys.readouterr().err


def test_a_peer_that_does_not_run_here_is_left_out_with_its_reason(fused, monkeypatch, capsys):
    def broken(subject, dtype):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(module("fused_embedding_bag.candidates"), "padded_run", broken)
    assert fused("--figures", "models", "--markdown") == 0
    output = capsys.readouterr().out
    assert "A: padded is left out: out of memory  " in output


def test_recfuse_itself_must_run(fused, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(recfuse, "tune", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        fused("--figures", "models")


def test_plans_are_read_again(fused, monkeypatch, tmp_path):
    options = ["--figures", "models", "--plans", tmp_path, "--models", "D"]
    assert fused(*options) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["D-float32.json"]
    monkeypatch.setattr(recfuse.Plan, "load", lambda path: FakePlan())
    monkeypatch.delattr(recfuse, "tune")
    record = results(fused, tmp_path, *options)
    assert record["models"]["D 6"]["tuning_s"] is None


def test_a_static_mapping_covers_every_bag_once(fused):
    rescaled = module("fused_embedding_bag.mapping").rescaled
    offsets, schedules = np.zeros(3 * 7 + 1, np.int64), np.zeros((3, 5), np.int32)
    mapping = torch.from_numpy(fake_map((None, schedules, 0), offsets, 132, False))
    for bags in (1, 2, 7, 20):
        changed = rescaled(mapping, bags)
        assert changed[0].tolist() == [1, 6, 1, 0, 0, bags, 3, 77]
        for feature in range(3):
            own = changed[1:7][changed[1:7, 0] == feature]
            covered = [bag for task in own.tolist() for bag in range(task[1], task[2])]
            assert covered == list(range(bags))
        assert torch.equal(changed[7:], mapping[7:])
    mapping[0, 3] = 1
    with pytest.raises(ValueError, match="share bags"):
        rescaled(mapping, 7)
    mapping[0, 3] = 0
    with pytest.raises(ValueError, match="staged"):
        rescaled(torch.cat((mapping, mapping[:1])), 7)


def test_schedules_that_are_never_staged(fused):
    rows = [
        [0, 0, 0, 0, 32],
        [0, 0, 0, 0, 33],
        [0, 8, 0, 0, 16],
        [2, 0, 0, 0, 99],
        [0, 0, 0, 0, -1],
    ]
    given = np.array(rows, np.int32)
    changed = module("fused_embedding_bag.native").never_staged(given)
    assert changed[:, 0].tolist() == [2, 1, 1, 2, 2] and (changed[:, 1:] == given[:, 1:]).all()


def test_figure_12_counts_the_tuned_schedule_s_better_time(fused, monkeypatch, tmp_path):
    record = results(fused, tmp_path, "--figures", "12")["12"]
    assert len(record) == 2
    for entry in record.values():
        assert entry["schedules"][0] == [0, 0, 0, 0]
        assert entry["tuned_over_best"] == 1.0 and len(entry["s"]) == 3


def test_extrapolated_compile_times_are_marked(fused, tmp_path, capsys):
    folders = []
    options = ["--figures", "per_feature,tuning", "--markdown"]
    tuning = module("fused_embedding_bag.tuning")
    real = tuning._with_cache
    before = os.environ.get("RECFUSE_CACHE_DIR")
    tuning._with_cache = lambda folder, call: folders.append(folder) or real(folder, call)
    try:
        record = results(fused, tmp_path, *options)
    finally:
        tuning._with_cache = real
    assert os.environ.get("RECFUSE_CACHE_DIR") == before
    assert len(record["per_feature"]["compiled"]) == 8 and len(set(folders)) == 9
    assert list(record["tuning"]) == ["empty", "warm"]
    assert "Extrapolated from 8 features" in capsys.readouterr().out


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_the_stand_in_compiles_without_spills(fused, half, wide):
    peers = module("fused_embedding_bag.runs")
    options = peers.one_warp_options(half, wide)
    log = compiler_log(
        (module("common.ceilings").KERNELS / peers.ONE_WARP_KERNEL).read_text(),
        ["-arch=sm_90", "--ptxas-options=-v", *options],
    )
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_stand_in_is_right(monkeypatch, dtype):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(workloads, "model", tiny_model)
    setting = made_setting(monkeypatch)
    setting.device = torch.device("cuda")
    subject, real = setting.subject("A"), module("fused_embedding_bag.setting")
    batch = subject.batches(6)[0]
    output = module("fused_embedding_bag.runs").one_warp_run(subject, dtype)(batch)
    error = module("common.checks").relative_error(output, real.right_output(subject, batch, dtype))
    assert error <= module("common.checks").TOLERANCES[dtype]
