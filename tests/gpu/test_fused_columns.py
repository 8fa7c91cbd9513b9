"""Tiles of the fused operator on a GPU: bags of at most one lookup, some longer, invalid contents among
them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.fused import Problem
from support.gpu import DTYPES, INTEGERS
from support.gpu_fused import Fused, bags_of, precompile
from support.reference import Feature

pytestmark = gpu.MARKS

DIMS = (4, 8, 16, 32, 128, 3, 1, 17, 300, 64, 4, 4, 8)
ROWS = 23
ONE_LOOKUP = [2, 0, 0, 0, 16]  # columns, with the expected lookups
BAGS = (1, 4, 5, 9, 64, 300)


def problem_of(dtype: torch.dtype = torch.float32, modes: tuple[str, ...] = ("sum",)) -> Problem:
    """Features of many widths, every third with a padding row."""
    torch.manual_seed(0)
    features = [
        Feature(number, modes[number % len(modes)], 2 if number % 3 == 1 else None)
        for number in range(len(DIMS))
    ]
    return Problem([(ROWS, dim, dtype) for dim in DIMS], features, lead=0)


def lookups(bags: int, present: float = 0.8) -> tuple[Tensor, Tensor]:
    """At most one per bag."""
    return bags_of((torch.rand(len(DIMS), bags) < present).int().tolist(), [ROWS] * len(DIMS))


def without(output: Tensor, bags: set[tuple[int, int]]) -> Tensor:
    """The same with zeros for these bags, each by its feature and its number."""
    output = output.clone()
    for feature, bag in bags:
        column = sum(DIMS[:feature])
        output[bag, column : column + DIMS[feature]] = 0
    return output


def ways_of(problem: Problem) -> tuple[Fused, Fused]:
    """By tiles, with the partition computed from the batch size, and on the GPU."""
    return Fused(problem, schedules=[ONE_LOOKUP] * len(DIMS)), Fused(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("modes", (("sum",), ("mean", "sum"), ("max",)), ids=str)
def test_bags_of_one_lookup_or_none(dtype: torch.dtype, modes: tuple[str, ...]) -> None:
    problem = problem_of(dtype, modes)
    ways = ways_of(problem)
    weighted = (False, True) if modes == ("sum",) else (False,)
    for integer in INTEGERS:
        precompile(ways, (integer,), (integer,), weighted)
    for bags in BAGS:
        indices, offsets = lookups(bags)
        factors = torch.randn(indices.numel()) if len(weighted) > 1 else None
        want = ways[0].run_and_check(indices, offsets)
        weighed = None if factors is None else ways[0].run_and_check(indices, offsets, factors)
        for one, integer in itertools.product(ways, INTEGERS):
            given = indices.to(integer), offsets.to(integer)
            assert torch.equal(one.run(*given), want)
            assert torch.equal(one.run(*given, mapping=one.map(given[1])), want)
            assert weighed is None or torch.equal(one.run(*given, factors), weighed)
    recfuse.check()


@pytest.mark.parametrize("modes", (("sum",), ("mean", "max")), ids=str)
def test_some_bags_are_longer(modes: tuple[str, ...]) -> None:
    """Wherever they are, all others are as before."""
    problem = problem_of(modes=modes)
    ways = ways_of(problem)
    precompile(ways)
    for bags in (9, 70):
        for feature, bag in ((0, 0), (len(DIMS) - 1, bags - 1), (4, bags // 2), (7, 3)):
            lengths = torch.ones(len(DIMS), bags, dtype=torch.int64)
            lengths[feature, bag] = 7
            given = bags_of(lengths.tolist(), [ROWS] * len(DIMS))
            want = ways[0].run_and_check(*given)
            for one in ways:
                assert torch.equal(one.run(*given), want)
                assert torch.equal(one.run(*given, mapping=one.map(given[1])), want)


@pytest.mark.parametrize("value", (ROWS, -1, 2**31 - 1, -(2**31), 2**40, -(2**63)))
def test_a_bad_index_among_bags_of_one_lookup(value: int) -> None:
    problem = problem_of()
    for one, bags in itertools.product(ways_of(problem), (7, 200)):
        indices, offsets = lookups(bags, present=1.0)
        want = one.run(indices, offsets)
        for feature, bag in ((0, 0), (3, bags // 2), (8, bags - 1), (len(DIMS) - 1, bags - 1)):
            position = feature * bags + bag
            bad = indices.clone()
            bad[position] = value
            got = one.run(bad, offsets)
            text = rf"indices\[{position}\] is {value}, for feature {feature}, bag {bag}; expected 0 to 22"
            with pytest.raises(IndexError, match=text):
                recfuse.check()
            recfuse.check()
            assert torch.equal(got, without(want, {(feature, bag)}))


@pytest.mark.parametrize("value", (-1, 2**20, 2**40))
def test_a_bad_offset_among_bags_of_one_lookup(value: int) -> None:
    """Both bags that it is of are zeros."""
    problem = problem_of()
    for one, bags in itertools.product(ways_of(problem), (7, 200)):
        indices, offsets = lookups(bags, present=1.0)
        want = one.run(indices, offsets)
        for place in (0, 1, 4 * bags - 1, 5 * bags, len(DIMS) * bags):
            bad = offsets.clone()
            bad[place] = value
            got = one.run(indices, bad)
            with pytest.raises(ValueError, match=rf"offsets\[{place}\] is {value}"):
                recfuse.check()
            recfuse.check()
            hit = {divmod(at, bags) for at in (place - 1, place) if 0 <= at < len(DIMS) * bags}
            assert torch.equal(got, without(want, hit))
