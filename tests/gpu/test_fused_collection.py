"""Collections on a GPU: learning, plans, mappings, graphs, moves, copies, threads and streams."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support import gpu
from support.collection import COPIES, SPECS, assert_packed, lookups_of
from support.gpu import moved
from support.gpu_fused import batch, check, on_gpu

pytestmark = gpu.MARKS

FEATURES = 6  # of SPECS, and of SUMS


class Learned:
    """Counts the batches that were read for calibration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from recfuse.nn import tuning

        self.count, add = 0, tuning.Lengths.add

        def counted(*arguments: Any) -> bool:
            self.count += 1
            return add(*arguments)

        monkeypatch.setattr(tuning.Lengths, "add", counted)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> Learned:
    return Learned(monkeypatch)


def test_a_collection_is_one_call() -> None:
    collection = on_gpu()
    assert collection.on_cuda == (gpu.DEVICE.type == "cuda")
    assert collection.layout.features.device.type == "cpu"
    assert all(weight.device == gpu.DEVICE for weight in collection.packed_weights())
    assert_packed(collection)
    given = batch(collection)
    with torch.profiler.profile() as profile:
        check(collection, *given)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["recfuse::fused_embedding_bag"] == 2 and "recfuse::embedding_bag" not in counts


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize("integer", gpu.INTEGERS, ids=str)
def test_types(dtype: torch.dtype, integer: torch.dtype) -> None:
    collection = on_gpu().to(dtype)
    for bags in (1, 30):
        indices, offsets = (one.to(integer) for one in batch(collection, bags))
        got = collection(indices, offsets)
        want = collection.float()(indices, offsets)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
        collection.to(dtype)


def test_the_first_call_learns_once(learned: Learned) -> None:
    collection = on_gpu()
    first = batch(collection, 9)
    check(collection, *first)
    expected = collection.schedules[:, -1]
    lookups = first[1][::9].diff().cpu()
    assert expected.tolist() == [max(round(16 * one / 9), 1) for one in lookups.tolist()]
    count = learned.count
    for bags in (9, 4, 100):
        check(collection, *batch(collection, bags, 30))
    assert learned.count == count
    collection.calibrate([batch(collection, 5) for _ in range(3)])
    check(collection, *batch(collection))


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
def test_later_calls_do_not_wait_for_the_gpu() -> None:
    """Nor does a backward pass over tables of one dim."""
    collection, same = on_gpu(), on_gpu([(9, 8)] * FEATURES)
    given = batch(collection)
    bounded = (given[0] % 5, given[1])
    for module in (collection, same):
        module(*bounded).sum().backward()
    gpu.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for module in (collection, same):
            with torch.no_grad():
                module(*bounded)
            out = module(*bounded)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recfuse.check()


