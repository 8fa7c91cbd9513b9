"""ikbo_linear on a GPU, by every path: values, invalid contents, graphs, streams, gradients, the compiler.

Paths "small" and "fused" are compared if they accept the call.
"""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from recfuse.nn import IKBOLinear, LinearCompression
from support import gpu
from support.ikbo import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    NOTHING,
    Case,
    Problem,
    kernels_of,
    random_case,
    reference,
)
from support.reference import assert_close_to_reference

pytestmark = gpu.MARKS

PATHS = ("decomposed", "aligned", "broadcast")
HALVES = (torch.float16, torch.bfloat16)
HOPPER = gpu.MISSING is None and torch.cuda.get_device_capability(gpu.DEVICE) == (9, 0)
TF32_UNIT = 2.0**-10
PAPER = Case(m=433, n=256, features=(1178, 866), items=(3, 70), dtype=torch.bfloat16)


def on_gpu(case: Case) -> Problem:
    return Problem(case, gpu.DEVICE)


def paths_of(problem: Problem) -> list[str]:
    """Those that take the call; runs it."""
    return [*PATHS, *kernels_of(problem)]


def check_every_path(problem: Problem) -> list[str]:
    """Compares each path, and "auto" with the path that it selects."""
    paths = paths_of(problem)
    for path in paths:
        problem.check(problem.run(path=path))
    assert torch.equal(problem.run(), problem.run(path=problem.path()))
    return paths


