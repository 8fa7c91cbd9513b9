"""Shared by the tests of ikbo_attention on a GPU: the paths that accept a call, and comparisons of all of
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support import gpu
from support.ikbo_attention import HALVES, Case, Problem

HOPPER = gpu.MISSING is None and torch.cuda.get_device_capability(gpu.DEVICE) == (9, 0)
ONLY_HOPPER = pytest.mark.skipif(not HOPPER, reason="the one-launch kernel is for compute capability 9.0")
HALF_DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=str)


def on_gpu(case: Case) -> Problem:
    """The tensors of a case there."""
    return Problem(case, gpu.DEVICE)


def takes(problem: Problem, path: str) -> bool:
    """Returns true if a path accepts the call."""
    try:
        problem.run(path=path)
    except NotImplementedError:
        return False
    return True


def paths_of(problem: Problem) -> list[str]:
    """Those that take the call: one at least, but of float64."""
    paths = [path for path in ("packed", "fused") if takes(problem, path)]
    assert paths or problem.case.dtype == torch.float64
    return paths


def check_every_path(problem: Problem) -> list[str]:
    """Compares each path, with and without log-sum-exps, and "auto" with the path that it selects."""
    paths = paths_of(problem)
    specified = problem.specified() if paths else []
    for path in paths:
        problem.check_all(specified, path=path)
    if paths:
        chosen, automatic = problem.run(path=problem.path()), problem.run()
        for one, other in zip(results(chosen), results(automatic), strict=True):
            assert torch.equal(one, other)
    return paths


def results(found: Any) -> list[Tensor]:
    """A list of them, of one too."""
    return [found] if isinstance(found, Tensor) else list(found)
