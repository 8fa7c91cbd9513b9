"""Sharded tables inside models and with options; sharding on one rank."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from support.processes.ranks import check, run_cases
from support.shards import uses
from support.shards.ranks import MANY

NAMES = (
    "parallel",
    "from_meta",
    "moved_optimizers",
    "options",
    "planned",
    "accumulated",
    "scaled",
    "raw_states",
    "clipped",
    "parts_of_wrapped",
    "swapped_dlrm",
    "several_modules",
)


def _cases() -> dict[str, Any]:
    return {name: getattr(uses, name) for name in NAMES}


@pytest.mark.parametrize("world", [1, MANY])
def test_uses(world):
    results = run_cases(world, _cases)
    for name in NAMES:
        check(results, name)


def _compiled() -> dict[str, Any]:
    return {"compiled": uses.compiled}


@pytest.mark.long
def test_compiled():
    check(run_cases(2, _compiled), "compiled")


def _torchrec() -> dict[str, Any]:
    return {"swapped_torchrec": uses.swapped_torchrec}


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")
def test_swapped_torchrec():
    check(run_cases(2, _torchrec), "swapped_torchrec")
