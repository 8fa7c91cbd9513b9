"""`recfuse.explain` of training: gradients and updates of fused calls, without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse import _C
from recfuse.ops.updates import update_of
from recfuse.perf.reserved import Reserving
from support.backward.explained import gradient, update

GPUS = ("H100", "H200", "A100", "L4", "B200")
BAGS, EACH = 64, 8  # per feature; lookups per bag
BACKWARD = "fused_embedding_bag_backward"
SPARSE = "fused_embedding_bag_sparse_backward"
UPDATE = "fused_embedding_bag_update"

Case = tuple[torch.nn.Module, Tensor, Tensor]


def tables(*shapes: tuple[int, int], sparse: bool = False, **options: Any) -> Case:
    configs = [recfuse.nn.Table(rows, dim, **options) for rows, dim in shapes]
    collection = recfuse.nn.FusedEmbeddingBagCollection(configs, sparse=sparse)
    indices = torch.cat([torch.randint(rows, (BAGS * EACH,)) for rows, _ in shapes])
    return collection, indices, torch.arange(0, indices.numel() + 1, EACH)


def updated(optimizer: str, *shapes: tuple[int, int], **options: Any) -> Case:
    case = tables(*shapes)
    case[0].optimizer = getattr(recfuse.optim, optimizer)(case[0], lr=0.1, **options)
    return case


SHAPES = (1000, 8), (50_000, 16), (40, 16)
CASES: dict[str, tuple[str, Callable[[], Case]]] = {
    "dense": (BACKWARD, lambda: tables(*SHAPES)),
    "mean": (BACKWARD, lambda: tables(*SHAPES, mode="mean")),
    "max": ("fused_embedding_bag_winners", lambda: tables(*SHAPES, mode="max")),
    "sparse": (SPARSE, lambda: tables(*SHAPES, sparse=True)),
    "small": (UPDATE, lambda: updated("SGD", (1000, 8), (40, 16))),
    **{name: (UPDATE, lambda name=name: updated(name, *SHAPES)) for name in ("SGD", "Adagrad", "Adam")},
    "RowWiseAdagrad": (UPDATE, lambda: updated("RowWiseAdagrad", *SHAPES)),
    "rounded": (UPDATE, lambda: updated("SGD", *SHAPES, stochastic_rounding=True)),
    "deferred": (SPARSE, lambda: updated("Adam", *SHAPES, deferred=True)),
}


def state_of(module: torch.nn.Module) -> list[Tensor]:
    """Copies of all that a step of training could change."""
    tensors = [*module.parameters()]
    for parameter in module.parameters():
        if (update := update_of(parameter)) is not None:
            tensors += [*update.states, update.updater.numbers]
            tensors.append(torch.tensor([update.updated, update.captured, update.updater.steps_done]))
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_training_is_explained_without_a_gpu(name: str, gpu: str) -> None:
    operator, make = CASES[name]
    module, *batch = make()
    before = state_of(module)
    launches = recfuse.explain(module, *batch, gpu=gpu, training=True)
    found = [launch for launch in launches if launch.operator == operator]
    assert found and launches.gpu["name"] == gpu
    for launch in found:
        assert all(size > 0 for size in launch.grid)
        assert launch.read_bytes + launch.written_bytes > 0 and launch.bound_seconds > 0
        assert launch.kernel == "fill" or (0 < launch.threads <= 1024 and launch.file)
    after = state_of(module)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_larger_than_memory_cost_nothing(sparse: bool) -> None:
    with Reserving():
        table = recfuse.nn.FusedEmbeddingBagCollection([(2**33, 64)], sparse=sparse)
    launches = recfuse.explain(table, torch.zeros(8).long(), torch.arange(9), gpu="H100", training=True)
    assert any(launch.operator == (SPARSE if sparse else BACKWARD) for launch in launches)
    assert all(parameter.grad is None for parameter in table.parameters())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_offsets_of_one_table_keep_their_type(integer: torch.dtype, last: bool, sparse: bool) -> None:
    """As on a GPU; the CPU's gradients complete offsets as int64."""
    table = recfuse.nn.EmbeddingBag(50_000, 16, mode="sum", sparse=sparse, include_last_offset=last)
    batch = torch.zeros(64, dtype=integer), torch.arange(0, 64 + last, 4, dtype=integer)
    launches = recfuse.explain(table, *batch, gpu="H100", training=True)
    readers = [one for one in launches if one.kernel in ("rf_backward_keys", "rf_small_lists")]
    name = "int" if integer == torch.int32 else "rf_i64"
    assert readers and all(f"-DRF_OFFSET={name}" in one.defines.split() for one in readers)


def kernels(launches: Any, operator: str) -> list[tuple[Any, ...]]:
    return [
        (one.kernel.removeprefix("rf_"), *one.grid[:2], one.threads)
        if one.kernel != "fill"
        else (one.kernel, one.written_bytes)
        for one in launches
        if one.operator == operator
    ]


PASS = [("backward_places", 16, 1, 512), ("backward_sort", 1, 1, 512)]  # of 9 bits, 32 digits a block
ENTRIES = [("backward_keys", 1, 1, 512), *PASS, ("backward_count", 1, 1, 512), *PASS]
ROWS = [("backward_rows", 8, 1, 256), ("backward_joins", 1, 1, 256)]  # 64 lookups a block, 8 chunks a block


