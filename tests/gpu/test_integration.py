"""A GPU's embedding bag within torch: streams, graphs, devices, compiler, gradients, models, tuning."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

import recfuse
from recfuse import PinnedRows
from recfuse.data import traces
from recfuse.nn import EmbeddingBag
from support import gpu
from support.compiled import compare, embedding_bag_samples, with_gradients
from support.dlrm import DLRM_Net, batch_of, train
from support.gpu import moved
from support.inputs import ragged
from support.library_cases import OPS

pytestmark = gpu.MARKS


def on_gpu(rows: int, bags: int, longest: int) -> tuple[Tensor, Tensor]:
    """Random bags, without the last offset."""
    indices, offsets = ragged(rows, bags, longest)
    return moved(indices), moved(offsets[:-1])


def test_a_graph_with_new_inputs() -> None:
    """Captured once, replayed on other lookups and another table in the same memory."""
    table = torch.randn(500, 32, device=gpu.DEVICE)
    indices = torch.randint(0, 500, (960,), device=gpu.DEVICE)
    offsets = torch.arange(0, 960, 10, device=gpu.DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = recfuse.embedding_bag(indices, table, offsets, mode="sum")
        second = recfuse.embedding_bag(indices, table * 2, offsets, mode="max")
        third = recfuse.embedding_bag(indices % 96, first, offsets, mode="mean")  # its table is an output
    for _ in range(5):
        indices.copy_(torch.randint(0, 500, (960,)))
        table.normal_()
        offsets.copy_(torch.randint(0, 960, (96,)).sort().values)
        offsets[0] = 0
        graph.replay()
        expected = recfuse.embedding_bag(indices, table, offsets, mode="sum")
        assert torch.equal(first, expected)
        assert torch.equal(second, recfuse.embedding_bag(indices, table * 2, offsets, mode="max"))
        assert torch.equal(third, recfuse.embedding_bag(indices % 96, expected, offsets, mode="mean"))


def test_a_graph_of_many_launches() -> None:
    """Launches in a graph may overlap too: each output is the next one's table."""
    table = torch.randn(4000, 64, device=gpu.DEVICE)
    indices = torch.randint(0, 4000, (32_000,), device=gpu.DEVICE)
    offsets = torch.arange(0, 32_000, 8, device=gpu.DEVICE)
    factors = torch.randn(32_000, device=gpu.DEVICE) / 8**0.5

    def chain() -> Tensor:
        now = table
        for _ in range(30):
            now = OPS.embedding_bag(now, indices, offsets, "sum", factors)
        return now

    want = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_a_stream_sees_what_it_has_written_right_before() -> None:
    """On a stream other than the default; the lookups come late, the result is read at once."""
    table = torch.randn(300, 64, device=gpu.DEVICE)
    sets = [on_gpu(300, 50, 9) for _ in range(6)]
    want = [recfuse.embedding_bag(indices, table, offsets, mode="sum") for indices, offsets in sets]
    gpu.synchronize()
    stream = torch.cuda.Stream(gpu.DEVICE)
    with torch.cuda.stream(stream):
        for (indices, offsets), expected in zip(sets, want, strict=True):
            late, ends, rows = torch.zeros_like(indices), torch.zeros_like(offsets), torch.zeros_like(table)
            torch.cuda._sleep(3_000_000)
            late.copy_(indices)
            ends.copy_(offsets)
            rows.copy_(table)
            got = recfuse.embedding_bag(late, rows, ends, mode="sum")
            late.fill_(10**6)  # after the kernel has read them
            rows.fill_(torch.nan)
            assert torch.equal(got, expected)


