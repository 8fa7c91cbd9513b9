"""ikbo_attention on a GPU: bad contents, graphs, streams, memory; gradients.

In pieces, each of less than 90 s on an H200: -k gradients, "not gradients".
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.ikbo_attention import HALVES, Case, Problem, random_case, reference
from support.ikbo_attention.gpu import HOPPER, check_every_path, on_gpu, paths_of, results
from support.reference import assert_close_to_reference

pytestmark = gpu.MARKS

# ---- bad contents


def raises(argument: str, position: int | str, value: int | str, kind: Any = (IndexError, ValueError)) -> Any:
    return pytest.raises(kind, match=rf"^recfuse\.ikbo_attention: {argument}\[{position}\] is {value}\b")


BAD_VALUES = (-1, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))


def bad_values(index: torch.dtype, first: int) -> list[int]:
    limit = 2**31 if index == torch.int32 else 2**63
    return [value for value in (first, *BAD_VALUES) if -limit <= value < limit]


@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
def test_a_bad_user_gives_zeros_and_is_named(index: torch.dtype) -> None:
    for changes in ({}, {"jagged": True}, {"lengths": True, "self_queries": 3}):
        case = Case(dim=64, dtype=torch.bfloat16, candidates=30, positions=70, map_dtype=index)
        problem = on_gpu(case.but(**changes))
        good = problem.map
        for path in paths_of(problem):
            want = results(problem.run(path=path, return_lse=True))
            recfuse.check()
            for value in bad_values(index, case.users):
                problem.map = good.clone()
                problem.map[17] = value
                got = results(problem.run(path=path, return_lse=True))
                with raises("cand_to_user", 17, value, IndexError):
                    recfuse.check()
                recfuse.check()
                half = len(got) // 2
                assert not got[half - 1][17].any() and (got[-1][17] == -torch.inf).all()
                kept = torch.arange(30, device=gpu.DEVICE) != 17
                for number, (one, other) in enumerate(zip(got, want, strict=True)):
                    rows = kept if number in (half - 1, len(got) - 1) else slice(None)
                    assert torch.equal(one[rows], other[rows])
            problem.map = good


@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
def test_a_bad_length_counts_as_the_nearest_and_is_named(index: torch.dtype) -> None:
    case = Case(dim=64, dtype=torch.bfloat16, users=5, candidates=30, positions=70, map_dtype=index)
    for self_queries in (None, 3):
        problem = on_gpu(case.but(self_queries=self_queries))
        good = torch.tensor([70, 3, 64, 0, 70], device=gpu.DEVICE, dtype=index)
        for path in paths_of(problem):
            for value in bad_values(index, 71):
                problem.lengths = good.clone()
                problem.lengths[2] = min(max(value, 0), 70)
                want = problem.run(path=path, return_lse=True)
                recfuse.check()
                problem.lengths[2] = value
                got = problem.run(path=path, return_lse=True)
                with raises("kv_lengths", 2, value):
                    recfuse.check()
                recfuse.check()
                assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
def test_a_user_of_bad_offsets_has_no_keys(index: torch.dtype) -> None:
    case = Case(dim=64, dtype=torch.bfloat16, users=3, candidates=30, jagged=True, map_dtype=index)
    problem = on_gpu(case.but(positions=70, self_queries=3))
    for tensor in (problem.k, problem.v):  # also where a user has no keys
        tensor.nan_to_num_(0.5, 0.5, -0.5)
    total = problem.k.shape[0]
    for offsets, without in (
        ([0, 40, 20, 60], [1]),
        ([-1, 10, 20, 30], [0]),
        ([0, 10, 20, total + 1], [2]),
        ([0, 10, 2**31 - 1, 30], [1, 2]),
        ([-(2**31), 10, -5, 30], [0, 1, 2]),
    ):
        problem.offsets = torch.tensor(offsets, device=gpu.DEVICE, dtype=index)
        for path in ("packed", "fused") if HOPPER else ("packed",):
            found = problem.run(path=path, return_lse=True)
            with pytest.raises(
                (IndexError, ValueError), match=r"^recfuse\.ikbo_attention: kv_offsets\[\d\] is -?\d"
            ):
                recfuse.check()
            recfuse.check()
            for out, lse, (q, users) in zip(found[:2], found[2:], problem.sides(), strict=True):
                for user in range(3):
                    rows = (users == user).nonzero()[:, 0]
                    begin, end = (0, 0) if user in without else offsets[user : user + 2]
                    keys, values = problem.k[None, begin:end].double(), problem.v[None, begin:end].double()
                    want = reference(q[rows].double(), keys, values, torch.zeros_like(rows))
                    assert_close_to_reference(out[rows], want[0], 0.05)
                    assert_close_to_reference(lse[rows], want[1], 0.05)


def test_no_users() -> None:
    for jagged in (False, True):
        problem = on_gpu(Case(dim=64, dtype=torch.float16, users=1, jagged=jagged))
        if jagged:
            problem.offsets = problem.offsets[:1]
        else:
            problem.k, problem.v = problem.k[:0], problem.v[:0]
        paths = paths_of(problem)
        gpu.forget_errors()  # of the calls that found them
        for path in paths:
            out, lse = problem.run(path=path, return_lse=True)
            with pytest.raises(IndexError, match="cand_to_user"):
                recfuse.check()
            assert not out.any() and (lse == -torch.inf).all()


def test_unchecked_calls_are_the_same() -> None:
    for changes in ({}, {"lengths": True}, {"jagged": True, "self_queries": 3}):
        problem = on_gpu(Case(dim=64, dtype=torch.bfloat16, candidates=30).but(**changes))
        for path in paths_of(problem):
            problem.check_all(path=path, bounds_check="off")


def test_bad_arguments() -> None:
    problem = on_gpu(Case(dim=64, dtype=torch.float16))
    with pytest.raises(ValueError, match="k is on the CPU"):
        recfuse.ikbo_attention(problem.q, problem.k.cpu(), problem.v, problem.map)
    with pytest.raises(ValueError, match="cand_to_user is on the CPU"):
        recfuse.ikbo_attention(problem.q, problem.k, problem.v, problem.map.cpu())
    with pytest.raises(NotImplementedError, match="fused"):
        on_gpu(Case()).run(path="fused")


# ---- streams, graphs, memory

GRAPHED = (
    Case(dim=128, dtype=torch.bfloat16, sq=16, candidates=70, positions=130),
    Case(dim=64, dtype=torch.float16, sq=1, candidates=70, positions=130, lengths=True, self_queries=3),
    Case(dim=64, dtype=torch.float16, sq=1, candidates=70, positions=130, jagged=True, map_dtype=torch.int32),
    Case(dim=64, candidates=70, positions=130, lengths=True),
)


@pytest.mark.parametrize("case", GRAPHED, ids=str)
def test_graphs(case: Case) -> None:
    problem = on_gpu(case)
    for path in paths_of(problem):
        problem.run(path=path, return_lse=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = results(problem.run(path=path, return_lse=True))
        for _ in range(3):
            for given in (problem.q, problem.k, problem.v):
                given.normal_()
            problem.map.random_(0, case.users)
            if problem.lengths is not None:
                problem.lengths.random_(0, case.positions + 1)
            graph.replay()
            problem.check(got[: len(got) // 2], got[len(got) // 2 :])


def test_a_replay_leaves_its_errors() -> None:
    problem = on_gpu(GRAPHED[0])
    good = problem.map.clone()
    for path in paths_of(problem):
        problem.run(path=path)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run(path=path)
        graph.replay()
        recfuse.check()
        problem.map[3] = 77
        graph.replay()
        with raises("cand_to_user", 3, 77):
            recfuse.check()
        problem.map.copy_(good)


@pytest.mark.parametrize("path", ("packed", "fused", "auto"))
def test_many_streams_and_threads(path: str) -> None:
    if path == "fused" and not HOPPER:
        pytest.skip("the one-launch kernel is for compute capability 9.0")
    case = Case(sq=20, dim=128, dtype=torch.bfloat16, positions=300)
    problems = [on_gpu(case.but(candidates=60 + i, lengths=i % 2 == 0)) for i in range(8)]
    want = [problem.run(path=path) for problem in problems]
    torch.cuda.synchronize()

    def work(number: int) -> list[Tensor]:
        return [problems[number].run(path=path) for _ in range(20)]

    for expected, found in zip(want, gpu.run_in_threads(work), strict=True):
        assert all(torch.equal(expected, one) for one in found)


@pytest.mark.parametrize("path", ("packed", "auto"))
def test_memory_does_not_grow(path: str) -> None:
    problem = on_gpu(Case(sq=64, dim=128, dtype=torch.bfloat16, candidates=256, positions=512))
    gc.collect()
    sizes = []
    for _ in range(3):
        for _ in range(20):
            problem.run(path=path)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated(gpu.DEVICE))
    assert sizes[0] == sizes[1] == sizes[2]


def test_nothing_is_waited_for() -> None:
    for case in GRAPHED:
        problem = on_gpu(case)
        for path in paths_of(problem):
            problem.run(path=path)
            torch.cuda.set_sync_debug_mode("error")
            try:
                problem.run(path=path, return_lse=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@gpu.TWO_GPUS
def test_the_device_is_that_of_the_tensors() -> None:
    problem = Problem(Case(dim=64, dtype=torch.float16), torch.device("cuda", 1))
    with torch.cuda.device(0):
        check_every_path(problem)


# ---- gradients

GRADIENT_CASES = 60
DTYPES = (*HALVES, torch.float32)
CASE = Case(sq=5, dim=64, users=5, candidates=40, positions=130)


def gradients(
    problem: Problem, with_lse: bool, path: str = "auto", seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Of queries, keys and values: autograd's gradients, and the reference's in float64."""
    generator = torch.Generator(gpu.DEVICE).manual_seed(seed)
    given = [tensor.detach().requires_grad_() for tensor in problem.tensors()]
    wide = [tensor.detach().double().requires_grad_() for tensor in problem.tensors()]
    problem.q, problem.k, problem.v = given[:3]
    problem.q_user = given[3] if len(given) > 3 else None
    got = results(problem.run(path=path, return_lse=True))
    pairs = problem.expected(wide)
    want = [*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)]
    if not with_lse:
        got, want = got[: len(pairs)], want[: len(pairs)]
    ours = theirs = torch.zeros((), device=gpu.DEVICE, dtype=torch.float64)
    for one, other in zip(got, want, strict=True):
        factor = torch.randn(one.shape, device=gpu.DEVICE, generator=generator)
        finite = other.detach().isfinite()  # log-sum-exps of no keys have no gradient
        ours = ours + (one.double() * factor)[finite].sum()
        theirs = theirs + (other * factor)[finite].sum()
    found = torch.autograd.grad(ours, given)
    expected = (
        torch.autograd.grad(theirs, wide, allow_unused=True) if theirs.requires_grad else [None] * len(wide)
    )
    return list(found), [
        torch.zeros_like(one) if grad is None else grad for one, grad in zip(wide, expected, strict=True)
    ]


