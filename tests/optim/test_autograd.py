"""Updates inside backward(): the effects of a backward pass, a hook, a copy or a second call."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.ops.updates import update_of
from support.collection import COPIES, collection_of, lookups_of

SPECS = [(20, 4), (9, 8), Table(12, 4, mode="mean")]
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.fixture
def collection():
    return collection_of(SPECS, sparse=True)


def twins(collection, kind="Adagrad"):
    """The collection with an optimizer of ours, and a copy with torch's."""
    twin = copy.deepcopy(collection)
    return (
        (collection, getattr(optim, kind)(collection, lr=0.1)),
        (twin, getattr(torch.optim, kind)(twin.parameters(), lr=0.1)),
    )


def same_weights(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(one, other)


def train(pairs, loss, steps=3):
    for _ in range(steps):
        given = lookups_of(pairs[0][0])
        for module, optimizer in pairs:
            optimizer.zero_grad()
            loss(module, *given).backward()
            optimizer.step()
    same_weights(pairs[0][0], pairs[1][0])


def test_two_calls_of_one_collection_are_one_step(collection):
    def loss(module, indices, offsets):
        return (module(indices, offsets) * module(indices.flip(0) % 9, offsets).sigmoid()).sum()

    train(twins(collection), loss)


def test_a_call_of_one_table_and_a_call_of_the_collection(collection):
    def loss(module, indices, offsets):
        alone = module.tables["t0"](indices[:4] % 9, torch.tensor([0, 2, 4]))
        return module(indices, offsets).square().sum() + alone.square().sum()

    train(twins(collection), loss)


def test_tied_tables():
    bags = [recfuse.nn.EmbeddingBag(9, 4, mode="sum", sparse=True) for _ in range(2)]
    bags[1].weight = bags[0].weight
    model = nn.ModuleList(bags)
    twin = copy.deepcopy(model)
    ours, theirs = optim.Adagrad(model, lr=0.1), torch.optim.Adagrad(twin.parameters(), lr=0.1)
    for _ in range(3):
        indices = torch.randint(0, 9, (2, 5, 3))
        for module, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            (module[0](indices[0]) * module[1](indices[1])).sum().backward()
            optimizer.step()
    same_weights(model, twin)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(collection, reentrant):
    def loss(module, indices, offsets):
        start = torch.ones((), requires_grad=True)

        def part(factor):
            return (module(indices, offsets) * factor).sigmoid()

        return checkpoint(part, start, use_reentrant=reentrant).square().sum()

    train(twins(collection), loss)


@pytest.mark.parametrize("detached", (False, True))
def test_a_reentrant_checkpoint_that_would_recompute_from_updated_rows_is_refused(collection, detached):
    optimizer, start = optim.SGD(collection, lr=0.5), torch.ones(1, requires_grad=True)
    given = lookups_of(collection)

    def part(scale):
        pooled = collection(*given)
        return (pooled.detach() if detached else pooled) * scale

    middle = checkpoint(part, start, use_reentrant=True).mean()
    loss = checkpoint(lambda scale: collection(*given) * scale, middle, use_reentrant=True).square().sum()
    with pytest.raises(ValueError, match=r"would read rows that the same backward.*use_reentrant=False"):
        loss.backward()
    del optimizer


def test_checkpointed_calls_of_one_collection_are_recomputed_from_the_old_weights(collection):
    def loss(module, indices, offsets):
        def part(factor):
            return (module(indices, offsets) * factor).sigmoid()

        start = torch.ones((), requires_grad=True)
        middle = checkpoint(part, start, use_reentrant=False).mean()
        return checkpoint(part, middle, use_reentrant=False).square().sum()

    train(twins(collection), loss)


def test_gradients_of_factors_are_those_of_the_old_weights():
    collection = collection_of([(20, 4), (9, 8)], sparse=True)
    twin = copy.deepcopy(collection)
    optim.SGD(collection, lr=0.5)
    given, found = lookups_of(collection), []
    for module in (collection, twin):
        factors = torch.linspace(-1, 1, given[0].numel()).requires_grad_()
        module(*given, factors).square().sum().backward()
        found.append(factors.grad)
    close(*found)


def test_a_second_backward_before_step_is_refused(collection):
    optimizer = optim.Adagrad(collection, lr=0.1)
    given = lookups_of(collection)
    out = collection(*given).sum()
    out.backward(retain_graph=True)
    weights = copy.deepcopy(collection.state_dict())
    for second in (out, collection(*given).sum()):
        with pytest.raises(ValueError, match=r"second backward\(\) came before step.*deferred=True"):
            second.backward()
        for name, value in collection.state_dict().items():
            assert torch.equal(value, weights[name])
    optimizer.step()
    out.backward()  # the graph may be used again
    optimizer.step()


def test_passes_for_other_tensors_update_nothing(collection):
    optimizer = optim.SGD(collection, lr=0.5)
    before = copy.deepcopy(collection.state_dict())
    given = lookups_of(collection)
    scale = torch.ones((), requires_grad=True)

    def out():
        return (collection(*given) * scale).square().sum()

    torch.autograd.grad(out(), scale)
    out().backward(inputs=[scale])
    with torch.no_grad():
        out()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(out(), list(collection.parameters()))
    optimizer.step()
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])
    scale.grad = None
    out().backward()
    assert scale.grad is not None and not torch.equal(
        collection.tables["t0"].weight, before["embedding_bags.t0.weight"]
    )


