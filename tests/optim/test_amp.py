"""Gradient scalers, clipping and accumulation with deferred optimizers; direct optimizers refuse them."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from recfuse.ops.training.optimizers import GRAD_SCALE, SKIP
from recfuse.ops.updates import update_of
from support.collection import collection_of, lookups_of
from support.compiled import sees_optimizers

close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
SPECS = [(20, 4), (9, 8)]


@pytest.fixture
def collection():
    return collection_of(SPECS, sparse=True)


@pytest.fixture(autouse=True)
def no_scaler_is_left():
    yield
    gc.collect()


@pytest.fixture
def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


@pytest.mark.parametrize("unscaled", (False, True))
@pytest.mark.parametrize("kind", ("SGD", "Adagrad", "Adam"))
def test_a_scaler(collection, scaler, kind, unscaled):
    theirs = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.SparseAdam}
    twin = copy.deepcopy(collection)
    optimizer = getattr(optim, kind)(collection, lr=0.1, deferred=True)
    other = theirs[kind](list(twin.parameters()), lr=0.1)
    for step in range(6):
        given = lookups_of(collection)
        bad = step in (1, 4)
        scaler.scale(collection(*given).square().sum() * (torch.inf if bad else 1)).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not bad:
            twin(*given).square().sum().backward()
            other.step()
            other.zero_grad()
        for one, reference in zip(collection.parameters(), twin.parameters(), strict=True):
            close(one, reference)
        numbers = update_of(next(collection.parameters())).updater.numbers
        assert numbers[[GRAD_SCALE, SKIP]].tolist() == [1, 0]
    assert scaler.get_scale() == 1024 / 4
    if kind == "Adam":
        assert optimizer.state_dict()["state"][0]["step"] == 4


def test_a_scaler_is_refused_before_it_does_harm(collection, scaler):
    optimizer = optim.SGD(collection, lr=0.1)
    before = copy.deepcopy(collection.state_dict())
    with pytest.raises(ValueError, match=r"a GradScaler is in use.*deferred=True"):
        scaler.scale(collection(*lookups_of(collection)).sum()).backward()
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(ValueError, match=r"step\(\) is called by a GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("made_before", (False, True))
def test_a_scaler_that_begins_after_the_first_step_is_refused(collection, made_before):
    scaler = torch.amp.GradScaler("cpu") if made_before else None
    optimizer = optim.SGD(collection, lr=0.1)
    for _ in range(2):
        collection(*lookups_of(collection)).sum().backward()
        optimizer.step()  # by hand, as below
    before = [parameter.detach().clone() for parameter in collection.parameters()]
    scaler = scaler or torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        scaler.scale(collection(*lookups_of(collection)).sum()).backward()
    assert all(map(torch.equal, collection.parameters(), before))


def test_a_scaler_that_takes_the_place_of_another_is_refused(collection):
    optimizer = optim.SGD(collection, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    collection(*lookups_of(collection)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")  # as many as before
    before = [parameter.detach().clone() for parameter in collection.parameters()]
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        scaler.scale(collection(*lookups_of(collection)).sum()).backward()
    assert all(map(torch.equal, collection.parameters(), before))


def test_a_scaler_of_a_class_made_later_is_refused(collection):
    optimizer = optim.SGD(collection, lr=0.1)
    collection(*lookups_of(collection)).sum().backward()
    optimizer.step()
    scaler = type("Later", (torch.amp.GradScaler,), {})("cpu")
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        scaler.scale(collection(*lookups_of(collection)).sum()).backward()


def test_a_scaler_that_is_off_does_no_harm(collection):
    optimizer = optim.SGD(collection, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(collection(*lookups_of(collection)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("norm_type", (2.0, 1.0, torch.inf))
@pytest.mark.parametrize("max_norm", (0.5, 1e6))
def test_clipping(collection, norm_type, max_norm):
    dense = nn.Linear(12, 2)
    twins = collection_of(SPECS, sparse=False), copy.deepcopy(dense)
    twins[0].load_state_dict(collection.state_dict())
    optimizer = optim.SGD(collection, lr=0.1, deferred=True)
    given = [lookups_of(collection) for _ in range(2)]
    for table, top in ((collection, dense), twins):
        for one in given:  # accumulates
            top(table(*one)).square().sum().backward()
    own = [*collection.parameters(), *dense.parameters()]
    theirs = [*twins[0].parameters(), *twins[1].parameters()]
    norm = optim.clip_grad_norm_(own, max_norm, norm_type)
    close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for one, other in zip(own, theirs, strict=True):
        close(one.grad.to_dense(), other.grad, rtol=1e-4, atol=1e-5)
    before = [parameter.detach().clone() for parameter in collection.parameters()]
    optimizer.step()
    for old, new, other in zip(before, collection.parameters(), theirs, strict=False):
        close(new.detach(), old - 0.1 * other.grad, rtol=1e-4, atol=1e-5)


def test_clipping_of_a_norm_that_is_not_finite():
    parameter = nn.Parameter(torch.zeros(3, 2))
    assert optim.clip_grad_norm_(parameter, 1.0) == 0
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), torch.inf), (3, 2))
    with pytest.raises(RuntimeError, match="non-finite"):
        optim.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("function", ("clip_grad_norm_", "average_gradients"))
def test_utilities_refuse_gradients_applied_in_backward(collection, function):
    optimizer, given = optim.Adagrad(collection, lr=0.1), lookups_of(collection)
    collection(*given).sum().backward()
    use = functools.partial(
        getattr(optim, function), collection.parameters(), **({"max_norm": 1} if "clip" in function else {})
    )
    with pytest.raises(ValueError, match=r"updated inside backward\(\) by recfuse.optim.Adagrad"):
        use()
    del optimizer
    gc.collect()
    optim.clip_grad_norm_(collection.parameters(), 1.0)
    collection.requires_grad_(False)
    optim.clip_grad_norm_(collection.parameters(), 1.0)


def test_gradients_accumulate(collection):
    twin = copy.deepcopy(collection)
    pairs = [
        (collection, optim.Adagrad(collection, lr=0.1, deferred=True)),
        (twin, torch.optim.Adagrad(twin.parameters(), lr=0.1)),
    ]
    for _ in range(2):
        given = [lookups_of(collection) for _ in range(3)]
        for module, optimizer in pairs:
            optimizer.zero_grad()
            for one in given:
                module(*one).square().mean().backward()
            optimizer.step()
    for one, other in zip(collection.parameters(), twin.parameters(), strict=True):
        close(one, other)


def swapped():
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    return model, optimizer, torch.tensor([[1, 2], [3, 3]])


def test_a_scaler_that_begins_later_is_refused_by_a_swapped_optimizer():
    model, optimizer, indices = swapped()
    model(indices).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"a GradScaler is in use.*recfuse.swap without fuse_optimizers"):
        scaler.scale(model(indices).sum()).backward()
    assert all(map(torch.equal, model.parameters(), before))
    recfuse.unswap(model, optimizers=[optimizer])


@pytest.mark.parametrize("way", ("unscale_", "step"))
@pytest.mark.parametrize("make", ("swapped", "by hand"))
def test_a_scaler_that_is_not_seen_finds_no_gradients(make, way):
    model, optimizer, indices = swapped()
    if make == "by hand":
        model = nn.Sequential(recfuse.nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
        optimizer = optim.SGD(model[0], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    (model(indices).sum() * scaler.get_scale()).backward()  # as a subclass with a scale() of its own
    with pytest.raises(ValueError, match=r"reads the gradient of a Parameter of shape \[9, 4\]"):
        getattr(scaler, way)(optimizer)


@pytest.mark.parametrize("deferred", (False, True))
def test_a_scaler_of_another_model_does_no_harm(collection, scaler, deferred, monkeypatch):
    monkeypatch.setattr(gc, "get_objects", None)  # no step may walk over them
    other = nn.Linear(3, 1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    twin = copy.deepcopy(collection)
    optimizer = optim.SGD(collection, lr=0.1, deferred=deferred)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(other(torch.ones(2, 3)).sum()).backward()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        given = lookups_of(collection)
        for module, one in ((collection, optimizer), (twin, reference)):
            one.zero_grad()
            module(*given).square().sum().backward()
            one.step()
    for one, expected in zip(collection.parameters(), twin.parameters(), strict=True):
        close(one, expected)


def test_losses_of_a_list_are_seen(collection, scaler):
    optimizer = optim.SGD(collection, lr=0.1)
    first, second = scaler.scale([collection(*lookups_of(collection)).sum() for _ in range(2)])
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        (first + second).backward()
    del optimizer


@sees_optimizers
def test_compiled_programs_have_applied_gradients_too(collection, scaler):
    optimizer, given = optim.SGD(collection, lr=0.1), lookups_of(collection)
    compiled = torch.compile(collection, backend="aot_eager")
    before = [parameter.detach().clone() for parameter in collection.parameters()]
    with pytest.raises(ValueError, match="a GradScaler is in use"):
        scaler.scale(compiled(*given).sum()).backward()
    assert all(map(torch.equal, collection.parameters(), before))
    compiled(*given).sum().backward()
    with pytest.raises(ValueError, match="reads the gradient of a Parameter"):
        nn.utils.clip_grad_norm_(collection.parameters(), 1.0)
    optimizer.step()
