"""Gradients of per-sample weights of quantised tables, against float64; other gradients raise."""

from __future__ import annotations

import pytest
import torch

import recfuse
from support.reference import Feature
from support.tables.quantized import FLOATS, LAYOUTS, Stored, Tables, gradient_check, stored
from support.tables.stored import call, in_memory

KINDS = ("int8", "int4", *FLOATS)
OPERATOR = torch.ops.recfuse.fused_embedding_bag_quantized
GRADIENT = torch.ops.recfuse.fused_embedding_bag_quantized_sample_weights_backward


def problem_of(dims=(2, 6, 16, 30, 64, 66, 128, 300), layout="planar", kinds=KINDS) -> Tables:
    generator = torch.Generator().manual_seed(7)
    tables = [
        stored(torch.randn(20 + dim % 37, dim, generator=generator), kind, layout, gap=8)
        for dim in dims
        for kind in kinds
    ]
    return Tables(tables, [Feature(number, "sum", (None, 3)[number % 2]) for number in range(len(tables))])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("integer", (torch.int32, torch.int64))
def test_agrees_with_float64(layout, integer):
    problem = problem_of(layout=layout)
    for bags in (1, 5):
        lookups = problem.lookups(bags, integer=integer)
        gradient_check(problem, lookups, lambda factors, at=lookups: problem.run(*at, factors))


def test_any_dim_of_int8():
    problem = problem_of(range(1, 70), kinds=("int8",))
    lookups = problem.lookups(3)
    gradient_check(problem, lookups, lambda factors: problem.run(*lookups, factors))


@pytest.mark.parametrize("output", FLOATS.values())
@pytest.mark.parametrize("dtype", FLOATS.values())
def test_dtypes_of_outputs_and_weights(output, dtype):
    problem = problem_of((6, 34))
    lookups = problem.lookups(7)
    gradient_check(
        problem, lookups, lambda factors: problem.run(*lookups, factors, output_dtype=output), dtype
    )


def test_parameters_of_float32():
    memory = torch.ops.quantized.embedding_bag_byte_prepack(torch.randn(30, 24))
    parameters = memory[:, 24:].view(torch.float32)
    values = memory[:, :24].double() * parameters[:, :1].double() + parameters[:, 1:].double()
    problem = Tables([Stored(memory[:, :24], parameters, values)])
    lookups = problem.lookups(9)
    gradient_check(problem, lookups, lambda factors: problem.run(*lookups, factors))


@pytest.mark.parametrize("alignment", (1, 4, 64))
@pytest.mark.parametrize("behind", (False, True))
def test_tables_within_memory(alignment, behind):
    """Rows of floats have gaps too."""
    tables = [(rows, dim, kind) for rows, dim in ((9, 6), (1, 10), (21, 130)) for kind in KINDS]
    memory, rows, problem = in_memory(tables, alignment, behind)
    lookups = problem.lookups(5)
    gradient_check(problem, lookups, lambda factors: call(memory, rows, problem, lookups, factors))


def test_lookups_that_do_not_count_have_no_gradient():
    """The gradient operator leaves out bad lookups, as those of floats do."""
    one = stored(torch.randn(5, 8), "int4")
    rows = torch.tensor([[0, 0, 5, 8, 0, 2, 0]])
    lookups = torch.tensor([0, 2, -1, 5, 4]), torch.tensor([0, 3, 5])
    got = GRADIENT(torch.ones(2, 8), [one.weight], [one.parameters], rows, *lookups)
    want = one.values.sum(1)[torch.tensor([0, 0, 0, 0, 4])] * torch.tensor([1, 0, 0, 0, 1])
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    late = torch.tensor([0, 9, 5])
    assert not GRADIENT(torch.ones(2, 8), [one.weight], [one.parameters], rows, lookups[0], late).any()


def weighted(dtype="int8"):
    """A collection of sums, with lookups and weights."""
    torch.manual_seed(3)
    tables = [recfuse.nn.Table(40, 16, "a"), recfuse.nn.Table(30, 8, "b", padding_idx=2)]
    collection = recfuse.nn.FusedEmbeddingBagCollection(tables)
    recfuse.quantize(collection, dtype)
    indices, offsets = torch.randint(0, 30, (40,)), torch.arange(0, 41, 4)
    return collection, indices, offsets, torch.rand(40, requires_grad=True)


