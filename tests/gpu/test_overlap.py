"""Launches that overlap with previous launches see their writes."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support import gpu

pytestmark = gpu.MARKS

STEPS = 2000


@pytest.mark.parametrize("bags", (64, 2048))
def test_a_table_updated_between_calls(bags: int) -> None:
    """Each call reads the table after the previous update, in whatever cache its rows were."""
    table = torch.zeros(1000, 64, device=gpu.DEVICE)
    indices = torch.randint(0, 1000, (bags * 20,), device=gpu.DEVICE)
    offsets = torch.arange(0, bags * 20, 20, device=gpu.DEVICE)
    seen = torch.empty(STEPS, device=gpu.DEVICE)
    lowest = torch.empty(STEPS, device=gpu.DEVICE)
    for step in range(STEPS):
        table.add_(1)
        pooled = recfuse.embedding_bag(indices, table, offsets, mode="sum")
        seen[step], lowest[step] = pooled.max(), pooled.min()
    expected = 20.0 * torch.arange(1, STEPS + 1, device=gpu.DEVICE)
    assert torch.equal(seen, expected) and torch.equal(lowest, expected)


@pytest.mark.parametrize("bags", (64, 2048))
def test_calls_read_results_of_the_previous_call(bags: int) -> None:
    """Every call's table is the output of the one before, with memory that is used again and again."""
    offsets = torch.arange(bags, device=gpu.DEVICE)
    forward = (offsets + 1) % bags
    table = torch.arange(bags * 64, device=gpu.DEVICE, dtype=torch.float32).view(bags, 64)
    rotated = table
    for _ in range(STEPS):
        rotated = recfuse.embedding_bag(forward, rotated, offsets, mode="sum")
    assert torch.equal(rotated, table.roll(-(STEPS % bags), 0))


def test_indices_written_just_before() -> None:
    table = torch.arange(4096, device=gpu.DEVICE, dtype=torch.float32)[:, None].repeat(1, 8)
    offsets = torch.arange(4096, device=gpu.DEVICE)
    indices = torch.zeros(4096, dtype=torch.int64, device=gpu.DEVICE)
    wrong = torch.zeros((), device=gpu.DEVICE)
    for step in range(STEPS):
        indices.fill_(step % 4096)
        pooled = recfuse.embedding_bag(indices, table, offsets, mode="sum")
        wrong += (pooled != step % 4096).any()
    assert wrong.item() == 0


def collection(dims: tuple[int, ...], rows: int) -> recfuse.nn.FusedEmbeddingBagCollection:
    """Tables of one value each: their rows are full of their number."""
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(torch.full((rows, dim), float(number)), mode="sum", freeze=True)
        for number, dim in enumerate(dims)
    ]
    return recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(bags).to(gpu.DEVICE)


@pytest.mark.parametrize("lookups", (1, 20))
def test_a_collection_whose_tables_are_updated_between_calls(lookups: int) -> None:
    """Calls after each other and after updates: tasks are read before the previous call has ended."""
    dims, rows, bags = (16, 64, 16, 128), 500, 256
    module = collection(dims, rows)
    weights = list(module.packed_weights())
    indices = torch.randint(0, rows, (len(dims) * bags * lookups,), device=gpu.DEVICE)
    offsets = torch.arange(0, len(indices) + 1, lookups, device=gpu.DEVICE)
    first = module(indices, offsets).clone()
    wrong = torch.zeros((), device=gpu.DEVICE)
    for step in range(STEPS):
        with torch.no_grad():
            for weight in weights:
                weight.add_(1)
        for _ in range(2):
            wrong += (module(indices, offsets) != first + lookups * (step + 1)).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("lookups", (1, 20))
def test_a_collection_s_indices_written_just_before(lookups: int) -> None:
    dims, rows, bags = (16, 64, 16, 128), 500, 256
    module = collection(dims, rows)
    values = torch.arange(rows, device=gpu.DEVICE, dtype=torch.float32)
    with torch.no_grad():
        for weight in module.packed_weights():
            weight.copy_(values.repeat(len(weight) // rows)[:, None])
    indices = torch.zeros(len(dims) * bags * lookups, device=gpu.DEVICE, dtype=torch.int64)
    offsets = torch.arange(0, len(indices) + 1, lookups, device=gpu.DEVICE)
    wrong = torch.zeros((), device=gpu.DEVICE)
    for step in range(STEPS):
        indices.fill_(step % rows)
        wrong += (module(indices, offsets) != lookups * (step % rows)).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("anew", (False, True))
def test_a_backward_pass_of_lookups_written_just_before(anew: bool) -> None:
    """By the kernel before the forward pass, or again by the kernel before the backward pass, as with
    checkpoints."""
    tables, rows, dim, bags, lookups = 60, 500, 8, 128, 16
    module = recfuse.nn.FusedEmbeddingBagCollection([(rows, dim)] * tables, device=gpu.DEVICE)
    with torch.no_grad():
        for weight in module.packed_weights():
            weight.zero_()
    optimizer = recfuse.optim.SGD(module, lr=1.0)
    indices = torch.randint(0, rows, (tables * bags * lookups,), device=gpu.DEVICE, dtype=torch.int32)
    offsets = torch.arange(0, len(indices) + 1, lookups, device=gpu.DEVICE, dtype=torch.int32)
    firsts = torch.arange(tables, device=gpu.DEVICE).repeat_interleave(bags * lookups) * rows
    expected = torch.zeros(tables * rows, device=gpu.DEVICE)
    ones = torch.ones(len(indices), device=gpu.DEVICE)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return -tensor if anew and tensor.dtype == torch.int32 else tensor

    for _ in range(300):
        indices.add_(1).remainder_(rows)
        with torch.autograd.graph.saved_tensors_hooks(changed, changed):
            output = module(indices, offsets)
        output.backward(torch.ones_like(output))
        optimizer.step()
        expected.scatter_add_(0, firsts + indices, ones)
    (weight,) = module.packed_weights()
    assert torch.equal(weight, -expected[:, None].expand(-1, dim))