def test_frozen_and_unfrozen(collection):
    first, second = collection.parameters()
    optimizer = optim.Adam(collection, lr=0.1)
    twin = copy.deepcopy(collection)
    theirs = torch.optim.SparseAdam(list(twin.parameters()), lr=0.1)
    for step in range(5):
        for module in (collection, twin):
            next(module.parameters()).requires_grad_(step not in (1, 2))
        given = lookups_of(collection)
        for module, one in ((collection, optimizer), (twin, theirs)):
            one.zero_grad()
            module(*given).square().sum().backward()
            one.step()
        same_weights(collection, twin)
    state = optimizer.state_dict()["state"]
    assert [state[number]["step"] for number in (0, 1)] == [3, 5]
    assert theirs.state_dict()["state"][0]["step"] == 3
    assert update_of(first).updater is not update_of(second).updater


def test_some_tables_of_a_call_belong_to_another_optimizer(collection):
    twin = copy.deepcopy(collection)
    pairs = [
        (collection, optim.Adagrad([next(collection.parameters())], lr=0.1)),
        (twin, torch.optim.Adagrad([next(twin.parameters())], lr=0.1)),
    ]
    train(pairs, lambda module, *given: module(*given).square().sum())
    assert [parameter.grad is None for parameter in collection.parameters()] == [True, False]
    for one, other in zip(list(collection.parameters())[1:], list(twin.parameters())[1:], strict=True):
        close(one.grad.to_dense(), other.grad.to_dense())


def test_groups_have_their_own_numbers(collection):
    ours, theirs = (
        [{"params": [first], "lr": 0.3}, {"params": [second], "lr": 0.01}]
        for first, second in (list(one.parameters()) for one in (collection, copy.deepcopy(collection)))
    )
    twin = FusedEmbeddingBagCollection(SPECS, sparse=True)
    twin.load_state_dict(collection.state_dict())
    for group, parameter in zip(theirs, twin.parameters(), strict=True):
        group["params"] = [parameter]
    train(
        [(collection, optim.Adagrad(ours)), (twin, torch.optim.Adagrad(theirs))],
        lambda module, *given: module(*given).square().sum(),
    )


@pytest.mark.parametrize("use", ("penalty", "torch's module", "functional_call", "view"))
def test_a_gradient_of_another_use_is_refused(use):
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.1)
    indices = torch.tensor([[1, 2]])
    if use == "penalty":
        loss = bag(indices).sum() + bag.weight.square().sum()
    elif use == "view":
        loss = bag(indices).sum() + bag.weight[:2].sum()
    elif use == "functional_call":
        loss = torch.func.functional_call(bag, {"weight": bag.weight * 1}, (indices,)).sum()
    else:
        loss = nn.functional.embedding_bag(indices, bag.weight, mode="sum").sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace|has a gradient, where backward"):
        loss.backward()
        optimizer.step()
    bag.weight.grad = None


def test_deferred_refuses_dense_gradients():
    bag = recfuse.nn.EmbeddingBag(9, 4)
    optimizer = optim.SGD(bag, lr=0.1, deferred=True)
    (bag(torch.tensor([[1]])).sum() + bag.weight.sum()).backward()
    with pytest.raises(ValueError, match="expected a gradient that is sparse by rows"):
        optimizer.step()


