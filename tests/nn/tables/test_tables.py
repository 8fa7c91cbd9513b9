"""Packed tables as modules: names, freezing, learning rates of their own, programs, copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, FusedEmbeddingBagList
from recfuse.nn.packed.table import PackedTable
from support.tables.model import LOOKUPS, OFFSETS, Model, assert_equal, backward, init


@pytest.mark.parametrize("method", ("append", "extend", "insert", "pop", "__delitem__", "__iadd__"))
def test_a_list_is_not_changed(method):
    with pytest.raises(TypeError, match=rf"{method} of packed tables is not supported.*unswap"):
        getattr(Model(packed=True).emb_l, method)(1)


def test_a_dictionary_is_not_changed():
    tables = FusedEmbeddingBagCollection([(5, 4), (6, 4)]).tables
    for method in ("pop", "clear", "update", "__delitem__"):
        with pytest.raises(TypeError, match=r"not supported.*unswap"):
            getattr(tables, method)("t0")
    assert list(tables) == ["t0", "t1"] and isinstance(tables, nn.ModuleDict)


def test_each_parameter_of_a_model_is_there_once():
    """As parallel wrappers and param groups collect them, module by module."""
    model = Model(packed=True)
    model.emb_l[0].requires_grad_(False)
    own = [p for module in model.modules() for _, p in module.named_parameters(recurse=False)]
    assert [id(p) for p in own] == [id(p) for p in {p: None for p in own}]
    assert {id(p) for p in own} == {id(p) for p in model.parameters()}
    assert not any(isinstance(p, type(model.emb_l[0].weight)) for p in own)


def test_packed_parameters_are_named_below_their_tables():
    model = nn.Sequential(FusedEmbeddingBagCollection([(5, 4), (6, 4)]))
    assert [name for name, _ in model.named_parameters()] == ["0.embedding_bags.packed_dim4"]
    with pytest.raises(AttributeError, match=r"Set embedding_bags\.packed_dim4"):
        model[0].packed_dim4 = nn.Parameter(torch.zeros(14, 4))


@pytest.mark.parametrize("kind", ("SGD", "Adagrad", "Adam", "RowWiseAdagrad"))
def test_a_table_has_its_own_learning_rate(kind):
    """As the same tables with an optimizer each."""
    models = [Model(packed=True) for _ in range(3)]
    make = getattr(recfuse.optim, kind)
    groups = [
        {"params": models[0].emb_l[2].parameters(), "lr": 0.5},
        {"params": [p for number in (0, 1, 3) for p in models[0].emb_l[number].parameters()]},
    ]
    optimizers = [[make(groups, lr=0.01)], [make(models[1].emb_l, lr=0.5)], [make(models[2].emb_l, lr=0.01)]]
    for model, own in zip(models, optimizers, strict=True):
        backward(model)
        for optimizer in own:
            optimizer.step()
    for number, bag in enumerate(models[0].emb_l):
        torch.testing.assert_close(bag.weight, models[1 if number == 2 else 2].emb_l[number].weight)
    assert len(optimizers[0][0].param_groups[0]["params"]) == 1


def test_a_table_has_a_parameter_of_its_own_for_an_optimizer_of_torch():
    models = Model(packed=True), Model(packed=False)
    (own,) = recfuse.optim.embedding_parameters(models[0].emb_l[2])
    rest = [parameter for parameter in models[0].parameters() if parameter is not own]
    theirs = models[1].emb_l[2].weight
    others = [parameter for parameter in models[1].parameters() if parameter is not theirs]
    for model, groups in zip(models, ((own, rest), (theirs, others)), strict=True):
        optimizer = torch.optim.Adagrad([{"params": [groups[0]], "lr": 0.5}, {"params": groups[1]}], lr=0.01)
        backward(model)
        optimizer.step()
    torch.testing.assert_close(dict(models[0].state_dict()), dict(models[1].state_dict()))
    models[0].load_state_dict(Model(packed=False).state_dict())
    torch.testing.assert_close(models[0](), Model(packed=False)())


@pytest.mark.parametrize("kind", ("SGD", "Adam"))
def test_a_frozen_table_is_not_updated_inside_backward(kind):
    models = Model(packed=True), Model(packed=True)
    optimizers = [getattr(recfuse.optim, kind)(model.emb_l, lr=0.1) for model in models]
    models[0].emb_l[2].requires_grad_(False)
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model)
        optimizer.step()
    for number, (ours, theirs) in enumerate(zip(models[0].emb_l, models[1].emb_l, strict=True)):
        before = Model(packed=False).emb_l[number].weight
        torch.testing.assert_close(ours.weight.detach(), (before if number == 2 else theirs.weight).detach())
    models[0].emb_l[2].requires_grad_(True)
    backward(models[0])
    optimizers[0].step()
    assert not torch.equal(models[0].emb_l[2].weight, Model(packed=False).emb_l[2].weight)


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_a_frozen_table_of_a_program(compiled):
    torch.compiler.reset()
    plain, packed = Model(packed=False), Model(packed=True)
    call = torch.compile(packed, backend="aot_eager", fullgraph=True) if compiled else packed
    for trained in (True, False, True):
        for model, run in ((plain, plain), (packed, call)):
            model.emb_l[0].requires_grad_(trained)
            model.zero_grad()
            run(LOOKUPS, OFFSETS).sum().backward()
        for ours, theirs in zip(packed.emb_l, plain.emb_l, strict=True):
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_tables_are_called_in_a_program():
    torch.compiler.reset()
    packed = Model(packed=True)

    def call(indices):
        return torch.cat([bag(indices, OFFSETS) for bag in packed.emb_l], dim=1)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(LOOKUPS), call(LOOKUPS))


def test_guards_do_not_grow_with_the_tables():
    counts = []
    for tables in (4, 200):
        torch.compiler.reset()
        collection = FusedEmbeddingBagCollection([(5, 4)] * tables)
        batch = torch.zeros(tables, dtype=torch.int64), torch.arange(tables + 1)
        found = []

        def note(guard_manager, found=found):
            found.append(str(guard_manager).count("\n"))

        compiled = torch.compile(collection, backend="eager", fullgraph=True)
        compiled(*batch)
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(collection).forward.__code__)
        note(entries[0].guard_manager)
        counts.append(found[0])
    assert counts[1] <= counts[0] + 8


def test_tied_tables_are_frozen_together():
    bags = [nn.EmbeddingBag(10, 4, mode="sum") for _ in range(3)]
    bags[2].weight = bags[0].weight
    packed = FusedEmbeddingBagList(bags)
    packed[0].requires_grad_(False)
    assert [bag.weight.requires_grad for bag in packed] == [False, True, False]
    packed[2].weight.data.fill_(3)
    assert packed[0].weight.eq(3).all()
    torch.cat(packed.pool([OFFSETS] * 3, [LOOKUPS] * 3)).sum().backward()
    assert [bag.weight.grad is None for bag in packed] == [True, False, True]


def test_a_table_outlives_its_model_and_a_model_its_tables():
    model = Model(packed=True)
    table, want = model.emb_l[1], model.emb_l[1].weight.detach().clone()
    matrices = [torch.utils.weak.WeakTensorKeyDictionary({p: 0}) for p in model.emb_l.parameters()]
    del model
    assert torch.equal(table.weight, want) and len(matrices[0]) == 1
    with pytest.raises(ValueError, match="its module is gone"):
        table.requires_grad_(False)
    del table
    assert [len(matrix) for matrix in matrices] == [0, 0]  # without the garbage collector


def test_a_swapped_model_is_swapped_once_and_unswapped_with_its_flags():
    model = Model(packed=True)
    model.emb_l[0].requires_grad_(False)
    report = recfuse.swap(model)
    assert [entry.action for entry in report.entries] == ["already"]
    assert all(type(bag) is PackedTable for bag in model.emb_l)
    bags = nn.Module()
    bags.emb_l = nn.ModuleList(copy.deepcopy(bag) for bag in model.emb_l)
    assert [bag.weight.requires_grad for bag in bags.emb_l] == [False, True, True, True]


def collection_of_torchrec():
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    tables = [
        configs.EmbeddingBagConfig(name=f"t{n}", num_embeddings=9, embedding_dim=4, feature_names=[f"f{n}"])
        for n in range(3)
    ]
    return nn.Sequential(modules.EmbeddingBagCollection(tables))


def test_tables_of_torchrec():
    """Filters by name, freezing, and initialisation, as before ``swap``; then ``unswap``."""
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    plain = collection_of_torchrec()
    packed = copy.deepcopy(plain)
    recfuse.swap(packed)
    assert all("embedding_bags" in name for name, _ in packed.named_parameters())
    assert [name for name, _ in packed.named_modules()] == [name for name, _ in plain.named_modules()]
    batch = jagged.KeyedJaggedTensor(["f0", "f1", "f2"], torch.arange(6), offsets=torch.arange(0, 7, 1))
    for model in (plain, packed):
        model.apply(init)
        model.get_submodule("0.embedding_bags.t1").requires_grad_(False)
        model(batch).values().sum().backward()
    assert_equal(dict(packed.state_dict()), dict(plain.state_dict()))
    for ours, theirs in zip(packed[0].embedding_bags.values(), plain[0].embedding_bags.values(), strict=True):
        assert_equal(ours.weight.grad, theirs.weight.grad)
    assert_equal(packed(batch).values().detach(), plain(batch).values().detach())
    recfuse.unswap(packed)
    assert_equal(dict(packed.state_dict()), dict(plain.state_dict()))
    assert [p.requires_grad for p in packed.parameters()] == [True, False, True]
    assert [name for name, _ in packed.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_names_in_an_optimizer_of_torchrecs_tables():
    packed = collection_of_torchrec()
    optimizer = torch.optim.SGD(list(packed.named_parameters()), lr=0.1)
    names = list(optimizer.param_groups[0]["param_names"])
    recfuse.swap(packed, optimizers=[optimizer])
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in packed.named_parameters()]
    recfuse.unswap(packed, optimizers=[optimizer])
    assert optimizer.param_groups[0]["param_names"] == names


def test_an_optimizer_that_is_not_row_wise_is_refused_of_a_collection():
    class Scaled(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    collection = FusedEmbeddingBagCollection([(5, 4), (6, 4)])
    packed = collection_of_torchrec()
    recfuse.swap(packed)
    recfuse.unswap(packed)  # has no packed Parameters any more
    optimizer = Scaled(collection.parameters(), lr=0.1)
    collection(torch.arange(4), torch.arange(5)).sum().backward()
    with pytest.raises(ValueError, match="Scaled is about to make a step of a packed Parameter"):
        optimizer.step()


def test_columns_have_tables_that_are_modules():
    column = recfuse.nn.columns.Identity
    columns = recfuse.nn.EmbeddingColumns([column(name, num_embeddings=9, embedding_dim=4) for name in "ab"])
    batch = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 3])}
    columns.apply(init)
    columns.tables.a.requires_grad_(False)
    out = columns(batch)
    names = [name for name, _ in columns.named_parameters()]
    assert names == ["tables.packed_dim4", "tables.packed_dim4_frozen"]
    torch.testing.assert_close(out, columns.to_torch()(batch))
    out.sum().backward()
    assert columns.tables.a.weight.grad is None and columns.tables.b.weight.grad.sum() == 8
    columns.tables.a.requires_grad_(True)
    torch.testing.assert_close(columns(batch), out)


def test_unswap_gives_optimizers_the_state_of_a_frozen_table():
    plain = collection_of_torchrec()
    packed = copy.deepcopy(plain)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (plain, packed)]
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    batch = jagged.KeyedJaggedTensor(["f0", "f1", "f2"], torch.arange(6), offsets=torch.arange(0, 7, 1))
    recfuse.swap(packed, optimizers=[optimizers[1]])
    for trained in (True, False, False, True):
        for model, optimizer in zip((plain, packed), optimizers, strict=True):
            model.get_submodule("0.embedding_bags.t1").requires_grad_(trained)
            optimizer.zero_grad()
            model(batch).values().square().sum().backward()
            optimizer.step()
            if not trained and model is packed:
                recfuse.unswap(packed, optimizers=[optimizer])
    assert_equal(dict(packed.state_dict()), dict(plain.state_dict()))
    states = ([state["sum"] for state in one.state_dict()["state"].values()] for one in optimizers)
    assert_equal(*states)


def test_a_shallow_copy_follows():
    packed = FusedEmbeddingBagList([nn.EmbeddingBag(10, 4, mode="sum") for _ in range(3)])
    twin, want = copy.copy(packed), packed.pool([OFFSETS] * 3, [LOOKUPS] * 3)
    twin[1].requires_grad_(False)
    for module in (packed, twin):
        assert_equal(module.pool([OFFSETS] * 3, [LOOKUPS] * 3), want)
    del twin
    packed[1].requires_grad_(True)
    assert_equal(packed.pool([OFFSETS] * 3, [LOOKUPS] * 3), want)


def test_quantisers_are_refused_where_they_would_skip_a_module():
    qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    bag = nn.Sequential(nn.EmbeddingBag(9, 4))
    recfuse.swap(bag)
    torchrec = collection_of_torchrec()
    recfuse.swap(torchrec)
    for model in (bag, torchrec, Model(packed=True)):
        of_others = copy.deepcopy(model)
        torch.ao.quantization.propagate_qconfig_(of_others, {nn.Linear: qconfig})
        with pytest.raises(ValueError, match=r"qconfig of .* expected None.*recfuse\.unswap"):
            torch.ao.quantization.propagate_qconfig_(model, {"": qconfig})
    prepared = nn.Sequential(nn.EmbeddingBag(9, 4))
    prepared[0].qconfig = qconfig
    assert "qconfig" in recfuse.swap(prepared).left[0].detail
    prepared = collection_of_torchrec()
    prepared[0].qconfig = qconfig
    assert "qconfig" in recfuse.swap(prepared).left[0].detail