KINDS = ([1, 0, 0, 0], [2, 0, 0, 0], [1, 64, 4, 1], [1, 0, 2, 1], [0, 0, 0, 0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("warps", (0, 16))
def test_schedules_that_are_set(kind: list[int], warps: int) -> None:
    collection = on_gpu([one for one in SPECS if not (isinstance(one, Table) and one.mode == "max")])
    features = len(collection.feature_names)
    rows = torch.tensor([[*kind, 40]] * features, dtype=torch.int32)
    collection.set_plan(rows, warps)
    given = batch(collection, 40)
    got = check(collection, *given)
    assert torch.equal(collection(*given), got)
    collection.set_plan(torch.tensor([[*kind, 0]] * features, dtype=torch.int32), warps)
    check(collection, *given)
    collection.set_plan(torch.tensor([[*kind, -1]] * features, dtype=torch.int32), warps)
    check(collection, *given)
    collection.set_plan(None)
    check(collection, *given)


def test_schedules_that_are_wrong() -> None:
    collection = on_gpu()
    given = batch(collection)
    for column, value in ((0, 99), (1, 3), (1, 1 << 20), (2, 3), (3, 1 << 20)):
        rows = torch.zeros(FEATURES, 5, dtype=torch.int32)
        rows[:, 0] = 1
        rows[2, column] = value
        collection.set_plan(rows)
        with pytest.raises(ValueError, match=r"recfuse\.fused_embedding_bag: .*schedule"):
            collection(*given)
    for warps in (1, 65, 10**6):
        collection.set_plan(None, warps)
        with pytest.raises(ValueError, match="warps"):
            collection(*given)
    collection.set_plan(None)
    check(collection, *given)


def test_mappings_of_the_loaders_thread() -> None:
    collection = on_gpu()
    batches = [lookups_of(collection, 40, longest) for longest in (1, 5, 60)]
    mappings: list[Any] = []
    thread = threading.Thread(target=lambda: mappings.extend(collection.map(o.numpy()) for _, o in batches))
    thread.start()
    thread.join()
    for (indices, offsets), mapping in zip(batches, mappings, strict=True):
        assert mapping.tensor.is_pinned() == (gpu.DEVICE.type == "cuda") and mapping.bags == 40
        given = moved((indices, offsets))
        got = check(collection, *given, mapping=mapping)
        assert torch.equal(collection(*given, mapping=mapping), got)
        collection(*given, mapping=mapping).sum().backward()
    with pytest.raises(ValueError, match="40 bags, this batch has 6 features and 6 bags"):
        collection(*batch(collection), mapping=mappings[0])
    collection.set_plan(torch.tensor([[1, 0, 0, 0, 0]] * FEATURES, dtype=torch.int32), 16)
    check(collection, *moved(batches[0]), mapping=mappings[0])  # it contains its schedules
    check(collection, *moved(batches[0]), mapping=collection.map(batches[0][1]))


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
def test_kernels_compiled_ahead_run_where_compiling_is_forbidden(tmp_path: Path) -> None:
    """Those of a plan, also for calls with a mapping."""
    plan, kernels = tmp_path / "plan.json", tmp_path / "kernels"
    collection = on_gpu()
    given = [batch(collection, 40) for _ in range(2)]
    recfuse.tune(collection, given, budget_s=2, progress=False).save(plan)
    printed = gpu.run_command("compile", "--arch", gpu.arch(), "--plan", str(plan), "--out", str(kernels),
                              "--training", "gradients")  # fmt: skip
    assert printed.count("rf_fused_embedding_bag ") > 0, printed
    script = """
        import sys
        import recfuse
        from support.gpu_fused import batch, check, on_gpu
        collection = on_gpu()
        recfuse.Plan.load(sys.argv[1]).apply(collection)
        given = batch(collection, 40)
        check(collection, *given)
        check(collection, *given, mapping=collection.map(given[1].cpu()))
        recfuse.check()
        print("fine")
    """
    environment = {"RECFUSE_CACHE_DIR": str(kernels), "RECFUSE_JIT": "off"}
    assert gpu.run_alone(script, str(plan), environment=environment) == "fine\n"


def test_mappings_are_dropped_at_once() -> None:
    """Their page-locked memory is reused by the next mapping, which must wait for the copy."""
    collection = on_gpu()
    batches = [lookups_of(collection, 30, longest) for longest in (2, 7, 20)]
    given = [moved(one) for one in batches]
    want = [collection(*one, mapping=collection.map(b[1])) for one, b in zip(given, batches, strict=True)]
    for turn in range(60):
        number = turn % 3
        got = collection(*given[number], mapping=collection.map(batches[number][1]))
        assert torch.equal(got, want[number])


@pytest.mark.parametrize("known", (False, True), ids=("nothing known", "learned"))
def test_a_graph_with_new_inputs(known: bool, learned: Learned) -> None:
    """Captured once, replayed on other lookups and other tables in the same memory."""
    collection = on_gpu([(50, 16), Table(9, 4, mode="mean"), Table(30, 64, mode="max")]).requires_grad_(False)
    bags = 20
    indices = torch.zeros(600, dtype=torch.int64, device=gpu.DEVICE)
    offsets = torch.zeros(3 * bags + 1, dtype=torch.int64, device=gpu.DEVICE)

    def fill() -> None:
        lookups, ends = lookups_of(collection, bags, 9)
        indices[: lookups.numel()].copy_(lookups)
        offsets.copy_(ends)

    fill()
    warm = (
        on_gpu([(50, 16), Table(9, 4, mode="mean"), Table(30, 64, mode="max")]) if not known else collection
    )
    warm(indices, offsets)
    gpu.synchronize()
    count, graph = learned.count, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = collection(indices, offsets)
        again = collection(indices, offsets) * 2
    assert learned.count == count and (collection.schedules is not None) == known
    for _ in range(5):
        fill()
        for weight in collection.parameters():
            weight.normal_()
        graph.replay()
        check(collection, indices, offsets)
        torch.testing.assert_close(got, collection(indices, offsets), rtol=1e-4, atol=1e-4)
        assert torch.equal(again, got * 2)
        collection.set_plan(None)


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_packed_and_their_own(way: str) -> None:
    collection = on_gpu()
    collection.set_plan(torch.tensor([[1, 0, 0, 0, 48]] * FEATURES, dtype=torch.int32), 24)
    given = batch(collection)
    want = collection(*given)
    other = COPIES[way](collection)
    assert_packed(other)
    assert torch.equal(other.schedules, collection.schedules) and other.warps == 24
    assert torch.equal(other(*given), want)
    with torch.no_grad():
        other.tables.t0.weight.fill_(9)
    assert torch.equal(collection(*given), want)
    assert not torch.equal(other(*given), want)


MOVES = {
    "there": lambda c: c.to(gpu.DEVICE),
    "there and back": lambda c: c.cpu().to(gpu.DEVICE),
    "half and back": lambda c: c.half().float(),
    "device and dtype": lambda c: c.cpu().to(gpu.DEVICE, torch.float64).float(),
    "to_empty": lambda c: c.to_empty(device=gpu.DEVICE),
    "through meta": lambda c: c.to("meta").to_empty(device=gpu.DEVICE),
    "share_memory": lambda c: c.share_memory(),
    "in a parent": lambda c: nn.Sequential(nn.Linear(2, 2), c.cpu()).to(gpu.DEVICE)[1],
}


@pytest.mark.parametrize("way", MOVES)
def test_moves_keep_it_packed(way: str) -> None:
    collection = on_gpu()
    parameters, given = list(collection.parameters()), batch(collection)
    collection(*given).sum().backward()
    before = [weight.detach().clone() for weight in collection.parameters()]
    assert MOVES[way](collection) is collection
    if "meta" not in way:
        assert all(a is b for a, b in zip(collection.parameters(), parameters, strict=True))
    if "empty" not in way and "meta" not in way:
        for weight, value in zip(collection.parameters(), before, strict=True):
            torch.testing.assert_close(weight.detach(), value, rtol=1e-3, atol=1e-3)
        collection(*given).sum().backward()
    with torch.no_grad():
        collection.reset_parameters()
    check(collection, *given)


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
def test_moving_takes_no_memory_twice() -> None:
    collection = FusedEmbeddingBagCollection([(1 << 18, 64)] * 4)  # 256 MiB
    size = sum(weight.numel() * 4 for weight in collection.parameters())
    gpu.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(gpu.DEVICE)
    torch.cuda.reset_peak_memory_stats(gpu.DEVICE)
    collection.to(gpu.DEVICE)
    assert torch.cuda.max_memory_allocated(gpu.DEVICE) - before < 1.1 * size
    collection.cpu()
    assert torch.cuda.memory_allocated(gpu.DEVICE) - before < 0.1 * size


@pytest.mark.parametrize("assign", (False, True))
def test_state_dicts(assign: bool) -> None:
    collection, other = on_gpu(), FusedEmbeddingBagCollection(SPECS, device=gpu.DEVICE)
    given = batch(collection)
    want = collection(*given)
    for device in (gpu.DEVICE, torch.device("cpu")):
        state = {name: value.to(device, copy=True) for name, value in collection.state_dict().items()}
        other.load_state_dict(state, assign=assign)
        other.to(gpu.DEVICE)
        assert_packed(other)
        assert torch.equal(other(*given), want)


def test_changed_weights_are_seen() -> None:
    collection = on_gpu()
    given = batch(collection)
    collection(*given)
    changes = (
        lambda: setattr(collection.tables.t3, "weight", torch.randn(50, 8)),
        lambda: setattr(collection.tables.t0.weight, "data", torch.randn(30, 4).to(gpu.DEVICE)),
        lambda: collection.tables.t1.weight.data.mul_(2),
        lambda: setattr(collection.embedding_bags.packed_dim16, "data", torch.randn(20, 16).to(gpu.DEVICE)),
        lambda: setattr(
            collection.embedding_bags, "packed_dim3", nn.Parameter(torch.randn(7, 3).to(gpu.DEVICE))
        ),
    )
    for change in changes:
        before = collection(*given)
        change()
        with torch.no_grad():
            assert not torch.equal(collection(*given), before)
        check(collection, *given)
    before = collection(*given)
    zeros = {name: torch.zeros_like(value) for name, value in collection.named_parameters()}
    assert torch.func.functional_call(collection, zeros, given).abs().sum() == 0
    assert torch.equal(collection(*given), before)


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
def test_tables_on_two_devices_are_pooled_one_by_one() -> None:
    bags = [nn.EmbeddingBag(9, 4), nn.EmbeddingBag(9, 8).to(gpu.DEVICE)]
    collection = FusedEmbeddingBagCollection.from_embedding_bags(bags)
    assert not collection.has_kernel
    assert collection.to(gpu.DEVICE).has_kernel


def test_autocast_leaves_tables_alone() -> None:
    collection = on_gpu()
    given = batch(collection)
    want = collection(*given)
    with torch.autocast("cuda", dtype=torch.float16):
        got = collection(*given)
        got.sum().backward()
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_a_default_device_changes_nothing() -> None:
    for device in ("cpu", gpu.DEVICE):
        with torch.device(device):
            collection = on_gpu()
            given = batch(collection)
            collection(*given).sum().backward()
            assert collection.layout.features.device.type == "cpu"
        check(collection, *given)


def test_pickles_of_mappings() -> None:
    collection = on_gpu()
    indices, offsets = lookups_of(collection)
    mapping = pickle.loads(pickle.dumps(collection.map(offsets)))
    check(collection, *moved((indices, offsets)), mapping=mapping)
