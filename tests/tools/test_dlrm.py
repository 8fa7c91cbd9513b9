"""The main job and the operator benchmarks, at tiny sizes."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import recfuse
import recfuse.data.workloads
from support.processes.fresh import run_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY_DLRM = [
    "--device",
    "cpu",
    "--arch-embedding-size",
    "50-60-70",
    "--arch-sparse-feature-size",
    "8",
    "--arch-mlp-bot",
    "4-8",
    "--arch-mlp-top",
    "8-1",
    "--mini-batch-size",
    "5",
    "--num-indices-per-lookup",
    "3",
    "--num-batches",
    "2",
]


@pytest.fixture
def run(monkeypatch):
    """Runs a benchmark script in this process; returns its exit status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run_script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        except SystemExit as stopped:
            return stopped.code
        return 0

    return run_script


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("".join(f"{row % 50}\n" for row in range(0, 300, 7)))
    return path


def test_dlrm_as_a_program_prints_one_table_and_writes_the_same_figures(tmp_path, trace):
    target = tmp_path / "dlrm.json"
    result = run_python(BENCHMARKS / "dlrm.py", *TINY_DLRM, "--trace", trace, "--json", target)
    assert result.returncode == 0, result.stderr
    assert "mini-batches" in result.stderr  # the progress bar
    record = json.loads(target.read_text())
    for stage in ("bottom MLP", "embeddings", "interaction", "top MLP", "total"):
        assert stage in result.stdout
        assert record["ratio"][stage] > 0
    assert 0 <= record["difference"]["outputs"] < 1e-5
    assert 0 <= record["difference"]["embeddings_relative"] < 1e-5
    timings = record["measured"]["timings"]
    assert {len(timings[name]["samples_s"]) for name in ("nn.EmbeddingBag", "recfuse")} == {2}
    for name, size in record["model_bytes"].items():
        assert size >= 4 * 8 * (50 + 60 + 70), name
    assert record["environment"]["command"].startswith("dlrm.py --device cpu --arch-embedding-size 50-60")
    assert result.stdout.startswith("Running on ")
    last = result.stdout.rstrip().splitlines()[-1]
    assert last == record["verdict"] and "nn.EmbeddingBag in a loop" in last and "outputs " in last
    assert not any(
        "memory" in cell.lower() for table in record["tables"] for row in table["rows"] for cell in row
    )
    assert "Memory of the model: " in result.stdout


def compared(baseline, candidate, load=0.0):
    """A comparison with these samples."""
    result = recfuse.timing.compare({"recfuse": lambda: None, "torch": lambda: None}, rounds=1)
    result.timings["torch"].samples[:], result.timings["recfuse"].samples[:] = baseline, candidate
    return dataclasses.replace(result, other_load=load)


@pytest.mark.parametrize(
    "cases, differences, expected",
    [
        ([([4.0] * 9, [3.0] * 9)], [0.0, 0.0], "recfuse: 1.33x faster than torch, outputs identical"),
        ([([3.0] * 9, [4.0] * 9)], [0.0, 2e-7], "recfuse: 1.33x slower than torch, outputs within 2e-07"),
        ([([4.0] * 9, [4.04] * 9)], [0.0], "recfuse: level with torch (0.99x), outputs identical"),
        # Faster by its median, but as often slower.
        (
            [([3.0, 5.0] * 4 + [4.4], [4.0] * 9)],
            [0.0],
            "recfuse: level with torch (1.10x), outputs identical",
        ),
        (
            [([4.0], [2.0]), ([9.0], [3.0])],
            [0.0],
            "recfuse: 2.00x to 3.00x faster than torch in 2 cases, outputs",
        ),
        (
            [([2.0], [4.0]), ([3.0], [9.0])],
            [0.0],
            "recfuse: 2.00x to 3.00x slower than torch in 2 cases, outputs",
        ),
        (
            [([2.0], [4.0]), ([9.0], [3.0])],
            [0.0],
            "recfuse: 0.50x to 3.00x as fast as torch in 2 cases, outputs",
        ),
    ],
)
def test_the_verdict_is_honest(monkeypatch, cases, differences, expected):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.verdict import verdict

    for load, doubt in ((0.0, ""), (0.5, " (not a quiet machine: measure again)")):
        results = {str(number): compared(*case, load) for number, case in enumerate(cases)}
        line = verdict(results, "recfuse", "torch", "torch", differences)
        assert line.startswith(expected) and line.endswith(doubt) and "\n" not in line
        assert ("quiet" in line) == bool(doubt)


