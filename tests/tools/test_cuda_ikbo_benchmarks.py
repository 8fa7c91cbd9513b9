"""The flow of the benchmark of linear layers over users and candidates, on CPU tensors and tiny shapes."""

import importlib
import json

import pytest
import torch

import recfuse
from support.gpu_benchmark import BENCHMARKS, on_the_cpu

pytestmark = pytest.mark.long

TINY = [
    "--device", "cuda", "--candidates", "12", "--ratio", "5", "--m", "9", "--n", "8", "--k-user", "13",
    "--k-cand", "11", "--matmul", "16", "--rounds", "2", "--sweep-rounds", "1",
    "--batches", "4,12", "--small", "4",
    "--ratios", "1,12", "--shapes", "8x8x16x8,3x1x5x7", "--dtypes", "float32",
]  # fmt: skip
FIGURES = ["main", "batches", "small", "ratios", "shapes", "host"]
FORMS = [
    "broadcast + concat", "concatenated", "decomposed", "decomposed baddbmm", "padded", "padded baddbmm",
    "padded in call", "padded in call baddbmm", "pitched", "pitched baddbmm",
]  # fmt: skip
SWEPT = [*FORMS[:2], "padded", "padded baddbmm", "pitched", "pitched baddbmm", "recfuse"]
PATHS = ["path decomposed", "path aligned", "path broadcast"]
PATHS_OF_AUTO = [name.removeprefix("path ") for name in PATHS]


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def ikbo(monkeypatch):
    """Runs ikbo_linear.py's GPU part on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "ikbo_linear", TINY) as run:
        measure = module("ikbo_linear.measure")
        monkeypatch.setattr(torch, "compile", lambda **options: lambda call: call)
        monkeypatch.setattr(measure.IkboSetting, "copy_speed", 1e9)
        monkeypatch.setattr(measure.IkboSetting, "on_gpu", True)
        yield run


def results(ikbo, tmp_path, *options):
    target = tmp_path / "ikbo.json"
    assert ikbo("--json", target, *options) == 0
    return json.loads(target.read_text())


def test_every_figure_runs(ikbo, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = results(ikbo, tmp_path, "--plots", tmp_path, "--compile", "all", "--markdown")
    output = capsys.readouterr().out
    assert {*FIGURES, "roofline", "matmul"} <= set(record)
    plotted = {path.stem for path in tmp_path.glob("*.png")}
    assert plotted == {f"ikbo_{name}" for name in (*FIGURES[:-1], "roofline")}
    assert "Triton is left out" in output and "path fused is left out" in output
    assert "| geometric mean |" in output and "| least |" in output
    assert (
        "**Small batches, float32, as called: µs**" in output
        and "**Batches, float32, as called" not in output
    )
    entry = record["main"]["float32"]
    compiled = {name for name in entry["relative_error"] if name.startswith("compiled ")}
    assert set(entry["relative_error"]) == {*FORMS, *compiled, *PATHS, "recfuse"} and len(compiled) == 6
    assert 0 < max(entry["relative_error"].values()) < 1e-6
    assert [list(record[name]["float32"]) for name in ("batches", "ratios")] == [["4", "12"], ["1", "12"]]
    assert entry["path"] in PATHS_OF_AUTO
    for mode, called in (("back to back", True), ("with pauses", False)):
        names = {*entry["relative_error"], "matmul"}
        assert set(entry["us"][mode]) == names | {f"{name}, eager" for name in names if called}
        assert entry["us"][mode][entry["best_torch"][mode]] <= entry["us"][mode]["padded"]
        median = entry["measured"][mode]["timings"]["recfuse"]["median_s"]
        assert entry["us"][mode]["recfuse"] == pytest.approx(median * 1e6)
    assert set(record["host"]) == {
        "decomposed",
        "padded",
        "padded baddbmm",
        "padded in call",
        *PATHS,
        "recfuse",
    }
    # A shape that two figures have is measured once.
    assert record["batches"]["float32"]["12"]["us"] == record["main"]["float32"]["us"]
    swept = record["ratios"]["float32"]["1"]
    assert set(swept["us"]["with pauses"]) == {*SWEPT, "matmul"} == {*swept["relative_error"], "matmul"}
    assert len(record["roofline"]["back to back"]) == 1 + 1 + 2 + 2


def test_least_work_matches_the_paper(ikbo):
    make = module("ikbo_linear.problem").Shape
    shape = make()
    assert (shape.users, shape.candidates, shape.m, shape.n) == (15, 1024, 433, 256)
    assert shape.flop == 2 * 433 * 256 * (1024 * 866 + 15 * 1178) == pytest.approx(200.5e9, rel=1e-3)
    assert shape.least_bytes(torch.float16) == pytest.approx(692e6, rel=1e-3)
    assert [make(1024, ratio).users for ratio in (1, 10, 1000)] == [
        1024,
        103,
        2,
    ]


def test_the_bound_is_the_greater_of_two_times(ikbo, tmp_path):
    entry = results(ikbo, tmp_path, "--figures", "main", "--dtypes", "float16")["main"]["float16"]
    flop, least_bytes = entry["flop"], entry["least_bytes"]
    assert flop == 2 * 9 * 8 * (12 * 11 + 3 * 13)
    assert least_bytes == 2 * (12 * 11 * 8 + 3 * 13 * 8 + 9 * (13 + 11) + 12 * 9 * 8) + 8 * 12
    for mode, rate in entry["matmul_flop_per_s"].items():
        assert entry["bound_us"][mode] == pytest.approx(max(flop / rate, least_bytes / 1e9) * 1e6)


@pytest.mark.parametrize("mapping", ["sorted", "shuffled"])
def test_every_form_gives_the_same_sums(ikbo, mapping):
    forms, problem = module("ikbo_linear.forms"), module("ikbo_linear.problem")
    shape = problem.Shape(10, 3, 5, 4, 7, 9)
    made = problem.Problem(shape, torch.float64, torch.device("cpu"), 3, mapping)
    made.checked = torch.arange(10)
    users = made.inputs[0].cand_to_user.tolist()
    assert sorted(users) == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3] and (users == sorted(users)) == (
        mapping == "sorted"
    )
    names = [*FORMS, *(f"compiled {name}" for name in forms.COMPILABLE), *PATHS, "recfuse"]
    runs = forms.make_runs(made, names)
    for name, run in runs.items():
        torch.testing.assert_close(run(made.inputs[0]), made.right, msg=name)
    assert forms.path_taken(made) in PATHS_OF_AUTO


def test_a_wrong_output_ends_the_run(ikbo, monkeypatch, capsys):
    forms = module("ikbo_linear.forms")
    right = forms.accumulated
    monkeypatch.setattr(forms, "accumulated", lambda *parts: right(*parts) * 1.001)
    assert ikbo("--figures", "main") == 1
    message = "float32, 12 candidates of 3 users, M 9, N 8, K 13 + 11, decomposed baddbmm: the outputs differ"
    assert message in capsys.readouterr().err


def test_an_element_that_is_not_written_ends_the_run(ikbo, monkeypatch, capsys):
    """For a candidate whose output is not compared with float64."""
    forms = module("ikbo_linear.forms")
    right = forms.accumulated

    def unwritten(*parts):
        output = right(*parts)
        output[1, 3, 4] = float("nan")
        return output

    monkeypatch.setattr(forms, "accumulated", unwritten)
    assert ikbo("--figures", "main") == 1
    assert "by nan" in capsys.readouterr().err


def test_recfuse_itself_must_run(ikbo, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(recfuse, "ikbo_linear", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        ikbo("--figures", "main")


def test_the_overview_joins_types_and_runs(ikbo, monkeypatch, tmp_path):
    record = results(ikbo, tmp_path, "--figures", "main,batches")
    for point in (record["main"]["float32"], *record["batches"]["float32"].values()):
        point["us"] = {"back to back": {"broadcast + concat": 40, "padded": 12, "Triton": 9, "recfuse": 8}}
        point["best_torch"]["back to back"] = "padded"
        point |= {"flop": 4e9, "matmul_flop_per_s": {"back to back": 1e15}}
    record["batches"]["float32"]["4"]["us"]["back to back"]["padded"] = 10
    folder = tmp_path / "h200" / "ikbo_linear"
    folder.mkdir(parents=True)
    (folder / "ikbo_float32.json").write_text(json.dumps(record))
    points = record.pop("batches")["float32"]
    points["4"]["us"]["back to back"]["padded"] = 7
    (folder / "ikbo_shapes.json").write_text(json.dumps({**record, "shapes": {"float32": points}}))
    overviews = module("common.overviews")
    monkeypatch.setattr(overviews, "RESULTS", tmp_path)
    (row,) = overviews.OVERVIEWS["ikbo"]().rows
    assert row == [
        "float32, back to back", "40", "12", "9", "8", "50%", "1.50x", "1.12x", "1.25x", "-", "0.88x",
    ]  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 2, 70, 40, 20, 75), (300, 70, 433, 256, 118, 86), (1, 1, 1, 8, 8, 1)])
def test_the_triton_kernel_is_right(monkeypatch, dtype, sizes):
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    problem, peer = module("ikbo_linear.problem"), module("ikbo_linear.triton_peer")
    made = problem.Problem(problem.Shape(*sizes), dtype, torch.device("cuda"), 0, "shuffled")
    made.checked = torch.arange(sizes[0], device="cuda")
    inputs = made.inputs[0]
    x_user, x_cand = inputs.padded
    base = torch.matmul(problem.padded_columns(made.weights.user), x_user)
    weight = problem.padded_columns(made.weights.cand)
    for config in peer.CONFIGS[:: 1 if sizes[3] == 256 else 4]:
        output = peer.launch(config, weight, x_cand, base, inputs.cand_to_user, 132)
        error = module("common.checks").relative_error(output, made.right)
        assert error <= 3 * module("common.checks").TOLERANCES[dtype], str(config)
    assert peer.triton_run(made)(inputs).shape == made.right.shape
