"""The command line of every benchmark: help, wrong arguments and short runs."""

import runpy
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from support.gpu_benchmark import BENCHMARKS, on_the_cpu

PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "__init__")
SMALL_DLRM = [
    "--device", "cpu", "--arch-embedding-size", "50-60-70", "--arch-sparse-feature-size", "8",
    "--arch-mlp-bot", "4-8", "--arch-mlp-top", "8-1",
]  # fmt: skip
WRONG = [
    ("embedding_bag, GPU", ["--figures", "6,7"], "--figures: found '6,7'; expected ceilings, main, 6"),
    (
        "embedding_bag, GPU",
        ["--candidates", "torch,cudf"],
        "--candidates: found 'torch,cudf'; expected torch",
    ),
    ("embedding_bag, GPU", ["--candidates", "torch"], "torch or recfuse is missing"),
    (
        "embedding_bag, GPU",
        ["--dims", "8,16"],
        "--dims: found 8,16; expected a single power of two from 8 on",
    ),
    (
        "embedding_bag, GPU",
        ["--dims", "96"],
        "--dims: found 96; expected a single power of two from 8 on",
    ),
    ("embedding_bag, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    (
        "fused_embedding_bag, GPU",
        ["--figures", "models,7"],
        "--figures: found 'models,7'; expected models, ",
    ),
    (
        "fused_embedding_bag, GPU",
        ["--candidates", "recfuse,cudf"],
        "--candidates: found 'recfuse,cudf'; expected torch",
    ),
    ("fused_embedding_bag, GPU", ["--candidates", "torch"], "--candidates: recfuse is missing"),
    (
        "fused_embedding_bag, GPU",
        ["--candidates", "recfuse", "--figures", "12"],
        "recfuse tuned is missing",
    ),
    ("fused_embedding_bag, GPU", ["--hotness", "tepid"], "--hotness: found 'tepid'"),
    ("fused_embedding_bag, GPU", ["--batch-sizes", "512,0"], "--batch-sizes"),
    ("fused_embedding_bag, GPU", ["--skewed", "Z"], "--skewed"),
    ("fused_embedding_bag, GPU", ["--cache", "cold"], "--cache: cold is for --device cpu"),
    ("fused_embedding_bag, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    ("fused_embedding_bag, GPU", ["--plans", "/nowhere/plans"], "/nowhere/plans is no folder"),
    ("ikbo_linear, GPU", ["--figures", "main,7"], "--figures: found 'main,7'; expected main, batches"),
    (
        "ikbo_linear, GPU",
        ["--contestants", "recfuse,cutlass"],
        "--contestants: found 'recfuse,cutlass'; expected broadcast",
    ),
    (
        "ikbo_linear, GPU",
        ["--in-sweeps", "padded"],
        "--in-sweeps: recfuse is missing, or a peer of decomposed",
    ),
    (
        "ikbo_linear, GPU",
        ["--contestants", "recfuse,concatenated"],
        "--contestants: recfuse is missing, or a peer of decomposed",
    ),
    ("ikbo_linear, GPU", ["--dtypes", "int8"], "--dtypes: found 'int8'"),
    ("ikbo_linear, GPU", ["--modes", "asleep"], "--modes: found 'asleep'"),
    ("ikbo_linear, GPU", ["--batches", ""], "--batches: found ''"),
    ("ikbo_linear, GPU", ["--compile", "pitched"], "--compile: found 'pitched'; expected broadcast"),
    ("ikbo_linear, GPU", ["--shapes", "64x64"], "expected shapes of four integers joined by x"),
    ("ikbo_linear, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    ("ikbo_attention, GPU", ["--figures", "main,7"], "--figures: found 'main,7'; expected main, ratios"),
    (
        "ikbo_attention, GPU",
        ["--contestants", "recfuse,cutlass"],
        "--contestants: found 'recfuse,cutlass'; expected repeated",
    ),
    ("ikbo_attention, GPU", ["--dtypes", "int8"], "--dtypes: found 'int8'"),
    ("ikbo_attention, GPU", ["--modes", "asleep"], "--modes: found 'asleep'"),
    ("ikbo_attention, GPU", ["--kv", ""], "--kv: found ''"),
    ("ikbo_attention, GPU", ["--groups", "0"], "found '0'; expected N, N+M or N..M"),
    ("ikbo_attention, GPU", ["--ratios", "9..3"], "found '9..3'; expected N, N+M or N..M"),
    (
        "ikbo_attention, GPU",
        ["--heads", "2", "--kv-heads", "3"],
        "--kv-heads: found 3, needs a divisor of --heads 2",
    ),
    ("ikbo_attention, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    ("training, GPU", ["--subjects", "A"], "subject is 'A'; expected NAME-SIZE"),
    ("training, GPU", ["--subjects", "Q-3"], "loads: name is 'Q'; expected A, B, C"),
    ("training, GPU", ["--subjects", ""], "--subjects: found ''; expected at least a value"),
    ("training, GPU", ["--optimizers", "lamb"], "--optimizers: found 'lamb'; expected sgd"),
    ("training, GPU", ["--sides", "torch"], "--sides: recfuse is missing"),
    ("training, GPU", ["--figures", "steps,7"], "--figures: found 'steps,7'; expected steps, host"),
    ("training, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    (
        "embedding_columns, GPU",
        ["--figures", "micro,7"],
        "--figures: found 'micro,7'; expected micro, mixed",
    ),
    (
        "embedding_columns, GPU",
        ["--contestants", "torch; fbgemm"],
        "--contestants: found 'torch,fbgemm'; expected torch",
    ),
    (
        "embedding_columns, GPU",
        ["--contestants", "recfuse"],
        "--contestants: recfuse is missing, or a peer of torch",
    ),
    ("embedding_columns, GPU", ["--models", "G"], "--models: found 'G'; expected E, F"),
    ("embedding_columns, GPU", ["--columns", "0"], "found '0'; expected an integer of at least 1"),
    ("embedding_columns, GPU", ["--columns", ""], "--columns: found ''; expected at least a value"),
    ("embedding_columns, GPU", ["--plots", "/nowhere"], "/nowhere is no folder"),
    ("dlrm", ["--trace", "lukewarm"], "expected a file or a hotness level (one_item, high"),
    ("dlrm", ["--device", "cuda"], "torch finds no GPU. Pass --device cpu."),
    ("dlrm", ["--mini-batch-size", "0"], "expected an integer of at least 1"),
    ("dlrm", ["--arch-embedding-size", "50-x"], "found 'x'; expected an integer of at least 1"),
    ("dlrm", ["--arch-mlp-bot", "4-9"], "last equal to --arch-sparse-feature-size 8"),
    ("dlrm", ["--json", "/nowhere/figures.json"], "/nowhere is no folder, or cannot be written"),
    ("dlrm", ["--seed", "-1"], "expected an integer of at least 0"),
    ("embedding_bag", ["--hotness", "random,tepid"], "; expected one_item"),
    ("embedding_bag", ["--dims", "0"], "expected an integer of at least 1"),
    ("embedding_bag", ["--device", "cuda"], "torch finds no GPU"),
    ("fused_embedding_bag", ["--device", "cuda"], "torch finds no GPU"),
    ("fused_embedding_bag", ["--models", "Z"], "--models: "),
    ("fused_embedding_bag", ["--plots", "/nowhere"], "/nowhere is no folder"),
    ("training", ["--device", "cuda"], "torch finds no GPU"),
    ("training", ["--shapes", "3x4"], "expected 3 or 4 integers"),
    ("training", ["--bag", "3xA"], "expected an integer of at least 1"),
    ("training", ["--shapes", "", "--bag-rows", ""], "both empty"),
    ("performance_model", ["measure"], "--measure FILE is missing, which the figure measure writes"),
    ("performance_model", ["--measure", "a.json", "--parts", "held,all"], "--parts: found 'held,all'"),
    ("show", [__file__], "is no result file"),
]
IKBO_FIGURES = ["main", "batches", "small", "ratios", "shapes", "host"]
# Options in addition to --device, and the values that the run gets; explicit values do not change.
QUICK = [
    (
        "embedding_bag",
        ["--quick", "--tables", 3, "--rounds", 2],
        {"tables": 3, "rounds": 2, "hotness": ["medium", "random"]},
    ),
    (
        "fused_embedding_bag",
        ["--quick", "--rounds", 2, "--equal-tables", 3],
        {"rounds": 2, "equal_tables": 3, "tune_budget": 5.0},
    ),
    (
        "ikbo_linear",
        ["--quick", "--rounds", 2, "--batches", "4,12"],
        {"rounds": 2, "batches": [4, 12], "figures": IKBO_FIGURES},
    ),
    ("training", ["--quick", "--rounds", 2], {"rounds": 2, "subjects": 2}),
    ("training", ["--rounds", 2], {"rounds": 2, "subjects": 5}),
    ("performance_model", [], {"figures": ["recorded"]}),
    ("performance_model", ["--recorded", "--baselines"], {"figures": ["recorded", "baselines"]}),
    (
        "performance_model",
        ["--measure", "held.json", "--calibrate", "new.json"],
        {"figures": ["calibrate", "measure"], "parts": 8},
    ),
    ("performance_model", ["baselines", "--recorded"], {"figures": ["baselines", "recorded"]}),
]


def program(monkeypatch, name):
    """Returns the call that runs a program with arguments and returns its exit status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) is None:  # the folder tests/distributed
        monkeypatch.delitem(sys.modules, name)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        except SystemExit as stopped:
            return stopped.code
        return 0

    return run


@pytest.mark.parametrize("name, options, message", WRONG)
def test_a_wrong_argument_is_refused(monkeypatch, capsys, name, options, message):
    family, _, gpu = name.partition(", ")
    if gpu:
        with on_the_cpu(monkeypatch, family, ["--device", "cuda"]) as run:
            assert run(*options) == 2
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        small = SMALL_DLRM if family == "dlrm" else []
        assert program(monkeypatch, family)(*small, *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("family, options, expected", QUICK)
def test_quick_leaves_given_values_alone(monkeypatch, family, options, expected):
    seen = {}
    with on_the_cpu(monkeypatch, family, ["--device", "cuda"]) as run:
        bench = import_module(family).bench
        monkeypatch.setattr(bench, "run", lambda parser, arguments, device: seen.update(vars(arguments)))
        assert run(*options) == 0
    counts = {name: len(value) for name, value in seen.items() if isinstance(value, list)}
    for name, value in expected.items():
        assert value in (seen[name], counts.get(name))


def test_on_the_cpu_triton_stays_and_its_peers_are_missing(monkeypatch):
    """torch asks once for triton and remembers the answer, which must be that of the machine."""
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with on_the_cpu(monkeypatch, "ikbo_linear", ["--device", "cuda"]):
        assert import_module("triton") is sys.modules["triton"]
        with pytest.raises(ModuleNotFoundError, match=r"ikbo_linear\.triton_peer"):
            import_module("ikbo_linear.triton_peer")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help(monkeypatch, capsys, name):
    assert program(monkeypatch, name)("--help") == 0
    assert "usage:" in capsys.readouterr().out
