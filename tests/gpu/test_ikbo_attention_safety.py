"""ikbo_attention on a GPU: bad contents, graphs, streams, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import recfuse
from support import gpu
from support.gpu_ikbo_attention import HOPPER, check_every_path, on_gpu, paths_of, results
from support.ikbo_attention import Case, Problem, reference
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
    total = problem.k.shape[0]
    for offsets, without in (
        ([0, 40, 20, 60], [1]),
        ([-1, 10, 20, 30], [0]),
        ([0, 10, 20, total + 1], [2]),
        ([0, 10, 2**31 - 1, 30], [1, 2]),
        ([-(2**31), 10, -5, 30], [0, 1, 2]),
    ):
        problem.offsets = torch.tensor(offsets, device=gpu.DEVICE, dtype=index)
        for path in paths_of(problem):
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
        for path in paths_of(problem):
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
