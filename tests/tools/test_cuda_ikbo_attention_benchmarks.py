"""The flow of the benchmark of attention to users' histories, on CPU tensors and tiny shapes."""

import importlib
import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import recfuse
from support.gpu_benchmark import BENCHMARKS, on_the_cpu

pytestmark = pytest.mark.long

TINY = [
    "--device", "cuda", "--candidates", "8", "--groups", "3,3+1", "--q", "2", "--dim", "8", "--heads", "2",
    "--kv", "4,6", "--sweep-kv", "6", "--self-kv", "5", "--ratios", "1,3,1..4", "--queries", "1,2",
    "--matmul", "16", "--rounds", "2", "--sweep-rounds", "1", "--dtypes", "float32",
]  # fmt: skip
FIGURES = ["main", "ratios", "queries", "ragged", "self", "host"]
OURS = ["path packed", "recfuse"]
COPIES = ["repeated flash", "broadcast + flash"]


def module(name):
    return importlib.import_module(name)


@pytest.fixture
def run_benchmark(monkeypatch):
    """Runs ikbo_attention.py with the options of a GPU on the CPU; returns its exit status."""
    with on_the_cpu(monkeypatch, "ikbo_attention", TINY) as run:
        monkeypatch.setattr(module("ikbo_attention.measure").AttentionSetting, "copy_speed", 1e9)
        yield run


def results(run_benchmark, tmp_path, *options):
    target = tmp_path / "attention.json"
    assert run_benchmark("--json", target, *options) == 0
    return json.loads(target.read_text())


