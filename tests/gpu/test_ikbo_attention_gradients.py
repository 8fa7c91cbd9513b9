"""ikbo_attention on a GPU: gradients, modules, the compiler, autocast."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.gpu_ikbo_attention import on_gpu, paths_of, results
from support.ikbo_attention import HALVES, Case, Problem, random_case
from support.reference import assert_close_to_reference

pytestmark = gpu.MARKS

GRADIENT_CASES = 60
DTYPES = (*HALVES, torch.float32)
CASE = Case(sq=5, dim=64, users=5, candidates=40, positions=130)


def gradients(
    problem: Problem, with_lse: bool, path: str = "auto", seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Of queries, keys and values: what autograd gives, and the reference's in float64."""
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
        assert_close_to_reference(ours, theirs, 8 * eps * scale + 16 * eps)


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
            assert_close_to_reference(ours, one, 8 * torch.finfo(dtype).eps * (scale + 1))


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


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_modules_follow_their_weights(mode: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = recfuse.nn.TargetAttention(
            48, 4, kv_heads=2, head_dim=32, kdim=40, device=gpu.DEVICE, dtype=dtype
        )
        x_cand, x_user = (
            torch.randn(*sizes, device=gpu.DEVICE, dtype=dtype) for sizes in ((30, 5, 48), (4, 70, 40))
        )
        found = torch.randint(0, 4, (30,), device=gpu.DEVICE)
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        with torch.no_grad():
            for _ in range(4):
                got, want = compiled(x_cand, x_user, found), layer(x_cand, x_user, found)
                torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
                layer.q_proj.weight.mul_(-2)


def test_training_of_compiled_modules() -> None:
    layer = recfuse.nn.TargetAttention(64, 4, device=gpu.DEVICE, dtype=torch.bfloat16)
    x_cand, x_user = (
        torch.randn(*s, device=gpu.DEVICE, dtype=torch.bfloat16) for s in ((30, 5, 64), (4, 70, 64))
    )
    found = torch.randint(0, 4, (30,), device=gpu.DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    grads = []
    for function in (compiled, layer):
        layer.zero_grad()
        function(x_cand, x_user, found).float().square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05 * float(other.abs().max()) + 1e-3)


def test_autocast() -> None:
    problem = on_gpu(Case(dim=64, self_queries=3))
    narrow = on_gpu(Case(dim=64, self_queries=3))
    narrow.map = problem.map
    narrow.q, narrow.k, narrow.v, narrow.q_user = (tensor.bfloat16() for tensor in problem.tensors())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = problem.run()
    assert all(torch.equal(one, other) for one, other in zip(got, narrow.run(), strict=True))
