"""recfuse's kernels inside TorchRec's DistributedModelParallel, compared with FBGEMM's: several processes.

They have gloo, or with RANK_TESTS=nccl in the environment a GPU each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.modules.embedding_configs import DataType, PoolingType

from recfuse.torchrec import uses_recfuse
from support.processes.ranks import check, run_cases
from support.torchrec.models import (
    SHARDINGS,
    Model,
    batch,
    dense_optimizer,
    device,
    local_state,
    loss_of,
    set_values,
    sharded,
    train,
)

pytestmark = pytest.mark.long

STEPS = 50  # of the plan with several sharding types, once for each optimizer
FEW_STEPS = 12
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
PRECISIONS = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}


def _both(sharding: str, optimizer: EmbOptimType, weighted: bool, precision: str, pooling: str) -> Any:
    """Losses and state of both kernels after a training."""
    found = []
    for kernels in ("fbgemm", "recfuse"):
        torch.manual_seed(0)
        model = Model(weighted, PRECISIONS[precision], PoolingType[pooling])
        parallel = sharded(kernels, sharding, optimizer, model)
        assert uses_recfuse(parallel) == (kernels == "recfuse")
        many = (sharding, weighted, precision, pooling) == ("mixed", False, "fp32", "SUM")
        losses = train(parallel, range(STEPS if many else FEW_STEPS), weighted)
        states = parallel.fused_optimizer.state_dict()["state"]
        classes = {(table, name): type(v).__name__ for table, s in states.items() for name, v in s.items()}
        found.append((losses, local_state(parallel), classes))
    return found


def _odd_dims() -> Any:
    """Dims that FBGEMM does not take: the result is that of one process."""
    dims, losses = (3, 10, 7), {}
    for sharding in ("table", "row", "data_parallel"):
        model = Model(dims=dims)
        losses[sharding] = train(
            sharded("recfuse", sharding, EmbOptimType.EXACT_SGD, model), range(FEW_STEPS)
        )
    return losses


def _one_process(sharding: str) -> Any:
    """Losses of a sharded model, and of the whole model trained by torch with all ranks' batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel = sharded("recfuse", sharding, EmbOptimType.EXACT_SGD)
    whole = Model().to(device())
    set_values(whole)
    optimizer, expected = dense_optimizer(whole), []
    for step in range(FEW_STEPS):
        optimizer.zero_grad()
        losses = [loss_of(whole, batch(step, other)) for other in range(world)]
        (sum(losses) / world).backward()
        optimizer.step()
        expected.append(losses[rank].item())
    return train(parallel, range(FEW_STEPS)), expected


def _forwards_first() -> Any:
    """Two forward passes, then their backward passes, as a pipeline makes them."""
    found = []
    for kernels in ("fbgemm", "recfuse"):
        parallel = sharded(kernels, "mixed", EmbOptimType.EXACT_SGD)
        for step in range(0, 10, 2):
            losses = [loss_of(parallel, batch(step + n, dist.get_rank())) for n in range(2)]
            for loss in losses:
                loss.backward()
        found.append(local_state(parallel))
    return found


def _empty_rank() -> Any:
    """A rank without lookups."""
    found = []
    for kernels in ("fbgemm", "recfuse"):
        parallel = sharded(kernels, "row", EmbOptimType.EXACT_ROWWISE_ADAGRAD)
        for step in range(4):
            rank = dist.get_rank()
            loss_of(parallel, batch(step, rank, empty=(rank + step) % 2 == 0)).backward()
        found.append(local_state(parallel))
    return found


def _learning_rates() -> Any:
    """lr of the fused optimizer, set as warm-up schedules do."""
    found = []
    for kernels in ("fbgemm", "recfuse"):
        parallel = sharded(kernels, "table", EmbOptimType.EXACT_ADAGRAD)
        for step in range(6):
            for group in parallel.fused_optimizer.param_groups:
                group["lr"] = 0.02 * (step + 1)
            parallel.fused_optimizer.step()
            loss_of(parallel, batch(step, dist.get_rank())).backward()
        found.append(local_state(parallel))
    return found


def _half_output() -> Any:
    found = []
    for kernels in ("fbgemm", "recfuse"):
        options = {"output_dtype": SparseType.FP16}
        parallel = sharded(kernels, "table", EmbOptimType.EXACT_SGD, **options)
        found.append(parallel.module.ebc(batch(0, dist.get_rank())).values().detach().cpu())
    return found


def _name(sharding: str, optimizer: EmbOptimType, weighted: bool, precision: str, pooling: str) -> str:
    return f"{sharding} {optimizer.name} {'weighted' if weighted else pooling} {precision}"


COMBINATIONS = [
    (sharding, optimizer, weighted, precision, pooling)
    for sharding in SHARDINGS
    for optimizer in OPTIMIZERS
    for weighted, precision, pooling in (
        (False, "fp32", "SUM"),
        (True, "fp32", "SUM"),
        (False, "fp32", "MEAN"),
        (False, "fp16", "SUM"),
    )
    if (precision, optimizer) == ("fp16", EmbOptimType.EXACT_ROWWISE_ADAGRAD) or precision == "fp32"
]


def _cases() -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {
        _name(*values): functools.partial(_both, *values) for values in COMBINATIONS
    }
    cases |= {f"one process {name}": functools.partial(_one_process, name) for name in SHARDINGS}
    cases["odd dims"] = _odd_dims
    cases["forwards first"] = _forwards_first
    cases["empty rank"] = _empty_rank
    cases["learning rates"] = _learning_rates
    cases["half output"] = _half_output
    return cases


def _cases_of_three() -> dict[str, Callable[[], Any]]:
    values = [(sharding, EmbOptimType.EXACT_ROWWISE_ADAGRAD, False, "fp32", "SUM") for sharding in SHARDINGS]
    return {_name(*each): functools.partial(_both, *each) for each in values}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return run_cases(2, _cases)


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return run_cases(3, _cases_of_three)


def _assert_equal(results: list[Any], tolerance: float = 2e-5) -> None:
    for theirs, ours in results:
        assert list(theirs[1]) == list(ours[1])
        assert theirs[2] == ours[2]
        torch.testing.assert_close(theirs[0], ours[0], rtol=tolerance, atol=tolerance)
        for name, value in theirs[1].items():
            torch.testing.assert_close(
                ours[1][name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("values", COMBINATIONS, ids=lambda values: _name(*values))
def test_losses_and_states_are_those_of_fbgemm(two, values):
    _assert_equal(check(two, _name(*values)), 2e-5 if values[3] == "fp32" else 4e-3)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_three_processes(three, sharding):
    _assert_equal(check(three, _name(sharding, EmbOptimType.EXACT_ROWWISE_ADAGRAD, False, "fp32", "SUM")))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_losses_are_those_of_one_process(two, sharding):
    for losses, expected in check(two, f"one process {sharding}"):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_dims_that_are_no_multiple_of_four(two):
    for losses in check(two, "odd dims"):
        torch.testing.assert_close(losses["row"], losses["table"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(losses["data_parallel"], losses["table"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["forwards first", "empty rank", "learning rates"])
def test_states_are_those_of_fbgemm(two, name):
    for theirs, ours in check(two, name):
        assert list(theirs) == list(ours)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


def test_output_dtype(two):
    for theirs, ours in check(two, "half output"):
        assert ours.dtype == theirs.dtype == torch.float16
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
