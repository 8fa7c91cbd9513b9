"""Checkpoints that cross kernels, plans and numbers of processes, by torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel

from support.processes.ranks import check, run_cases
from support.torchrec.models import parts_of, sharded, train

pytestmark = pytest.mark.long

KERNELS = ("fbgemm", "recfuse")
PLANS = (("table", "table"), ("table", "row"), ("row", "column"), ("grid", "row"))
ADAGRAD = EmbOptimType.EXACT_ADAGRAD


def _contents(parallel: DistributedModelParallel) -> dict[str, Any]:
    return {"model": parallel.state_dict(), "optimizer": parallel.fused_optimizer.state_dict()}


def _whole(parallel: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """All weights and states, put together from all ranks."""
    states = parallel.fused_optimizer.state_dict()["state"]
    values = dict(parallel.state_dict())
    values |= {f"{table} {name}": value for table, each in states.items() for name, value in each.items()}
    own = {name: (tuple(value.size()), parts_of(value)) for name, value in values.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)  # if a table is on one rank, other ranks have no state
    found: dict[str, torch.Tensor] = {}
    for name, (size, parts) in itertools.chain.from_iterable(each.items() for each in ranks):
        whole = found.setdefault(name, torch.zeros(size))
        for tensor, (rows, columns) in parts:
            whole[(rows, columns) if whole.dim() == 2 else rows] = tensor.float()
    return dict(sorted(found.items()))


def _cross(saver: str, loader: str, plans: tuple[str, str], folder: str) -> Any:
    """Trains, saves, loads into another model, and trains both on."""
    path = f"{folder}/{saver}-{loader}-{'-'.join(plans)}"
    first = sharded(saver, plans[0], ADAGRAD)
    train(first, range(5))
    dcp.save(_contents(first), checkpoint_id=path)
    second = sharded(loader, plans[1], ADAGRAD)
    train(second, range(20, 23))  # other values, which loading must replace
    contents = _contents(second)
    dcp.load(contents, checkpoint_id=path)
    second.load_state_dict(contents["model"])
    second.fused_optimizer.load_state_dict(contents["optimizer"])
    loaded = _whole(first), _whole(second)
    losses = train(first, range(5, 15)), train(second, range(5, 15))
    return loaded, losses, (_whole(first), _whole(second))


def _load_saved(path: str) -> Any:
    """Loads a checkpoint of two processes, with both kernels, and continues training."""
    found = []
    for loader in KERNELS:
        parallel = sharded(loader, "row", ADAGRAD)
        contents = _contents(parallel)
        dcp.load(contents, checkpoint_id=path)
        parallel.load_state_dict(contents["model"])
        parallel.fused_optimizer.load_state_dict(contents["optimizer"])
        before = _whole(parallel)
        found.append((before, train(parallel, range(5, 15)), _whole(parallel)))
    return found


def _save(folder: str) -> Any:
    parallel = sharded("recfuse", "table", ADAGRAD)
    train(parallel, range(5))
    dcp.save(_contents(parallel), checkpoint_id=f"{folder}/two")
    return _whole(parallel)


def _cases(folder: str) -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {
        f"{saver} {loader} {plans}": functools.partial(_cross, saver, loader, plans, folder)
        for saver, loader, plans in itertools.product(KERNELS, KERNELS, PLANS)
    }
    return cases | {"save": functools.partial(_save, folder)}


def _cases_of_three(folder: str) -> dict[str, Callable[[], Any]]:
    return {"load": functools.partial(_load_saved, f"{folder}/two")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    found = run_cases(2, functools.partial(_cases, folder))
    return found | run_cases(3, functools.partial(_cases_of_three, folder))


def _assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("saver", KERNELS)
@pytest.mark.parametrize("loader", KERNELS)
@pytest.mark.parametrize("plans", PLANS, ids=" to ".join)
def test_checkpoints_cross_kernels_and_plans(results, saver, loader, plans):
    for loaded, losses, after in check(results, f"{saver} {loader} {plans}"):
        _assert_same(*loaded, tolerance=0)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        _assert_same(*after, tolerance=2e-5)


def test_another_number_of_processes(results):
    saved = check(results, "save")[0]
    for (before, losses, after), (own_before, own_losses, own_after) in check(results, "load"):
        _assert_same(saved, before, tolerance=0)
        _assert_same(saved, own_before, tolerance=0)
        torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-6)
        _assert_same(after, own_after, tolerance=2e-5)