def check(problem: Problem, with_lse: bool, path: str = "auto") -> None:
    for ours, theirs in zip(*gradients(problem, with_lse, path), strict=True):
        eps = torch.finfo(problem.case.dtype).eps
        assert ours.dtype == problem.case.dtype
        scale = float(theirs.abs().amax()) if theirs.numel() else 0.0
        units = 512 if ours.dtype == torch.float32 else 8  # cancellation in sums over thousands of rows
        assert_close_to_reference(ours, theirs, units * eps * (scale + 2))


@pytest.mark.parametrize("with_lse", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
def test_gradients(form: str, dtype: torch.dtype, with_lse: bool) -> None:
    for changes in (
        {},
        {"dim": 128, "sq": 64},
        {"dim": 40},
        {"dim": 31, "sq": 1, "candidates": 300},
        {"dim": 256},
        {"kv_heads": 1},
        {"kv_heads": 4, "map": "grouped"},
        {"self_queries": 9},
        {"users": 50, "candidates": 20},
    ):
        case = CASE.but(dtype=dtype, lengths=form == "lengths", jagged=form == "jagged").but(**changes)
        problem = on_gpu(case)
        for path in paths_of(problem):
            check(on_gpu(case), with_lse, path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_gradients(dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    for _ in range(GRADIENT_CASES):
        case = random_case(draw, dtype=dtype, peak=1.0)
        if case.dim > 1:
            check(on_gpu(case), draw.random() < 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_candidates_are_in_float32(dtype: torch.dtype) -> None:
    q = torch.zeros(4096, 1, 1, 8, dtype=dtype, device=gpu.DEVICE)
    k, v = (torch.zeros(2, 1, 1, 8, dtype=dtype, device=gpu.DEVICE, requires_grad=True) for _ in range(2))
    found = torch.zeros(4096, dtype=torch.int32, device=gpu.DEVICE)
    recfuse.ikbo_attention(q, k, v, found).sum().backward()
    assert v.grad[0].unique().tolist() == [4096] and not v.grad[1].any()  # 2048 + 1 is 2048 in float16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_bad_contents_are_zeros(dtype: torch.dtype) -> None:
    for changes in ({}, {"lengths": True}, {"jagged": True}):
        case = CASE.but(dtype=dtype, **changes)
        problem = on_gpu(case)
        problem.map[3], problem.map[9] = -5, 10**6
        given = [tensor.detach().requires_grad_() for tensor in (problem.q, problem.k, problem.v)]
        out = recfuse.ikbo_attention(*given, problem.map, **problem.options())
        got = torch.autograd.grad(out.float().sum(), given)
        with pytest.raises(IndexError, match="cand_to_user"):
            recfuse.check()
        kept = (problem.map >= 0) & (problem.map < case.users)
        assert not got[0][~kept].any()
        rest = on_gpu(case)
        rest.q, rest.k, rest.v, rest.map = problem.q[kept], problem.k, problem.v, problem.map[kept]
        rest.lengths, rest.offsets = problem.lengths, problem.offsets
        q, k, v = (tensor.detach().double().requires_grad_() for tensor in (rest.q, rest.k, rest.v))
        ((want, _),) = rest.expected([q, k, v])
        theirs = torch.autograd.grad(want.sum(), (q, k, v))
        for ours, one in zip((got[0][kept], *got[1:]), theirs, strict=True):
            scale = float(one.abs().max())
            assert_close_to_reference(ours, one, 16 * torch.finfo(dtype).eps * (scale + 1))


def test_gradients_wait_for_nothing_and_can_be_captured() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for changes in ({}, {"lengths": True}, {"jagged": True, "self_queries": 3}):
            problem = on_gpu(CASE.but(dtype=dtype, **changes))
            given = [tensor.requires_grad_() for tensor in problem.tensors()]
            factors = [torch.randn_like(one) for one in results(problem.run())]

            def step(problem=problem, given=given, factors=factors) -> tuple[Tensor, ...]:
                return torch.autograd.grad(results(problem.run()), given, factors)

            want = step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = step()
            graph.replay()
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, equal_nan=True)
