"""Launches of the fused embedding bag, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse.ops.schedules import FusedSchedule
from recfuse.perf.launches import Launches

BAGS, LENGTH, ROWS = 512, 5, 1000
DIMS = (8, 16, 64, 128)
STAGED = FusedSchedule.parse("kind=staged").row()


def tables(dims: tuple[int, ...] = DIMS) -> tuple[Tensor, list[Tensor]]:
    """Features that pool sums, and their tables."""
    rows, column = [], 0
    for number, dim in enumerate(dims):
        rows.append([number, 0, ROWS, dim, 0, -1, column])
        column += dim
    return torch.tensor(rows), [torch.zeros(ROWS, dim) for dim in dims]


def offsets_of(features: int, length: int = LENGTH) -> Tensor:
    return torch.arange(0, features * BAGS * length + 1, length)


def schedules_of(features: int, expected: int = 16 * LENGTH, **fields: int) -> Tensor:
    rows = torch.zeros(features, 5, dtype=torch.int32)
    rows[:, 4] = expected
    for name, value in fields.items():
        rows[:, ("kind", "threads", "distance", "split").index(name)] = value
    return rows


def explain(
    dims: tuple[int, ...] = DIMS, gpu: str = "H100", length: int = LENGTH, **options: Any
) -> Launches:
    features, weights = tables(dims)
    indices = torch.zeros(len(dims) * BAGS * length, dtype=torch.long)
    offsets = offsets_of(len(dims), length)
    return recfuse.explain(
        lambda: recfuse.fused_embedding_bag(weights, features, indices, offsets, sum(dims), **options),
        gpu=gpu,
    )


def test_unknown_lengths_are_mapped_on_the_device() -> None:
    launches = explain()
    mapping, pooling = launches
    assert (mapping.kernel, pooling.kernel) == ("rf_fused_map", "rf_fused_embedding_bag")
    assert mapping.block == (1024, 1, 1) and pooling.block == (64, 1, 1)
    assert 0 < mapping.written_bytes <= launches.workspace_bytes
    assert pooling.grid[0] * 32 < launches.workspace_bytes  # a task a block


def test_bytes_and_operations_are_those_of_the_batch() -> None:
    launches = explain(schedules=schedules_of(4))
    (launch,) = launches
    lookups = len(DIMS) * BAGS * LENGTH
    assert launch.read_bytes == ROWS * 4 * sum(DIMS) + 8 * lookups + 8 * (len(DIMS) * BAGS + 1)
    assert launch.written_bytes == 4 * BAGS * sum(DIMS)
    assert launch.flops == pytest.approx(BAGS * LENGTH * sum(DIMS))
    assert launches.workspace_bytes == 0


def test_few_lookups_read_no_whole_tables() -> None:
    features, weights = tables((64,))
    (launch,) = recfuse.explain(
        lambda: recfuse.fused_embedding_bag(
            weights,
            features,
            torch.zeros(32, dtype=torch.long),
            torch.arange(33),
            64,
            schedules=schedules_of(1, 16),
        ),
        gpu="H100",
    )
    assert launch.read_bytes == 32 * 64 * 4 + 32 * 8 + 33 * 8


def test_a_block_works_on_a_task_of_the_mapping() -> None:
    """Bags as long as expected have the same mapping, computed from the offsets or from the expected
    lookups."""
    module = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(
        [torch.nn.EmbeddingBag(ROWS, dim, mode="sum") for dim in DIMS]
    )
    offsets = offsets_of(len(DIMS))
    indices = torch.zeros(int(offsets[-1]), dtype=torch.long)
    mapping = module.map(offsets)
    (mapped,) = recfuse.explain(lambda: module(indices, offsets, mapping=mapping), gpu="H100")
    (expected,) = recfuse.explain(module, indices, offsets, gpu="H100")
    assert mapped.grid == expected.grid == (int(mapping.tensor[0, 1]), 1, 1)
    assert "-DRF_CALLERS_MAPPING=1" in mapped.defines and "-DRF_CALLERS_MAPPING=0" in expected.defines


def test_blocks_that_share_bags_count_from_zero() -> None:
    schedules = schedules_of(1, 8000, kind=1, threads=64, split=2)
    launches = explain((64,), length=500, schedules=schedules)
    fill, launch = launches
    assert (fill.kernel, launch.kernel) == ("fill", "rf_fused_embedding_bag")
    groups = launch.grid[0] // 2
    assert fill.written_bytes == 4 * groups
    assert launches.workspace_bytes > fill.written_bytes  # partial sums come first
    assert (launches.workspace_bytes - fill.written_bytes) % 128 == 0


@pytest.mark.parametrize(("gpu", "kernels"), [("A100", 1), ("L4", 1), ("H100", 2), ("H200", 2), ("B200", 2)])
def test_tables_are_staged_where_the_gpu_has_room(gpu: str, kernels: int) -> None:
    schedules = schedules_of(2)
    schedules[0] = torch.tensor([*STAGED[:4], 16 * LENGTH])
    launches = explain((8, 128), gpu, schedules=schedules)
    assert len(launches) == kernels
    assert launches[-1].kernel == "rf_fused_embedding_bag"
    assert ("-DRF_WITH_STAGED=1" in launches[-1].defines) == (kernels == 2)
    whole = explain((8, 128), gpu, schedules=schedules_of(2))
    assert sum(launch.flops for launch in launches) == pytest.approx(sum(launch.flops for launch in whole))
    if kernels == 2:
        assert launches[0].kernel == "rf_fused_staged" and launches[0].threads == 768
        assert launches[0].grid == (1, 1, 1)  # 512 bags are one task


def test_warps_limit_blocks_by_shared_memory() -> None:
    (free,) = explain(schedules=schedules_of(4))
    (held,) = explain(schedules=schedules_of(4), warps=8)
    assert "-DRF_MIN_BLOCKS=14" in free.defines and "-DRF_MIN_BLOCKS=4" in held.defines
    assert free.shared_bytes == held.shared_bytes < held.dynamic_shared
    assert free.dynamic_shared == free.shared_bytes


def test_a_collection_has_the_launches_of_a_gpu() -> None:
    """It learns the lengths of its first batch; on the CPU it has no schedules otherwise."""
    module = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(
        [torch.nn.EmbeddingBag(ROWS, 64, mode="sum")]
    )
    offsets = offsets_of(1)
    indices = torch.zeros(int(offsets[-1]), dtype=torch.long)
    module(indices, offsets)
    assert module.schedules is None
    (launch,) = recfuse.explain(module, indices, offsets, gpu="H100")
    assert launch.kernel == "rf_fused_embedding_bag"
    assert module.schedules is not None and module.schedules[0, -1] == 16 * LENGTH
