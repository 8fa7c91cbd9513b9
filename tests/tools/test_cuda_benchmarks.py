"""The flow of the GPU benchmarks, on CPU tensors: everything that needs no GPU."""

import argparse
import contextlib
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import recfuse
from recfuse import info, timing
from support.gpu_benchmark import compiler_log, on_the_cpu

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = [
    "--device", "cuda", "--rows", "500", "--dims", "8", "--batch-size", "6", "--num-indices-per-lookup", "4",
    "--num-batches", "2", "--rounds", "2", "--tables", "3", "--mix-tables", "5", "--tune-budget", "0.2",
]  # fmt: skip


def module(name):
    return importlib.import_module(name)


def plain_gather(shape, table, rows, checksum=None, every=0):
    """As the kernel's, by torch."""
    return table[rows][every - 1 :: every] if every else table[:0]


@pytest.fixture
def bag(monkeypatch):
    """Runs embedding_bag.py's GPU part on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "embedding_bag", TINY) as run:
        monkeypatch.setattr(torch, "compile", lambda **options: lambda call: call)
        monkeypatch.setattr(module("common.settings").Setting, "copy_speed", 1e9)
        for place in ("common.ceilings", "embedding_bag.main_table", "embedding_bag.short_bags"):
            monkeypatch.setattr(module(place), "gather", plain_gather)
        sweeps, before = module("embedding_bag.sweeps"), module("embedding_bag.pinning").pinned_before
        monkeypatch.setattr(sweeps, "pinned_concurrently", before)
        monkeypatch.setattr(sweeps, "compiled", lambda setting, text: {"registers": 40, "spill_bytes": 0})
        # The CPU's wheel of FBGEMM has no GPU module to offer.
        monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
        monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_table_batched_embeddings_ops_inference", None)
        yield run


def test_the_main_table_has_every_candidate_at_every_hotness(bag, tmp_path, capsys):
    target = tmp_path / "bag.json"
    assert bag("--json", target, "--plots", tmp_path, "--markdown") == 0
    output, record = capsys.readouterr().out, json.loads(target.read_text())
    assert record["main"] == ["one_item", "high", "medium", "low", "random"]
    for hotness in record["main"]:
        entry = record[f"main {hotness}"]
        assert "fbgemm v1" not in entry["us"]
        for name in ("torch", "torch.compile", "recfuse", "recfuse tuned", "recfuse fp16", "recfuse bf16"):
            assert entry["us"][name] > 0 and entry["us"][f"{name}, eager"] > 0
            assert entry["relative_error"][name] < 8e-3
            assert entry["share_of_gather"][name] > 0 and entry["share_of_floor"][name] > 0
        assert 1 <= entry["unique_rows"] <= 24
        # A sample is a pass over three tables, a figure is for one.
        median = entry["measured"]["timings"]["recfuse"]["median_s"]
        assert entry["us"]["recfuse"] == pytest.approx(median * 1e6 / 3)
    assert "FBGEMM is left out" in output and "over torch" in output
    assert (tmp_path / "main.png").read_bytes().startswith(b"\x89PNG")


def test_cold_caches_have_no_times_as_called(bag, capsys):
    options = ["--hotness", "random", "--candidates", "torch,recfuse", "--cache", "cold", "--markdown"]
    assert bag(*options) == 0
    output = capsys.readouterr().out
    assert "cold L2" in output and "as called, host included" not in output


def test_a_wrong_output_ends_the_run(bag, monkeypatch, capsys):
    candidates = module("embedding_bag.candidates")
    right = candidates.torch_bag
    monkeypatch.setattr(
        candidates,
        "torch_bag",
        lambda weights: lambda requests: [out * 1.001 for out in right(weights)(requests)],
    )
    assert bag("--hotness", "low", "--candidates", "torch,recfuse") == 1
    assert "low, torch: the outputs differ from sums in float64 by 1.0e-03" in capsys.readouterr().err


def test_a_peer_that_does_not_run_here_is_left_out_with_its_reason(bag, monkeypatch, capsys):
    def broken(call):
        def raises(*arguments):
            raise RuntimeError("no C compiler found\nand more")

        return raises

    monkeypatch.setattr(torch, "compile", lambda **options: broken)
    assert bag("--hotness", "low", "--candidates", "torch,torch.compile,recfuse", "--markdown") == 0
    output = capsys.readouterr().out
    assert "low: torch.compile is left out: no C compiler found  " in output
    assert "| hotness | torch | recfuse | gather 32 B |" in output


FIGURES = ["6", "9", "11", "12", "15", "16", "17"]


def test_short_bags(bag, monkeypatch, tmp_path):
    figure = module("embedding_bag.short_bags")
    monkeypatch.setattr(figure, "ROWS", (300, 10**6))
    monkeypatch.setattr(figure, "BAGS", (5, 40, 1000))
    assert bag("--figures", "short", "--quick", "--json", tmp_path / "short.json") == 0
    record = json.loads((tmp_path / "short.json").read_text())
    cells = [cell for dim in (128, 32) for cell in record[f"short 0M x {dim}"]]
    assert [cell["alpha"] for cell in cells[:3]] == [0.0, 1.05, 1.15] and len(cells) == 2 * 2 * 2 * 3
    for cell in cells:
        assert ("index_select" in cell["us"]) == (cell["pooling"] == 1)
        assert {"torch", "recfuse", "recfuse fp16", "recfuse bf16"} < set(cell["us"])
        sizes = (2 * cell["dim"], 4 * cell["dim"])
        assert set(cell["gathers"]) == {
            f"gather {size} B{how}" for size in sizes for how in ("", ", writing")
        }
        assert 0 < cell["unique_rows"] <= min(cell["rows"], cell["bags"] * cell["pooling"])
    skewed = [cell["unique_rows"] for cell in cells if cell["bags"] == 40 and cell["pooling"] == 16]
    assert skewed[0] > skewed[1]
    wide, _, summary = record["tables"]
    assert [row[0] for row in summary["rows"]] == ["5 x 1", "5 x 16", "40 x 1", "40 x 16", "all"]
    assert len(wide["rows"]) == 4 and all(cell.count("/") == 2 for cell in wide["rows"][0][1:])


def test_the_figures_of_the_paper(bag, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    sweep, figures = module("embedding_bag.speeds"), module("embedding_bag.sweeps")
    pinned = []
    monkeypatch.setattr(recfuse, "pin_rows", lambda weight, rows: pinned.append(len(rows)))
    monkeypatch.setattr(figures, "TUNED_WARPS", (16, 32))
    monkeypatch.setattr(figures, "TUNED_DISTANCES", (2,))
    monkeypatch.setattr(figures, "POOLINGS", (2, 4))
    monkeypatch.setattr(sweep, "FEW_ROUNDS", 1)
    target = tmp_path / "figures.json"
    hotness = ["--hotness", "high,random", "--pin-mb", 5 * 8 * 4 / 1e6]
    assert bag("--figures", ",".join(FIGURES), "--json", target, "--plots", tmp_path, *hotness) == 0
    record, output = json.loads(target.read_text()), capsys.readouterr().out
    for number in FIGURES:
        assert (tmp_path / f"figure_{number}.png").read_bytes().startswith(b"\x89PNG")
        assert all(us["torch"] > 0 for us in record[f"figure {number}"]["us"].values())
    assert set(pinned) == {5}  # rows that --pin-mb holds
    assert list(record["figure 11"]["us"]) == ["high 2", "high 4", "random 2", "random 4"]
    assert set(record["figure 17"]["us"]) == {"mix1", "mix2", "mix3"}
    assert {"OptMT", "RPF+OptMT", "RPF+L2P+OptMT", "recfuse"} <= set(record["figure 12"]["us"]["high"])
    assert "Table IX" in output and "rows in use, MB" in output


def test_a_schedule_that_is_refused_is_left_out_with_its_reason(bag, monkeypatch, capsys):
    sweep = module("embedding_bag.speeds")
    monkeypatch.setattr(sweep, "DISTANCES", (1, 2))
    monkeypatch.setattr(module("embedding_bag.sweeps"), "DISTANCES", (1, 2))
    real = recfuse.embedding_bag

    def picky(*arguments, schedule="", **options):
        if "distance=2" in schedule:
            raise ValueError("too far\nand more")
        return real(*arguments, schedule=schedule, **options)

    monkeypatch.setattr(recfuse, "embedding_bag", picky)
    assert bag("--figures", "9", "--hotness", "high", "--markdown") == 0
    output = capsys.readouterr().out
    assert "refused: station=shared distance=2: too far  " in output
    assert "| 2 | - |" in output


def test_ceilings_are_measured_for_every_cell(bag, monkeypatch, tmp_path):
    random_rows, ceilings = module("embedding_bag.random_rows"), module("common.ceilings")
    monkeypatch.setattr(random_rows, "WORKING_SETS_MB", (1, 2))
    monkeypatch.setattr(random_rows, "ROW_BYTES", (64, 512))
    monkeypatch.setattr(random_rows, "LONG_RUN", 100)
    monkeypatch.setattr(ceilings, "SHAPES", ceilings.SHAPES[:2])
    target = tmp_path / "ceilings.json"
    assert bag("--figures", "ceilings", "--json", target) == 0
    cells = json.loads(target.read_text())["ceilings"]
    assert [(cell["row_bytes"], cell["working_set_bytes"] >> 20) for cell in cells] == [
        (64, 1), (64, 2), (512, 1), (512, 2),
    ]  # fmt: skip
    assert all(cell[run]["bytes_per_s"] > 0 for cell in cells for run in ("batch", "long"))


@pytest.mark.parametrize(
    "tables, expected", [(250, (100, 75, 50, 25)), (40, (16, 12, 8, 4)), (10, (4, 3, 2, 1))]
)
def test_mixes_keep_the_shares_of_the_paper(bag, tables, expected):
    levels = module("common.traces").mix_levels("mix1", tables)
    assert tuple(levels.count(name) for name in ("high", "medium", "low", "random")) == expected


def test_a_table_of_the_file_s_trace_starts_at_a_place_of_its_own(bag, monkeypatch):
    setting = module("embedding_bag.setting")
    tables = object.__new__(setting.BagSetting)
    tables.medium, tables.weights = torch.arange(12).numpy(), [None] * 3
    assert [tables.trace("medium", table)[0] for table in range(4)] == [0, 3, 6, 9]


def test_a_pass_without_a_graph_is_called_instead(bag, monkeypatch):
    setting = module("embedding_bag.setting")

    def refuse(call, device):
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")

    monkeypatch.setattr(timing, "graphed", refuse)
    part = (torch.zeros(4, dtype=torch.int64), torch.tensor([0, 4]))
    workload = setting.Workload("one", [], [[part]], bags=1, pooling=4)
    run = setting.each(lambda table, indices, offsets: indices.sum())
    result, failures = setting.time_passes({"a": run}, workload, torch.device("cpu"), rounds=1)
    assert failures == {"a": "operation not permitted when stream is capturing"}
    assert list(result.timings) == ["a, eager"]


@pytest.mark.parametrize("row_bytes", [16, 64, 128, 256, 512])
def test_every_shape_of_the_gather_compiles_without_spills(bag, row_bytes):
    ceiling = module("common.ceilings")
    source = (module("common.ceilings").KERNELS / ceiling.GATHER).read_text()
    writing = [shape for shape in ceiling.SHAPES if shape.l1 and not shape.rolling]
    cases = [(shape, row_bytes) for shape in ceiling.SHAPES] + [(shape, row_bytes, 16) for shape in writing]
    for options in {tuple(ceiling.options(*case)) for case in cases}:
        log = compiler_log(source, ["-arch=sm_90", "--ptxas-options=-v", *options])
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), f"{options}: {log}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("row_bytes", [64, 256, 512])
def test_the_gather_reads_all_of_every_row(monkeypatch, row_bytes):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ceiling = module("common.ceilings")
    table = torch.randint(-(2**31), 2**31 - 1, (1000, row_bytes // 4), dtype=torch.int32)
    for lookups in (1, 31, 4097, 307_200):
        ids = torch.randint(1000, (lookups,))
        expected = np.bitwise_xor.reduce(table[ids].numpy().reshape(-1, 4))
        for shape in ceiling.SHAPES:
            checksum = torch.zeros(4, dtype=torch.int32, device="cuda")
            for every in (0, 1, 16):
                checksum.zero_()
                written = ceiling.gather(shape, table.cuda(), ids.cuda(), checksum, every)
                assert (checksum.cpu().numpy() == expected).all(), shape
                assert torch.equal(written.cpu(), table[ids[every - 1 :: every]] if every else table[:0]), (
                    shape
                )


TINY_DLRM = [
    "--device", "cuda", "--arch-embedding-size", "50", "--tables", "5", "--arch-sparse-feature-size", "8",
    "--arch-mlp-bot", "4-8", "--arch-mlp-top", "8-1", "--mini-batch-size", "5",
    "--num-indices-per-lookup", "3", "--num-batches", "2",
]  # fmt: skip


@pytest.fixture
def dlrm(monkeypatch):
    """Runs dlrm.py's GPU part on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "dlrm", TINY_DLRM) as run:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
        monkeypatch.setattr(torch, "compile", lambda call, **options: call)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield run


