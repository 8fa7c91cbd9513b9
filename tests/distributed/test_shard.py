"""Sharded tables on several ranks give the results of one process with the batches of all ranks.

SHARD_PRODUCT=all in the environment runs every plan, dtype and optimizer, also on four ranks.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest

from support.processes.ranks import check, run_cases
from support.shards.models import DTYPES, OPTIMIZERS, compare, plans
from support.shards.ranks import MANY

ALL = os.environ.get("SHARD_PRODUCT") == "all"
PLANS = tuple(plans(2))
# Row-wise Adagrad needs whole rows; eps of torch's Adagrad is 0 in float16.
PRODUCT = [
    case
    for case in itertools.product(PLANS, (*DTYPES, "mixed"), OPTIMIZERS)
    if not (case[2] == "RowWiseAdagrad" and case[0] in ("columns", "mixed"))
    and not (case[2] == "torch Adagrad" and case[1] in ("fp16", "mixed"))
]
PAIRS = [case for number, case in enumerate(PRODUCT) if number % 7 == 0]  # every plan, dtype and optimizer
WEIGHTED = [(plan, "fp32", "SGD", 2, True) for plan in PLANS]
FEW = {2: [*PAIRS[::6], *WEIGHTED[::2]], MANY: [*PAIRS, *WEIGHTED]}


def _few(world: int) -> dict[str, Any]:
    return {str(case): functools.partial(compare, *case) for case in FEW[world]}


def _more() -> dict[str, Any]:
    step = 1 if ALL else 3
    return {str(case): functools.partial(compare, *case) for case in PRODUCT[1::step]}


@pytest.mark.parametrize("world", [2, MANY])
def test_ranks_equal_one_process(world):
    results = run_cases(world, functools.partial(_few, world))
    for name in _few(world):
        check(results, name)


def test_the_pairs_have_everything():
    """The cases that always run have every plan, dtype and optimizer."""
    assert {plan for plan, _, _ in PAIRS} == set(PLANS)
    assert {dtype for _, dtype, _ in PAIRS} == {*DTYPES, "mixed"}
    assert {optimizer for _, _, optimizer in PAIRS} == set(OPTIMIZERS)


@pytest.mark.long
@pytest.mark.parametrize("world", [MANY, 4] if ALL else [MANY])
def test_more_of_the_product(world):
    results = run_cases(world, _more)
    for name in _more():
        check(results, name)
