"""Compiled training with a torch whose compiler does not see optimizers: no table moves that torch would
not move, and errors name the version. Such a compiler is simulated by the present compiler without its
notifications."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagList
from recfuse.nn.packed import taking_part
from recfuse.ops.training import compilers

OFFSETS = torch.tensor([0, 2])
NAMED = rf"Update torch {torch.__version__.split('+')[0]}.*to 2.13 or later"


@pytest.fixture(autouse=True)
def _old(monkeypatch):
    torch.compiler.reset()
    calls = importlib.import_module("recfuse.ops.fused_embedding_bag")
    updates_of = calls.updates_of
    monkeypatch.setattr(compilers, "IS_OLD", True)
    monkeypatch.setattr(taking_part, "_untold", set())
    monkeypatch.setattr(taking_part, "_note", lambda *_: None)
    monkeypatch.setattr(
        calls,
        "updates_of",
        lambda weights: None if torch.compiler.is_compiling() else updates_of(weights),
    )
    yield
    torch.compiler.reset()


def tables(own_parameters=False):
    bags = [nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2)]
    optimizer = torch.optim.AdamW([bag.weight for bag in bags], lr=0.1)
    optimizer.recfuse_row_wise = not own_parameters
    return FusedEmbeddingBagList(bags, optimizers=[optimizer]), optimizer


def loss(packed, used):
    pooled = packed.pool([OFFSETS] * 2, [torch.tensor([1, 2, 3])] * 2)
    return sum(pooled[at].square().sum() for at in used)


def one_by_one(packed, used):
    return sum(packed[at](torch.tensor([1, 2, 3]), OFFSETS).square().sum() for at in used)


def backward(packed, used, of=loss):
    torch.compile(functools.partial(of, packed, used), backend="aot_eager", fullgraph=True)().backward()


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("kind", ("SGD", "Adam"))
def test_a_step_of_a_fused_optimizer_names_the_version(kind, deferred):
    packed, _ = tables()
    optimizer = getattr(recfuse.optim, kind)(packed.parameters(), lr=0.1, deferred=deferred)
    before = [parameter.detach().clone() for parameter in packed.parameters()]
    backward(packed, (0, 1))
    with pytest.raises(ValueError, match=NAMED):
        optimizer.step()
    assert all(map(torch.equal, packed.parameters(), before))


def test_a_step_of_an_optimizer_that_swap_has_fused_names_it_too():
    packed = FusedEmbeddingBagList([nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2)])
    optimizer = torch.optim.Adagrad(packed.parameters(), lr=0.1)
    recfuse.swap(nn.Sequential(packed), optimizers=[optimizer], fuse_optimizers=True)
    backward(packed, (0, 1))
    with pytest.raises(ValueError, match=NAMED):
        optimizer.step()


@pytest.mark.parametrize("of", (loss, one_by_one))
@pytest.mark.parametrize("own_parameters", (False, True))
def test_a_table_that_may_have_taken_no_part_is_not_moved(own_parameters, of):
    packed, optimizer = tables(own_parameters)
    backward(packed, (0, 1), of)
    optimizer.step()
    optimizer.zero_grad()
    before = packed[1].weight.detach().clone()
    backward(packed, (0,), of)
    if own_parameters and packed[1].weight.grad is None:
        optimizer.step()
    else:
        with pytest.raises(ValueError, match=f"table '1' took no part in this step.*{NAMED}"):
            optimizer.step()
    assert torch.equal(packed[1].weight, before)


def test_eager_steps_do_not_change():
    packed, optimizer = tables()
    loss(packed, (0, 1)).backward()
    optimizer.step()