def test_every_figure_runs(run_benchmark, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = results(run_benchmark, tmp_path, "--plots", tmp_path, "--markdown")
    output = capsys.readouterr().out
    assert {*FIGURES, "roofline", "matmul"} <= set(record)
    plotted = {path.stem for path in tmp_path.glob("*.png")}
    assert plotted == {f"attention_{name}" for name in (*FIGURES[:-1], "roofline")}
    for row in (
        "matmul",
        "recfuse, of the matmul",
        "best peer",
        "recfuse, of even groups",
        "recfuse, of q 2",
    ):
        assert f"| {row} |" in output
    even, uneven = record["main"]["float32"].values()
    assert list(even) == list(uneven) == ["4", "6"]
    assert set(even["4"]["relative_error"]) == {*COPIES, "packed flash", "user by user", *OURS}
    assert set(uneven["6"]["relative_error"]) == {*COPIES, "user by user", *OURS}
    assert 0 < max(even["4"]["relative_error"].values()) < 1e-6
    timed = {"matmul", "packed flash", *OURS}
    assert set(even["4"]["us"]["back to back"]) == {*timed, *COPIES, "user by user"}
    assert set(even["4"]["us"]["with pauses"]) == timed
    assert even["4"]["best_peer"]["with pauses"] == "packed flash"
    assert list(record["ratios"]["float32"]["Ratios, kv 6"]) == ["1", "3", "1..4"]
    ragged = record["ragged"]["float32"]["Ragged kv, 50 to 100 %"]["6"]
    assert set(ragged["relative_error"]) == {"user by user", "recfuse jagged", "recfuse"}
    own = record["self"]["float32"]["Self and target"]["5"]
    assert {"recfuse", "recfuse two calls", "user by user"} <= set(own["relative_error"])
    assert set(record["host"]) == set(OURS)


def test_least_work_matches_the_paper(run_benchmark):
    make = module("ikbo_attention.problem").Shape
    even, uneven = make(group="64"), make()
    assert (even.users, sum(even.counts), set(even.counts)) == (32, 2048, {64})
    assert (
        sum(uneven.counts) == 2064
        and set(uneven.counts) == {64, 65}
        and uneven.counts != sorted(uneven.counts)
    )
    assert uneven.counts == make(kv=512).counts and even.is_even and not uneven.is_even
    assert even.flop == 4 * 2048 * 64 * 1024 * 2 * 128
    assert even.least_bytes(torch.float16) == 2 * 128 * 2 * (2 * 2048 * 64 + 2 * 32 * 1024) + 8 * 2048
    ragged = make(group="64", least_kv=50)
    assert min(ragged.lengths) >= 512 and max(ragged.lengths) <= 1024 and len(set(ragged.lengths)) > 8
    assert ragged.flop == 4 * 64 * 64 * sum(ragged.lengths) * 2 * 128
    assert make(group="64", own=1024).flop == even.flop + 4 * 32 * 1024 * 1024 * 2 * 128
    assert [make(group=group).users for group in ("1", "10+1", "10000", "1..127")] == [2048, 204, 1, 32]


def varlen(q, k, v, q_cuts, k_cuts, most_q, most_k):
    """A variable-length attention for forms whose own function needs a GPU."""
    problem = module("ikbo_attention.problem")
    rows, keys = q_cuts.tolist(), k_cuts.tolist()
    assert q_cuts.dtype == torch.int32 and rows[-1] == len(q) and keys[-1] == len(k) == len(v)
    lengths = [high - low for low, high in pairwise(keys)]
    counts = [high - low for low, high in pairwise(rows)]
    assert most_q == max(counts) and most_k == max(lengths)
    padded = [torch.nn.utils.rnn.pad_sequence(each.split(lengths), batch_first=True) for each in (k, v)]
    users = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    inputs = problem.Inputs(q[:, None], *padded, users, counts, lengths)
    return module("ikbo_attention.forms").user_by_user(inputs)[:, 0]


@pytest.mark.parametrize("mapping", ["sorted", "shuffled"])
@pytest.mark.parametrize(
    "sizes",
    [
        (8, "3", 2, 6, 2, 2, 8),
        (9, "2+1", 3, 6, 4, 2, 8, 50),
        (9, "1..3", 1, 5, 2, 1, 8, 50, 4),
        (6, "2", 2, 4, 2, 2, 8, 100, 3),
    ],
)
def test_every_form_gives_the_same_values(run_benchmark, monkeypatch, mapping, sizes):
    forms, problem = module("ikbo_attention.forms"), module("ikbo_attention.problem")
    batch = forms.by_backend
    fake = SimpleNamespace(
        flash_attn_varlen_func=varlen,
        flash_attn_func=lambda *parts: (batch(torch.nn.attention.SDPBackend.MATH, *parts), None),
    )
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fake)
    peer = module("torch.nn.attention.varlen")
    monkeypatch.setattr(peer, "varlen_attn", lambda *parts, **options: varlen(*parts))
    for kinds in (forms.REPEATED, forms.BROADCAST, forms.PACKED):
        for name in kinds:
            monkeypatch.setitem(kinds, name, torch.nn.attention.SDPBackend.MATH)
    shape = problem.Shape(*sizes)
    made = problem.Problem(shape, torch.float64, torch.device("cpu"), 3, mapping)
    users = made.inputs[0].cand_to_user.tolist()
    assert (users == sorted(users)) == (mapping == "sorted")
    refused = {forms.TRITON, "path fused"}
    if not shape.own:
        refused |= {forms.FA3_JOINED, forms.TWO_CALLS}
    names = [name for name in forms.NAMES if name not in refused and forms.takes(name, shape, True)]
    made.checked = range
    for name, run in forms.make_runs(made, names).items():
        output = run(made.inputs[0])
        if shape.own and isinstance(output, torch.Tensor):
            output = made.inputs[0].apart(output)
        assert isinstance(output, tuple) == bool(shape.own)
        torch.testing.assert_close(made.sampled(output), made.right, msg=name)
    assert forms.path_taken(made) == "packed"


