"""Gradients and updates of fused calls on a GPU: against the CPU's functions and a float64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch

import recfuse  # noqa: F401 (loads the operators)
from recfuse.data import workloads
from support import gpu
from support.backward.calls import (
    BAD,
    CHUNKS,
    HOT,
    KINDS,
    Call,
    check_random_calls,
    check_repeated_calls,
    features_of,
    numbers_of,
    there,
)
from support.fused import Groups
from support.reference import DTYPES, Feature

pytestmark = gpu.MARKS

OPS = torch.ops.recfuse
SPECS = {
    "one": [(torch.float32, 8, (9, 30, 4))],
    "dims": [(torch.float32, dim, (5 + dim % 7, 12)) for dim in (1, 3, 4, 20, 32, 64, 100, 128, 300)],
    "aligned": [(torch.float32, dim, (5 + dim % 7, 40)) for dim in (4, 8, 20, 32, 48, 64, 128, 160)],
    "half": [(torch.float16, 12, (9, 7)), (torch.float16, 40, (6, 5))],
    "bfloat16": [(torch.bfloat16, 12, (9, 7)), (torch.bfloat16, 64, (6, 5))],
    "mixed": [(torch.float32, 8, (9, 7)), (torch.bfloat16, 20, (6,)), (torch.float16, 5, (6, 5))],
    "empty": [(torch.float32, 0, (4, 0)), (torch.float32, 8, (0, 9)), (torch.float32, 4, ())],
}


def problem_of(name: str, kind: str) -> Groups:
    tables = sum(len(sizes) for _, _, sizes in SPECS[name])
    return Groups(SPECS[name], features_of(tables, kind != "modes"))


@pytest.mark.parametrize("kind", ("sum", "modes", "weighted"))
@pytest.mark.parametrize("name", SPECS)
def test_gradients(name: str, kind: str) -> None:
    problem = problem_of(name, kind)
    for integer, bags, grad_dtype in ((torch.int64, 7, 0), (torch.int32, 33, 1), (torch.int64, 0, 0)):
        indices, offsets = problem.lookups(bags, integer=integer)
        grad = torch.randn(bags, problem.output_dim).to(DTYPES[grad_dtype])
        factors = torch.randn(indices.numel()) if kind == "weighted" else None
        call = Call(problem, grad, indices, offsets, factors)
        call.check_gradients(by_freq=bags == 33)
        if kind == "weighted":
            lookups = problem.rows, call.indices, call.offsets
            found = OPS.fused_embedding_bag_sample_weights_backward(call.grad, call.weights, *lookups)
            want = OPS.fused_embedding_bag_sample_weights_backward(
                grad, problem.weights, problem.rows, indices, offsets
            )
            torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_gradients_of_any_dtype(grad_dtype: torch.dtype) -> None:
    problem = problem_of("aligned", "sum")
    call = Call(problem, torch.randn(50, problem.output_dim).to(grad_dtype), *problem.lookups(50))
    call.check_gradients(sparse=False)


def test_winners_are_the_cpus() -> None:
    problem = problem_of("mixed", "modes")
    for weight in problem.weights:
        weight[torch.rand_like(weight, dtype=torch.float32) < 0.3] = 0.5
        weight[torch.rand_like(weight, dtype=torch.float32) < 0.05] = torch.nan
    indices, offsets = problem.lookups(200)
    call = Call(problem, torch.zeros(200, problem.output_dim), indices, offsets)
    assert torch.equal(call.winners.cpu(), problem.winners(indices, offsets))


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
@pytest.mark.parametrize("name", ("dims", "aligned", "mixed", "bfloat16", "empty"))
def test_updates(name: str, kind: int) -> None:
    for pooling in ("sum", "modes"):
        problem = problem_of(name, pooling)
        call = Call(problem, torch.randn(60, problem.output_dim), *problem.lookups(60))
        call.check_update(kind)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases(chunk: int) -> None:
    check_random_calls(chunk, 1000)


@pytest.mark.parametrize("kind", ("sum", "modes"))
@pytest.mark.parametrize("name", BAD)
def test_bad_contents_do_no_harm(name: str, kind: str) -> None:
    problem = problem_of("one", kind)
    indices, offsets = problem.lookups(9)
    BAD[name](indices, offsets)
    call = Call(problem, torch.randn(9, problem.output_dim), indices, offsets)
    if name in ("negative", "beyond", "largest"):
        call.check_gradients()
    for dense, (rows, values) in zip(call.gradients(False), call.gradients(True), strict=True):
        assert dense.isfinite().all() and values.isfinite().all() and (rows.diff() > 0).all()
    states = call.states(3)
    call.update(3, states, numbers_of())
    tables = [there(problem.weights)[0].isfinite(), call.weights[0].isfinite()]
    assert torch.equal(*tables) and all(state.isfinite().all() for state in states)
    if kind == "sum":
        OPS.fused_embedding_bag_sample_weights_backward(
            call.grad, call.weights, problem.rows, call.indices, call.offsets
        )
    gpu.synchronize()


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
@pytest.mark.parametrize("rows", (5, 100_000))
def test_a_million_lookups_of_one_row(rows: int, kind: int) -> None:
    """In bags of many lengths, together with rows that few lookups hit."""
    problem = Groups([(torch.float32, 8, (rows, 40))], [Feature(0, "mean", None), Feature(1, "sum", None)])
    bags, count = 2000, 1_000_000
    ends = torch.cat((torch.randint(count, (bags - 1,)).sort().values, torch.tensor([count])))
    indices = torch.cat((torch.full((count,), 3), torch.randint(40, (bags,))))
    offsets = torch.cat((torch.tensor([0]), ends, torch.arange(1, bags + 1) + count))
    call = Call(problem, torch.randn(bags, 16), indices, offsets)
    call.check_gradients()
    call.check_update(kind)


@pytest.mark.parametrize("longest", (40, 400))
@pytest.mark.parametrize("name", HOT)
def test_rows_are_sorted_alike_each_time(name: str, longest: int) -> None:
    check_repeated_calls(Call, name, bags=1500, longest=longest)


SHAPES = {  # rows, dims, bags, longest bag: on both sides of the limits that select an algorithm
    "short batch": ((40, 16_384, 16_385), (32, 8), 3, 900),
    "staged by sixteen columns": ((50, 3000, 9000), (64, 4), 1500, 12),
    "gathered": ((3, 700, 16_384), (128, 20), 4000, 6),
    "many bags": ((3, 5000), (8,), 66_000, 3),
    "long list": ((4096, 20_000), (16, 32), 600, 260),
    "wide rows": ((30, 600), (256, 516), 40, 30),
    "one lookup": ((10, 976, 12_000), (128,), 16_384, 1),
}


@pytest.mark.parametrize("pooling", ("sum", "mean"))
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, pooling: str) -> None:
    sizes, dims, bags, longest = SHAPES[name]
    problem = Groups(
        [(torch.float32, dim, sizes) for dim in dims],
        [Feature(table, pooling, None) for table in range(len(sizes) * len(dims))],
    )
    indices, offsets = problem.lookups(bags, longest)
    call = Call(problem, torch.randn(bags, problem.output_dim), indices, offsets)
    call.check_gradients()
    for kind in (0, 2, 3):
        if name != "wide rows" or KINDS[kind] != "RowWiseAdagrad":
            call.check_update(kind)


@pytest.mark.parametrize("hot", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("integer", (torch.int32, torch.int64), ids=str)
def test_many_narrow_tables(integer: torch.dtype, hot: float) -> None:
    """So many that a block handles each, from lookups to rows; some have few rows, or a row that many
    lookups hit."""
    sizes, dims, bags = (3, 90, 700, 5000) * 26, (4, 8, 20, 32), 60
    problem = Groups(
        [(torch.float32, dim, sizes) for dim in dims],
        [Feature(table, "sum", 2 if table % 5 == 0 else None) for table in range(len(sizes) * len(dims))],
    )
    indices, offsets = problem.lookups(bags, 60, integer=integer)
    indices[torch.rand(indices.shape) < hot] = 1
    call = Call(problem, torch.randn(bags, problem.output_dim), indices, offsets)
    for kind in range(4):
        call.check_update(kind)
    offsets[[7, 3000, 3001]] = torch.tensor([-5, 2**30, 0], dtype=integer)
    bad = Call(problem, torch.randn(bags, problem.output_dim), indices, offsets)
    bad.update(0, [], numbers_of())
    assert all(
        torch.equal(*pair)
        for pair in zip(
            (weight.isfinite() for weight in there(problem.weights)),
            (weight.isfinite() for weight in bad.weights),
            strict=True,
        )
    )


@pytest.mark.parametrize("kind", (0, 2), ids=("SGD", "RowWiseAdagrad"))
@pytest.mark.parametrize("model", ("B", "D"))
def test_models(model: str, kind: int) -> None:
    """A thousand tables in one call; and the same bits each time."""
    described = workloads.model(model)
    groups: dict[int, list[int]] = {}
    for number, dim in enumerate(described.dims):
        groups.setdefault(int(dim), []).append(number)
    batch = described.batch(100, seed=3)
    spec = [(torch.float32, dim, [int(described.rows[n]) for n in own]) for dim, own in groups.items()]
    table_of = {number: at for at, number in enumerate(itertools.chain(*groups.values()))}
    problem = Groups(spec, [Feature(table_of[n], "sum", None) for n in range(described.features)])
    indices, offsets = (torch.from_numpy(one) for one in (batch.indices, batch.offsets))
    grad = torch.randn(100, problem.output_dim)
    call = Call(problem, grad, indices, offsets)
    before, states = [weight.clone() for weight in call.weights], call.states(kind)
    call.check_update(kind)
    again = Call(problem, grad, indices, offsets)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(again.weights, before, strict=True)
    )
    again.update(kind, states, numbers_of(step=3))
    for one, same in zip(call.weights, again.weights, strict=True):
        assert torch.equal(one.nan_to_num(), same.nan_to_num())
