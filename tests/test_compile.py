"""The compiler and exporter: opcheck of both operators, and torch.compile and torch.export of every layer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.library import opcheck

import recfuse
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, Table
from support.compiled import compare, embedding_bag_samples, with_gradients
from support.dlrm import DLRM_Net, batch_of
from support.fused import Problem, every_mode
from support.inputs import ragged

OPERATORS = torch.ops.recfuse


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("gradients", (False, pytest.param(True, marks=pytest.mark.long)))
def test_opcheck_embedding_bag(gradients):
    for sample in embedding_bag_samples():
        opcheck(OPERATORS.embedding_bag.default, with_gradients(sample, gradients))


@pytest.mark.parametrize("gradients", (False, pytest.param(True, marks=pytest.mark.long)))
def test_opcheck_fused_embedding_bag(gradients):
    specs = [(9, dim, torch.float32) for dim in (4, 8, 3, 8)]
    mixed = [(9, 4, torch.float16), (5, 8, torch.float32), (7, 3, torch.bfloat16)]
    for problem, sparse in (
        (Problem(specs), False),
        (Problem(specs), True),
        (Problem(specs, every_mode(specs)), False),
        (Problem(mixed), False),
        (Problem(mixed), True),
    ):
        indices, offsets = problem.lookups(4)
        factors = torch.rand(indices.numel()) if not problem.rows[:, 4].any() else None
        sample = (problem.weights, problem.rows, indices, offsets, problem.output_dim, factors, sparse)
        opcheck(OPERATORS.fused_embedding_bag.default, with_gradients(sample, gradients))
    opcheck(OPERATORS.fused_embedding_bag.default, with_gradients(sample[:5], gradients))


def test_fakes_raise_where_the_kernel_would():
    real = torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch._subclasses.FakeTensorMode() as fake:
        given = [fake.from_tensor(one) for one in real]
        with pytest.raises(RuntimeError, match="weight has 1 dimensions"):
            OPERATORS.embedding_bag(*given)


BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.long))


@pytest.mark.long
@pytest.mark.parametrize("mode", ("sum", "mean", "max"))
def test_compiled_function(mode):
    @torch.compile(fullgraph=True, dynamic=True, backend="inductor")
    def compiled(indices, weight, offsets):
        return recfuse.embedding_bag(indices * 1, weight * 2, offsets, mode=mode, padding_idx=-1) + 1

    for bags in (3, 8):
        indices, offsets = ragged(12, bags, 5)
        ours, theirs = (torch.linspace(-1, 1, 60).view(12, 5).clone().requires_grad_() for _ in range(2))
        got = compiled(indices, ours, offsets[:-1])
        want = recfuse.embedding_bag(indices, theirs * 2, offsets[:-1], mode=mode, padding_idx=-1) + 1
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.long
def test_compiled_operator_without_gradients():
    problem = Problem([(9, 4, torch.float32), (5, 8, torch.float32)])
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(indices, offsets):
        return (
            OPERATORS.fused_embedding_bag(problem.weights, problem.rows, indices, offsets, problem.output_dim)
            * 2
        )

    with torch.no_grad():
        for bags in (4, 5, 9):
            indices, offsets = problem.lookups(bags)
            torch.testing.assert_close(compiled(indices, offsets), problem.run(indices, offsets) * 2)
    assert counter.frame_count == 1  # one graph for every batch size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", ({}, {"mode": "sum", "sparse": True}, {"mode": "max", "padding_idx": 2}), ids=str
)
def test_compiled_embedding_bag(backend, options):
    module = EmbeddingBag(12, 5, **options)
    inputs = [(indices, offsets[:-1]) for indices, offsets in (ragged(12, bags, 5) for bags in (4, 7))]
    compare(torch.compile(module, fullgraph=True, dynamic=True, backend=backend), module, module, inputs)
    two = [(torch.randint(0, 12, (bags, 3)),) for bags in (2, 5)]
    compare(torch.compile(module, fullgraph=True, dynamic=True, backend=backend), module, module, two)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sparse", (False, True))
def test_compiled_collection(backend, sparse):
    specs = [Table(9, 4), Table(9, 4, mode="mean"), Table(9, 8)]
    module = FusedEmbeddingBagCollection(
        specs if sparse else [*specs, Table(9, 3, mode="max")], sparse=sparse
    )
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    count = len(module.feature_names)
    inputs = [ragged(9, count * bags, 4) for bags in (2, 5)]
    compare(compiled, module, module, inputs)
    with torch.no_grad():
        for given in inputs:
            torch.testing.assert_close(compiled(*given), module(*given))


@pytest.mark.long
@pytest.mark.parametrize("tables", (1, 3))
def test_compiled_sparse_gradients_have_the_rows_that_occur(tables):
    single, several = EmbeddingBag(9, 4, mode="sum", sparse=True), [Table(9, 4)] * tables
    module = single if tables == 1 else FusedEmbeddingBagCollection(several, sparse=True)
    indices, offsets = torch.tensor([3, 3, 3, 8, 3, 1] * tables), torch.arange(0, 6 * tables + 1, 2)
    inputs = [(indices, offsets[:-1] if tables == 1 else offsets)]
    compare(torch.compile(module, fullgraph=True, backend="inductor"), module, module, inputs)
    meta = copy.deepcopy(module).to("meta")
    meta(*[given.to("meta") for given in inputs[0]]).sum().backward()


def test_the_size_of_a_sparse_gradient_is_not_known_in_a_trace():
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False))
    given = [
        torch.ones(3, 4),
        torch.tensor([[0, 0, 9, 4, 0, -1, 0]]),
        torch.arange(6),
        torch.tensor([0, 2, 4, 6]),
    ]
    given = [mode.from_tensor(tensor) for tensor in given]
    with mode:
        rows, values = OPERATORS.fused_embedding_bag_sparse_backward(*given, 0, 9, 4, 0, None, None)
        found = OPERATORS.fused_embedding_bag_sparse_gradients(*given, [0], [9], [4], [1], None, None)
    assert free_unbacked_symbols(rows.shape[0]) and values.shape == (rows.shape[0], 4)
    assert free_unbacked_symbols(found[0].shape[0]) and found[1].shape == (found[0].shape[0], 4)
    assert found[1].dtype == torch.float16


def test_compiled_dlrm():
    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    compare(compiled, model, model, [batch_of(model, bags, "stacked") for bags in (4, 9)])
    with torch.no_grad():
        dense_x, lS_o, lS_i = batch_of(model, 6)
        torch.testing.assert_close(compiled(dense_x, lS_o, lS_i), model(dense_x, lS_o, lS_i))
        lS_o[1, 0] = 1
        with pytest.raises(RuntimeError, match="begin with another number; expected 0"):
            compiled(dense_x, lS_o, lS_i)


def test_exported_embedding_bag():
    module = EmbeddingBag(12, 5, mode="sum").eval()
    exported = torch.export.export(
        module,
        (torch.arange(6), torch.tensor([0, 2, 4])),
        dynamic_shapes=({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}),
    )
    assert "recfuse.embedding_bag" in str(exported.graph)
    for bags in (2, 9):
        indices, offsets = ragged(12, bags, 5)
        torch.testing.assert_close(exported.module()(indices, offsets[:-1]), module(indices, offsets[:-1]))


def test_exported_collection(tmp_path):
    module = FusedEmbeddingBagCollection(
        [Table(9, 4), Table(9, 4, mode="mean"), Table(9, 8, mode="max")]
    ).eval()
    bags = torch.export.Dim("bags", min=2, max=4096)
    exported = torch.export.export(
        module,
        ragged(9, 12, 4),
        dynamic_shapes={"indices": {0: torch.export.Dim.AUTO}, "offsets": {0: 3 * bags + 1}},
    )
    assert str(exported.graph).count("recfuse.fused_embedding_bag") == 1
    torch.export.save(exported, tmp_path / "collection.pt2")
    loaded = torch.export.load(tmp_path / "collection.pt2")
    for one in (exported, loaded):
        for count in (2, 8):
            given = ragged(9, 3 * count, 4)
            torch.testing.assert_close(one.module()(*given), module(*given))


def test_a_compiled_collection_follows_its_weights():
    module = FusedEmbeddingBagCollection([Table(9, 4), Table(9, 8)])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    given = ragged(9, 8, 4)
    with torch.no_grad():
        compiled(*given)
        module.load_state_dict({k: torch.ones_like(v) for k, v in module.state_dict().items()}, assign=True)
        torch.testing.assert_close(compiled(*given), module(*given))
        other = copy.deepcopy(module).half()
        torch.testing.assert_close(
            torch.compile(other, fullgraph=True, backend="aot_eager")(*given), other(*given)
        )


@pytest.mark.parametrize("mode", ("sum", "max"))
def test_padding_idx_may_be_a_dynamic_int(mode):
    def call(indices, offsets, weight, row):
        return recfuse.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=row)

    weight = torch.randn(10, 4, requires_grad=True)
    indices, offsets = torch.tensor([3, 4, 5, 8, 9]), torch.tensor([0, 2])
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for row in (3, 5, -2):
        found = compiled(indices, offsets, weight, row)
        want = torch.nn.functional.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=row)
        torch.testing.assert_close(found, want)
        grads = (torch.autograd.grad(one.square().sum(), weight)[0] for one in (found, want))
        torch.testing.assert_close(*grads)