def test_kernels_of_a_dense_gradient() -> None:
    """100,000 rows have 17 bits: two passes. 512 lookups are one chunk of the sort."""
    launches = recfuse.explain(*tables((100_000, 64)), gpu="H100", training=True)
    assert kernels(launches, BACKWARD) == [("fill", 100_000 * 64 * 4), *ENTRIES, *ROWS]
    (rows,) = (one for one in launches if one.kernel == "rf_backward_rows")
    assert rows.flops == BAGS * EACH * 64  # a sum of each lookup
    partials = 8 * 2 * 64 * 4
    assert rows.read_bytes == BAGS * EACH * 8 + BAGS * 64 * 4  # entries, the gradient
    assert rows.written_bytes == BAGS * EACH * 64 * 4 + partials
    assert "-DRF_EPILOGUE=0 " in rows.defines and "-DRF_ENTRIES=0 " in rows.defines


def test_kernels_of_a_sparse_gradient() -> None:
    """Rows are counted, then written: two calls; the number of rows is at most that of lookups."""
    launches = recfuse.explain(*tables((100_000, 64), sparse=True), gpu="H100", training=True)
    counts = [("backward_count_rows", 8, 1, 256), ("backward_sum_rows", 1, 1, 256)]
    assert kernels(launches, SPARSE) == [*ENTRIES, *counts, *ROWS]
    several = recfuse.explain(*tables((100_000, 64), (9, 4), sparse=True), gpu="H100", training=True)
    assert ("backward_split_rows", 1, 1, 256) in kernels(several, SPARSE)


def test_kernels_of_small_tables() -> None:
    """A block a list; columns of 64 bags fit in shared memory."""
    launches = recfuse.explain(*updated("Adam", (1000, 8), (40, 16)), gpu="H100", training=True)
    lists, rows = [one for one in launches if one.operator == UPDATE]
    assert (lists.kernel, lists.grid, lists.threads) == ("rf_small_lists", (2, 1, 1), 512)
    assert (rows.kernel, rows.threads) == (
        "rf_small_rows",
        384,
    ) and "-DRF_STAGED=1 -DRF_EPILOGUE=4 " in rows.defines


@pytest.mark.parametrize(
    "parts, found",
    [
        (0, {"rf_small_lists", "rf_backward_count"}),
        (1, {"rf_backward_count"}),
    ],
)
def test_parts_of_a_backward_pass_can_be_left_out(parts: int, found: set[str]) -> None:
    few_rows = [(100, 32)] * 64
    collection, *lookups = updated("SGD", *few_rows, *[(50_000, 32)] * 4)
    _C.fused_embedding_bag_backward_leave_out(parts)
    try:
        launches = recfuse.explain(collection, *lookups, gpu="H100", training=True)
    finally:
        _C.fused_embedding_bag_backward_leave_out(0)
    asked = {"rf_small_lists", "rf_backward_count"}
    assert asked & {launch.kernel for launch in launches} == found & asked


def test_a_sparse_gradient_lists_as_many_rows_as_there_may_be() -> None:
    seen = []
    module, *batch = tables((100_000, 8), (5, 8), sparse=True)

    def step() -> None:
        module(*batch).sum().backward()
        seen.extend(parameter.grad for parameter in module.parameters())

    recfuse.explain(step, gpu="H100", training=True)
    (gradient,) = seen
    assert gradient._nnz() == 2 * BAGS * EACH and not gradient._values().any()


def test_a_deferred_step_is_explained() -> None:
    module, *batch = updated("Adam", (1000, 8), deferred=True)
    before = state_of(module)

    def step() -> None:
        module(*batch).sum().backward()
        module.optimizer.step()

    launches = recfuse.explain(step, gpu="H100", training=True)
    assert launches[-1].operator == "rows_update" and launches[-1].kernel == "rf_backward_listed"
    assert launches[-1].grid[0] == BAGS * EACH * 2 // 256  # two lanes a row of 8 columns
    after = state_of(module)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_training_continues_after_an_explanation() -> None:
    module, *batch = updated("SGD", (1000, 8))
    recfuse.explain(module, *batch, gpu="H100", training=True)
    weight = next(module.parameters())
    before = weight.detach().clone()
    module(*batch).sum().backward()
    module.optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("make", (gradient, update))
def test_random_calls_write_nothing(make: Callable[[random.Random], tuple[Any, ...]]) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        call, *tensors = make(random.Random(seed))
        before = [tensor.clone() for tensor in tensors]
        assert len(recfuse.explain(call, *tensors, gpu="H100")) > 1
        assert all(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))


@pytest.mark.parametrize("sparse", (False, True))
def test_gradients_do_not_change(sparse: bool) -> None:
    """Also for a function, whose Parameters have no names."""
    table = recfuse.nn.EmbeddingBag(100, 8, mode="sum", sparse=sparse)
    indices, offsets = torch.randint(100, (64,)), torch.arange(0, 64, 8)
    launches = recfuse.explain(lambda: table(indices, offsets), gpu="H100", training=True)
    assert any(launch.operator == (SPARSE if sparse else BACKWARD) for launch in launches)
    assert table.weight.grad is None
    table(indices, offsets).sum().backward()
    grad = table.weight.grad
    assert grad is not None
    before = grad.to_dense().clone()
    recfuse.explain(lambda: table(indices, offsets), gpu="H100", training=True)
    assert table.weight.grad is grad and torch.equal(grad.to_dense(), before)