@pytest.mark.parametrize(
    "gpu, expected", [(False, "torch finds no GPU."), (True, "--device cpu runs on the CPU.")]
)
def test_dlrm_uses_the_gpu_if_available(monkeypatch, capsys, gpu, expected):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from dlrm import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 << 30, 24 << 30))
    _, arguments = bench.parse([])
    output = capsys.readouterr().out
    assert arguments.device == ("cuda" if gpu else "cpu") and expected in output
    tables = len(arguments.arch_embedding_size)
    # A table of 256 MB twice, while the tables are packed.
    assert (20 < tables < 48 and f"{tables} tables of 250" in output) if gpu else tables == 26
    assert bench.parse(["--device", "cpu"])[1].device == "cpu"
    assert capsys.readouterr().out.startswith("Running on ")


@pytest.mark.parametrize("hotness", ["one_item", "medium", "random"])
def test_dlrm_on_generated_traces(run, capsys, hotness):
    assert run("dlrm", *TINY_DLRM, "--trace", hotness, "--markdown") == 0
    assert "| embeddings |" in capsys.readouterr().out


def test_dlrm_ends_with_status_1_when_the_outputs_differ(run, capsys, monkeypatch):
    real_swap = recfuse.swap

    def bad_swap(model):
        report = real_swap(model)
        with torch.no_grad():
            model.top_l[-2].bias.add_(torch.nan)
        return report

    monkeypatch.setattr(recfuse, "swap", bad_swap)
    assert run("dlrm", *TINY_DLRM) == 1
    assert "the outputs do not agree" in capsys.readouterr().err


def test_dlrm_trains(run, tmp_path, capsys):
    target = tmp_path / "train.json"
    assert run("dlrm", *TINY_DLRM, "--train", "--markdown", "--json", target) == 0
    output, record = capsys.readouterr().out, json.loads(target.read_text())
    for stage in ("forward", "backward", "optimizer", "step"):
        assert f"| medium, {stage} |" in output
    timings = record["measured"]["medium"]["timings"]
    assert set(timings) == {"nn.EmbeddingBag", "recfuse, torch.optim", "recfuse"}
    assert record["differences"]["medium"] < 1e-5
    verdict = output.rstrip().splitlines()[-1]  # how much faster depends on the machine
    assert "nn.EmbeddingBag in a loop, training" in verdict and "outputs identical" in verdict


def test_dlrm_reports_different_losses(run, capsys, monkeypatch):
    real_swap = recfuse.swap

    def bad_swap(model, optimizers, **options):
        report = real_swap(model, optimizers=optimizers, **options)
        optimizers[0].param_groups[0]["lr"] *= 2
        return report

    monkeypatch.setattr(recfuse, "swap", bad_swap)
    assert run("dlrm", *TINY_DLRM, "--train") == 1
    assert "the outputs do not agree" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message", [("60\n", "index 60 is outside a table of 50 rows"), ("x\n", "")]
)
def test_dlrm_names_errors_of_a_trace(run, capsys, trace, content, message):
    trace.write_text(content)
    assert run("dlrm", *TINY_DLRM, "--trace", trace) == 2
    assert f"--trace {trace}: {message}" in capsys.readouterr().err


TINY_BAG = [
    "--rows",
    "500",
    "--dims",
    "8",
    "--batch-size",
    "6",
    "--num-indices-per-lookup",
    "4",
    "--num-batches",
    "2",
    "--rounds",
    "2",
]


@pytest.mark.long
def test_embedding_bag_compares_all_hotness_levels(run, tmp_path, trace, capsys):
    target = tmp_path / "bag.json"
    assert run("embedding_bag", *TINY_BAG, "--trace", trace, "--json", target) == 0
    output = capsys.readouterr().out
    record = json.loads(target.read_text())
    assert [entry["hotness"] for entry in record["measured"]] == [
        "one_item",
        "high",
        "medium",
        "low",
        "random",
    ]
    for entry in record["measured"]:
        assert entry["ratio"]["torch"] > 0
        assert 0 <= entry["relative_difference"] < 1e-5
        assert entry["share_of_bandwidth"] > 0
        # All 24 indices and 7 offsets of int64 and six rows of output, and one to 24 rows of the table.
        assert 8 * 31 + 32 * 7 <= entry["least_bytes"] <= 8 * 31 + 32 * 30
    assert "Geometric mean" in output
    assert run("show", target) == 0
    assert "| one_item | 8 |" in capsys.readouterr().out


@pytest.fixture
def small_models(monkeypatch):
    """Models with one feature a group in place of fifty or more."""
    real_model = recfuse.workloads.model

    def small_model(name, seed=0):
        whole = real_model(name, seed=seed)
        firsts = [whole.group_of.index(number) for number in range(len(whole.groups))]
        return dataclasses.replace(
            whole,
            groups=tuple(dataclasses.replace(group, features=1) for group in whole.groups),
            rows=tuple(whole.rows[feature] for feature in firsts),
            dims=tuple(whole.dims[feature] for feature in firsts),
            group_of=tuple(range(len(whole.groups))),
        )

    monkeypatch.setattr(recfuse.workloads, "model", small_model)


TINY_FUSED = ["--batch-size", 3, "--num-batches", 2, "--rounds", 2]