def test_the_whole_model_at_every_hotness_and_mix(dlrm, tmp_path, capsys):
    target = tmp_path / "dlrm.json"
    assert dlrm("--json", target, "--markdown") == 0
    output, record = capsys.readouterr().out, json.loads(target.read_text())
    levels = ["one_item", "high", "medium", "low", "random", "mix1", "mix2", "mix3"]
    assert list(record["measured"]) == levels
    for level in levels:
        timings = record["measured"][level]["timings"]
        assert {"nn.EmbeddingBag graph", "recfuse graph", "recfuse compiled"} <= set(timings)
        assert set(timings["recfuse"]["stages"]) == {"bottom MLP", "embeddings", "interaction", "top MLP"}
        assert all(difference < 1e-5 for difference in record["differences"][level])
    assert "recfuse over nn.EmbeddingBag compiled" in output and "| mix3 |" in output
    assert "nn.EmbeddingBag in a loop in 8 cases, outputs " in output.rstrip().splitlines()[-1]


def test_the_two_models_share_one_set_of_weights(dlrm):
    gpu = module("dlrm.gpu")
    from dlrm.model import DLRM

    model = DLRM([50, 60], 8, [4, 8], [8, 1])
    swapped, report = gpu.swapped_copy(model)
    assert len(report.fused) == 1 and type(model.emb_l[0]) is torch.nn.EmbeddingBag
    (packed,) = swapped.emb_l.packed_weights()
    end = packed.data_ptr() + packed.nbytes
    for bag, table in zip(model.emb_l, swapped.emb_l, strict=True):
        assert bag.weight.data_ptr() == table.weight.data_ptr() and torch.equal(bag.weight, table.weight)
        assert packed.data_ptr() <= bag.weight.data_ptr() <= end - bag.weight.nbytes
    for name in ("bot_l", "top_l"):
        pairs = zip(getattr(model, name).parameters(), getattr(swapped, name).parameters(), strict=True)
        assert all(one is other for one, other in pairs)


