"""Caches of fused calls on a GPU: torch's memory, per stream, bounded; graphs' data stay; no call waits."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, Mapping, Table
from support import gpu
from support.collection import lookups_of
from support.gpu import moved
from support.gpu_fused import FEATURES, GOOD, OFFSETS, RESULT, Fused, batch, check, on_gpu, ones

pytestmark = gpu.MARKS

MOST_CALLS = 128
TABLES = ((50, 16), Table(9, 4, mode="mean"), Table(30, 64, mode="max"))


def schedules(expected: int) -> Tensor:
    """One kernel for all of them, and a description for each."""
    return torch.tensor([[1, 32, 4, 1, expected]] * FEATURES, dtype=torch.int32)


def given() -> tuple[Tensor, Tensor]:
    return torch.tensor(GOOD, device=gpu.DEVICE), torch.tensor(OFFSETS, device=gpu.DEVICE)


def right(got: Tensor) -> bool:
    return got[:, [0, 16, 20]].tolist() == RESULT


def test_it_is_torchs_memory_and_bounded() -> None:
    one, arguments = Fused(ones()), given()
    allocated = []
    for expected in range(1, 4 * MOST_CALLS):
        assert right(one.run(*arguments, schedules=schedules(expected)))
        allocated.append(torch.cuda.memory_allocated(gpu.DEVICE))
    features_and_mapping = 2 * 512  # torch's least
    assert len(set(allocated[2 * MOST_CALLS :])) == 1 and allocated[-1] >= MOST_CALLS * features_and_mapping


def test_many_batch_sizes_are_bounded() -> None:
    """A mapping for each; the last ones stay."""
    collection = on_gpu(TABLES).requires_grad_(False)
    check(collection, *batch(collection, 20))
    bags = 64
    for _ in range(40):
        check(collection, *batch(collection, bags, 2))
        bags = bags * 9 // 8
    gc.collect()
    before = torch.cuda.memory_allocated(gpu.DEVICE)
    for bags in (64, 1000, 70, 5000, 64):
        check(collection, *batch(collection, bags, 2))
    gc.collect()
    assert torch.cuda.memory_allocated(gpu.DEVICE) <= before + (64 << 20)


def test_streams_that_take_turns_with_more_calls_than_are_kept() -> None:
    one, arguments = Fused(ones()), given()
    gpu.synchronize()
    streams = [torch.cuda.Stream(gpu.DEVICE) for _ in range(5)]
    outs = []
    for expected in range(1, 2 * MOST_CALLS):
        for stream in streams[expected % 3 :]:
            with torch.cuda.stream(stream):
                outs.append(one.run(*arguments, schedules=schedules(expected)))
    gpu.synchronize()
    assert all(right(out) for out in outs)


def test_no_call_waits_for_the_gpu() -> None:
    """New calls, which replace old calls, after a kernel that takes seconds."""
    one, arguments = Fused(ones()), given()
    for expected in range(1, 2 * MOST_CALLS):
        one.run(*arguments, schedules=schedules(expected))
    unpinned = one.map(torch.tensor(OFFSETS))
    one.run(*arguments, mapping=unpinned.pin_memory())
    gpu.synchronize()
    # The first launch of a process after a running kernel waits for it, also with torch's own kernels.
    torch.cuda._sleep(100_000_000)
    one.run(*arguments, schedules=schedules(999))
    gpu.synchronize()
    torch.cuda._sleep(8_000_000_000)
    done = torch.cuda.Event()
    done.record()
    outs = [one.run(*arguments, schedules=schedules(expected)) for expected in range(1000, 1200)]
    outs += [one.run(*arguments, mapping=mapping) for mapping in (unpinned, unpinned.pin_memory())]
    waited = done.query()
    gpu.synchronize()
    assert not waited
    assert all(right(out) for out in outs)


def test_a_memory_pool_of_the_caller_has_nothing_left_in_it() -> None:
    one, arguments = Fused(ones()), given()
    one.run(*arguments, schedules=schedules(1))
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert right(one.run(*arguments, schedules=schedules(777)))
    gc.collect()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert not [block for block in blocks if block["state"] == "active_allocated"]
    assert right(one.run(*arguments, schedules=schedules(777)))


@pytest.mark.parametrize("mode", ("reduce-overhead",))
def test_compiled_into_graphs(mode: str) -> None:
    """torch warms up, and captures, in a memory pool that it wants to be empty again."""
    collection = on_gpu(TABLES).requires_grad_(False)
    compiled = torch.compile(collection, mode=mode)
    arguments = batch(collection, 20)
    want = collection(*arguments)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*arguments), want)
    torch._dynamo.reset()


def captured(collection: FusedEmbeddingBagCollection, *arguments: Tensor, mapping: Mapping | None = None):
    """A graph of one call, and its output."""
    gpu.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = collection(*arguments, mapping=mapping)
    return graph, out


@pytest.mark.parametrize("mapped", (False, True))
def test_buffers_of_a_graph_stay_alive(mapped: bool) -> None:
    """Its mapping is dropped and its memory used again; other calls come, more than are kept."""
    collection = on_gpu(TABLES).requires_grad_(False)
    indices, offsets = lookups_of(collection, 20, 9)
    arguments = moved((indices, offsets))
    want = collection(*arguments)
    mapping = collection.map(offsets) if mapped else None
    graph, out = captured(collection, *arguments, mapping=mapping)
    if mapping is not None:
        mapping.tensor.zero_()
        del mapping
        other = [torch.full((64, 8), -1, dtype=torch.int32, pin_memory=True) for _ in range(64)]
        del other
    one, others = Fused(ones()), given()
    for expected in range(1, 2 * MOST_CALLS):
        one.run(*others, schedules=schedules(expected))
    for _ in range(3):
        out.fill_(torch.nan)
        stream = torch.cuda.Stream(gpu.DEVICE)
        stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
        with torch.cuda.stream(stream):
            graph.replay()
        gpu.synchronize()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_graphs_of_many_batch_sizes() -> None:
    collection = on_gpu(TABLES).requires_grad_(False)
    check(collection, *batch(collection, 20))
    graphs = []
    for bags in (1, 2, 4, 8, 16, 32, 64, 128):
        arguments = batch(collection, bags)
        graphs.append((*captured(collection, *arguments), collection(*arguments), arguments))
    for graph, out, want, _ in graphs * 2:
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_a_mapping_that_was_changed_is_refused() -> None:
    """Rows without a task would have undefined contents."""
    collection = on_gpu(TABLES).requires_grad_(False)
    indices, offsets = lookups_of(collection, 40, 5)
    arguments = moved((indices, offsets))
    mapping = collection.map(offsets)
    want = collection(*arguments, mapping=mapping)
    for row in range(1, 1 + int(mapping.tensor[0, 1])):
        bad = mapping.tensor.clone()
        bad[row, 2] -= 1  # the last bag of a task
        changed = Mapping(bad, 40, mapping.features, mapping.schedules, mapping.warps)
        with pytest.raises(ValueError, match=r"mapping (has a task|leaves out bag)"):
            collection(*arguments, mapping=changed)
    assert torch.equal(collection(*arguments, mapping=mapping), want)
    recfuse.check()