@pytest.mark.long
def test_fused_embedding_bag_compares_models(run, small_models, tmp_path, capsys):
    target = tmp_path / "fused.json"
    assert run("fused_embedding_bag", "--models", "B,E", *TINY_FUSED, "--json", target) == 0
    entries = json.loads(target.read_text())["models"]
    assert [(entry["model"], entry["features"]) for entry in entries] == [("B", 12), ("E", 20)]
    for entry in entries:
        assert 0 <= entry["relative_difference"] < 1e-5
        assert entry["ratio"]["torch"] > 0
        # At least the offsets and the output, at most a row for each lookup too.
        dims = recfuse.workloads.model(entry["model"]).dims
        floor = 4 * (3 * len(dims) + 1) + 4 * 3 * sum(dims)
        assert floor <= entry["least_bytes"] <= floor + entry["lookups"] * (4 + 4 * max(dims))
    assert "geometric mean" in capsys.readouterr().out


TINY_TRAINING = ["--shapes", "3x4x1,2x5x3x50", "--rows", 40, "--dim", 4, "--bag", "3x7", "--bag-rows", "30"]


def test_training_compares_steps(run, tmp_path, capsys):
    target = tmp_path / "training.json"
    assert run("training", *TINY_TRAINING, "--num-batches", 2, "--rounds", 2, "--json", target) == 0
    entries = json.loads(target.read_text())["measured"]
    found = [(entry["tables"], entry["rows"], entry["sparse"], entry["alone"]) for entry in entries]
    assert found == [
        (3, 40, False, False),
        (3, 40, True, False),
        (2, 50, False, False),
        (2, 50, True, False),
        (1, 30, False, True),
        (1, 30, True, True),
    ]
    for entry in entries:
        assert 0 <= entry["relative_difference"] < 1e-3
        sides = {
            "torch",
            "recfuse, torch.optim",
            *(["recfuse"] if entry["sparse"] else []),
        }
        assert set(entry["measured"]["timings"]) == sides == {"torch", *entry["ratios"]}
        assert {len(side["samples_s"]) for side in entry["measured"]["timings"].values()} == {2}
    output = capsys.readouterr().out
    assert "geometric mean" in output and "one bag: 1 x 3 x 7, 30 x 4" in output
    assert run("show", target) == 0
    assert "| 3 x 4 x 1, 40 x 4 | sparse |" in capsys.readouterr().out


@pytest.mark.long
def test_ratios_are_plotted(run, small_models, tmp_path):
    pytest.importorskip("matplotlib")
    few_bags, few_models = [*TINY_BAG, "--hotness", "random"], [*TINY_FUSED, "--models", "B"]
    for name, arguments, plot in (
        ("embedding_bag", few_bags, "main"),
        ("fused_embedding_bag", few_models, "fused_models"),
    ):
        assert run(name, *arguments, "--plots", tmp_path) == 0
        assert (tmp_path / f"{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_measuring(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("embedding_bag", "--plots", tmp_path) == 2
    assert "Install matplotlib" in capsys.readouterr().err


def test_a_missing_peer_is_reported_and_left_out(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_table_batched_embeddings_ops_inference", None)
    assert run("embedding_bag", *TINY_BAG, "--hotness", "random") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "FBGEMM is left out" in output
    assert "over fbgemm" not in output


def test_agreement_is_refused_when_a_difference_is_not_a_number(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import argparse

    from common.checks import check_agreement

    check_agreement(argparse.ArgumentParser(), [0.0, 1e-6], 1e-5)
    for bad in (float("nan"), 1e-4):
        with pytest.raises(SystemExit):
            check_agreement(argparse.ArgumentParser(), [0.0, bad], 1e-5)


@pytest.mark.parametrize("load, warned", [(None, False), (0.05, False), (0.7, True)])
def test_a_busy_machine_is_told(monkeypatch, load, warned):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.report import load_notes

    quiet = recfuse.timing.compare({"a": lambda: None}, rounds=1)
    notes = load_notes([dataclasses.replace(quiet, other_load=number) for number in (0.0, load)])
    assert any("up to 0.7 cores" in note for note in notes) == warned == bool(notes)


@pytest.mark.parametrize(
    "costs, parts, expected",
    [([1, 1, 1, 1], 2, [0, 2, 4]), ([9, 1, 1], 2, [0, 1, 3]), ([1, 1, 9], 3, [0, 3]), ([5], 4, [0, 1])],
)
def test_work_is_dealt_out_in_ranges_of_like_cost(monkeypatch, costs, parts, expected):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.peers import balanced_cuts

    assert balanced_cuts(torch.tensor(costs), parts) == expected


def test_peers_in_threads_run_on_a_thread_each(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common.peers import InThreads

    def threads_in_use(indices, offsets):
        return torch.tensor([torch.get_num_threads()])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        part = (torch.zeros(1), torch.zeros(1))
        assert InThreads([threads_in_use] * 3, dim=0)([part] * 3).tolist() == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