@pytest.mark.skipif(not HOPPER, reason="the one-launch kernel is for compute capability 9.0")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_one_launch_kernel_is_taken_and_right(dtype: torch.dtype) -> None:
    for changes in (
        {},
        {"n": 64},
        {"m": 64},
        {"features": (1024, 512)},
        {"bias": True, "activation": "gelu"},
    ):
        problem = on_gpu(Case(**{**vars(PAPER), "dtype": dtype, **changes}))
        assert check_every_path(problem)[-2:] == ["small", "fused"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_few_items_take_the_small_kernel(dtype: torch.dtype) -> None:
    for changes in (
        {"items": (1, 1)},
        {"items": (1, 8)},
        {"items": (2, 8), "bias": True, "activation": "relu"},
        {"m": 1000, "n": 200, "items": (1, 3)},
        {"features": (1177, 865), "items": (1, 4)},
        {"features": (2048, 512), "items": (3, 4), "weight_layout": "rows first"},
        {"features": (1024, 512), "items": (1, 8), "bias": True, "activation": "silu"},
        {"features": (64, 72), "items": (4, 5), "bias": True, "weight_layout": "framed"},
    ):
        problem = on_gpu(Case(**{**vars(PAPER), "dtype": dtype, **changes}))
        assert "small" in check_every_path(problem)
        assert problem.path() == "small"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_small_layers(dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    for _ in range(800):
        problem = on_gpu(random_case(draw, dtype=dtype))
        for path in paths_of(problem):
            problem.check(problem.run(path=path))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_random_layers_around_tiles(dtype: torch.dtype) -> None:
    """Sizes that are multiples of 8, and one more or less, as tiles and TMA like them or do not."""
    draw = random.Random(str(dtype))
    for _ in range(120):
        near = [draw.randint(1, 40) * 8 + draw.choice((0, 0, 0, -1, 1)) for _ in range(4)]
        users, candidates = draw.choice(((1, 1), (1, 50), (7, 33), (40, 40), (5, 300), (90, 200)))
        case = random_case(
            draw, dtype=dtype, m=near[0], n=near[1], features=(near[2], near[3]), items=(users, candidates),
            input_layout=draw.choice(("plain", "plain", "odd", "poisoned", "transposed")),
            chain=False, activation="none", map_dtype=torch.int64,  # each is another kernel to compile
        )  # fmt: skip
        problem = on_gpu(case)
        for path in paths_of(problem):
            problem.check(problem.run(path=path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(activation: str, dtype: torch.dtype) -> None:
    for n, bias, chain in itertools.product((None, 1, 8, 300), (False, True), (False, True)):
        case = Case(m=40, n=n, features=(64, 24), dtype=dtype, bias=bias, activation=activation, chain=chain)
        check_every_path(on_gpu(case))


@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
def test_layouts(weight_layout: str, input_layout: str) -> None:
    for n, dtype in itertools.product((None, 32), (torch.float32, torch.bfloat16)):
        layouts = {"weight_layout": weight_layout, "input_layout": input_layout}
        problem = on_gpu(Case(m=48, n=n, features=(40, 24), items=(4, 30), dtype=dtype, bias=True, **layouts))
        problem.maps = [torch.stack((problem.maps[0], problem.maps[0] + 10**6), 1)[:, 0]]
        check_every_path(problem)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_of_k_beyond_whole_units(dtype: torch.dtype) -> None:
    """Those that path "broadcast" leaves to the kernel that adds; and layouts for which it does not."""
    layouts = ("plain", "framed", "rows first", "expanded", "odd", "transposed", "poisoned")
    for rest, layout, n in itertools.product((1, 2, 7, 8), layouts, (64, 72, 12)):
        case = Case(
            m=57, n=n, features=(48 + rest, 8 + rest), items=(3, 20), dtype=dtype, input_layout=layout
        )
        problem = on_gpu(replace(case, bias=rest > 1, activation="gelu" if rest == 7 else "none"))
        problem.check(problem.run(path="broadcast"))
    chain = Case(40, 64, (11, 13, 22), (3, 10, 40), dtype, torch.int32, chain=True)
    for weight_layout in ("plain", "transposed", "poisoned"):
        problem = on_gpu(replace(chain, weight_layout=weight_layout))
        problem.check(problem.run(path="broadcast"))


@pytest.mark.parametrize("levels", (2, 3, 4))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_chains(dtype: torch.dtype, levels: int) -> None:
    features, items = (128, 72, 200, 64)[:levels], (3, 10, 40, 90)[:levels]
    for n, index in itertools.product((None, 64), gpu.INTEGERS):
        case = Case(96, n, features, items, dtype, index, bias=True, activation="silu", chain=True)
        check_every_path(on_gpu(case))


@pytest.mark.skipif(not HOPPER, reason="the one-launch kernel is for compute capability 9.0")
@pytest.mark.parametrize(
    "items", ((300, 20_000), (3_000, 3_000), (4_000, 2_000), (15, 3, 20_000), (7, 1, 2, 9_000)), ids=str
)
def test_many_turns_of_every_cluster(items: tuple[int, ...]) -> None:
    """Users in any order: the sums in shared memory change in nearly every turn."""
    features = (600, 40, 64, 200)[: len(items) - 1]
    features = (*features, 200)
    problem = on_gpu(
        Case(433, 64, features, items, torch.bfloat16, torch.int32, bias=True, chain=len(items) > 2)
    )
    got, want = problem.run(path="fused"), problem.run(path="broadcast")
    scale = want.float().abs().mean().item()
    assert ((got.float() - want.float()).abs() <= 2**-7 * want.float().abs() + 2**-5 * scale).all()
    assert torch.equal(got, problem.run(path="fused"))


def test_nothing_of_something() -> None:
    for n, dtype in itertools.product((None, 3), (torch.float32, torch.bfloat16)):
        for changes in NOTHING:
            for bias in (False, True):
                check_every_path(on_gpu(Case(**{"n": n, "dtype": dtype, "bias": bias, **changes})))


def test_every_map() -> None:
    for items in ((1, 600), (600, 1), (64, 64), (3, 200)):
        problem = on_gpu(Case(m=64, n=64, features=(64, 64), items=items, dtype=torch.bfloat16))
        users, candidates = items
        steps = torch.arange(candidates, device=gpu.DEVICE)
        for found in (torch.zeros_like(steps), steps % users, (steps % users).flip(0), problem.maps[0]):
            for dtype in gpu.INTEGERS:
                problem.maps = [found.to(dtype)]
                check_every_path(problem)


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_non_finite_inputs_stay_in_their_rows(dtype: torch.dtype, wrong: float) -> None:
    for n, users in itertools.product((None, 64, 72), (3, 30)):
        problem = on_gpu(Case(m=136, n=n, features=(64, 48), items=(users, 40), dtype=dtype))
        clean = {path: problem.run(path=path) for path in paths_of(problem)}
        problem.inputs[1][7] = wrong
        problem.inputs[0][2] = wrong
        touched = problem.maps[0] == 2
        touched[7] = True
        for path, before in clean.items():
            got = problem.run(path=path)
            assert torch.equal(got[~touched], before[~touched])
            assert not got[touched].isfinite().any()


@pytest.mark.parametrize("allow", (False, True))
def test_float32_follows_torchs_setting(allow: bool) -> None:
    problem = on_gpu(Case(m=256, n=128, features=(1024, 512), items=(4, 30)))
    problem.weights = [weight / 32 for weight in problem.weights]
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        products = [
            torch.bmm(weight.expand(len(x), -1, -1), x)
            for weight, x in zip(problem.weights, problem.inputs, strict=True)
        ]
        found = [problem.run(path=path) for path in PATHS]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    want = products[1] + products[0][problem.maps[0].long()]
    for got in found:
        problem.check(got, TF32_UNIT if allow else None)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_same_bits_from_run_to_run() -> None:
    problem = on_gpu(Case(**{**vars(PAPER), "items": (9, 300)}))
    for path in paths_of(problem):
        first = problem.run(path=path)
        assert all(torch.equal(first, problem.run(path=path)) for _ in range(5))


# ---- bad contents


def raises(name: str, position: int, value: int, parents: int) -> Any:
    allowed = f"expected 0 to {parents - 1}, less than the {parents} items"
    return pytest.raises(IndexError, match=rf"^recfuse\.{name}\[{position}\] is {value}; {allowed}")


@pytest.mark.parametrize(("users", "n"), ((4, None), (4, 64), (2, 64)))
@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
@pytest.mark.parametrize("value", (4, -1, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63)))
def test_a_bad_user_counts_as_zeros_and_is_named(
    value: int, index: torch.dtype, users: int, n: int | None
) -> None:
    if index == torch.int32 and not -(2**31) <= value < 2**31:
        pytest.skip("not an int32")
    case = Case(m=64, n=n, features=(64, 64), items=(users, 30), dtype=torch.bfloat16, map_dtype=index)
    problem = on_gpu(case)
    good, without = problem.maps[0].clone(), on_gpu(problem.case)
    for path in paths_of(problem):
        problem.maps[0] = good.clone()
        problem.maps[0][17] = value
        got = problem.run(path=path)
        with raises("ikbo_linear: cand_to_user", 17, value, users):
            recfuse.check()
        recfuse.check()
        without.weights, without.inputs, without.maps = problem.weights, list(problem.inputs), [good]
        problem.maps[0] = good
        want = problem.run(path=path)
        kept = torch.arange(30, device=gpu.DEVICE) != 17
        assert torch.equal(got[kept], want[kept])
        without.inputs[0] = torch.zeros_like(problem.inputs[0])
        assert_close_to_reference(got[17].cpu(), without.expected()[17], without.allowed()[17])


def test_a_later_call_with_the_weight_raises_it() -> None:
    problem, other = (on_gpu(Case(m=64, n=64, features=(64, 64), items=(4, 30), dtype=torch.float16))
                      for _ in range(2))  # fmt: skip
    for path in paths_of(problem):
        good = problem.maps[0]
        problem.maps[0] = torch.full_like(good, 9)
        problem.run(path=path)
        torch.cuda.synchronize()
        other.check(other.run(path=path))
        problem.maps[0] = good
        with pytest.raises(IndexError, match=r"cand_to_user\[\d+\] is 9"):
            problem.run(path=path)
        problem.check(problem.run(path=path))


def test_bad_contents_of_a_chain() -> None:
    case = Case(64, 64, (64, 64, 64), (3, 10, 40), torch.bfloat16, bias=True, chain=True)
    for level, (position, parents) in enumerate(((7, 3), (33, 10))):
        problem = on_gpu(case)
        paths = paths_of(problem)
        problem.maps[level][position] = 10**6
        for path in paths:
            problem.run(path=path)
            with raises(rf"ikbo_linear_chain: maps\[{level}\]", position, 10**6, parents):
                recfuse.check()


def test_no_users() -> None:
    problem = on_gpu(Case(n=8, features=(8, 8), items=(1, 5), dtype=torch.float16))
    problem.inputs[0] = problem.inputs[0][:0]
    for path in paths_of(problem):
        got = problem.run(path=path)
        with pytest.raises(IndexError, match="x_user has no items, so no index is valid"):
            recfuse.check()
        want = problem.weights[1].double() @ problem.inputs[1].double()
        assert_close_to_reference(got.cpu(), want.cpu(), 0.1)


def test_a_bad_user_has_no_gradient() -> None:
    problem = on_gpu(Case(n=8, features=(8, 8), items=(2, 5)))
    problem.maps[0] = torch.tensor([0, 1, 7, -1, 0], device=gpu.DEVICE)
    x_user = problem.inputs[0].requires_grad_()
    problem.run().sum().backward()
    with pytest.raises(IndexError, match=r"cand_to_user\[[23]\] is (7|-1)"):
        recfuse.check()
    column = problem.weights[0].sum(0)[:, None].expand(8, 8)
    torch.testing.assert_close(x_user.grad, torch.stack((2 * column, column)))


def test_bad_arguments() -> None:
    problem = on_gpu(Case())
    with pytest.raises(ValueError, match="x_cand is on the CPU, other arguments are on a GPU"):
        recfuse.ikbo_linear(*problem.weights, problem.inputs[0], problem.inputs[1].cpu(), *problem.maps)
    with pytest.raises(ValueError, match="cand_to_user is on the CPU"):
        recfuse.ikbo_linear(*problem.weights, *problem.inputs, problem.maps[0].cpu())
    double = on_gpu(Case(dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="fused"):
        double.run(path="fused")


# ---- streams, graphs, memory


def test_graphs() -> None:
    for case in (Case(**vars(PAPER)), Case(m=33, n=None, dtype=torch.float16, bias=True, activation="silu"),
                 Case(features=(8, 16, 24), items=(2, 5, 9), dtype=torch.float32, chain=True)):  # fmt: skip
        problem = on_gpu(case)
        for path in paths_of(problem):
            problem.run(path=path)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = problem.run(path=path)
            for _ in range(3):
                for given in (*problem.inputs, *problem.weights):
                    given.normal_()
                problem.maps[0].random_(0, case.items[0])
                graph.replay()
                problem.check(got)


def test_a_replay_leaves_its_errors() -> None:
    problem = on_gpu(Case(m=64, n=64, features=(64, 64), dtype=torch.bfloat16))
    good = problem.maps[0].clone()
    for path in paths_of(problem):
        problem.maps[0].copy_(good)
        problem.run(path=path)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run(path=path)
        graph.replay()
        recfuse.check()
        problem.maps[0][3] = 77
        graph.replay()
        with pytest.raises(IndexError, match=r"cand_to_user\[3\] is 77"):
            recfuse.check()
        problem.maps[0].copy_(good)


@pytest.mark.parametrize("path", (*PATHS, "small", "auto"))
def test_many_streams_and_threads(path: str) -> None:
    problems = [
        on_gpu(
            Case(m=200 + 8 * i, n=64, features=(264, 136), items=(5, 60 + i), dtype=torch.bfloat16, bias=True)
        )
        for i in range(8)
    ]
    want = [problem.run(path=path) for problem in problems]
    torch.cuda.synchronize()

    def work(number: int) -> list[Tensor]:
        return [problems[number].run(path=path) for _ in range(20)]

    for expected, found in zip(want, gpu.run_in_threads(work), strict=True):
        assert all(torch.equal(expected, one) for one in found)


@pytest.mark.parametrize("path", (*PATHS, "small", "auto"))
def test_memory_does_not_grow(path: str) -> None:
    problem = on_gpu(PAPER)
    gc.collect()  # remains of earlier tests
    sizes = []
    for _ in range(3):
        for _ in range(20):
            problem.run(path=path)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated(gpu.DEVICE))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.skipif(not HOPPER, reason="the one-launch kernels are for compute capability 9.0")
@pytest.mark.parametrize("path", ("fused", "small"))
def test_users_of_one_candidate_have_nothing_in_memory(path: str) -> None:
    """No sums, and no packed weights if their rows are aligned to 16 bytes; users of many have both."""
    for users, aligned in ((16, True), (16, False), (1, True)):
        features = (128, 64) if aligned else (127, 63)
        problem = on_gpu(Case(m=433, n=64, features=features, items=(users, 16), dtype=torch.bfloat16))
        problem.check(problem.run(path=path))
        torch.cuda.reset_peak_memory_stats(gpu.DEVICE)
        got = problem.run(path=path)  # deleted below: in the next turn it would count until it is replaced
        temporary = torch.cuda.max_memory_allocated(gpu.DEVICE) - torch.cuda.memory_allocated(gpu.DEVICE)
        del got
        if aligned and users == 16:
            assert temporary == 0
        elif users == 16:
            assert 0 < temporary < 2**20
        elif path == "fused":
            assert temporary > 2**17


def test_outputs_beyond_2_to_the_31_elements() -> None:
    missing = gpu.needs_memory(14)
    if missing:
        pytest.skip(missing)
    candidates = 5000
    case = Case(m=433, n=1024, features=(8, 8), items=(3, 4), dtype=torch.float16)
    problem = on_gpu(case)
    problem.inputs[1] = problem.inputs[1].repeat(candidates // 4, 1, 1)
    problem.maps[0] = torch.arange(candidates, device=gpu.DEVICE) % 3
    for path in ("broadcast", "auto"):
        got = problem.run(path=path)
        assert got.numel() > 2**31
        small = on_gpu(case)
        rows = torch.tensor([0, 1, 2500, candidates - 2, candidates - 1], device=gpu.DEVICE)
        small.weights, small.maps = problem.weights, [problem.maps[0][rows]]
        small.inputs = [problem.inputs[0], problem.inputs[1][rows]]
        small.check(got[rows])


@gpu.TWO_GPUS
def test_the_device_is_that_of_the_tensors() -> None:
    problem = Problem(PAPER, torch.device("cuda", 1))
    with torch.cuda.device(0):
        check_every_path(problem)


# ---- gradients and the compiler


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
@pytest.mark.parametrize("n", (None, 32))
def test_gradients(n: int | None, dtype: torch.dtype) -> None:
    for activation, chain in itertools.product(("none", "gelu"), (False, True)):
        levels = (
            {"features": (24, 40, 16), "items": (2, 6, 50), "chain": True} if chain else {"items": (4, 90)}
        )
        problem = on_gpu(Case(m=48, n=n, dtype=dtype, bias=True, activation=activation, **levels))
        wide = [tensor.detach().double().requires_grad_() for tensor in problem.tensors()]
        for tensor in problem.tensors():
            tensor.requires_grad_()
        got = problem.run()
        factor = torch.randn_like(got)
        got.backward(factor)
        count = len(problem.weights)
        want = reference(wide[:count], wide[count : 2 * count], problem.maps, wide[-1], activation)
        want.backward(factor.double())
        for ours, theirs in zip(problem.tensors(), wide, strict=True):
            scale = float(theirs.grad.abs().max())
            assert_close_to_reference(ours.grad.cpu(), theirs.grad.cpu(), 16 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_modules_follow_their_weights(mode: str) -> None:
    for layer, tail in (
        (LinearCompression((40, 24), 48), (64,)),
        (IKBOLinear((40, 24), 48, activation="relu"), ()),
    ):
        layer.to(gpu.DEVICE)
        users, candidates = (
            torch.randn(count, k, *tail, device=gpu.DEVICE) for count, k in ((3, 40), (50, 24))
        )
        found = torch.randint(0, 3, (50,), device=gpu.DEVICE)
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        with torch.no_grad():
            for _ in range(4):
                torch.testing.assert_close(
                    compiled(users, candidates, found), layer(users, candidates, found)
                )
                layer.weight.mul_(-2)


def test_autocast() -> None:
    problem = on_gpu(Case(m=64, n=64, features=(64, 64), bias=True))
    narrow = [tensor.bfloat16() for tensor in problem.tensors()]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = problem.run()
    assert torch.equal(got, recfuse.ikbo_linear(*narrow[:4], *problem.maps, bias=narrow[4]))