def float_gradient(collection, indices, offsets, factors, grad):
    """The gradient of the same values as floats."""
    recfuse.dequantize(collection)
    return torch.autograd.grad(collection(indices, offsets, factors), factors, grad)[0]


@pytest.mark.parametrize("dtype", ("int8", {"b": "int4"}), ids=str)
@pytest.mark.parametrize("compiled", (False, True))
def test_collections(dtype, compiled):
    collection, indices, offsets, factors = weighted(dtype)
    run = torch.compile(collection, fullgraph=True, backend="aot_eager") if compiled else collection
    grad = torch.randn(5, 24)
    output = run(indices, offsets, factors)
    (got,) = torch.autograd.grad(output, factors, grad)
    with torch.no_grad():
        assert torch.equal(run(indices, offsets, factors), output)
    want = float_gradient(collection, indices, offsets, factors, grad)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_transforms():
    collection, indices, offsets, factors = weighted()

    def total(weights):
        return collection(indices, offsets, weights).square().sum()

    want = torch.autograd.grad(total(factors), factors)[0]
    assert torch.equal(torch.func.grad(total)(factors.detach()), want)
    batch = torch.stack((factors.detach(), torch.rand(40)))
    several = torch.func.vmap(torch.func.grad(total))(batch)
    torch.testing.assert_close(several[0], want)
    torch.testing.assert_close(several[1], torch.func.grad(total)(batch[1]))


def test_derivatives_that_do_not_exist():
    collection, indices, offsets, factors = weighted()
    total = collection(indices, offsets, factors).square().sum()
    (first,) = torch.autograd.grad(total, factors, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(
            lambda weights: collection(indices, offsets, weights), (factors.detach(),), (torch.ones(40),)
        )


def test_codes_that_change_before_backward_raise():
    collection, indices, offsets, factors = weighted()
    output = collection(indices, offsets, factors)
    state = {name: value.clone() for name, value in collection.state_dict().items()}
    collection.load_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_of_tables_raise():
    one, floats = stored(torch.randn(5, 8), "int8"), torch.randn(5, 8, requires_grad=True)
    lookups = torch.tensor([0]), torch.tensor([0, 1])
    rows = torch.tensor([[0, 0, 5, 8, 0, -1, 0]])
    wanted = one.parameters.clone().requires_grad_()
    for tables in (([one.weight], [wanted]), ([floats], [torch.empty(0, 2).half()])):
        for run in (recfuse.ops.fused_embedding_bag_quantized, OPERATOR):
            with pytest.raises(NotImplementedError, match=r"only per_sample_weights has a gradient\. Pass"):
                run(*tables, rows, *lookups, 8)
        with torch.no_grad():
            assert OPERATOR(*tables, rows, *lookups, 8).shape == (1, 8)


def test_bad_arguments_of_the_gradient():
    one = stored(torch.randn(5, 8), "int8")
    rows, lookups = torch.tensor([[0, 0, 5, 8, 0, -1, 0]]), (torch.tensor([0]), torch.tensor([0, 1]))
    tables = [one.weight], [one.parameters]
    with pytest.raises(ValueError, match="grad has 7 columns; expected the 8"):
        GRADIENT(torch.ones(1, 7), *tables, rows, *lookups)
    with pytest.raises(ValueError, match="parameters has 0 tensors"):
        GRADIENT(torch.ones(1, 8), [one.weight], [], rows, *lookups)
    rows[0, 4] = 2
    with pytest.raises(NotImplementedError, match="per-sample weights are given with max pooling"):
        GRADIENT(torch.ones(1, 8), *tables, rows, *lookups)


def test_the_compiler_s_check_of_the_operators():
    problem = problem_of((16,))
    indices, offsets = problem.lookups(3)
    factors = torch.rand(indices.numel(), requires_grad=True)
    arguments = (*problem.lists(), problem.rows, indices, offsets, problem.output_dim, factors)
    torch.library.opcheck(OPERATOR.default, arguments)
    grad = torch.randn(3, problem.output_dim)
    torch.library.opcheck(GRADIENT.default, (grad, *problem.lists(), problem.rows, indices, offsets))