def test_training_steps_at_every_trace(dlrm, tmp_path, capsys):
    target = tmp_path / "train.json"
    assert dlrm("--train", "--trace", "low,mix2", "--json", target, "--markdown") == 0
    output, record = capsys.readouterr().out, json.loads(target.read_text())
    assert list(record["measured"]) == ["low", "mix2"]
    for level, found in record["measured"].items():
        timings = found["timings"]
        assert list(timings) == ["nn.EmbeddingBag", "recfuse, torch.optim", "recfuse", "recfuse graph"]
        assert list(timings["recfuse"]["stages"]) == ["forward", "backward", "optimizer"]
        assert record["differences"][level] < 1e-5
    assert "| mix2, optimizer |" in output and "| low, step |" in output
    assert "nn.EmbeddingBag in a loop, training in 2 cases, outputs " in output.rstrip().splitlines()[-1]


def test_a_model_that_computes_something_else_ends_the_run(dlrm, monkeypatch, tmp_path):
    real = recfuse.swap

    def bad_swap(model):
        report = real(model)
        model.interact_features = lambda x, ly: type(model).interact_features(model, x, ly) + 1
        return report

    monkeypatch.setattr(recfuse, "swap", bad_swap)
    assert dlrm("--trace", "low", "--json", tmp_path / "dlrm.json", "--no-compile") == 1
    assert list(json.loads((tmp_path / "dlrm.json").read_text())["measured"]) == ["low"]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--trace", "low,lukewarm"],
            "--trace: found 'low,lukewarm'; expected one_item",
        ),
        (["--arch-embedding-size", "50-60"], "tables differ in their rows"),
    ],
)
def test_dlrm_names_wrong_arguments(dlrm, capsys, options, message):
    assert dlrm(*options) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_figure_6_tells_the_registers_of_each_schedule(monkeypatch, tmp_path):
    if info.cuda()["libraries"]["libnvrtc"]["found"] is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("RECFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    setting = object.__new__(module("embedding_bag.setting").BagSetting)
    setting.device, setting.weights = torch.device("cpu"), [torch.zeros(10, 128)]
    setting.arguments = argparse.Namespace(batch_size=2048, num_indices_per_lookup=150)
    few, many = (
        module("embedding_bag.sweeps").compiled(setting, f"station=none warps={warps}") for warps in (16, 64)
    )
    assert 0 < many["registers"] <= 32 < few["registers"]


def test_concurrent_pinning_stays_one_table_ahead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pinning = module("embedding_bag.pinning")
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(recfuse, "pin_rows", lambda weight, rows: done.append(f"pin {rows}"))
    weights = [torch.zeros(1)] * 2
    run = pinning.pinned_concurrently(
        lambda requests: [done.append(f"bag {requests[0][0]}")], weights, ["0", "1"]
    )
    run([(0, None), (1, None)])
    assert done == [
        "side waits for main", "pin 0", "main waits for side",
        "side waits for main", "pin 1", "bag 0", "main waits for side",
        "bag 1",
    ]  # fmt: skip
