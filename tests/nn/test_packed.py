"""Packed tables: their Parameters, the properties of a single table, and tables that cannot be packed."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from recfuse.nn import (
    EmbeddingBag,
    FusedEmbeddingBagCollection,
    FusedEmbeddingBagList,
    IKBOLinear,
    LinearCompression,
    TargetAttention,
)
from support.collection import assert_packed, by_hand, collection_of, lookups_of


@pytest.mark.parametrize("sparse", (False, True))
def test_an_optimizer_continues_with_the_packed_parameters(sparse):
    torch.manual_seed(0)
    bags = [nn.EmbeddingBag(20, dim, mode="sum", sparse=sparse) for dim in (4, 8, 4)]
    twins = nn.ModuleList(copy.deepcopy(bags))
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=0.5)
    own = torch.optim.Adagrad(twins.parameters(), lr=0.5)
    collection = FusedEmbeddingBagCollection.from_embedding_bags(bags, list("xyz"), optimizers=[optimizer])
    assert list(collection.state_dict()) == [f"embedding_bags.{name}.weight" for name in "xyz"]
    assert optimizer.param_groups[0]["params"] == list(collection.parameters())
    for _ in range(3):
        indices, offsets = lookups_of(collection)
        collection(indices, offsets).square().sum().backward()
        weights = {number: bag.weight for number, bag in enumerate(twins)}
        by_hand(collection, indices, offsets, None, weights).square().sum().backward()
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
    for ours, theirs in zip(collection.tables.values(), twins, strict=True):
        torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())
    assert_packed(collection)


def test_an_optimizer_that_would_train_nothing_is_named():
    bags = [nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3)]
    before = [bag.weight.detach().clone() for bag in bags]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=0.5)
    with pytest.raises(ValueError, match="Adagrad"):
        FusedEmbeddingBagCollection.from_embedding_bags(bags)
    assert all(torch.equal(bag.weight, was) for bag, was in zip(bags, before, strict=True))
    del optimizer
    gc.collect()
    FusedEmbeddingBagCollection.from_embedding_bags(bags)


def test_old_parameters_show_the_rows_they_became():
    bags = [nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3)]
    collection = FusedEmbeddingBagCollection.from_embedding_bags(bags)
    collection.tables.t1.weight = torch.full((20, 4), 7.0)
    assert bags[1].weight.eq(7).all()


def test_many_small_tables_train():
    collection = collection_of([(3, 4)] * 300)
    assert len(list(collection.parameters())) == 1
    indices, offsets = torch.randint(0, 3, (600,)), torch.arange(601)
    collection(indices, offsets).sum().backward()
    assert torch.stack([t.weight.grad.sum() for t in collection.tables.values()]).eq(8).all()


def test_frozen_tables_and_other_dtypes_have_parameters_of_their_own():
    bags = [nn.EmbeddingBag(6, 4, mode="sum") for _ in range(4)]
    bags[1].weight.requires_grad_(False)
    bags[2].half()
    collection = FusedEmbeddingBagCollection.from_embedding_bags(bags)
    assert [name for name, _ in collection.named_parameters()] == [
        "embedding_bags.packed_dim4",
        "embedding_bags.packed_dim4_1",
        "embedding_bags.packed_dim4_2",
    ]
    assert [p.requires_grad for p in collection.parameters()] == [True, False, True]
    out = collection(torch.arange(4), torch.arange(5))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert (
        collection.embedding_bags.packed_dim4.grad.sum() == 8
        and collection.embedding_bags.packed_dim4_1.grad is None
    )


def test_a_shared_parameter_is_packed_once():
    first = nn.EmbeddingBag(10, 4, mode="sum")
    second = nn.EmbeddingBag(10, 4, mode="sum")
    second.weight = first.weight
    collection = FusedEmbeddingBagCollection.from_embedding_bags(
        [first, nn.EmbeddingBag(5, 4, mode="sum"), second]
    )
    assert collection.embedding_bags.packed_dim4.shape == (12 + 5, 4)  # ten rows, two that align
    indices, offsets = torch.tensor([1, 2, 1]), torch.arange(4)
    out = collection(indices, offsets)
    assert torch.equal(out[:, :4], out[:, 8:])
    out.sum().backward()
    assert collection.tables.t0.weight.grad[1].eq(2).all()
    assert torch.equal(collection.tables.t0.weight, collection.tables.t2.weight)


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("grad", (False, True))
def test_one_table_is_called_as_torchs_module(sparse, grad):
    torch.manual_seed(3)
    modes = ("sum", "mean") if sparse else ("sum", "mean", "max")
    bags = [nn.EmbeddingBag(12, 5, mode=mode, sparse=sparse, padding_idx=3) for mode in modes]
    bags[1].include_last_offset = True
    collection = FusedEmbeddingBagCollection.from_embedding_bags(copy.deepcopy(bags))
    indices = torch.randint(0, 12, (10,))
    with torch.set_grad_enabled(grad):
        for number, (bag, table) in enumerate(zip(bags, collection.tables.values(), strict=True)):
            assert (table.mode, table.padding_idx, table.num_embeddings) == (bag.mode, 3, 12)
            offsets = torch.tensor([0, 4, 4, 10])
            factors = torch.rand(10) if number == 0 else None
            calls = [(indices, offsets, factors), (indices.view(5, 2), None, None)]
            for call in calls:
                want = bag(*call)
                got = table(*call)
                torch.testing.assert_close(got, want)
                if grad:
                    bag.zero_grad()
                    collection.zero_grad()
                    want.square().sum().backward()
                    got.square().sum().backward()
                    torch.testing.assert_close(table.weight.grad.to_dense(), bag.weight.grad.to_dense())


def test_a_table_refuses_changes_without_effect():
    collection = collection_of()
    table = collection.tables.t0
    for name, value in (("mode", "mean"), ("padding_idx", 1), ("sparse", True), ("forward", print)):
        with pytest.raises(AttributeError, match="unswap"):
            setattr(table, name, value)
    with pytest.raises(AttributeError, match="unswap"):
        table.register_forward_hook(print)
    with pytest.raises(AttributeError, match="unswap"):
        table.half()
    with pytest.raises(ValueError, match=r"\[30, 4\]"):
        table.weight = torch.zeros(30, 5)
    with pytest.raises(ValueError, match=r"\[30, 4\]"):
        table.weight.data = torch.zeros(1)
    with pytest.raises(TypeError, match="tensor"):
        table.weight = None
    with pytest.raises(AttributeError, match="zero_grad"):
        table.weight.grad = None
    with pytest.raises(AttributeError, match="t9"):
        collection.tables.t9  # noqa: B018
    with pytest.raises(KeyError):
        collection.tables["t9"]
    assert list(collection.tables) == ["t0", "t1", "t2", "t3", "t4"]
    assert "5 packed tables: t0" in repr(collection.tables) and "30, 4" in repr(table)
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(other.weight, table.weight)


def test_hooks_on_a_tables_weight_are_refused():
    collection = collection_of()
    with pytest.raises(AttributeError, match="never run"):
        collection.tables.t0.weight.register_hook(print)


@pytest.mark.parametrize("compute", ("parametrized", "pruned"))
def test_the_weight_of_a_computed_matrix_is_not_assigned(compute):
    collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])
    if compute == "pruned":
        prune.l1_unstructured(collection.embedding_bags, "packed_dim4", 3)
    else:
        parametrize.register_parametrization(collection.embedding_bags, "packed_dim4", _Double())
    with pytest.raises(ValueError, match="packed_dim4 is computed"):
        collection.tables.t0.weight = torch.zeros(5, 4)
    with pytest.raises(ValueError, match="packed_dim4 is computed"):
        collection.tables.t0.weight.data = torch.zeros(5, 4)


class _Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def test_a_copy_of_a_tables_weight_is_a_parameter_alone(tmp_path):
    collection = FusedEmbeddingBagCollection([(5, 4), (100_000, 4)])
    weight = collection.tables.t0.weight
    path = tmp_path / "weight.pt"
    torch.save(weight, path)
    assert path.stat().st_size < 10_000
    for other in (torch.load(path), copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(other) is nn.Parameter and torch.equal(other, weight)
        assert other.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_a_list_is_found_by_the_names_in_its_state_dict():
    packed = FusedEmbeddingBagList([nn.EmbeddingBag(12, 5) for _ in range(3)])
    assert torch.equal(getattr(packed, "2").weight, packed[2].weight)  # as distributed checkpoints find it
    with pytest.raises(AttributeError, match="'3'"):
        getattr(packed, "3")
    with pytest.raises(IndexError, match="no table 3; expected -3 to 2"):
        packed[3]
    with pytest.raises(TypeError, match=r"table 2 cannot be replaced"):
        packed[2] = nn.EmbeddingBag(12, 5)


@pytest.mark.parametrize("name", ("tables", "embedding_bags"))
def test_tables_cannot_be_replaced_by_modules(name):
    collection = collection_of()
    with pytest.raises(AttributeError, match="unswap"):
        setattr(collection, name, nn.ModuleDict({"t0": nn.EmbeddingBag(30, 4)}))
    with pytest.raises(TypeError, match=r"'t0' cannot be replaced .* weight, or call recfuse\.unswap"):
        getattr(collection, name)["t0"] = nn.EmbeddingBag(30, 4)
    collection.other = nn.Linear(2, 2)
    assert isinstance(collection.other, nn.Linear)


def test_unsupported_tools_raise_with_a_remedy():
    collection = collection_of()
    with pytest.raises(TypeError, match="unswap"):
        torch.fx.symbolic_trace(collection)
    layers = EmbeddingBag(3, 4), IKBOLinear((3, 4), 2), LinearCompression((3, 4), 2), TargetAttention(8, 2)
    for module in (collection, *layers, nn.Sequential(layers[0])):
        with pytest.raises(NotImplementedError, match=r"cannot be scripted. Call recfuse\.unswap"):
            torch.jit.script(module)
    zeros = {"embedding_bags.t0.weight": torch.zeros(30, 4)}
    with pytest.raises(ValueError, match="functional_call the names of named_parameters"):
        torch.func.functional_call(collection, zeros, lookups_of(collection))


def test_a_list_of_bags_made_by_hand():
    bags = [nn.EmbeddingBag(12, 5, mode="sum") for _ in range(3)]
    packed = FusedEmbeddingBagList(copy.deepcopy(bags))
    indices, offsets = torch.randint(0, 12, (3, 8)), torch.tensor([[0, 3, 3]] * 3)
    for got, bag, own in zip(packed.pool(offsets, indices), bags, indices, strict=True):
        torch.testing.assert_close(got, bag(own, offsets[0]))
    assert len(packed) == 3 and len(packed[1:]) == 2 and len(list(packed)) == 3
    assert list(packed.state_dict()) == ["0.weight", "1.weight", "2.weight"]
    packed.load_state_dict(nn.ModuleList(bags).state_dict())
    with pytest.raises(ValueError, match="empty"):
        FusedEmbeddingBagList([])
    with pytest.raises(ValueError, match="Linear"):
        FusedEmbeddingBagList([nn.Linear(2, 2)])
    with pytest.raises(IndexError):
        packed[3]


class _Scaled(nn.EmbeddingBag):
    def forward(self, *arguments, **options):
        return 2 * super().forward(*arguments, **options)


def _hooked(bag):
    bag.register_forward_hook(lambda module, arguments, output: output * 2)
    return bag


def _pruned(bag):
    prune.l1_unstructured(bag, "weight", amount=2)
    return bag


def _parametrized(bag):
    parametrize.register_parametrization(bag, "weight", nn.Identity())
    return bag


def _replaced(bag):
    bag.forward = lambda *arguments: None
    return bag


@pytest.mark.parametrize(
    ("bag", "words"),
    (
        (lambda: _Scaled(5, 2), "subclass"),
        (lambda: _hooked(nn.EmbeddingBag(5, 2)), "hooks"),
        (lambda: _pruned(nn.EmbeddingBag(5, 2)), "weight that is computed"),
        (lambda: _parametrized(nn.EmbeddingBag(5, 2)), "weight that is computed"),
        (lambda: _replaced(nn.EmbeddingBag(5, 2)), "forward"),
        (lambda: nn.EmbeddingBag(5, 2, max_norm=1), "max_norm"),
        (lambda: nn.EmbeddingBag(5, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: nn.EmbeddingBag(5, 2, sparse=True), "sparse"),
    ),
)
def test_tables_that_one_call_would_change_are_refused(bag, words):
    for make in (FusedEmbeddingBagCollection.from_embedding_bags, FusedEmbeddingBagList):
        with pytest.raises(ValueError, match=words):
            make([nn.EmbeddingBag(5, 2), bag()])


def test_tables_that_are_tied_by_their_data_are_refused():
    bags = [nn.EmbeddingBag(5, 2) for _ in range(3)]
    bags[2].weight.data = bags[0].weight.data
    for make in (FusedEmbeddingBagCollection.from_embedding_bags, FusedEmbeddingBagList):
        with pytest.raises(ValueError, match="table 2 shares memory with table 0"):
            make(bags)
    bags[2].weight = bags[0].weight  # one Parameter of two tables
    assert torch.equal(FusedEmbeddingBagList(bags)[2].weight, bags[0].weight)


def test_strict_loading_speaks_of_tables():
    collection = collection_of()
    state = collection.state_dict()
    del state["embedding_bags.t1.weight"]
    state["embedding_bags.t9.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*embedding_bags.t1.weight.*Unexpected.*t9.weight"):
        collection.load_state_dict(state)
    found = collection.load_state_dict(state, strict=False)
    assert found.missing_keys == ["embedding_bags.t1.weight"]
    assert found.unexpected_keys == ["embedding_bags.t9.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for embedding_bags.t0.weight"):
        collection.load_state_dict({**collection.state_dict(), "embedding_bags.t0.weight": torch.zeros(1, 4)})
    with torch.device("meta"):
        empty = FusedEmbeddingBagCollection([(3, 2), (4, 2)])
    with pytest.raises(
        RuntimeError, match=r"assign=True for packed_dim2, .* found 1 entries .*; expected all entries"
    ):
        empty.load_state_dict({"embedding_bags.t0.weight": torch.zeros(3, 2)}, strict=False, assign=True)
