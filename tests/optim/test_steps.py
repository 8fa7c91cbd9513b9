"""Steps of fused optimizers: against plain PyTorch in float64, and against torch's own optimizers."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.collection import by_hand, collection_of, lookups_of, tables_of
from support.reference import Hyper, assert_close_to_reference, updated

KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")
TORCH = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.SparseAdam,
}
SPECS = (
    Table(30, 4),
    Table(20, 16, mode="mean", padding_idx=2),
    Table(50, 8, feature_names=("a", "b")),
    (5, 1),
)
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def looked_up(collection, indices, offsets):
    """Returns for each matrix, [rows], whether a lookup of the row counts."""
    found = [torch.zeros(weight.shape[0], dtype=torch.bool) for weight in collection.packed_weights()]
    tables = tables_of(collection)
    bags = (offsets.numel() - 1) // len(tables)
    for number, table in enumerate(tables):
        own = indices[offsets[number * bags] : offsets[(number + 1) * bags]]
        if table.padding_idx is not None:
            own = own[own != table.padding_idx]
        found[table.spec.matrix][own + table.spec.first_row] = True
    return found


def names_of(kind):
    return {"SGD": (), "Adam": ("exp_avg", "exp_avg_sq")}.get(kind, ("sum",))


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_reference(kind, weighted, deferred):
    specs = [Table(9, 4), Table(30, 4), Table(7, 3)] if weighted else SPECS
    collection = collection_of(specs)
    hyper = Hyper(weight_decay=0.01, betas=(0.8, 0.95)) if kind == "Adam" else Hyper(weight_decay=0.01)
    options = {} if kind == "SGD" else {"eps": hyper.eps}
    options |= {"betas": hyper.betas} if kind == "Adam" else {}
    optimizer = getattr(optim, kind)(collection, hyper.lr, weight_decay=0.01, deferred=deferred, **options)
    for step in range(1, 4):
        indices, offsets = lookups_of(collection)
        factors = torch.rand(indices.numel()) if weighted else None
        wide = copy.deepcopy(collection).double()
        before = [
            (
                parameter.detach().clone(),
                [optimizer.state[parameter][name].clone() for name in names_of(kind)],
            )
            for parameter in collection.parameters()
        ]
        tables = [table.weight for table in wide.tables.values()]
        out = by_hand(
            wide, indices, offsets, None if factors is None else factors.double(), dict(enumerate(tables))
        )
        out.square().sum().backward()
        collection(indices, offsets, factors).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = looked_up(collection, indices, offsets)
        for (weight, states), parameter, own, reference in zip(
            before, collection.parameters(), rows, wide.parameters(), strict=True
        ):
            new, kept = updated(kind, weight, states, reference.grad, own, step, hyper)
            close(parameter.double(), new)
            assert torch.equal(parameter[~own], weight[~own])
            for name, state in zip(names_of(kind), kept, strict=True):
                close(optimizer.state[parameter][name].double(), state)


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("kind", TORCH)
def test_training_is_that_of_torchs_optimizer(kind, deferred):
    ours = collection_of(SPECS, sparse=True)
    theirs = copy.deepcopy(ours)
    pairs = [
        (ours, getattr(optim, kind)(ours, lr=0.1, maximize=True, deferred=deferred)),
        (theirs, TORCH[kind](list(theirs.parameters()), lr=0.1, maximize=True)),
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pairs]
    for _ in range(5):
        indices, offsets = lookups_of(ours)
        for (module, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            optimizer.zero_grad()
            module(indices, offsets).square().mean().backward()
            optimizer.step()
            scheduler.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(one, other)
            assert deferred or one.grad is None


@pytest.mark.parametrize("kind", ("SGD", "Adagrad"))
def test_tables_pooled_by_max_train_as_torchs(kind):
    ours = collection_of()
    theirs = copy.deepcopy(ours)
    pairs = [(ours, getattr(optim, kind)(ours, lr=0.1)), (theirs, TORCH[kind](theirs.parameters(), lr=0.1))]
    for _ in range(4):
        indices, offsets = lookups_of(ours)
        for module, optimizer in pairs:
            optimizer.zero_grad()
            module(indices, offsets).square().mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(one, other)


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("mode", ("sum", "mean", "max", "weighted", "2-D"))
def test_a_single_bag(mode, deferred):
    pool = "sum" if mode in ("weighted", "2-D") else mode
    sparse = mode != "max"
    bag = recfuse.nn.EmbeddingBag(20, 6, mode=pool, sparse=sparse, padding_idx=3, max_norm=2.0)
    twin = nn.EmbeddingBag(20, 6, mode=pool, sparse=sparse, padding_idx=3, max_norm=2.0)
    twin.load_state_dict(bag.state_dict())
    if mode == "max" and deferred:
        twin.sparse = False
    pairs = (
        (bag, optim.Adagrad(bag, lr=0.1, deferred=deferred)),
        (twin, torch.optim.Adagrad([twin.weight], lr=0.1)),
    )
    for _ in range(3):
        given = (torch.randint(0, 20, (5, 4)), None) if mode == "2-D" else (
            torch.randint(0, 20, (20,)),
            torch.arange(0, 20, 4),
        )  # fmt: skip
        factors = torch.rand(20, requires_grad=True) if mode == "weighted" else None
        grads = []
        for module, optimizer in pairs:
            optimizer.zero_grad()
            module(*given, factors).square().sum().backward()
            optimizer.step()
            if factors is not None:
                grads.append(factors.grad)
                factors.grad = None
        close(bag.weight, twin.weight)
        if grads:
            close(*grads)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_half_tables_are_rounded_once(kind, dtype):
    collection = collection_of([(30, 8), (20, 8)]).to(dtype)
    wide = copy.deepcopy(collection).float()
    pairs = [(one, getattr(optim, kind)(one, lr=0.1)) for one in (collection, wide)]
    indices, offsets = lookups_of(collection)
    scale = torch.randn(6, 16).to(dtype)
    for module, optimizer in pairs:
        (module(indices, offsets) * scale.to(next(module.parameters()).dtype)).sum().backward()
        optimizer.step()
    for half, full in zip(collection.parameters(), wide.parameters(), strict=True):
        step = torch.finfo(dtype).eps * full.abs().double() + 1e-6
        assert_close_to_reference(half, full.double(), step)
        assert all(state.dtype == torch.float32 for state in pairs[0][1].state[half].values())


@pytest.mark.parametrize("deferred", (False, True))
def test_stochastic_rounding_keeps_the_mean_and_repeats_itself(deferred):
    def trained(seed, stochastic=True):
        bag = recfuse.nn.EmbeddingBag(4, 2048, mode="sum", dtype=torch.bfloat16)
        nn.init.ones_(bag.weight)
        optimizer = optim.SGD(bag, lr=2.0**-12, stochastic_rounding=stochastic, seed=seed, deferred=deferred)
        for _ in range(32):  # 2^-7 in all; a step of bfloat16 below 1 is 2^-8
            optimizer.zero_grad()
            bag(torch.tensor([0, 2]), torch.tensor([0, 1])).sum().backward()
            optimizer.step()
        return bag.weight.detach()

    first = trained(5)
    assert torch.equal(first, trained(5)) and not torch.equal(first, trained(6))
    assert torch.equal(first[1], torch.ones(2048, dtype=torch.bfloat16))
    assert abs(float(first[[0, 2]].double().mean()) - (1 - 2**-7)) < 2**-10
    assert torch.equal(trained(5, stochastic=False), torch.ones(4, 2048, dtype=torch.bfloat16))


@pytest.mark.parametrize("deferred", (False, True))
def test_stochastic_rounding_works_after_step_2_to_the_24(deferred):
    """By bits of the step number, which would stay at 2^24."""
    bag = recfuse.nn.EmbeddingBag(1, 512, mode="sum", dtype=torch.bfloat16)
    nn.init.ones_(bag.weight)
    optimizer = optim.Adam(bag, lr=2.0**-12, stochastic_rounding=True, deferred=deferred)
    for made in (2**24 - 3, 2**24 + 5):
        saved = optimizer.state_dict()
        state = {"step": made, "exp_avg": torch.ones(1, 512), "exp_avg_sq": torch.ones(1, 512)}
        optimizer.load_state_dict({**saved, "state": {0: state}})
        rounded = []
        for _ in range(6):
            nn.init.ones_(bag.weight)
            optimizer.zero_grad()
            bag(torch.tensor([[0]])).sum().backward()
            optimizer.step()
            rounded.append(bag.weight.detach().clone())
        assert all(not torch.equal(one, other) for one, other in itertools.combinations(rounded, 2))
        assert optimizer.state_dict()["state"][0]["step"] == made + 6


def test_a_gradient_that_is_not_finite_stays_in_its_row():
    collection = FusedEmbeddingBagCollection([(6, 4)])
    optimizer = optim.Adam(collection, lr=0.1)
    out = collection(torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
    (out * torch.tensor([[torch.inf], [1.0]])).sum().backward()
    optimizer.step()
    (weight,) = collection.parameters()
    assert weight[1].isnan().all() and weight[[0, 2, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_lookups_and_empty_tables(kind):
    collection = FusedEmbeddingBagCollection([(6, 4), (0, 4), (3, 0)])
    optimizer = getattr(optim, kind)(collection, lr=0.1)
    before = copy.deepcopy(collection.state_dict())
    for bags in (0, 2):
        collection(
            torch.zeros(0, dtype=torch.int64), torch.zeros(3 * bags + 1, dtype=torch.int64)
        ).sum().backward()
        optimizer.step()
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])
