"""The flow of the GPU benchmark of training steps, on CPU tensors and tiny tables: all but the GPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from recfuse.data import workloads
from support.gpu_benchmark import on_the_cpu

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = [
    "--num-batches",
    "2",
    "--rounds",
    "2",
    "--rows-cap",
    "200",
    "--dynamicemb-rows",
    "300",
    "--steps",
    "4",
]
SUBJECTS = ["A-3", "mlperf-4", "dynamicemb-50"]
OURS = {"recfuse", "recfuse, torch.optim"}


def module(name):
    return importlib.import_module(name)


def tiny_model(name, seed=0):
    """Tables of two dimensions; bags may be empty."""
    if name not in ("A", "D"):
        raise ValueError(f"name is {name!r}")
    groups = (workloads.Group("one-hot", 3, 20, 1), workloads.Group("multi-hot", 2, 30, 4, 3, 9, 0.5))
    return workloads.Model(
        name=name, seed=seed, skew=0.0, groups=groups, rows=(20, 20, 20, 30, 30), dims=(4, 8, 4, 16, 8),
        group_of=(0, 0, 0, 1, 1),
    )  # fmt: skip


@pytest.fixture
def training(monkeypatch):
    """Runs training.py's GPU part on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "training", ["--device", "cuda", *TINY]) as run:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(workloads, "model", tiny_model)
        monkeypatch.setattr(module("common.settings").Setting, "copy_speed", 1e9)
        yield run


def results(training, tmp_path, *options):
    target = tmp_path / "training.json"
    assert training("--json", target, "--subjects", ",".join(SUBJECTS), *options) == 0
    return json.loads(target.read_text())


def test_every_subject_and_optimizer_is_measured_and_right(training, tmp_path, capsys):
    record = results(training, tmp_path, "--markdown", "--optimizers", "sgd,rowwise_adagrad,adagrad,adam")
    with_torch = {"sgd", "adagrad", "adam"}
    for subject in SUBJECTS:
        for kind in ("sgd", "rowwise_adagrad", "adagrad", "adam"):
            entry = record[f"{subject}, {kind}"]
            sides = set(entry["relative_error"]) - {"fbgemm"}
            assert sides == ({"torch", *OURS} if kind in with_torch else {"recfuse"})
            assert max(entry["relative_error"].values()) < 1e-4
            names = {"recfuse", "recfuse, eager", "recfuse, forward", "recfuse, forward, eager"}
            if kind in with_torch:
                names |= {"torch, eager", "recfuse, torch.optim, eager"}
            assert {name for name in entry["us"] if "fbgemm" not in name} == names
            least = entry["least"]
            assert 0 < least["unique_rows"] <= least["lookups"]
    assert record["steps"] == [f"{s}, {k}" for k in module("training.sides").OPTIMIZERS for s in SUBJECTS]
    assert [table["title"].split(" (")[0] for table in record["tables"]] == [
        "us a step as a CUDA graph, and as called",
        "How many times faster is a step",
        "The limit: least bytes at copy speed, 0.00 TB/s",
        "us of the host: a step with SGD, 5 tables, batch 4",
    ]  # fmt: skip
    assert set(record["host"]) >= {*OURS, *(f"{side}, one thread" for side in OURS)}
    assert "| mlperf-4, sgd |" in capsys.readouterr().out


def test_the_least_bytes_are_those_of_the_batch(training):
    subject = module("training.lookups").make_subject("dynamicemb-50", 0, 1, 300)
    batches = subject.batches(1, 0, torch.device("cpu"))
    rows = sum(len(indices.unique()) for indices, _ in batches[0].parts)
    ids, grads = 8 * (500 + 501), 4 * 50 * 1280
    for kind, states in (("sgd", 0), ("rowwise_adagrad", 1), ("adagrad", 128), ("adam", 256)):
        optimizer = module("training.sides").OPTIMIZERS[kind]
        least = module("training.stages").least(subject, batches, optimizer)
        assert (least.lookups, least.unique_rows) == (500, rows)
        assert least.forward_bytes == ids + 512 * rows + grads
        assert least.backward_bytes == ids + 8 * 500 + grads + 2 * rows * (512 + 4 * states)


def test_a_subject_s_rows_are_inside_its_tables(training):
    lookups = module("training.lookups")
    cases = ("mlperf-4", 26, lookups.MLPERF_LOOKUPS), ("dynamicemb-50", 10, [1] * 10)
    for name, tables, of_a_bag in cases:
        subject = lookups.make_subject(name, 0, 200, 300)
        batch = subject.batches(1, 0, torch.device("cpu"))[0]
        assert len(batch.parts) == tables == len(subject.rows)
        assert batch.lengths.tolist() == [subject.size * each for each in of_a_bag]
        for (indices, starts), rows, each in zip(batch.parts, subject.rows, of_a_bag, strict=True):
            assert indices.min() >= 0 and indices.max() < rows
            assert starts.tolist() == list(range(0, subject.size * each, each))
    first, second = subject.batches(2, 0, torch.device("cpu"))
    assert not torch.equal(first.indices, second.indices) and not torch.equal(first.grad, second.grad)
    assert torch.equal(first.indices, subject.batches(1, 0, torch.device("cpu"))[0].indices)


