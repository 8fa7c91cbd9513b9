"""Param groups, schedulers, state_dicts and refusals of fused optimizers."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from recfuse.nn import FusedEmbeddingBagCollection
from recfuse.ops.training.optimizers import BETA1, EPS, GRAD_SCALE, LR, STEP, WEIGHT_DECAY
from recfuse.ops.updates import update_of
from support.collection import collection_of, lookups_of

SPECS = [(20, 4), (9, 8)]
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
TORCH = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.SparseAdam}


@pytest.fixture
def collection():
    return collection_of(SPECS, sparse=True)


def numbers(collection):
    return update_of(next(collection.parameters())).updater.numbers


def step(module, optimizer, given):
    optimizer.zero_grad()
    module(*given).square().sum().backward()
    optimizer.step()


def test_writes_to_a_group_reach_the_kernels(collection):
    optimizer = optim.Adam(collection, lr=0.5, betas=(0.5, 0.75), eps=2.0, weight_decay=0.25, maximize=True)
    own = numbers(collection)
    assert own[[LR, EPS, BETA1, WEIGHT_DECAY, GRAD_SCALE, STEP]].tolist() == [0.5, 2.0, 0.5, 0.25, -1, 1]
    place, version = own.data_ptr(), own._version
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.param_groups[0].update(eps=4.0, maximize=False)
    assert own[[LR, EPS, GRAD_SCALE]].tolist() == [0.125, 4, 1] and own.data_ptr() == place
    assert own._version == version + 3
    optimizer.param_groups[0]["lr"] = 0.125
    assert own._version == version + 3, "nothing has changed"
    optimizer.param_groups[0] |= {"lr": 1.0}
    assert optimizer.param_groups[0].setdefault("name", "tables") == "tables" and own[LR] == 1


@pytest.mark.parametrize("fused", (False, True))
def test_groups_that_were_replaced_are_refused_before_anything_changes(fused):
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True), nn.Linear(4, 1))
    indices = torch.tensor([[1, 2], [3, 3]])
    if fused:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
        recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    else:
        recfuse.swap(model)
        optimizer = optim.Adagrad(optim.embedding_parameters(model), lr=0.5)
    for replace in (
        lambda: [dict(group, lr=0.0) for group in optimizer.param_groups],
        lambda: copy.deepcopy(optimizer.param_groups),
    ):
        kept, before = optimizer.param_groups, [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups = replace()
        with pytest.raises(ValueError, match="param_groups was replaced"):
            model(indices).sum().backward()
        with pytest.raises(ValueError, match="param_groups was replaced"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        optimizer.param_groups = list(kept)
        model.zero_grad()
        model(indices).sum().backward()
        optimizer.step()
        assert not torch.equal(next(model.parameters()), before[0])


def test_options_of_a_group_cannot_be_removed(collection):
    optimizer = optim.Adam(collection, lr=0.5)
    (group,) = optimizer.param_groups
    for remove in (lambda: group.pop("lr"), lambda: group.__delitem__("betas"), group.clear, group.popitem):
        with pytest.raises(ValueError, match="cannot be removed from a param group"):
            remove()
    group["name"] = "tables"
    assert group.pop("name") == "tables" and group.pop("name", None) is None and group["lr"] == 0.5


@pytest.mark.parametrize("kind", ("Adam", "Adagrad"))
def test_the_number_of_the_step_is_not_set_by_hand(collection, kind):
    given, optimizer = lookups_of(collection), getattr(optim, kind)(collection, lr=0.1)
    step(collection, optimizer, given)
    parameter = next(collection.parameters())
    for _ in range(2):  # with the entry of state_dict(), and without
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state[parameter]["step"] = 7
        for use in (optimizer.step, optimizer.state_dict):
            with pytest.raises(ValueError, match=r"was set to 7 by hand.*load_state_dict"):
                use()
        saved["state"][0]["step"] = saved["state"][1]["step"] = 7
        optimizer.load_state_dict(saved)
        step(collection, optimizer, given)
        assert optimizer.state_dict()["state"][0]["step"] == 8
        step(collection, optimizer, given)
        assert "step" not in optimizer.state[parameter], "it would be old"


def test_the_number_of_the_step_of_a_swapped_optimizer_is_not_set_by_hand():
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum", sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    state, indices = optimizer.state[next(model.parameters())], torch.tensor([[1, 2], [3, 3]])
    for _ in range(2):
        step(model, optimizer, (indices,))
    assert state["step"] == 2
    state["step"] = 1
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match="was set to 1 by hand"):
            use()


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=9, cycle_momentum=False
    ),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        [3],
    ),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(collection, name):
    twin = copy.deepcopy(collection)
    pairs = (collection, optim.SGD(collection, lr=0.1)), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    schedulers = [SCHEDULERS[name](optimizer) for _, optimizer in pairs]
    for _ in range(6):
        given = lookups_of(collection)
        for (module, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            step(module, optimizer, given)
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        lr = pairs[1][1].param_groups[0]["lr"]
        close(numbers(collection)[LR], torch.tensor(lr))
    for one, other in zip(collection.parameters(), twin.parameters(), strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", TORCH)
def test_state_dicts_are_those_of_torch(collection, kind):
    twin = copy.deepcopy(collection)
    pairs = [
        (collection, getattr(optim, kind)(collection, lr=0.1)),
        (twin, TORCH[kind](list(twin.parameters()), lr=0.1)),
    ]
    for turn in range(3):
        for _ in range(2):
            given = lookups_of(collection)
            for module, optimizer in pairs:
                step(module, optimizer, given)
        ours, theirs = (optimizer.state_dict() for _, optimizer in pairs)
        for number, state in theirs["state"].items():
            for key, value in state.items():
                if value is not None:
                    close(ours["state"][number][key], value)
                    assert type(ours["state"][number][key]) is type(value)
        lr = 0.1 / (turn + 2)
        for state_dict, (_, optimizer) in zip((theirs, ours), pairs, strict=True):  # each has the other's now
            state_dict["param_groups"][0]["lr"] = lr
            optimizer.load_state_dict(copy.deepcopy(state_dict))
        close(numbers(collection)[LR], torch.tensor(lr))
    for one, other in zip(collection.parameters(), twin.parameters(), strict=True):
        close(one, other)


def test_row_wise_adagrad_has_the_names_of_torchrec(collection):
    optimizer = optim.RowWiseAdagrad(collection, lr=0.1, initial_accumulator_value=0.5)
    twin = copy.deepcopy(collection)
    step(collection, optimizer, lookups_of(collection))
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == {"step", "sum"} and saved["state"][0]["sum"].shape == (20, 1)
    assert saved["state"][0]["sum"].min() == 0.5 and saved["state"][0]["step"] == 1
    theirs = pytest.importorskip("torchrec.optim.rowwise_adagrad").RowWiseAdagrad(twin.parameters(), lr=0.3)
    theirs.load_state_dict(saved)
    other = optim.RowWiseAdagrad(twin)
    other.load_state_dict(theirs.state_dict())
    twin.load_state_dict(collection.state_dict())
    given = lookups_of(collection)
    step(collection, optimizer, given)
    step(twin, other, given)
    for one, two in zip(collection.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def test_states_of_half_tables_are_saved_and_loaded_in_float32(collection):
    collection.to(torch.bfloat16)
    optimizer = optim.Adagrad(collection, lr=0.1)
    step(collection, optimizer, lookups_of(collection))
    places = [state["sum"].data_ptr() for state in optimizer.state.values()]
    saved = copy.deepcopy(optimizer.state_dict())
    step(collection, optimizer, lookups_of(collection))
    optimizer.load_state_dict(saved)
    for number, (parameter, place) in enumerate(zip(collection.parameters(), places, strict=True)):
        own = optimizer.state[parameter]["sum"]
        assert own.dtype == torch.float32 and own.data_ptr() == place
        assert torch.equal(own, saved["state"][number]["sum"])
    step(collection, optimizer, lookups_of(collection))


def test_a_state_dict_without_states_restarts_the_optimizer(collection):
    optimizer = optim.Adagrad(collection, lr=0.1, initial_accumulator_value=0.5)
    step(collection, optimizer, lookups_of(collection))
    saved = optimizer.state_dict()
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    for parameter in collection.parameters():
        assert torch.equal(optimizer.state[parameter]["sum"], torch.full_like(parameter, 0.5))


def test_a_state_dict_of_others_is_refused_and_changes_nothing(collection):
    optimizer = optim.Adagrad(collection, lr=0.1)
    step(collection, optimizer, lookups_of(collection))
    before = copy.deepcopy(optimizer.state_dict())
    momentum = copy.deepcopy(before)
    momentum["param_groups"][0]["lr_decay"] = 0.5
    shape = copy.deepcopy(before)
    shape["state"][0]["sum"] = torch.zeros(3, 4)
    group = copy.deepcopy(before)
    group["param_groups"][0]["params"].pop()
    for wrong, text in (
        (momentum, "lr_decay is 0.5"),
        (shape, r"sum .* has shape \[3, 4\]"),
        (group, "group"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(wrong)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert torch.equal(after["state"][1]["sum"], before["state"][1]["sum"])


def test_groups_are_added(collection):
    first, second = collection.parameters()
    optimizer = optim.Adam([("a", first)], lr=0.1)
    step(collection, optimizer, lookups_of(collection))
    assert second.grad is not None
    second.grad = None
    optimizer.add_param_group({"params": [("b", second)], "lr": 0.2})
    step(collection, optimizer, lookups_of(collection))
    assert second.grad is None and [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [2, 1]
    with pytest.raises(ValueError, match=r"expected an embedding table"):
        optimizer.add_param_group({"params": [("c", nn.Parameter(torch.zeros(3)))]})
    assert len(optimizer.param_groups) == 2


def test_a_closure(collection):
    optimizer = optim.SGD(collection, lr=0.01)
    given = lookups_of(collection)

    def closure():
        loss = collection(*given).square().sum()
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first


REFUSED = {
    "momentum": ("SGD", {"momentum": 0.9}, "momentum is 0.9; expected 0, since momentum moves rows"),
    "nesterov": ("SGD", {"nesterov": True}, "nesterov is True"),
    "lr_decay": ("Adagrad", {"lr_decay": 0.1}, "lr_decay is 0.1; expected 0. Use a scheduler"),
    "amsgrad": ("Adam", {"amsgrad": True}, "amsgrad is True"),
    "betas": ("Adam", {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; expected a number in \[0, 1\)"),
    "one beta": ("Adam", {"betas": 0.9}, "betas is a float"),
    "lr": ("SGD", {"lr": -1}, "lr is -1; expected >= 0"),
    "no lr": ("SGD", {"lr": math.nan}, "lr is nan; expected >= 0"),
    "a text": ("SGD", {"lr": "fast"}, "lr is a str; expected a number"),
    "a tensor": ("SGD", {"lr": torch.tensor(0.1)}, "lr is a Tensor; expected a number"),
    "eps": ("Adagrad", {"eps": -1e-3}, "eps is -0.001"),
    "seed": ("SGD", {"seed": -1}, "seed is -1"),
    "unknown": ("RowWiseAdagrad", {"tables": 3}, "there is no option 'tables'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_mean_nothing_here_are_refused(collection, name):
    kind, options, text = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=text):
        getattr(optim, kind)(collection, **{"lr": 0.1, **options})


def test_disabled_options_are_accepted(collection):
    optim.SGD(collection, lr=0.1, momentum=0, foreach=None, fused=False, differentiable=False)
    optimizer = optim.Adam(collection, lr=0.1, amsgrad=False, capturable=False)
    with pytest.raises(ValueError, match="amsgrad is True"):
        optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.param_groups[0]["lr"] = -1


def test_modules(collection):
    model = nn.Sequential(recfuse.nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    model.collection = collection
    with pytest.raises(ValueError, match=r"no embedding tables of recfuse \(1.weight and 1 more\)"):
        optim.SGD(model, lr=0.1)
    with pytest.raises(ValueError, match="has no embedding tables of recfuse"):
        optim.SGD(nn.EmbeddingBag(3, 4).requires_grad_(False), lr=0.1)
    found = optim.embedding_parameters(model)
    assert [id(p) for p in found] == [id(model[0].weight), *map(id, collection.parameters())]
    optim.SGD(found, lr=0.1)
    model[1].requires_grad_(False)
    assert len(optim.SGD(model, lr=0.1).param_groups[0]["params"]) == 3


def test_parameters_that_no_kernel_updates(collection):
    for wrong, text in (
        (nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)), "float64"),
        (nn.Parameter(torch.zeros(4, 3).t()), "not contiguous"),
        (nn.Parameter(torch.zeros(4, 3, device="meta")), "is on meta"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            optim.SGD([wrong], lr=0.1)


def test_scale_grad_by_freq_is_refused():
    bag = recfuse.nn.EmbeddingBag(9, 4, scale_grad_by_freq=True)
    optimizer = optim.SGD(bag, lr=0.1)
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        bag(torch.tensor([[1]]))
    optimizer.step()


def test_a_module_that_was_cast_after_its_optimizer(collection):
    optimizer = optim.Adagrad(collection, lr=0.1)
    collection.to(torch.bfloat16)
    step(collection, optimizer, lookups_of(collection))
    collection.double()
    with pytest.raises(ValueError, match="has a gradient, where backward"):
        step(collection, optimizer, lookups_of(collection))


def test_optimizers_move_with_swap_and_unswap():
    bags = [nn.EmbeddingBag(9, 4, mode="sum", sparse=True) for _ in range(2)]
    twins = [copy.deepcopy(bag) for bag in bags]
    mine = FusedEmbeddingBagCollection.from_embedding_bags(twins)
    reference = torch.optim.SparseAdam([bag.weight for bag in bags], lr=0.1)
    singles = nn.ModuleList([recfuse.nn.EmbeddingBag.from_pretrained(
        bag.weight.detach().clone(), freeze=False, mode="sum", sparse=True) for bag in bags])  # fmt: skip
    optimizer = optim.Adam(singles, lr=0.1)
    indices = torch.tensor([[1, 2], [2, 3]])
    for _ in range(2):
        for one in (bags, singles):
            sum(bag(indices).square().sum() for bag in one).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    mine = FusedEmbeddingBagCollection.from_embedding_bags(singles, optimizers=[optimizer])
    for _ in range(2):
        sum(bag(indices).square().sum() for bag in bags).backward()
        mine(indices.reshape(-1).repeat(2), torch.arange(0, 9, 2)).square().sum().backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for bag, table in zip(bags, mine.tables.values(), strict=True):
        close(table.weight.detach(), bag.weight.detach())
    assert next(mine.parameters()).grad is None
    assert optimizer.state_dict()["state"][0]["step"] == 4
