"""ikbo_attention on a GPU with scores far from those of a history's first keys: weights are relative to
these, and to larger scores only if they would be too large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import gpu
from support.ikbo_attention import Case, Problem
from support.ikbo_attention.gpu import HALF_DTYPES, ONLY_HOPPER, check_every_path, on_gpu, paths_of, results

pytestmark = gpu.MARKS

DIMS = (32, 64, 96, 128, 192, 256)
FORMS = ({}, {"lengths": True}, {"jagged": True}, {"sq": 1, "candidates": 200}, {"self_queries": 20})


def check(problem: Problem, most: int = 192) -> None:
    """For larger dims only the outputs: sums of that many products of one sign, which tensor cores round
    towards zero, may exceed the tolerance of a log-sum-exp."""
    if problem.case.dim <= most:
        check_every_path(problem)
        return
    for path in paths_of(problem):
        problem.check(problem.run(path=path))


def ramp(problem: Problem, growth: float) -> None:
    """Scores grow by about `growth` (a natural logarithm) from each 128 keys to the next, above noise."""
    positions = problem.k.shape[-3]
    size = problem.k.shape[-1]
    far = torch.arange(positions, device=gpu.DEVICE) / 128 * growth / size**0.5
    problem.q.abs_().clamp_(0.5, 1.5)
    problem.k.mul_(0.5).add_(far[:, None, None])


@HALF_DTYPES
@pytest.mark.parametrize("dim", DIMS)
def test_scores_that_grow_along_a_history(dim: int, dtype: torch.dtype) -> None:
    for growth in (3.0, 9.0, 11.0, 40.0, 90.0, -40.0):
        for changes in FORMS:
            problem = on_gpu(Case(sq=33, dim=dim, dtype=dtype, candidates=20, positions=700).but(**changes))
            ramp(problem, growth)
            check(problem)


@HALF_DTYPES
@pytest.mark.parametrize("dim", DIMS)
def test_single_keys_far_above_the_rest(dim: int, dtype: torch.dtype) -> None:
    """Of some candidates only: their warps have rows of both kinds."""
    torch.manual_seed(dim)
    for changes in FORMS:
        problem = on_gpu(Case(sq=9, dim=dim, dtype=dtype, candidates=30, positions=900).but(**changes))
        heads, kv_heads = problem.q.shape[-2], problem.k.shape[-2]
        for candidate, at, times in (
            (3, 130, 3.0),
            (4, 255, 6.0),
            (9, 500, 20.0),
            (9, 520, 40.0),
            (29, -1, 9.0),
        ):
            rows = problem.q[candidate, 0, :: heads // kv_heads]
            problem.k[..., at, :, :] = rows * times
        check(problem, 128)


@HALF_DTYPES
def test_a_history_that_begins_with_scores_of_minus_infinity(dtype: torch.dtype) -> None:
    for first in (1, 128, 200, 699, 700):
        problem = on_gpu(Case(sq=9, dim=64, dtype=dtype, candidates=30, positions=700))
        problem.q.abs_().add_(0.1)
        problem.k.sub_(6)
        problem.k[:, :first] = -torch.inf
        if first < 700:
            check_every_path(problem)
        else:
            assert all(not one.isfinite().any() for one in results(problem.run()))


@ONLY_HOPPER
@HALF_DTYPES
def test_bits_of_a_row_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    def run(q: Tensor) -> list[Tensor]:
        problem.q = q
        return results(problem.run(path="fused", return_lse=True))

    for sq, candidates in ((1, 500), (3, 200), (16, 40)):
        case = Case(sq=sq, dim=128, dtype=dtype, users=2, candidates=candidates, positions=1500)
        problem = on_gpu(case)
        assert "fused" in paths_of(problem)
        calm = problem.q.clone()
        loud = torch.arange(candidates, device=gpu.DEVICE) % 7 == 3
        wild = calm.clone()
        wild[loud] *= 60
        out, lse = run(calm)
        other_out, other_lse = run(wild)
        assert torch.equal(out[~loud], other_out[~loud]) and torch.equal(lse[~loud], other_lse[~loud])
        assert not torch.equal(out[loud], other_out[loud])
        problem.check_all(path="fused")
