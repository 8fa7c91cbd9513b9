"""Param groups that were changed other than by a write to them: heeded, or refused before rows change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim

INDICES = torch.tensor([[1, 2], [3, 3]])


def bags_with(way, kind="SGD", lrs=(0.5, 0.25)):
    """Two bags with a group each, and an optimizer: ours, or torch's after a swap."""
    bags = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum", sparse=True) for _ in range(2))
    if way == "ours":
        recfuse.swap(bags)
    groups = [{"params": [bag.weight], "lr": lr} for bag, lr in zip(bags, lrs, strict=True)]
    optimizer = getattr(optim if way == "ours" else torch.optim, kind)(groups)
    if way == "swapped":
        recfuse.swap(bags, optimizers=[optimizer], fuse_optimizers=True)
    return bags, optimizer


def changes(bags, optimizer):
    """Returns the change of each table in a step."""
    before = [bag.weight.detach().clone() for bag in bags]
    optimizer.zero_grad()
    sum(bag(INDICES).sum() for bag in bags).backward()
    optimizer.step()
    return [
        round(float((old - bag.weight.detach()).abs().max()), 5)
        for old, bag in zip(before, bags, strict=True)
    ]


CHANGES = {
    "a Parameter is taken out": lambda groups: groups[1]["params"].pop(),
    "params are replaced": lambda groups: groups[1].update(params=[groups[0]["params"][0]]),
    "params are exchanged": lambda groups: groups[1]["params"].__setitem__(0, groups[0]["params"][0]),
    "a group is taken out": lambda groups: groups.pop(),
    "a group is copied": lambda groups: groups.__setitem__(1, copy.copy(dict(groups[1]))),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ("ours", "swapped"))
def test_writes_that_reach_no_kernel_are_refused(way, name):
    bags, optimizer = bags_with(way)
    assert changes(bags, optimizer) == [1.0, 0.5]
    before = [bag.weight.detach().clone() for bag in bags]
    CHANGES[name](optimizer.param_groups)
    with pytest.raises(ValueError, match="param_groups was replaced, or one of its groups or its params"):
        sum(bag(INDICES).sum() for bag in bags).backward()
    assert all(map(torch.equal, before, (bag.weight for bag in bags)))


@pytest.mark.parametrize("way", ("ours", "swapped"))
def test_groups_in_another_order(way):
    bags, optimizer = bags_with(way)
    optimizer.param_groups.reverse()
    optimizer.param_groups[0]["lr"] = 1.0
    assert changes(bags, optimizer) == [1.0, 2.0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[1]["lr"] = 0.125
    assert changes(bags, optimizer) == [0.25, 2.0]


def test_other_parameters_of_a_swapped_group_come_and_go():
    bag, dense = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([bag.weight, *dense.parameters()], lr=0.5)
    model = nn.Sequential(bag, dense)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    optimizer.param_groups[0]["params"].pop()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(INDICES).sum().backward()
    optimizer.step()
    equal = map(torch.equal, before, model.parameters())
    assert list(equal) == [False, False, True]


def test_a_group_from_before_the_swap_that_is_written_to():
    bags = nn.ModuleList([nn.EmbeddingBag(9, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    (kept,) = optimizer.param_groups
    recfuse.swap(bags, optimizers=[optimizer], fuse_optimizers=True)
    assert changes(bags, optimizer) == [1.0]
    kept["lr"] = 0.25
    before = bags[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"from before the swap was written to.*param_groups again"):
        bags[0](INDICES).sum().backward()
    assert torch.equal(before, bags[0].weight)


@pytest.mark.parametrize("again", ("unswap", "swap", "load"))
def test_a_group_read_after_the_swap_stays_valid(again):
    bags = nn.ModuleList([nn.EmbeddingBag(9, 4, mode="sum", sparse=True)])
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.5)
    recfuse.swap(bags, optimizers=[optimizer], fuse_optimizers=True)
    (group,) = optimizer.param_groups
    if again == "unswap":
        recfuse.unswap(bags, optimizers=[optimizer])
    elif again == "swap":
        recfuse.swap(bags, optimizers=[optimizer], fuse_optimizers=True)
    else:  # as in torch, which then creates new groups
        optimizer.load_state_dict(optimizer.state_dict())
        (group,) = optimizer.param_groups
    group["lr"] = 0.25
    assert changes(bags, optimizer) == [0.5]


@pytest.mark.parametrize(
    "way, dtype", (("ours", torch.float32), ("ours", torch.bfloat16), ("swapped", torch.float32))
)
def test_hooks_of_load_state_dict_are_heeded(way, dtype):
    bags, optimizer = bags_with(way, "Adagrad")
    bags.to(dtype)
    changes(bags, optimizer)

    def hook(_, given):
        given = copy.deepcopy(given)
        given["state"][0]["sum"].fill_(8.5)
        given["param_groups"][0]["lr"] = 2.0
        return given

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert (optimizer.state[bags[0].weight]["sum"] == 8.5).all()
    assert not (optimizer.state[bags[1].weight]["sum"] == 8.5).any()
