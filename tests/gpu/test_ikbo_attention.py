"""ikbo_attention on a GPU, by every path that takes a call: its values.

In pieces, each of less than 90 s on an H200: -k chunk0 and so on to chunk9 (random calls), dims, queries,
"heads or maps", lengths, layouts, real, rest, "compiled or autocast".
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.ikbo import LAYOUTS
from support.ikbo_attention import (
    DTYPES,
    HALVES,
    KV_LAYOUTS,
    MAPS,
    NOTHING,
    Case,
    random_case,
    reference,
)
from support.ikbo_attention.gpu import HALF_DTYPES, ONLY_HOPPER, check_every_path, on_gpu, paths_of, results
from support.reference import assert_close_to_reference

pytestmark = gpu.MARKS

RANDOM_CHUNKS, RANDOM_CASES = 10, 120
"""Random calls: number of tests, and of calls per test, for each dtype."""
USUAL_DIMS, OTHER_DIMS = (32, 64, 96, 128, 256), (1, 7, 8, 24, 31, 40, 72, 100, 136, 160, 192, 200, 264)
AROUND_TILES = (
    1,
    7,
    8,
    15,
    16,
    63,
    64,
    65,
    127,
    128,
    129,
    175,
    176,
    177,
    191,
    192,
    193,
    255,
    256,
    257,
    383,
    385,
)


# ---- values


@pytest.mark.parametrize("chunk", range(RANDOM_CHUNKS), ids="chunk{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_small_calls(dtype: torch.dtype, chunk: int) -> None:
    draw = random.Random(f"{dtype} {chunk}")
    random.seed(chunk)
    for _ in range(RANDOM_CASES):
        case = random_case(draw, dtype=dtype)
        try:
            check_every_path(on_gpu(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@ONLY_HOPPER
@HALF_DTYPES
@pytest.mark.parametrize("dim", USUAL_DIMS)
def test_usual_dims_have_one_launch(dim: int, dtype: torch.dtype) -> None:
    for changes in (
        {},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"lengths": True},
        {"jagged": True},
        {"self_queries": 70},
        {"sq": 1, "candidates": 300},
        {"map": "grouped", "sq": 16, "candidates": 65},
    ):
        case = Case(sq=64, dim=dim, dtype=dtype, candidates=33, positions=300).but(**changes)
        assert "fused" in check_every_path(on_gpu(case)), case


@HALF_DTYPES
@pytest.mark.parametrize("dim", OTHER_DIMS)
def test_other_dims(dim: int, dtype: torch.dtype) -> None:
    for lengths, jagged in ((False, False), (True, False), (False, True)):
        case = Case(sq=5, dim=dim, dtype=dtype, candidates=60, positions=200, lengths=lengths, jagged=jagged)
        check_every_path(on_gpu(case))


@pytest.mark.parametrize("dim", (32, 100, 128, 256))
def test_float32_dims(dim: int) -> None:
    for changes in ({}, {"lengths": True}, {"jagged": True, "self_queries": 9}):
        case = Case(sq=5, dim=dim, candidates=60, positions=200).but(**changes)
        assert check_every_path(on_gpu(case)) == ["packed"]


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("first", range(1, 200, 25))
def test_every_number_of_queries(first: int, dim: int) -> None:
    for sq in range(first, first + 25):
        case = Case(sq=sq, dim=dim, dtype=HALVES[sq % 2], candidates=1 + sq % 9, users=3, positions=100 + sq)
        check_every_path(on_gpu(case.but(lengths=sq % 3 == 0, jagged=sq % 3 == 1)))


@HALF_DTYPES
@pytest.mark.parametrize("kv_heads", (1, 2, 3, 8))
def test_heads_of_queries_share_those_of_keys(kv_heads: int, dtype: torch.dtype) -> None:
    for share in (1, 2, 3, 4, 5, 8):
        for dim in (64, 128):
            case = Case(sq=3, heads=kv_heads * share, kv_heads=kv_heads, dim=dim, dtype=dtype, candidates=50)
            check_every_path(on_gpu(case.but(positions=130, self_queries=4)))


@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
@pytest.mark.parametrize("kind", MAPS)
def test_maps(kind: str, index: torch.dtype) -> None:
    for users, candidates in ((1, 1), (1, 300), (300, 1), (64, 64), (7, 450), (1000, 500), (3, 5000)):
        case = Case(sq=2, dim=64, dtype=torch.bfloat16, users=users, candidates=candidates, positions=70)
        check_every_path(on_gpu(case.but(map=kind, map_dtype=index)))


def test_maps_of_any_strides() -> None:
    for path in paths_of(problem := on_gpu(Case(dtype=torch.float16, dim=64, candidates=40, lengths=True))):
        want = problem.run(path=path)
        plain = problem.map, problem.lengths
        for one in (0, 1):
            spread = [torch.stack((given, given + 10**6), 1)[:, 0] for given in plain]
            problem.map, problem.lengths = (spread[0], plain[1]) if one else (plain[0], spread[1])
            assert torch.equal(problem.run(path=path), want)
        problem.map = problem.map[:1].expand(40)
        problem.check(problem.run(path=path))
        problem.map, problem.lengths = plain


@HALF_DTYPES
@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
def test_lengths_around_tiles(form: str, dtype: torch.dtype) -> None:
    """Tails of keys: after a user's last key are NaN, or another user's keys."""
    for positions in AROUND_TILES:
        case = Case(sq=9, dim=128, dtype=dtype, users=6, candidates=40, positions=positions, self_queries=3)
        problem = on_gpu(case.but(lengths=form == "lengths", jagged=form == "jagged"))
        check_every_path(problem)


@pytest.mark.parametrize("q_layout", LAYOUTS)
@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_layouts(kv_layout: str, q_layout: str) -> None:
    for dim, form in ((64, "lengths"), (128, "jagged"), (40, "dense")):
        case = Case(sq=5, dim=dim, dtype=torch.bfloat16, candidates=30, positions=77, self_queries=6)
        layouts = {"q_layout": q_layout, "kv_layout": kv_layout}
        check_every_path(on_gpu(case.but(lengths=form == "lengths", jagged=form == "jagged", **layouts)))


@ONLY_HOPPER
@HALF_DTYPES
@pytest.mark.parametrize("dim", (32, 64, 96, 128, 192, 256))
def test_lengths_in_parts(dim: int, dtype: torch.dtype) -> None:
    """Few tiles, whose keys several blocks share: parts of all sizes, of some tiles or all, in any order."""
    for users, candidates, sq, positions in (
        (1, 1, 1, 513),
        (2, 9, 1, 1100),
        (1, 3, 64, 5000),
        (9, 40, 16, 900),
        (30, 300, 16, 640),
        (70, 140, 64, 1030),
    ):
        case = Case(sq=sq, dim=dim, heads=2, kv_heads=2, dtype=dtype, users=users, candidates=candidates)
        for changes in ({}, {"lengths": True}, {"jagged": True}, {"self_queries": 3}):
            problem = on_gpu(case.but(positions=positions, **changes))
            problem.check_all(path="fused")
            first = results(problem.run(path="fused", return_lse=True))
            for _ in range(3):
                again = results(problem.run(path="fused", return_lse=True))
                assert all(map(torch.equal, first, again))


def test_layouts_of_the_same_keys_and_values_for_all() -> None:
    for path in paths_of(problem := on_gpu(Case(dtype=torch.float16, dim=64, users=9, candidates=40))):
        problem.k, problem.v = problem.k[:1].expand(9, -1, -1, -1), problem.k[:1].expand(9, -1, -1, -1)
        problem.check_all(path=path)


def test_rest_nothing_of_something() -> None:
    for changes in NOTHING:
        for dtype in (torch.bfloat16, torch.float32):
            for lengths in (False, True):
                case = Case(dtype=dtype, dim=64).but(**changes)
                check_every_path(on_gpu(case.but(lengths=lengths and not case.jagged)))


@HALF_DTYPES
def test_rest_great_and_steep_scores(dtype: torch.dtype) -> None:
    """The largest score comes first, last or anew in every tile; all weight is on one key, or weights are
    equal."""
    for peak, order in ((1.0, 1), (1.0, -1), (60.0, 1), (60.0, -1), (0.0, 1)):
        problem = on_gpu(Case(sq=20, dim=128, dtype=dtype, candidates=30, positions=700, peak=peak))
        first = problem.q[0, 0, 0].float()
        scores = (problem.k.float() * first).sum(-1, keepdim=True).argsort(1, descending=order < 0)
        problem.k = problem.k.gather(1, scores.expand_as(problem.k))
        problem.q = (problem.q.float() * 0.2 + first).to(dtype)
        check_every_path(problem)
    for value in (300.0, -300.0):
        problem = on_gpu(Case(sq=20, dim=128, dtype=dtype, candidates=30, positions=300))
        problem.q.fill_(value)
        problem.k.fill_(17.0)
        check_every_path(problem)


@ONLY_HOPPER
@HALF_DTYPES
def test_rest_sums_do_not_drift_with_blocks(dtype: torch.dtype) -> None:
    """Large scores with a constant maximum: an error per block must not accumulate over 128 blocks."""
    generator = torch.Generator(gpu.DEVICE).manual_seed(0)
    q = torch.full((1, 64, 1, 64), 16.0, device=gpu.DEVICE).to(dtype)
    noise = torch.randint(-2, 3, (1, 16384, 1, 64), device=gpu.DEVICE, generator=generator)
    k = (10 + noise / 64).to(dtype)
    v = torch.ones_like(k)
    v[:, 8192:] = -1
    users = torch.zeros(1, dtype=torch.int64, device=gpu.DEVICE)
    want = reference(q.double(), k.double(), v.double(), users, scale=1.0)[0]
    found = recfuse.ikbo_attention(q, k, v, users, scale=1.0, path="fused")
    assert_close_to_reference(found, want, 4e-3)


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf))
@HALF_DTYPES
def test_non_finite_inputs_of_the_rest_stay_in_their_rows(dtype: torch.dtype, wrong: float) -> None:
    for changes in ({}, {"lengths": True}, {"jagged": True}, {"dim": 64, "sq": 1, "candidates": 300}):
        case = Case(sq=9, dim=128, dtype=dtype, users=5, candidates=40, positions=90, self_queries=7)
        problem = on_gpu(case.but(**changes))
        clean = {path: results(problem.run(path=path, return_lse=True)) for path in paths_of(problem)}
        before = problem.k.clone(), problem.v.clone(), problem.q.clone()
        start, end = (2, 3) if problem.offsets is None else map(int, problem.offsets[2:4])
        for name in ("k", "v", "q"):
            problem.k, problem.v, problem.q = (one.clone() for one in before)
            touched = torch.zeros_like(problem.map, dtype=torch.bool)
            users = torch.zeros(case.users, dtype=torch.bool, device=gpu.DEVICE)
            if name == "q":
                problem.q[7] = wrong
                touched[7] = True
            else:
                getattr(problem, name)[start:end] = wrong
                touched, users[2] = problem.map == 2, True
            for path, wanted in clean.items():
                got = results(problem.run(path=path, return_lse=True))
                for one, want, rows in zip(got, wanted, (users, touched) * 2, strict=True):
                    assert torch.equal(one[~rows], want[~rows])
                if name == "v" and end > start and bool(touched.any()):
                    assert not got[1][touched].isfinite().all()


@HALF_DTYPES
def test_rest_the_same_bits_from_run_to_run(dtype: torch.dtype) -> None:
    case = Case(sq=64, heads=2, kv_heads=2, dim=128, dtype=dtype, users=16, candidates=500, positions=900)
    for changes in ({}, {"lengths": True}, {"jagged": True, "self_queries": 64}):
        problem = on_gpu(case.but(**changes))
        for path in paths_of(problem):
            first = results(problem.run(path=path, return_lse=True))
            for _ in range(5):
                again = results(problem.run(path=path, return_lse=True))
                assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


# ---- real sizes

REAL = Case(sq=64, heads=2, kv_heads=2, dim=128, users=32, candidates=2048, dtype=torch.bfloat16)


def uneven(candidates: int, users: int, order: str = "grouped") -> Tensor:
    """Groups of nearly the same sizes, as production has them."""
    found = torch.arange(candidates, device=gpu.DEVICE) * users // candidates
    return found if order == "grouped" else found[torch.randperm(candidates, device=gpu.DEVICE)]


@pytest.mark.parametrize("order", ("grouped", "random"))
@pytest.mark.parametrize("positions", (512, 1000, 2048))
@HALF_DTYPES
def test_real_sizes(dtype: torch.dtype, positions: int, order: str) -> None:
    for changes in ({"candidates": 2063}, {"lengths": True}, {"jagged": True, "self_queries": 64}):
        case = REAL.but(dtype=dtype, positions=positions, **changes)
        problem = on_gpu(case)
        problem.map = uneven(case.candidates, case.users, order)
        check_every_path(problem)


@pytest.mark.parametrize("sq", (1, 16, 32, 64))
@pytest.mark.parametrize("positions", (64, 512))
def test_real_sizes_of_one_candidate_a_user(positions: int, sq: int) -> None:
    one_each = {"users": 700, "candidates": 700, "map": "cyclic"}
    for changes in ({}, {"lengths": True}, {"self_queries": sq}):
        check_every_path(on_gpu(REAL.but(sq=sq, **{**one_each, "positions": positions, **changes})))


def test_real_long_histories() -> None:
    problem = on_gpu(REAL.but(sq=16, users=3, candidates=200, positions=16384))
    check_every_path(problem)


@ONLY_HOPPER
@HALF_DTYPES
def test_real_errors_are_those_of_torchs(dtype: torch.dtype) -> None:
    for positions in (512, 4096):
        problem = on_gpu(REAL.but(dtype=dtype, candidates=512, users=8, positions=positions))
        ((want, _),) = problem.expected()
        theirs, ours = ((problem.run(path=path).double() - want).square().mean().sqrt().item()
                        for path in ("packed", "fused"))  # fmt: skip
        assert ours <= 1.2 * theirs, (ours, theirs)


def test_real_outputs_beyond_2_to_the_31_elements() -> None:
    missing = gpu.needs_memory(20)
    if missing:
        pytest.skip(missing)
    case = Case(sq=64, heads=2, kv_heads=2, dim=128, users=3, candidates=8, positions=40, dtype=torch.float16)
    candidates = 2**31 // (64 * 2 * 128) + 9
    for path in paths_of(on_gpu(case)):
        problem = on_gpu(case)
        problem.q = problem.q.repeat(candidates // 8 + 1, 1, 1, 1)[:candidates]
        problem.map = torch.arange(candidates, device=gpu.DEVICE) % 3
        got = problem.run(path=path)
        assert got.numel() > 2**31
        rows = torch.tensor([0, 1, candidates // 2, candidates - 2, candidates - 1], device=gpu.DEVICE)
        problem.q, problem.map = problem.q[rows], problem.map[rows]
        problem.check(got[rows])


# ---- modules, the compiler, autocast


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
