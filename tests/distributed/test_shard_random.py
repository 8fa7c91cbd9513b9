"""Random small cases of sharded tables; SHARD_RANDOM in the environment is their number."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from support.processes.ranks import check, run_cases
from support.shards.random_cases import compare_all
from support.shards.ranks import MANY

FEW = 12


def _few() -> dict[str, Any]:
    return {"random": functools.partial(compare_all, 0, FEW)}


def _many() -> dict[str, Any]:
    count = int(os.environ.get("SHARD_RANDOM", "100"))
    return {"random": functools.partial(compare_all, FEW, count)}


def test_random_cases():
    check(run_cases(2, _few), "random")


@pytest.mark.long
def test_many_random_cases():
    check(run_cases(MANY, _many), "random")
