"""The weight and the optimizer's state of a single frozen table, compared with torch's."""

from __future__ import annotations

import copy

import pytest
import torch

import recfuse
from support.tables.model import Model, assert_equal, backward

SAME = {
    "SGD": dict(momentum=0.9, weight_decay=0.1),
    "SGD, Nesterov": dict(momentum=0.9, nesterov=True),
    "RMSprop": dict(momentum=0.5, weight_decay=0.1, centered=True),
    "Adadelta": dict(weight_decay=0.1),
    "Adagrad": dict(weight_decay=0.1, initial_accumulator_value=0.3),
    "Rprop": {},
}
COUNTED = {
    "Adam": dict(weight_decay=0.1),
    "AdamW": dict(weight_decay=0.1, amsgrad=True),
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Adagrad": dict(lr_decay=0.1),
    "SGD": dict(momentum=0.9, dampening=0.5),
}


def made(name, options, foreach):
    models = Model(packed=False), Model(packed=True)
    kind = getattr(torch.optim, name.partition(",")[0])
    return models, [kind(model.parameters(), lr=0.1, foreach=foreach, **options) for model in models]


def steps(models, optimizers, number=2):
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(number):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()


def rows_of_state(model, optimizer):
    """Returns the rows of the state of table 2, the only frozen table."""
    name, first_row = model.emb_l._store.origins[2]
    state = optimizer.state[model.emb_l._store.parameters[name]]
    return {
        key: value[first_row : first_row + 12].clone() for key, value in state.items() if value.dim() == 2
    }


def freeze(models, optimizers, before):
    """Freezes table 2 after some steps. More steps must leave its weight and the rows of its state as they
    are. Returns the latter.
    """
    steps(models, optimizers, before)
    for model in models:
        model.emb_l[2].requires_grad_(False)
    weight = models[1].emb_l[2].weight.detach().clone()
    state = rows_of_state(models[1], optimizers[1])
    steps(models, optimizers)
    assert torch.equal(models[1].emb_l[2].weight, weight)
    now = rows_of_state(models[1], optimizers[1])
    assert all(torch.equal(now[key], value) for key, value in state.items())
    return state


@pytest.mark.parametrize("foreach", (False, True))
@pytest.mark.parametrize("before", (0, 2))
@pytest.mark.parametrize("name", SAME)
def test_a_table_frozen_alone_resumes_its_state(name, before, foreach):
    models, optimizers = made(name, SAME[name], foreach)
    state = freeze(models, optimizers, before)
    assert bool(state) == bool(before or name == "Adagrad")
    for model in models:
        model.emb_l[2].requires_grad_(True)
    steps(models, optimizers, 3)
    assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))


@pytest.mark.parametrize("way", ("table", "model"))
@pytest.mark.parametrize("before", (0, 2))
@pytest.mark.parametrize("name", COUNTED)
def test_a_table_is_not_trained_again_by_another_number_of_steps(name, before, way):
    models, optimizers = made(name, COUNTED[name], None)
    freeze(models, optimizers, before)
    for model in models:
        (model.emb_l[2] if way == "table" else model).requires_grad_(True)
    if name == "SGD" and before:  # its state has no number
        steps(models, optimizers)
        assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))
        return
    state = copy.deepcopy(models[1].state_dict())
    with pytest.raises(
        ValueError, match=r"recfuse: packed table '2' was frozen alone, and .* has made steps"
    ):
        steps(models[1:], optimizers[1:], 1)
    assert_equal(dict(models[1].state_dict()), dict(state))
    new = [
        type(optimizer)(model.parameters(), lr=0.1)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    steps(models, new)
    assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))


def test_a_closure_does_not_move_a_frozen_table():
    models, optimizers = made("SGD", SAME["SGD"], None)
    steps(models, optimizers)
    for model, optimizer in zip(models, optimizers, strict=True):
        model.emb_l[2].requires_grad_(False)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            backward(model)

        optimizer.step(closure)
        optimizer.step(closure)
        model.emb_l[2].requires_grad_(True)
    steps(models, optimizers)
    assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))


@pytest.mark.parametrize("copied", (False, True))
def test_a_table_with_its_own_parameter_counts_its_own_steps(copied):
    models = Model(packed=False), Model(packed=True)
    recfuse.optim.embedding_parameters(models[1].emb_l[2])
    models = copy.deepcopy(models) if copied else models
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for trained in (True, False, True):
        for model in models:
            model.emb_l[2].requires_grad_(trained)
        steps(models, optimizers)
    assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))


def test_a_copied_model_keeps_the_state_of_its_frozen_table():
    models, _ = made("SGD", {}, None)
    for model in models:
        model.emb_l[2].requires_grad_(False)
    models = copy.deepcopy(models)
    optimizers = [
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1) for model in models
    ]
    steps(models, optimizers)
    for model in models:
        model.emb_l[2].requires_grad_(True)
    steps(models, optimizers)
    assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))


@pytest.mark.parametrize("name", ("Adagrad", "RowWiseAdagrad", "SGD", "Adam"))
@pytest.mark.parametrize("deferred", (False, True))
def test_the_state_of_a_fused_optimizer_stays(name, deferred):
    model = Model(packed=True)
    parameters = recfuse.optim.embedding_parameters(model)
    optimizer = getattr(recfuse.optim, name)(parameters, lr=0.1, weight_decay=0.1, deferred=deferred)
    steps([model], [optimizer])
    model.emb_l[2].requires_grad_(False)
    weight = model.emb_l[2].weight.detach().clone()
    kept = rows_of_state(model, optimizer)
    steps([model], [optimizer])
    now = rows_of_state(model, optimizer)
    assert torch.equal(model.emb_l[2].weight, weight)
    assert bool(kept) == (name != "SGD") and all(torch.equal(now[key], kept[key]) for key in kept)
