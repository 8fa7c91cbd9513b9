"""Gradients of the tables: dense, sparse, by optimizers in the backward pass; and values without
gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import recfuse
from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Cross, Hash, Identity, Numeric, Vocabulary
from support.columns.inputs import COLUMNS, SUMS, mapping, parts

OPTIMIZERS = {
    "SGD": (recfuse.optim.SGD, torch.optim.SGD),
    "Adagrad": (recfuse.optim.Adagrad, torch.optim.Adagrad),
}


def trained(module, batches, optimizer):
    """The weights after a step a batch."""
    for batch in batches:
        optimizer.zero_grad()
        out = module(batch)
        (out * torch.linspace(-1, 1, out.shape[1])).square().sum().backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("columns", (SUMS, COLUMNS), ids=("sums", "all"))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_in_the_backward(kind, columns):
    """As torch's with the reference; also for a table that two calls pool, by sum and by max."""
    both = Identity("largest", 50, 16, feature="tags", pooling="max", table="tags", invalid="drop")
    module = EmbeddingColumns(columns if columns is SUMS else [*columns, both])
    before = module.tables["tags"].weight.detach().clone()
    reference = module.to_torch()
    batches = [mapping(parts(seed)) for seed in range(4)]
    ours, torchs = OPTIMIZERS[kind]
    got = trained(module, batches, ours(module, lr=0.05))
    want = trained(reference, batches, torchs(reference.parameters(), lr=0.05))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)
    assert not torch.equal(got["tables.tags.weight"], before)


@pytest.mark.parametrize("sparse", (False, True))
def test_optimizers_of_torch(sparse):
    module = EmbeddingColumns(SUMS, sparse=sparse)
    reference = module.to_torch()
    batches = [mapping(parts(seed)) for seed in range(3)]
    got = trained(module, batches, torch.optim.SGD(module.parameters(), lr=0.05))
    assert all(parameter.grad.is_sparse == sparse for parameter in module.parameters())
    want = trained(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.05))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_tables_that_are_not_trained():
    columns = [Identity("a", 5, 4, trainable=False), Identity("b", 5, 4)]
    module = EmbeddingColumns(columns)
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([1, 1])}
    module(batch).sum().backward()
    assert module.tables["a"].weight.grad is None
    assert module.tables["b"].weight.grad.sum() == 8
    frozen = EmbeddingColumns(columns[:1])
    assert not frozen(batch).requires_grad
    module.requires_grad_(False)
    assert not module(batch).requires_grad


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_narrow_tables(dtype):
    module = EmbeddingColumns(COLUMNS, dtype=dtype)
    reference = module.to_torch().double()
    batch = mapping(parts())
    out, want = module(batch), reference(batch)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    out.sum().backward()
    want.sum().backward()
    for name, table in module.tables.items():
        theirs = reference.tables._modules[name].weight.grad
        torch.testing.assert_close(table.weight.grad.double(), theirs, rtol=0.02, atol=0.02)


def test_tables_of_several_types():
    columns = [
        Identity("a", 9, 4, dtype=torch.float16),
        Identity("b", 9, 4, dtype=torch.bfloat16, pooling="max"),
        Identity("c", 9, 4),
        Numeric("n"),
    ]
    module = EmbeddingColumns(columns)
    whole = torch.randint(0, 9, (5, 2))
    batch = {"a": whole, "b": whole, "c": whole, "n": torch.rand(5)}
    reference = module.to_torch()
    out = module(batch)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, reference(batch), rtol=0.02, atol=0.02)
    with torch.no_grad():
        torch.testing.assert_close(module(batch), out, rtol=0.02, atol=0.02)


def test_values_and_weights_have_no_gradient_and_say_so():
    module = EmbeddingColumns([Numeric("n"), Identity("t", 9, 4, weighted=True), Bucketize("b", [0.5], 4)])
    ends = torch.arange(4)
    batch = {"n": torch.rand(3), "t": (torch.tensor([1, 2, 3]), ends, torch.rand(3)), "b": torch.rand(3)}
    for name, change in (
        ("n", batch["n"].clone().requires_grad_()),
        ("t", (*batch["t"][:2], batch["t"][2].clone().requires_grad_())),
    ):
        with pytest.raises(NotImplementedError, match=f"feature '{name}' needs a gradient"):
            module({**batch, name: change})
        with torch.no_grad():
            assert torch.equal(module({**batch, name: change}), module(batch))
    stepped = module({**batch, "b": batch["b"].clone().requires_grad_()})  # a step function: it is zero
    assert torch.equal(stepped, module(batch))


def test_the_bare_operator_refuses_a_gradient():
    module = EmbeddingColumns([Identity("a", 9, 4)])
    given = module._reader.read({"a": torch.tensor([1, 2])})
    program, _ = module._whole.programs.of(given.places, given.device)
    call = [module.packed_weights(), program, given.dense, [], [], [], 2, 4]
    with torch.no_grad():
        want = module({"a": torch.tensor([1, 2])})
        assert torch.equal(torch.ops.recfuse.embedding_columns(*call), want)
    out = torch.ops.recfuse.embedding_columns(*call)
    assert torch.equal(out, want)
    with pytest.raises(NotImplementedError, match="embedding_columns has no gradient"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(call[0][0].detach(), torch.ones(9, 4))
        torch.ops.recfuse.embedding_columns([dual], *call[1:])


def test_functional_calls_and_gradients_of_functions():
    module = EmbeddingColumns(COLUMNS)
    batch = mapping(parts())
    parameters = dict(module.named_parameters())
    double = {name: parameter.detach() * 2 for name, parameter in parameters.items()}
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        got = torch.func.functional_call(module, double, (batch,))
        assert torch.equal(got, other(batch))

    def loss(given):
        return torch.func.functional_call(module, given, (batch,)).square().sum()

    grads = torch.func.grad(loss)({name: one.detach() for name, one in parameters.items()})
    module(batch).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_a_step_twice_gives_the_same_bits():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        module = EmbeddingColumns(COLUMNS)
        results.append(trained(module, [mapping(parts())] * 2, recfuse.optim.SGD(module, lr=0.1)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_fills_take_no_gradient():
    module = EmbeddingColumns(
        [
            Vocabulary("v", [1, 2], 3, invalid="drop", fill_value=7.0, scale=2.0),
            Hash("h", 4, 2, slice=(1, 2)),
            Cross("x", ("v", "h"), 5, 2, empty=3, pooling="max"),
        ]
    )
    batch = {"v": torch.tensor([1, 9, 9]), "h": (torch.tensor([5, 6]), torch.tensor([0, 0, 1, 2]))}
    out = module(batch)
    assert out[1:, :3].eq(7).all() and out.shape == (3, 6)
    out.sum().backward()
    assert module.tables["v"].weight.grad.tolist() == [[2.0] * 3, [0.0] * 3]
    assert module.tables["h"].weight.grad[:, 0].eq(0).all() and module.tables["h"].weight.grad.sum() == 2
    assert module.tables["x"].weight.grad[3].ge(1).all()
