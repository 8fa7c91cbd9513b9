"""Updates inside the backward graph of a compiled program: the weights change as in an eager program."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import shutil

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection, Table
from recfuse.ops.training.optimizers import STATES
from support.compiled import sees_optimizers

pytestmark = [pytest.mark.long, sees_optimizers]

BACKENDS = ["eager", "aot_eager", *["inductor"] * bool(shutil.which("g++"))]
KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
OPS = torch.ops.recfuse


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


class Model(nn.Module):
    """Tables of several dims, modes and dtypes, a bag of its own, and a layer on top."""

    def __init__(self, checkpointed=False):
        super().__init__()
        tables = [(30, 4), Table(20, 16, mode="mean", padding_idx=2), Table(9, 4, dtype=torch.bfloat16)]
        self.collection = FusedEmbeddingBagCollection(
            [*tables, Table(20, 8, feature_names=("a", "b"), mode="max")]
        )
        self.bag = recfuse.nn.EmbeddingBag(30, 4, mode="sum")
        self.top = nn.Linear(4 + 16 + 4 + 8 + 8 + 4, 3)
        self.checkpointed = checkpointed

    def inner(self, indices, offsets):
        bags = offsets[: (offsets.numel() - 1) // 5] % 30
        parts = self.collection(indices, offsets), self.bag(bags[:, None])
        return self.top(torch.cat(parts, dim=1)).sigmoid()

    def forward(self, indices, offsets):
        if self.checkpointed:
            return checkpoint(self.inner, indices, offsets, use_reentrant=False)
        return self.inner(indices, offsets)


def batch(bags):
    return torch.randint(0, 9, (10 * bags,)), torch.arange(0, 10 * bags + 1, 2)


def trained(model, call, kind, steps=5, **options):
    """Trains with a scheduler, and with weights changed by hand in between; the weights after each step."""
    tables = optim.embedding_parameters(model)
    groups = [{"params": tables[:2]}, {"params": tables[2:], "lr": 0.02}]
    optimizer = getattr(optim, kind)(groups, lr=0.1, **options)
    top = torch.optim.SGD(model.top.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    generator, found = torch.random.fork_rng(), []
    with generator:
        torch.manual_seed(3)
        for step in range(steps):
            call(*batch(4 + step)).square().sum().backward()
            for one in (optimizer, top):
                one.step()
                one.zero_grad()
            scheduler.step()
            if step == 2:
                with torch.no_grad():
                    tables[0].mul_(0.5)
                    tables[-1].data = torch.ones_like(tables[-1])
            found.append([parameter.detach().float().clone() for parameter in model.parameters()])
    return found


# Inductor takes seconds for each kind, which to it is a number among the arguments.
@pytest.mark.parametrize(
    ("backend", "kind"),
    [(name, kind) for name in BACKENDS[:2] for kind in KINDS] + [(name, "Adam") for name in BACKENDS[2:]],
)
def test_compiled_training_is_eager_training(backend, kind):
    model = Model()
    twin = copy.deepcopy(model)
    expected = trained(twin, twin, kind)
    # Sizes that turn out to differ compile a second time: inductor is told at once.
    dynamic = True if backend == "inductor" else None
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for ours, theirs in zip(trained(model, compiled, kind), expected, strict=True):
        close(ours, theirs)
    assert all(parameter.grad is None for parameter in optim.embedding_parameters(model))


FORMS = [("aot_eager", form) for form in ("checkpointed", "frozen", "deferred", "partly")]


@pytest.mark.parametrize(("backend", "form"), FORMS)
def test_forms_of_compiled_training(backend, form):
    model = Model(form == "checkpointed")
    if form == "frozen":
        model.collection.embedding_bags.packed_dim16.requires_grad_(False)
    twin = copy.deepcopy(model)
    options = {"deferred": form == "deferred", "stochastic_rounding": form == "partly"}
    if form == "partly":
        model.bag.weight = nn.Parameter(model.bag.weight.detach().clone(), requires_grad=False)
        twin.bag.weight = nn.Parameter(twin.bag.weight.detach().clone(), requires_grad=False)
    expected = trained(twin, twin, "Adam", **options)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for ours, theirs in zip(trained(model, compiled, "Adam", **options), expected, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("way", ("direct", "deferred", "swapped", "swapped, scheduled"))
def test_a_whole_step_is_compiled(way):
    """The compiler also gets backward() and step()."""
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    theirs = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    if way.startswith("swapped"):
        optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1)]
        schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizers[0], 1.0)] if "scheduled" in way else []
        recfuse.swap(model, optimizers=optimizers, fuse_optimizers=True)
        schedulers += [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)]
    else:
        recfuse.swap(model)
        own = optim.Adagrad(optim.embedding_parameters(model), lr=0.1, deferred=way == "deferred")
        optimizers = [own, torch.optim.Adagrad(model[1].parameters(), lr=0.1)]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5))

    def step(model, optimizers, indices):
        loss = model(indices).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="aot_eager")
    for number in range(4):
        indices = torch.randint(0, 9, (3, 2))
        close(compiled(model, optimizers, indices), step(twin, [theirs], indices))
        for scheduler in schedulers:
            scheduler.step()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            close(one, other)
        if way == "swapped" and number == 1:
            recfuse.unswap(model, optimizers=optimizers)


def test_a_table_that_is_frozen_before_its_compiled_backward_raises():
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.5)
    loss = torch.compile(bag, backend="aot_eager", fullgraph=True)(torch.tensor([[1, 2]])).sum()
    bag.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="was frozen between the forward and the backward pass"):
        loss.backward()
    del optimizer


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_gradients_of_factors_are_those_of_the_old_weights(backend):
    collection = FusedEmbeddingBagCollection([(9, 4), (9, 8)])
    twin = copy.deepcopy(collection)
    optimizer = optim.SGD([next(collection.parameters())], lr=0.5)
    indices, offsets = torch.randint(0, 9, (12,)), torch.arange(0, 13, 3)
    found = []
    for module in (torch.compile(collection, backend=backend, fullgraph=True), twin):
        factors = torch.linspace(-1, 1, 12).requires_grad_()
        module(indices, offsets, factors).square().sum().backward()
        found.append(factors.grad)
    optimizer.step()
    close(*found)
    (first, second), (first_twin, second_twin) = collection.parameters(), twin.parameters()
    close(first.detach(), (first_twin - 0.5 * first_twin.grad).detach())
    close(second.grad, second_twin.grad)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_two_lookups_of_a_table_in_one_program_are_refused(backend):
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.1)
    before = bag.weight.detach().clone()
    indices = torch.tensor([[1, 2]])
    both = torch.compile(lambda: (bag(indices) * bag(indices + 1)).sum(), backend=backend, fullgraph=True)
    with pytest.raises(Exception, match=r"two calls of (one compiled program|compiled programs)"):
        both().backward()
    if backend != "eager":  # it runs the program unchanged
        assert torch.equal(bag.weight, before)
    del optimizer


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_of_programs_in_one_backward_are_refused(backend):
    collection = FusedEmbeddingBagCollection([(9, 4), (9, 8)])
    optimizer = optim.Adam(collection, lr=0.1)
    compiled = torch.compile(collection, backend=backend, fullgraph=True)
    batches = [(torch.randint(0, 9, (12,)), torch.arange(0, 13, 3)) for _ in range(2)]
    words = "two calls of (compiled programs|one compiled program) look rows up in (one|the same) Parameter"
    with pytest.raises(ValueError, match=words):
        sum(compiled(*one).square().sum() for one in batches).backward()
    with pytest.raises(ValueError, match=words):  # again: the failed pass left no state
        sum(compiled(*one).square().sum() for one in batches).backward()
    for one in batches:  # each in a pass of its own
        compiled(*one).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("way", ("hooks", "data"))
def test_no_copy_of_a_weight_is_updated(way, compiled):
    collection = FusedEmbeddingBagCollection([(9, 4), (9, 8)])
    twin = copy.deepcopy(collection)
    optimizers = [optim.Adam(one, lr=0.1) for one in (collection, twin)]
    call = torch.compile(collection, backend="aot_eager", fullgraph=True) if compiled else collection
    one = torch.randint(0, 9, (12,)), torch.arange(0, 13, 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)  # as save_on_cpu on a GPU
    with hooks if way == "hooks" else contextlib.nullcontext():
        loss = call(*one).square().sum()
    if way == "data":
        for weight in collection.parameters():
            weight.data = weight.data.clone()
    if compiled and way == "hooks":
        before = [weight.detach().clone() for weight in collection.parameters()]
        with pytest.raises(ValueError, match="would update a copy of a Parameter"):
            loss.backward()
        assert all(map(torch.equal, before, collection.parameters()))
        return
    loss.backward()
    twin(*one).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for ours, theirs in zip(collection.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


def test_two_programs_of_one_optimizer_are_one_step():
    bags = nn.ModuleList(recfuse.nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2))
    twins = copy.deepcopy(bags)
    indices = torch.tensor([[1, 2], [2, 3]])
    for own, compiled in ((bags, True), (twins, False)):
        optimizer = optim.Adam(own.parameters(), lr=0.1)
        calls = [torch.compile(bag, backend="aot_eager", fullgraph=True) if compiled else bag for bag in own]
        for _ in range(3):
            sum(call(indices).square().sum() for call in calls).backward()
            optimizer.step()
    for one, other in zip(bags.parameters(), twins.parameters(), strict=True):
        close(one, other)


def test_a_second_backward_before_step_is_noticed():
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.1)
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    compiled(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(ValueError, match=r"a second backward\(\) came before step"):
        compiled(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


def test_programs_follow_the_optimizer():
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    indices = torch.tensor([[1, 2]])
    compiled(indices).sum().backward()
    assert bag.weight.grad is not None
    bag.weight.grad = None
    optimizer = optim.SGD(bag, lr=0.5)
    before = bag.weight.detach().clone()
    compiled(indices).sum().backward()
    optimizer.step()
    close(bag.weight.detach()[1:3], before[1:3] - 0.5)
    with torch.no_grad():
        compiled(indices)
    optimizer.step()
    close(bag.weight.detach()[1:3], before[1:3] - 0.5)
    second = optim.Adagrad(bag, lr=0.5)
    compiled(indices).sum().backward()
    second.step()
    close(bag.weight.detach()[1:3], before[1:3] - 1)
    del optimizer, second
    gc.collect()
    compiled(indices).sum().backward()
    close(bag.weight.grad[1:3], torch.ones(2, 4))


def test_an_exported_program_has_no_optimizer():
    bag = recfuse.nn.EmbeddingBag(9, 4, mode="sum")
    optimizer = optim.SGD(bag, lr=0.1)
    exported = torch.export.export(bag, (torch.tensor([[1, 2]]),))
    assert "updated" not in str(exported.graph)
    del optimizer


@pytest.mark.parametrize("kind", range(4))
def test_opcheck_of_the_updates(kind):
    weights = [torch.randn(9, 4), torch.randn(7, 8)]
    states = [
        torch.rand(9 if kind == 2 else (9, 4))
        if weight.shape[0] == 9
        else torch.rand(7 if kind == 2 else (7, 8))
        for weight in weights
        for _ in range(STATES[kind])
    ]
    features = torch.tensor([[0, 0, 9, 4, 0, -1, 0], [1, 0, 7, 8, 1, 2, 4]])
    indices, offsets = torch.randint(0, 7, (12,)), torch.arange(0, 13, 2)
    numbers = torch.tensor([0.1, 0.0, 1e-8, 0.9, 0.99, 1.0, 1.0, 0.0])
    # Its writes are not in its schema, which test_schema checks.
    call = torch.randn(3, 12), weights, states, features, indices, offsets, None, None, numbers, [], kind
    opcheck(
        OPS.fused_embedding_bag_update.default,
        call,
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    rows = torch.tensor([1, 4])
    call = weights[0], states[: STATES[kind]], rows, torch.randn(2, 4), numbers, kind
    opcheck(OPS.rows_update.default, call)
    opcheck(OPS._features_of.default, (features, [1]))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad = torch.randn(3, 12, requires_grad=True)
        call = grad, weights, states, features, indices, offsets, None, None, numbers, [], kind
        OPS.fused_embedding_bag_update(*call).sum().backward()


@pytest.mark.parametrize("gradients", (False, True))
def test_opcheck_of_the_calls(gradients):
    weight = torch.randn(9, 4, requires_grad=gradients)
    numbers, anchor = (
        torch.tensor([0.1, 0, 1e-8, 0.9, 0.99, 1, 1, 0]),
        torch.zeros(0, requires_grad=gradients),
    )
    features = torch.tensor([[0, 0, 9, 4, 0, -1, 0]])
    indices, offsets = torch.randint(0, 9, (12,)), torch.arange(0, 13, 2)
    own = [], [numbers], [anchor], [0], [0, 0, 0]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for operator, call in (
        (OPS._fused_embedding_bag_updated, ([weight], features, indices, offsets, 4)),
        (OPS._embedding_bag_updated, (weight, indices, offsets, "sum", None, True)),
    ):
        opcheck(operator.default, (*own, *call), test_utils=tests)
