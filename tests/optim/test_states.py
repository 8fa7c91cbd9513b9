"""States in a state_dict: loading, refusals, and that a refusal changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from support.collection import collection_of, lookups_of

KINDS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam")


def trained(kind, **options):
    collection = collection_of([(20, 4), (9, 8)], sparse=True)
    optimizer = getattr(optim, kind)(collection, lr=0.1, **options)
    for _ in range(2):
        collection(*lookups_of(collection)).square().sum().backward()
        optimizer.step()
    return collection, optimizer


def swapped(kind):
    theirs = {"Adam": torch.optim.SparseAdam, "Adagrad": torch.optim.Adagrad}[kind]
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True))
    optimizer = theirs(list(model.parameters()), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def changed(**entries):
    def change(state_dict):
        state_dict["state"][0] |= entries

    return change


def of_another(state_dict):
    state = state_dict["state"][0]
    names = [name for name in state if name != "step"]
    other = "sum" if "exp_avg" in state else "exp_avg"
    state[other] = state.pop(names[0])


WRONG = {
    "NaN": (changed(step=float("nan")), "step in the state of a Parameter is nan; expected a whole number"),
    "2**70": (changed(step=2**70), "step in the state of a Parameter is 1180591620717411303424; expected"),
    "float 2**70": (changed(step=torch.tensor(2.0**70)), "step in the state"),
    "a string": (changed(step="3"), "step in the state of a Parameter is a str; expected a number"),
    "half a step": (changed(step=1.5), r"step in the state of a Parameter is 1\.5; expected a whole number"),
    "negative": (changed(step=-1), "step in the state of a Parameter is -1; expected"),
    "bool": (changed(step=True), "step in the state of a Parameter is a bool"),
    "infinite": (changed(step=torch.tensor(torch.inf)), "step in the state of a Parameter is inf"),
    "complex step": (changed(step=torch.tensor(1j)), "expected one real number"),
    "two steps": (changed(step=torch.ones(2)), "expected one real number"),
    "another optimizer": (of_another, "since this is the state of another optimizer"),
    "more": (changed(max_exp_avg_sq=torch.zeros(1)), "since this is the state of another optimizer"),
    "no dict": (lambda given: given["state"].update({0: 3}), "the state of a Parameter is an int"),
    "no states": (lambda given: given.update(state=[]), "state in the state_dict is a list"),
}


WRONG_TENSORS = {
    "complex": lambda value: value.to(torch.complex64),
    "integers": lambda value: value.long(),
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
    "shape": lambda value: value[1:],
    "transposed": lambda value: value.repeat(1, 2).t(),
    "a list": lambda value: value.tolist(),
}


def check_refused(model, optimizer, given, text):
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    own = [(p, state.get("exp_avg", state.get("sum"))) for p, state in optimizer.state.items()]
    groups = optimizer.param_groups
    with pytest.raises((ValueError, TypeError), match=text):
        optimizer.load_state_dict(given)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.param_groups is groups
    assert [(p, state.get("exp_avg", state.get("sum"))) for p, state in optimizer.state.items()] == own
    groups[0]["lr"] = 0.2  # reaches the kernels as before


@pytest.mark.parametrize("kind", ("Adagrad", "RowWiseAdagrad", "Adam"))
@pytest.mark.parametrize("name", WRONG)
def test_invalid_states_are_refused_unchanged(name, kind):
    model, optimizer = trained(kind)
    given = copy.deepcopy(optimizer.state_dict())
    given["param_groups"][0]["lr"] = 0.7
    WRONG[name][0](given)
    check_refused(model, optimizer, given, WRONG[name][1])
    model(*lookups_of(model)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ("Adagrad", "RowWiseAdagrad", "Adam"))
@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_invalid_state_tensors_are_refused_unchanged(name, kind):
    model, optimizer = trained(kind)
    given = copy.deepcopy(optimizer.state_dict())
    entry = "exp_avg" if kind == "Adam" else "sum"
    given["state"][1][entry] = WRONG_TENSORS[name](given["state"][1][entry])
    check_refused(model, optimizer, given, f"recfuse.optim.{kind}: {entry} in the state of a Parameter")


@pytest.mark.parametrize("kind", ("Adagrad", "Adam"))
@pytest.mark.parametrize("name", WRONG)
def test_a_swapped_optimizer_refuses_them_too(name, kind):
    model, optimizer = swapped(kind)
    given = copy.deepcopy(optimizer.state_dict())
    WRONG[name][0](given)
    check_refused(model, optimizer, given, "recfuse.swap: .* of tables: .*" + WRONG[name][1])
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ("NaN", "a string", "half a step"))
def test_a_swap_refuses_them_before_it_changes_anything(name):
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    WRONG[name][0]({"state": [optimizer.state[model[0].weight]]})
    with pytest.raises((ValueError, TypeError), match="SparseAdam of tables: step in the state"):
        recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    assert type(model[0]) is nn.EmbeddingBag and type(optimizer.param_groups[0]) is dict


def test_a_hook_that_raises_after_loading_changes_nothing():
    model, optimizer = trained("Adam")

    def hook(_):
        raise ArithmeticError("a hook")

    optimizer.register_load_state_dict_post_hook(hook)
    before, groups = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups
    given = copy.deepcopy(before)
    given["param_groups"][0]["lr"], given["state"][0]["step"] = 0.7, 9
    with pytest.raises(ArithmeticError):
        optimizer.load_state_dict(given)
    assert optimizer.param_groups is groups and groups[0]["lr"] == 0.1
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    model(*lookups_of(model)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", (3, 3.0, torch.tensor(3.0), torch.tensor([3])))
def test_steps_in_each_form_are_accepted(kind, step):
    _, optimizer = trained(kind)
    given = copy.deepcopy(optimizer.state_dict())
    for state in given["state"].values():
        state["step"] = step
    optimizer.load_state_dict(given)
    if kind != "SGD":
        assert int(optimizer.state_dict()["state"][0]["step"]) == 3


def test_a_momentum_that_is_off_is_not_read():
    _, optimizer = trained("SGD")
    given = copy.deepcopy(optimizer.state_dict())
    given["state"] = {0: {"momentum_buffer": torch.ones(20, 4)}, 1: {"momentum_buffer": None}}
    optimizer.load_state_dict(given)
