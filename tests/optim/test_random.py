"""Random models and steps: the weights that torch's optimizers give."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection, Table

TORCH = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.SparseAdam}


def table(choose, weighted):
    mode = "sum" if weighted else choose.choice(["sum", "mean"])
    rows, padding_idx = choose.randint(1, 12), choose.choice([None, 0])
    return Table(rows, choose.choice([1, 4, 8]), mode=mode, padding_idx=padding_idx)


def lookups(choose, tables, bags):
    indices, offsets = [], [0]
    for one in tables:
        for _ in range(bags):
            indices += [choose.randrange(one.num_embeddings) for _ in range(choose.choice([0, 1, 3]))]
            offsets.append(len(indices))
    return torch.tensor(indices, dtype=torch.int64), torch.tensor(offsets)


def loss_of(module, calls, factors, recomputed):
    """The product of several calls' outputs, each of which may be recomputed in the backward pass."""
    start = torch.ones((), requires_grad=True)
    product = start
    for call, own in zip(calls, factors, strict=True):

        def part(scale, call=call, own=own):
            return module(*call, own) * scale

        out = checkpoint(part, start, use_reentrant=False) if recomputed else part(start)
        product = product * out.sigmoid()
    return product.sum()


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_torchs(seed):
    choose, weighted = random.Random(seed), seed % 3 == 0
    torch.manual_seed(seed)
    tables = [table(choose, weighted) for _ in range(choose.randint(1, 5))]
    modules = [FusedEmbeddingBagCollection(tables, sparse=True)]
    modules.append(copy.deepcopy(modules[0]))
    count = len(list(modules[0].parameters()))
    chosen = [number for number in range(count) if choose.random() < 0.8] or [0]
    parts = [part for part in (chosen[::2], chosen[1::2]) if part]
    kind, deferred, optimizers = choose.choice(list(TORCH)), choose.random() < 0.3, []
    for module in modules:
        own = list(module.parameters())
        groups = [{"params": [own[n] for n in part], "lr": 0.1 / (at + 1)} for at, part in enumerate(parts)]
        ours = module is modules[0]
        optimizers.append(getattr(optim, kind)(groups, deferred=deferred) if ours else TORCH[kind](groups))
    for _ in range(choose.randint(1, 4)):
        bags, recomputed = choose.randint(0, 4), choose.random() < 0.3
        calls = [lookups(choose, tables, bags) for _ in range(choose.choice([1, 1, 2, 3]))]
        frozen, gradients = choose.choice([None, None, choose.randrange(count)]), []
        values = [torch.rand(call[0].numel()) for call in calls]
        for module, optimizer in zip(modules, optimizers, strict=True):
            for number, parameter in enumerate(module.parameters()):
                parameter.requires_grad_(number != frozen)
            module.zero_grad()
            factors = [value.clone().requires_grad_() if weighted else None for value in values]
            loss_of(module, calls, factors, recomputed).backward()
            optimizer.step()
            gradients.append([factor.grad for factor in factors if factor is not None])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        for one, other in zip(*(module.parameters() for module in modules), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        if choose.random() < 0.3:
            taker, giver = choose.sample(optimizers, 2)
            taker.load_state_dict(copy.deepcopy(giver.state_dict()))


@pytest.mark.parametrize("deferred", (False, True))
def test_tables_that_take_part_in_some_steps_count_their_own(deferred):
    draw = torch.Generator().manual_seed(7)
    ours = [recfuse.nn.EmbeddingBag(6, 3, mode="sum") for _ in range(5)]
    theirs = [nn.EmbeddingBag(6, 3, mode="sum", sparse=True) for _ in range(5)]
    for own, other in zip(ours, theirs, strict=True):
        other.load_state_dict(own.state_dict())
    optimizer = optim.Adam([bag.weight for bag in ours], lr=0.1, deferred=deferred)
    reference = torch.optim.SparseAdam([bag.weight for bag in theirs], lr=0.1)
    for _ in range(12):
        used = [number for number in range(5) if torch.rand(1, generator=draw) < 0.5] or [0]
        indices = torch.randint(0, 6, (4, 3), generator=draw)
        for bags, stepping in ((ours, optimizer), (theirs, reference)):
            stepping.zero_grad()
            sum(bags[number](indices).square().sum() for number in used).backward()
            stepping.step()
    steps = {number: int(state["step"]) for number, state in reference.state_dict()["state"].items()}
    assert {number: state["step"] for number, state in optimizer.state_dict()["state"].items()} == steps
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.weight, other.weight, rtol=1e-4, atol=1e-5)


def test_a_table_frozen_after_its_forward_pass_keeps_its_rows():
    bag = recfuse.nn.EmbeddingBag(6, 3)
    optimizer, before = optim.SGD(bag, lr=0.1), bag.weight.detach().clone()
    output = bag(torch.tensor([[1, 2]]))
    bag.weight.requires_grad_(False)
    output.sum().backward()
    optimizer.step()
    assert torch.equal(bag.weight, before)


@pytest.mark.parametrize("fused", (False, True))
def test_states_that_were_replaced_by_hand_are_refused(fused):
    model = nn.Sequential(nn.EmbeddingBag(6, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=fused)
    if not fused:
        optimizer = optim.Adagrad(model, lr=0.1)
    own = optimizer.state[model[0].weight]
    own["sum"].fill_(2.0)
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert own["sum"][1, 0] > 2
    own["sum"] = own["sum"].clone()
    with pytest.raises(ValueError, match="sum in the state of a Parameter was removed or replaced"):
        optimizer.step()
    with pytest.raises(ValueError, match="was removed or replaced"):
        optimizer.state_dict()