def test_dynamicemb_has_the_published_number_of_rows(training):
    subject = module("training.lookups").make_subject("dynamicemb-104857", 0, 1, 8_000_000)
    (batch,) = subject.make([0], torch.device("cpu"))
    assert len(batch.indices) == 1_048_570
    unique = sum(len(part.unique()) for part in batch.indices.split(batch.lengths.tolist()))
    assert unique == pytest.approx(350_280, rel=0.01)


def test_a_wrong_step_ends_the_run(training, monkeypatch, capsys):
    sides = module("training.sides")
    real = sides.Optimizer.change
    monkeypatch.setattr(sides.Optimizer, "change", lambda self, sums: real(self, sums) * 1.01)
    assert training("--subjects", "mlperf-4", "--optimizers", "sgd") == 1
    assert "mlperf-4, sgd, torch: the outputs differ" in capsys.readouterr().err


def test_the_check_does_not_change_tables(training):
    lookups, sides, stages = (module(f"training.{name}") for name in ("lookups", "sides", "stages"))
    subject, device = lookups.make_subject("mlperf-4", 0, 200, 1), torch.device("cpu")
    batch = subject.batches(1, 0, device)[0]
    made, _ = sides.make_sides(subject, "sgd", sides.NAMES, device, torch.int64)
    right = stages.right_changes(subject, batch, sides.OPTIMIZERS["sgd"])
    before = [table.clone() for table in made["recfuse"].tables]
    for side in made.values():
        assert stages.first_step_error(side, batch, right) < 1e-4
        assert all(map(torch.equal, side.tables, before))
    # One set of tables serves all sides.
    assert len({side.tables[0].data_ptr() for side in made.values()}) == 1
    made["recfuse"].step(batch)
    assert not all(map(torch.equal, made["torch"].tables, before))


@pytest.mark.parametrize(
    "kernel, stage",
    [
        ("rf_fused_embedding_bag", "forward"),
        ("rf_fused_map", "forward"),
        ("rf_backward_keys", "transpose"),
        ("rf_backward_sort", "transpose"),
        ("rf_backward_rows", "backward + update"),
        ("rf_backward_joins", "backward + update"),
        ("rf_small_lists", "transpose"),
        ("rf_small_rows", "backward + update"),
        ("rf_backward_count", "transpose"),
        ("rf_winners", "forward"),
        ("void cub::DeviceRadixSortOnesweepKernel<cub::Policy>", "transpose"),
        ("split_embedding_backward_codegen_find_long_segments", "transpose"),
        ("split_embedding_backward_sgd_unweighted_kernel_warp_per_row_1", "backward + update"),
        ("split_embedding_codegen_forward_unweighted_kernel", "forward"),
        ("Memset (Device)", "other"),
    ],
)
def test_kernels_belong_to_stages(training, kernel, stage):
    assert module("training.stages").stage_of(kernel) == stage
    assert module("training.stages").by_stage({kernel: 2.0})[stage] == 2.0


def test_stages_are_shown_where_kernels_can_be_profiled(training, monkeypatch, tmp_path, capsys):
    kernels = {"rf_backward_keys": 1e-6, "rf_backward_rows": 3e-6, "rf_fused_embedding_bag": 2e-6}
    monkeypatch.setattr(module("training.stages"), "profile", lambda step, batches, steps: kernels)
    record = results(training, tmp_path, "--markdown", "--optimizers", "sgd", "--figures", "steps")
    assert record["A-3, sgd"]["stages_us"]["recfuse"]["transpose"] == pytest.approx(1.0)
    assert "| A-3, sgd | recfuse | 2.0 | 1.0 | 3.0 | 0.0 | 6.0 |" in capsys.readouterr().out


def test_a_missing_peer_is_noted(training, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_table_batched_embeddings_ops_inference", None)
    assert training("--subjects", "mlperf-4", "--optimizers", "sgd", "--figures", "steps") == 0
    assert "FBGEMM is left out" in " ".join(capsys.readouterr().out.split())


def test_losses_are_those_of_torch(training, tmp_path, capsys):
    """A short form of the page's figure, with a plot."""
    pytest.importorskip("matplotlib")
    options = ["--figures", "convergence", "--steps", "60", "--plots", tmp_path]
    record = results(training, tmp_path, *options)
    for kind, losses in record["convergence"].items():
        assert len(losses["torch"]) == len(losses["recfuse"]) == 60, kind
        assert losses["recfuse"] == pytest.approx(losses["torch"], abs=1e-4)
        assert sum(losses["torch"][-20:]) < sum(losses["torch"][:20])
    assert (tmp_path / "training_losses.png").read_bytes().startswith(b"\x89PNG")
    assert "Log loss over 60 steps" in capsys.readouterr().out


def test_losses_that_differ_end_the_run(training, monkeypatch, capsys):
    convergence = module("training.convergence")
    real = convergence.learn
    shifted = {"torch": 0.0, "recfuse": float("nan")}
    monkeypatch.setattr(
        convergence, "learn",
        lambda side, kind, **options: [loss + shifted[side] for loss in real(side, kind, **options)],
    )  # fmt: skip
    assert training("--figures", "convergence") == 1
    assert "do not agree" in capsys.readouterr().err