@gpu.TWO_GPUS
def test_two_gpus_in_turns() -> None:
    """Tensors determine the device of a call, not the current device."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    table, (indices, offsets) = torch.randn(300, 48), ragged(300, 40, 9)
    want = F.embedding_bag(indices, table, offsets, mode="sum", include_last_offset=True)
    given = {device: moved((indices, table, offsets), device) for device in (first, second)}
    for current, device in itertools.product((first, second), (first, second, first)):
        with torch.cuda.device(current):
            got = recfuse.embedding_bag(*given[device], mode="sum", include_last_offset=True)
            assert torch.cuda.current_device() == current.index
        assert got.device == device
        torch.testing.assert_close(got.cpu(), want)
        with torch.cuda.device(current):
            recfuse.pin_rows(given[device][1], [1, 2, 3])
            recfuse.unpin(given[device][1])
            recfuse.check(device)
    module = EmbeddingBag(300, 48, mode="sum", include_last_offset=True).to(second)
    module(given[second][0], given[second][2]).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.device == second


def _same_as_torch(
    indices: Tensor, offsets: Tensor, table: Tensor, factors: Tensor | None, **options: Any
) -> None:
    """Output and gradients, against torch's own in float64 on the CPU.

    But for the division by frequency: torch's CPU kernel divides rows by other rows' counts.
    """
    ours, theirs = table.clone().requires_grad_(), table.double().cpu().requires_grad_()
    weights = None if factors is None else factors.clone().requires_grad_()
    theirs_weights = None if factors is None else factors.double().cpu().requires_grad_()
    got = recfuse.embedding_bag(indices, ours, offsets, per_sample_weights=weights, **options)
    by_frequency = options.pop("scale_grad_by_freq", False)
    want = F.embedding_bag(indices.cpu(), theirs, offsets.cpu(), per_sample_weights=theirs_weights, **options)
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(got, want, **close)
    upstream = torch.randn(want.shape, dtype=torch.float64)
    want.backward(upstream)
    got.backward(upstream.to(got))
    assert ours.grad is not None and theirs.grad is not None
    assert ours.grad.layout == theirs.grad.layout
    expected = theirs.grad.to_dense()
    if by_frequency:
        expected = expected / torch.bincount(indices.cpu(), minlength=len(table)).clamp(min=1)[:, None]
    torch.testing.assert_close(ours.grad.to_dense(), expected, **close)
    if weights is not None:
        torch.testing.assert_close(weights.grad, theirs_weights.grad, **close)


GRADIENTS = [
    {
        "mode": mode,
        "sparse": sparse,
        "padding_idx": padding,
        "scale_grad_by_freq": scaled,
        "weighted": weighted,
    }
    for mode, sparse, padding, scaled, weighted in itertools.product(
        gpu.MODES, (False, True), (None, 3), (False, True), (False, True)
    )
    if not (mode == "max" and (sparse or scaled))
    and not (weighted and mode != "sum")
    and not (sparse and scaled)  # torch has no such gradient
]


@pytest.mark.parametrize("options", GRADIENTS, ids=lambda one: "-".join(map(str, one.values())))
def test_gradients_are_torchs(options: dict[str, Any]) -> None:
    options = dict(options)
    table = torch.randn(12, 20, device=gpu.DEVICE)
    indices, offsets = on_gpu(12, 30, 6)
    factors = torch.rand(indices.numel(), device=gpu.DEVICE) if options.pop("weighted") else None
    _same_as_torch(indices, offsets, table, factors, **options)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_gradients_of_half_precision(dtype: torch.dtype) -> None:
    table = torch.randn(12, 20, device=gpu.DEVICE).to(dtype).requires_grad_()
    indices, offsets = on_gpu(12, 30, 6)
    for mode in gpu.MODES:
        got = torch.autograd.grad(
            recfuse.embedding_bag(indices, table, offsets, mode=mode).float().square().sum(), table
        )
        wide = table.detach().float().requires_grad_()
        want = torch.autograd.grad(F.embedding_bag(indices, wide, offsets, mode=mode).square().sum(), wide)
        assert got[0].dtype == dtype
        torch.testing.assert_close(got[0].float(), want[0], rtol=0.05, atol=0.3)


@pytest.mark.parametrize("norm_type", (1.0, 2.0))
def test_max_norm_is_torchs(norm_type: float) -> None:
    indices, offsets = on_gpu(12, 30, 6)
    ours = torch.randn(12, 20, device=gpu.DEVICE)
    theirs = ours.clone()
    options = {"mode": "mean", "max_norm": 1.5, "norm_type": norm_type}
    got, want = (
        function(indices, table, offsets, **options)
        for function, table in ((recfuse.embedding_bag, ours), (F.embedding_bag, theirs))
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_autocast_leaves_tables_alone(dtype: torch.dtype) -> None:
    module = EmbeddingBag(50, 16, mode="sum").to(gpu.DEVICE)
    linear = torch.nn.Linear(16, 4).to(gpu.DEVICE)
    indices, offsets = on_gpu(50, 20, 6)
    want = module(indices, offsets)
    with torch.autocast("cuda", dtype=dtype):
        got = module(indices, offsets)
        linear(got).float().sum().backward()
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32


MODULES = (
    {},
    {"mode": "sum", "sparse": True},
    {"mode": "max", "padding_idx": 2},
    {"mode": "sum", "include_last_offset": True, "max_norm": 1.0},
)


@pytest.mark.parametrize("options", MODULES, ids=str)
def test_a_module_trains_as_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    theirs = torch.nn.EmbeddingBag(40, 12, **options).to(gpu.DEVICE)
    ours = EmbeddingBag(40, 12, **options).to(gpu.DEVICE)
    ours.load_state_dict(theirs.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.3) for one in (ours, theirs)]
    for _ in range(4):
        indices, offsets = ragged(40, 25, 6)
        given = moved((indices, offsets if options.get("include_last_offset") else offsets[:-1]))
        outputs = []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(module(*given))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs)
    torch.testing.assert_close(ours.weight, theirs.weight)
    square = moved(torch.randint(0, 40, (7, 3)))
    torch.testing.assert_close(ours(square), theirs(square))


@pytest.mark.parametrize("sparse", (False, True))
def test_a_dlrm_trains_with_the_same_losses(sparse: bool) -> None:
    model = DLRM_Net(sparse=sparse).to(gpu.DEVICE)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin)]
    report = recfuse.swap(twin, fuse=False)
    assert [entry.name for entry in report.replaced] == [f"emb_l.{number}" for number in range(4)]
    assert not report.fused
    batches = [moved(batch_of(model, form=form)) for form in ("tensor", "list", "stacked") * 2]
    torch.testing.assert_close(train(twin, optimizers[1], batches), train(model, optimizers[0], batches))
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_fused_dlrm_works_after_a_move_to_the_gpu() -> None:
    model = DLRM_Net()
    plain = copy.deepcopy(model).to(gpu.DEVICE)
    recfuse.swap(model)
    model.to(gpu.DEVICE)
    batch = moved(batch_of(model))
    torch.testing.assert_close(model(*batch), plain(*batch))


@pytest.mark.parametrize("gradients", (False, True))
def test_opcheck(gradients: bool) -> None:
    for sample in itertools.islice(embedding_bag_samples(), int(gradients), None, 4):
        opcheck(OPS.embedding_bag.default, with_gradients(moved(sample), gradients))


def test_opcheck_of_the_last_arguments() -> None:
    indices, offsets = on_gpu(12, 7, 5)
    table = torch.randn(12, 5, device=gpu.DEVICE)
    rest = ("sum", None, False, -1, False, False, -1, "off", "threads=32 distance=2")
    opcheck(OPS.embedding_bag.default, (table, indices, offsets, *rest))


BACKENDS = ["aot_eager"]
if gpu.MISSING is None and shutil.which("cc"):
    BACKENDS.append("inductor")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module(backend: str) -> None:
    if backend == "inductor" and gpu.DEVICE.type == "cuda":
        pytest.importorskip("triton", reason="inductor needs triton for CUDA")
    for options in ({"mode": "sum"}, {"mode": "max", "padding_idx": 2})[: 1 + (backend == "aot_eager")]:
        module = EmbeddingBag(12, 8, **options).to(gpu.DEVICE)
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
        compare(compiled, module, module, [on_gpu(12, bags, 5) for bags in (4, 7)])

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def around(indices: Tensor, table: Tensor, offsets: Tensor) -> Tensor:
        return recfuse.embedding_bag(indices * 1, table * 2, offsets, mode="mean", schedule="distance=2") + 1

    table = torch.randn(12, 8, device=gpu.DEVICE)
    for bags in (3, 9):
        indices, offsets = on_gpu(12, bags, 5)
        want = recfuse.embedding_bag(indices, table * 2, offsets, mode="mean") + 1
        torch.testing.assert_close(around(indices, table, offsets), want)


def test_an_exported_module(tmp_path: Path) -> None:
    module = EmbeddingBag(12, 8, mode="sum").to(gpu.DEVICE).eval()
    example = moved((torch.arange(6), torch.tensor([0, 2, 4])))
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(module, example, dynamic_shapes=({0: auto}, {0: auto}))
    assert "recfuse.embedding_bag" in str(exported.graph)
    torch.export.save(exported, tmp_path / "module.pt2")
    loaded = torch.export.load(tmp_path / "module.pt2")
    for bags in (2, 9):
        given = on_gpu(12, bags, 5)
        assert torch.equal(loaded.module()(*given), module(*given))


def test_pinning_changes_no_result() -> None:
    module = EmbeddingBag(5000, 64, mode="sum").to(gpu.DEVICE)
    given = on_gpu(5000, 200, 40)
    want = module(*given)
    with PinnedRows(module.weight, given[0]) as pinned:
        assert pinned.active == (gpu.DEVICE.type == "cuda") and len(pinned) > 0
        for overlap in (False, True):
            module.pinned = pinned.overlap(overlap)
            for _ in range(3):
                assert torch.equal(module(*given), want)
        pinned.update(rows=[7, 8, 9])
        assert torch.equal(module(*given), want)
    module.pinned = None
    strided = torch.randn(50, 40, device=gpu.DEVICE)[:, 3:20]
    for rows in (torch.arange(50, device=gpu.DEVICE), [0, 49], torch.tensor([], dtype=torch.int64)):
        kept = strided.clone()
        recfuse.pin_rows(strided, rows)
        recfuse.unpin(strided, rows)
        assert torch.equal(strided, kept)
    recfuse.unpin(module.weight)
    assert torch.equal(module(*given), want)


def test_pinning_in_a_graph() -> None:
    module = EmbeddingBag(5000, 64, mode="sum").to(gpu.DEVICE)
    given = on_gpu(5000, 200, 40)
    want = module(*given)
    module.pinned = PinnedRows(module.weight, given[0])
    graph = torch.cuda.CUDAGraph()
    module.pinned.refresh()  # its row ids are copied to the GPU before
    with torch.no_grad(), torch.cuda.graph(graph):
        got = module(*given)
    for _ in range(3):
        graph.replay()
        assert torch.equal(got, want)
    module.pinned.close()


def test_tuning_gives_a_plan_that_applies(tmp_path: Path) -> None:
    trace = traces.generate("medium", rows=2000)
    batches = [moved(tuple(map(torch.from_numpy, traces.bags(trace, 64, 16, at)))) for at in range(3)]
    module = EmbeddingBag(2000, 32, mode="sum", include_last_offset=True).to(gpu.DEVICE)
    want = module(*batches[0])
    plan = recfuse.tune(module, batches, budget_s=5.0, progress=False)
    assert plan.device.type == gpu.DEVICE.type and plan.best_us > 0 and plan.seconds < 60
    assert plan.decisions and plan.matches(module)
    plan.save(tmp_path / "plan.json")
    loaded = recfuse.Plan.load(tmp_path / "plan.json")
    assert loaded.schedule == plan.schedule
    plan.apply(module)
    torch.testing.assert_close(module(*batches[0]), want)
    other = copy.deepcopy(module)
    loaded.apply(other, trace=trace)
    torch.testing.assert_close(other(*batches[0]), want)


def test_kernels_compiled_ahead_run_where_compiling_is_forbidden(tmp_path: Path) -> None:
    """By the command line, for the defaults of this GPU, and for a schedule."""
    command = ["compile", "--arch", gpu.arch(), "--out", str(tmp_path)]
    command += ["--dim", "64", "--batch", "128", "--pooling", "20", "--mode", "sum", "max"]
    properties = torch.cuda.get_device_properties(gpu.DEVICE)
    command += ["--training", "gradients", "--rows", "1000"]
    command += ["--gpu", f"{properties.multi_processor_count}:{properties.L2_cache_size >> 20}"]
    schedules = ["station=register distance=4 threads=32 block=128 parts=1 segment=64", ""]
    for schedule in schedules:
        printed = gpu.run_command(*command, "--schedule", schedule)
        assert printed.count("rf_embedding_bag ") == 2, printed
    script = """
        import sys
        import torch
        import recfuse
        table = torch.randn(1000, 64).to("cuda")
        indices = torch.randint(0, 1000, (2560,)).to("cuda")
        offsets = torch.arange(0, 2560, 20).to("cuda")
        for schedule in sys.argv[1:]:
            for mode in ("sum", "max"):
                got = recfuse.embedding_bag(indices, table, offsets, mode=mode, schedule=schedule)
                want = torch.nn.functional.embedding_bag(indices, table, offsets, mode=mode)
                torch.testing.assert_close(got, want)
        recfuse.pin_rows(table, indices[:20])
        recfuse.unpin(table, indices[:20])
        table.requires_grad_()
        pooled = recfuse.embedding_bag(indices, table, offsets, mode="sum", schedule=sys.argv[1])
        pooled.sum().backward()
        assert table.grad.sum().item() == 2560 * 64
        recfuse.check()
        print("fine")
    """
    environment = {"RECFUSE_CACHE_DIR": str(tmp_path), "RECFUSE_JIT": "off"}
    assert gpu.run_alone(script, *schedules, environment=environment) == "fine\n"
