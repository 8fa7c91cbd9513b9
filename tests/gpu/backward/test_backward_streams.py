"""Gradients and updates of fused calls on a GPU: the same bits each time, streams, graphs, rounding."""

from __future__ import annotations

import pytest
import torch

import recfuse  # noqa: F401 (loads the operators)
from support import gpu
from support.backward.calls import KINDS, Call, numbers_of, there
from support.fused import Groups
from support.reference import DTYPES, Feature, Hyper

pytestmark = gpu.MARKS

OPS = torch.ops.recfuse
LR = 0


def call_of(bags: int = 600, dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    """Small tables, large tables, shared tables, a maximum, a hot row."""
    torch.manual_seed(seed)
    spec = [(dtype, 32, (7, 900, 5000, 60_000)), (dtype, 8, (300, 40_000))]
    features = [Feature(0, "mean", None), Feature(1, "sum", 3), Feature(2, "sum", None),
                Feature(3, "sum", None), Feature(4, "max", 0), Feature(5, "mean", None),
                Feature(3, "mean", 5)]  # fmt: skip
    problem = Groups(spec, features)
    indices, offsets = problem.lookups(bags, 30)
    indices[torch.rand(indices.shape) < 0.2] = 1
    return Call(problem, torch.randn(bags, problem.output_dim), indices, offsets)


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.nan_to_num().clone() for tensor in tensors]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_the_same_bits_each_time(kind: int) -> None:
    """Also concurrently with other work, and in half precision with stochastic rounding."""
    for dtype in DTYPES:
        results = []
        busy = torch.randn(4000, 4000, device=gpu.DEVICE)
        for turn in range(4):
            call = call_of(dtype=dtype)
            dense, states = call.gradients(False), call.states(kind)
            stream = torch.cuda.Stream(gpu.DEVICE)
            with torch.cuda.stream(stream):
                for _ in range(turn):
                    busy = busy @ busy * 1e-3
            call.update(kind, states, numbers_of(), True, 9)
            results.append(bits([*dense, *call.weights, *states]))
            gpu.synchronize()
        assert all(same(results[0], other) for other in results[1:])


def test_other_streams() -> None:
    want = call_of()
    want.update(1, states := want.states(1), numbers_of())
    for _ in range(3):
        call = call_of()
        mine = call.states(1)
        stream = torch.cuda.Stream(gpu.DEVICE)
        stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
        with torch.cuda.stream(stream):
            dense = call.gradients(False)
            call.update(1, mine, numbers_of())
        torch.cuda.current_stream(gpu.DEVICE).wait_stream(stream)
        assert same(bits([*call.weights, *mine]), bits([*want.weights, *states]))
        assert same(bits(dense), bits(want.gradients(False)))


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_in_a_graph(kind: int) -> None:
    """Replays see other lookups, gradients and numbers."""
    call, other = call_of(), call_of(seed=1)
    most = max(call.indices.numel(), other.indices.numel())
    padded = torch.zeros(most, dtype=torch.int64, device=gpu.DEVICE)
    padded[: call.indices.numel()] = call.indices
    call.indices = padded
    states, numbers = call.states(kind), numbers_of()
    stream = torch.cuda.Stream(gpu.DEVICE)
    stream.wait_stream(torch.cuda.current_stream(gpu.DEVICE))
    kept = [tensor.clone() for tensor in (*call.weights, *states)]
    with torch.cuda.stream(stream):
        call.update(kind, states, numbers)
        call.gradients(False)
    torch.cuda.current_stream(gpu.DEVICE).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.update(kind, states, numbers)
        dense = call.gradients(False)
    for own, before in zip((*call.weights, *states), kept, strict=True):
        own.copy_(before)
    for lookups in (call_of(), other):
        padded.zero_()[: lookups.indices.numel()] = lookups.indices
        call.offsets.copy_(lookups.offsets)
        call.grad.copy_(lookups.grad)
        if call.winners is not None:
            call.winners.copy_(lookups.winners)
        numbers[LR] = numbers[LR] * 2
        eager = call_of()
        eager.weights, eager.grad, eager.indices = [w.clone() for w in call.weights], call.grad, padded
        eager.offsets, eager.winners = call.offsets, call.winners
        mine = [state.clone() for state in states]
        graph.replay()
        eager.update(kind, mine, numbers)
        assert same(bits([*call.weights, *states]), bits([*eager.weights, *mine]))
        assert same(bits(dense), bits(eager.gradients(False)))


@pytest.mark.skipif(gpu.DEVICE.type != "cuda", reason="needs CUDA")
def test_nothing_waits_for_the_gpu() -> None:
    call = call_of()
    states, numbers = call.states(3), numbers_of()
    call.update(3, states, numbers)
    call.gradients(False)
    gpu.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.update(3, states, numbers)
        call.gradients(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_that_is_skipped() -> None:
    for kind in range(4):
        call = call_of()
        states = call.states(kind)
        before = bits([*call.weights, *states])
        call.grad.fill_(torch.nan)
        call.update(kind, states, numbers_of(skip=1.0))
        assert same(bits([*call.weights, *states]), before)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_stochastic_rounding_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    """With sums of one term and a step that adds zero, only the rounding remains."""
    sizes = (50, 3000, 70_000)
    problem = Groups([(dtype, 32, sizes)], [Feature(table, "sum", None) for table in range(3)])
    for weight in problem.weights:
        weight.zero_()
    bags = 40
    indices = torch.cat([torch.randperm(rows)[:bags] for rows in sizes])
    offsets = torch.arange(3 * bags + 1)
    grad = torch.randn(bags, 96) * torch.logspace(-7, 4, 96)
    numbers = numbers_of(Hyper(lr=-1.0), step=5)
    call = Call(problem, grad, indices, offsets)
    call.update(0, [], numbers, True, 123)
    given = grad, problem.weights, [], problem.rows, indices, offsets, None, None, numbers.cpu(), []
    with torch.no_grad():
        OPS.fused_embedding_bag_update(*given, 0, True, 123)
    assert torch.equal(call.weights[0].cpu(), problem.weights[0])


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_summed_rows(dtype: torch.dtype, kind: int) -> None:
    """Of a coalesced gradient: equal to the update from lookups, and to the CPU's."""
    torch.manual_seed(2)
    weight, rows = torch.randn(900, 20).to(dtype), torch.randperm(900)[:600].sort().values
    sums, numbers = torch.randn(600, 20), numbers_of(step=2)
    shape = (900,) if KINDS[kind] == "RowWiseAdagrad" else (900, 20)
    states = [0.1 + torch.rand(shape) for _ in range((0, 1, 1, 2)[kind])]
    mine, own = there(weight), there(states)
    with torch.no_grad():
        OPS.rows_update(mine, own, there(rows), there(sums), numbers, kind)
        OPS.rows_update(weight, states, rows, sums, numbers.cpu(), kind)
    torch.testing.assert_close(mine.cpu(), weight, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    for one, other in zip(own, states, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


def test_non_finite_weights_do_not_change() -> None:
    problem = Groups([(torch.float32, 4, (6, 30_000))], [Feature(0, "sum", None), Feature(1, "sum", None)])
    for weight in problem.weights:
        weight[:, 0] = torch.inf
    indices, offsets = problem.lookups(30)
    call = Call(problem, torch.randn(30, 8), indices, offsets)
    states = call.states(2)
    call.update(2, states, numbers_of(Hyper()))
    first = call.weights[0][2:8, 0]
    assert (first == torch.inf).all() and states[0].isfinite().all()