def test_functorch_sees_ordinary_weights(collection):
    given = lookups_of(collection)
    named = dict(collection.named_parameters())

    def loss(weights):
        return torch.func.functional_call(collection, weights, given).square().sum()

    expected = torch.func.grad(loss)({name: value.detach() for name, value in named.items()})
    optim.SGD(collection, lr=0.5)
    before = copy.deepcopy(collection.state_dict())
    found = torch.func.grad(loss)(named)
    for name, value in found.items():
        close(value.to_dense(), expected[name].to_dense())
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", ("register_hook", "register_post_accumulate_grad_hook"))
def test_hooks_on_the_parameter_are_refused(collection, kind):
    optimizer = optim.SGD(collection, lr=0.1)
    handle = getattr(next(collection.parameters()), kind)(lambda *_: None)
    given = lookups_of(collection)
    for call in (lambda: collection(*given), optimizer.step):
        with pytest.raises(ValueError, match="has a hook, which would never run"):
            call()
    handle.remove()
    collection(*given).sum().backward()
    optimizer.step()


def test_hooks_run_with_deferred(collection):
    optimizer = optim.SGD(collection, lr=0.1, deferred=True)
    seen = []
    next(collection.parameters()).register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.is_coalesced())
    )
    collection(*lookups_of(collection)).sum().backward()
    optimizer.step()
    assert len(seen) == 1


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_model_belongs_to_no_optimizer(collection, way):
    optimizer = optim.SGD(collection, lr=0.1)
    twin = COPIES[way](collection)
    given = lookups_of(collection)
    twin(*given).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    collection(*given).sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in collection.parameters())


@pytest.mark.parametrize("way", (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))))
def test_a_copy_of_both_trains_on(collection, way):
    optimizer = optim.Adam(collection, lr=0.1)
    collection(*lookups_of(collection)).square().sum().backward()
    optimizer.step()
    pairs = [(collection, optimizer), way((collection, optimizer))]
    train(pairs, lambda module, *given: module(*given).square().sum())
    assert all(parameter.grad is None for parameter in pairs[1][0].parameters())
    assert optimizer.state_dict()["state"][1]["step"] == 4


def test_a_state_dict_is_loaded_with_weights_only(collection):
    optim.Adagrad(collection)
    for content in (collection.state_dict(), list(collection.parameters())):
        stream = io.BytesIO()
        torch.save(content, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)


def test_gradients_return_without_the_optimizer(collection):
    optimizer = optim.SGD(collection, lr=0.1)
    given = lookups_of(collection)
    out = collection(*given).sum()
    del optimizer
    gc.collect()
    with pytest.raises(ValueError, match=r"optimizer .* is gone"):
        out.backward()
    collection(*given).sum().backward()
    assert all(parameter.grad is not None for parameter in collection.parameters())


def test_a_later_optimizer_takes_over(collection):
    first, second = optim.SGD(collection, lr=0.1), optim.Adagrad(collection, lr=0.1)
    collection(*lookups_of(collection)).sum().backward()
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        first.step()
    second.step()
    del first
    gc.collect()
    collection(*lookups_of(collection)).sum().backward()
    second.step()
    assert all(parameter.grad is None for parameter in collection.parameters())


def test_weights_changed_by_hand_count(collection):
    pairs = twins(collection)
    for _ in range(3):
        for module, _ in pairs:
            with torch.no_grad():
                next(module.parameters()).mul_(0.5)
            module.tables["t1"].weight.data = torch.ones(9, 8)
            module.load_state_dict(module.state_dict())
        train(pairs, lambda module, *given: module(*given).square().sum(), steps=1)


def test_a_weight_that_a_graph_kept_must_not_be_read_after_its_update():
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.1)
    kept = bag.weight.detach().requires_grad_()
    product = (bag.weight.detach() * kept).sum()  # keeps the weight, not its gradient
    bag(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        product.backward()


def test_a_failing_pass_has_no_effect(collection):
    optimizer = optim.SGD(collection, lr=0.1)
    given = lookups_of(collection)
    before = copy.deepcopy(collection.state_dict())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    start = torch.ones(collection.layout.output_dim, requires_grad=True)
    with pytest.raises(ArithmeticError):
        (collection(*given) * Fails.apply(start)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in collection.state_dict().items())
    collection(*given).sum().backward()
    optimizer.step()


def test_threads_train_models_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    def trained(seed):
        generator = torch.Generator().manual_seed(seed)
        bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
        nn.init.ones_(bag.weight)
        optimizer = optim.Adagrad(bag, lr=0.1)
        for _ in range(10):
            bag(torch.randint(0, 9, (4, 3), generator=generator)).square().sum().backward()
            optimizer.step()
        return bag.weight.detach()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(trained, range(8)))
    for seed, weight in enumerate(found):
        assert torch.equal(weight, trained(seed))