def test_a_wrong_output_ends_in_status_1(run_benchmark, monkeypatch, capsys, tmp_path):
    forms = module("ikbo_attention.forms")
    right = forms.by_backend
    monkeypatch.setattr(forms, "by_backend", lambda *parts: right(*parts) * 1.001)
    target = tmp_path / "attention.json"
    assert run_benchmark("--figures", "main", "--json", target) == 1
    captured = capsys.readouterr().err
    assert "8 candidates" not in captured and "repeated flash is wrong: 1.0e-03 from float64" in captured
    record = json.loads(target.read_text())["main"]["float32"]["3 candidates a user"]["4"]
    assert "repeated flash" not in record["us"]["back to back"] and "recfuse" in record["us"]["back to back"]


def test_a_row_that_is_not_written_is_seen(run_benchmark, monkeypatch, capsys):
    """For a candidate whose output is not compared with float64."""
    forms, problem = module("ikbo_attention.forms"), module("ikbo_attention.problem")
    monkeypatch.setattr(problem, "_CHECKED", 2)
    right = forms.recfuse_form

    def unwritten(path, i):
        output = right(path, i).clone()
        output[1, 1, 0, 3] = float("nan")
        return output

    monkeypatch.setattr(forms, "recfuse_form", unwritten)
    assert run_benchmark("--figures", "main") == 1
    assert "nan from others as a whole" in capsys.readouterr().err


def test_the_run_continues_without_recfuse(run_benchmark, monkeypatch, capsys, tmp_path):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(recfuse, "ikbo_attention", broken)
    target = tmp_path / "attention.json"
    assert run_benchmark("--figures", "main", "--json", target) == 1
    assert "recfuse is left out: no kernel" in capsys.readouterr().err
    assert json.loads(target.read_text())["main"]["float32"]["3 candidates a user"]["6"]["us"]


def test_repeated_keys_that_do_not_fit_are_left_out(run_benchmark, tmp_path):
    record = results(run_benchmark, tmp_path, "--figures", "main", "--most-copied", "0")
    point = record["main"]["float32"]["3 candidates a user"]["4"]
    assert not set(COPIES) & set(point["us"]["back to back"]) and "are left out" in point["notes"][0]


def test_the_overview_joins_types_and_modes(run_benchmark, monkeypatch, tmp_path):
    record = results(run_benchmark, tmp_path, "--figures", "main", "--groups", "3+1")
    for point in record["main"]["float32"]["3+1 candidates a user"].values():
        point |= {"flop": 4e9, "us": {"back to back": {"FA3 varlen": 11, "recfuse": 10}}}
        point["best_peer"] = {"back to back": "FA3 varlen"}
    folder = tmp_path / "h200" / "ikbo_attention"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_text(json.dumps(record))
    overviews = module("common.overviews")
    monkeypatch.setattr(overviews, "RESULTS", tmp_path)
    table = overviews.OVERVIEWS["attention"]()
    assert table.columns[1:] == ["4", "6"]
    assert table.rows == [["3+1 candidates a user, float32, back to back", "400 (1.10x)", "400 (1.10x)"]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [
        (256, "64+1", 64, 512, 2, 2, 128),
        (33, "5..9", 7, 130, 4, 2, 64, 50),
        (3, "1", 1, 40, 2, 1, 32, 50, 9),
    ],
)
def test_the_triton_kernel_is_right(monkeypatch, dtype, sizes):
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    problem, peer = module("ikbo_attention.problem"), module("ikbo_attention.triton_peer")
    checks = module("common.checks")
    made = problem.Problem(problem.Shape(*sizes), dtype, torch.device("cuda"), 0, "shuffled")
    inputs = made.inputs[0]
    for config in peer.CONFIGS[:: 1 if sizes[6] == 128 else 2]:
        output = peer.launch(config, inputs)
        if inputs.q_user is not None:
            output = peer.launch(config, inputs.own), output
        error = checks.relative_error(made.sampled(output).double(), made.right)
        assert error <= 3 * checks.TOLERANCES[dtype], str(config)
    assert peer.triton_run(made)(inputs).shape == inputs.q.shape
