"""fused_embedding on a GPU: bits of torch's embedding, gradients, errors, CUDA graphs, no waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.operators.histories import LAYOUTS, Histories, by_torch, draw_histories

pytestmark = gpu.MARKS


def looked_up(call: Histories) -> Tensor:
    arguments, options = call.arguments()
    return recfuse.fused_embedding(*arguments, **options)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    integer = torch.int32 if found.dtype.itemsize == 4 else torch.int16
    assert torch.equal(found.cpu().view(integer), expected.cpu().view(integer))


@contextmanager
def without_waits() -> Iterator[None]:
    """A wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def group(layout: str, length: int = 0, dtype: torch.dtype = torch.float32, dim: int = 32) -> Histories:
    """Eight features of 512 histories of 1 to 100 lookups."""
    torch.manual_seed(0)
    tables = [torch.randn(1000 + 97 * number, dim).to(dtype) for number in range(8)]
    features = [[number, 0, len(table), dim, 0, -1, dim * number] for number, table in enumerate(tables)]
    lengths = torch.randint(1, 101, (512,))
    ends = torch.cat((lengths.new_zeros(1), lengths.repeat(8).cumsum(0)))
    indices = torch.cat([torch.randint(len(table), (int(lengths.sum()),)) for table in tables])
    return Histories(tables, torch.tensor(features), indices, ends, layout, length)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_calls_have_the_bits_of_torch(layout: str) -> None:
    draw = random.Random(layout)
    torch.manual_seed(0)
    for _ in range(150):
        call = draw_histories(draw, layout)
        assert_same_bits(looked_up(call.to("cuda")), by_torch(call))
    recfuse.check()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("layout", "length"), (("jagged", 0), ("joined", 0), ("padded", 64), ("padded", 128))
)
def test_a_group_has_the_bits_of_torch(layout: str, length: int, dtype: torch.dtype) -> None:
    for dim in (32, 128, 50):
        call = group(layout, length, dtype, dim)
        assert_same_bits(looked_up(call.to("cuda")), by_torch(call))
        wide = replace(call, dtype=torch.float32)
        assert_same_bits(looked_up(wide.to("cuda")), by_torch(wide))


@pytest.mark.parametrize("features", (40, 200, 448))
def test_many_features(features: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 8)
    rows = torch.tensor([[0, 0, 50, 8, 0, -1, 8 * number] for number in range(features)])
    lengths = torch.randint(0, 3, (features * 4,))
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    indices = torch.randint(50, (int(ends[-1]),))
    for layout, length in (("jagged", 0), ("padded", 2)):
        call = Histories([table], rows, indices, ends, layout, length)
        assert_same_bits(looked_up(call.to("cuda")), by_torch(call))


def test_too_many_features_are_refused() -> None:
    rows = torch.tensor([[0, 0, 5, 1, 0, -1, number] for number in range(449)])
    call = Histories(
        [torch.randn(5, 1)], rows, torch.zeros(449, dtype=torch.int64), torch.arange(450), "jagged"
    )
    with pytest.raises(NotImplementedError, match=r"449 features .* expected at most 448 features"):
        looked_up(call.to("cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sparse", (False, True))
def test_gradients_are_those_of_the_cpu(layout: str, sparse: bool) -> None:
    draw = random.Random(f"{layout} {sparse}")
    torch.manual_seed(0)
    for _ in range(40):
        call = draw_histories(draw, layout, torch.float32)
        call = replace(call, weights=[weight.requires_grad_() for weight in call.weights])
        found = []
        grad = None
        for own in (call, call.to("cuda")):
            arguments, options = own.arguments()
            output = recfuse.fused_embedding(*arguments, **options, sparse=sparse)
            grad = torch.randint(-3, 4, output.shape).float() if grad is None else grad
            output.backward(grad.to(output.device))
            found.append([weight.grad for weight in own.weights])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(one.to_dense(), other.to_dense().cpu())
    recfuse.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_deterministic(layout: str) -> None:
    call = group(layout, 64 if layout == "padded" else 0)
    steps = []
    for _ in range(2):
        own = replace(call.to("cuda"), weights=[torch.nn.Parameter(weight.cuda()) for weight in call.weights])
        optimizer = recfuse.optim.Adam(own.weights, lr=0.1)
        for turn in range(3):
            output = looked_up(own)
            grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(turn)).cuda()
            output.backward(grad)
            optimizer.step()
        steps.append([weight.detach().clone() for weight in own.weights])
    assert all(torch.equal(*pair) for pair in zip(*steps, strict=True))
    assert not torch.equal(steps[0][0].cpu(), call.weights[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_index_gives_zeros_and_the_next_call_raises(layout: str) -> None:
    call = group(layout, 100 if layout == "padded" else 0).to("cuda")
    place = int(call.offsets[515]) + 0  # the first lookup of history 3 of feature 1
    bad = replace(call, indices=call.indices.clone())
    bad.indices[place] = 10_000
    expected = looked_up(call)
    found = looked_up(bad)
    torch.cuda.synchronize()
    differs = (found != expected).nonzero()
    assert len(differs) == 32 and not found[tuple(differs.T)].any()
    text = r"history\[0\] is 10000, for feature 1, bag 3; expected 0 to 1096, less than the 1097 rows"
    with pytest.raises(IndexError, match=text):
        looked_up(call)
    assert torch.equal(looked_up(call), expected)
    recfuse.check()


def test_different_histories_of_a_group_raise() -> None:
    call = group("joined").to("cuda")
    bad = replace(call, offsets=call.offsets.clone())
    bad.offsets[513] += 1
    looked_up(bad)
    with pytest.raises(ValueError, match=r"offsets\[513\] is .* since it repeats another offset"):
        recfuse.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_never_wait(layout: str) -> None:
    call = group(layout, 64 if layout == "padded" else 0).to("cuda")
    looked_up(call)
    torch.cuda.synchronize()
    with without_waits():
        looked_up(call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_graphs(layout: str) -> None:
    call = group(layout, 64 if layout == "padded" else 0).to("cuda")
    looked_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = looked_up(call)
    call.indices.copy_(call.indices.flip(0) % 1000)
    graph.replay()
    assert_same_bits(output, looked_up(call))


def test_lookups_after_the_last_history_give_zeros() -> None:
    features = torch.tensor([[0, 0, 10, 4, 0, -1, 0]])
    table = torch.randn(10, 4).cuda()
    indices, offsets = torch.tensor([1, 2, 99, -5]).cuda(), torch.tensor([0, 1, 2]).cuda()
    found = recfuse.fused_embedding([table], features, indices, offsets, 4)
    assert torch.equal(found[:2], table[1:3]) and not found[2:].any()
    recfuse.check()


def test_the_mask_never_waits() -> None:
    offsets = group("joined").offsets.cuda()
    with without_waits():
        mask = recfuse.history_mask(offsets, 64, 8)
    lengths = offsets.diff()[:512].clamp(max=64)
    assert torch.equal(mask.sum(1), lengths)
