"""RWSAdagrad of facebookresearch/dlrm: its tables' steps are those of RowWiseAdagrad."""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import recfuse
from recfuse import optim
from support.dlrm import DLRM_Net, batch_of

close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class RWSAdagrad(Optimizer):
    """With the formula, the state and the options of dlrm's: a sum of squares per row for sparse
    gradients, per element for dense gradients; the first step initialises it."""

    def __init__(self, params, lr=1e-2, eps=1e-10, **options):
        self.defaults = {"lr": lr, "lr_decay": 0.0, "eps": eps, "weight_decay": 0.0}
        self.defaults |= {"initial_accumulator_value": 0.0, **options}
        super().__init__(params, self.defaults)
        self.momentum_initialized = False
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)
        self.momentum_initialized = True
        return loss

    def _update(self, parameter, state, group):
        first, by_row = self.defaults["initial_accumulator_value"], parameter.grad.is_sparse
        name, shape = ("momentum", parameter.shape[:1]) if by_row else ("sum", parameter.shape)
        if not self.momentum_initialized:
            state[name] = torch.full(shape, first, dtype=torch.float32)
        state["step"] += 1
        grad = parameter.grad.to_dense().float()
        state[name] += grad.square().mean(dim=1) if by_row else grad.square()
        scale = state[name].sqrt() + group["eps"]
        parameter -= group["lr"] * grad / (scale[:, None] if by_row else scale)


RWSAdagrad.__module__, RWSAdagrad.__qualname__ = "optim.rwsadagrad", "RWSAdagrad"


@pytest.fixture
def dlrm(monkeypatch):
    """The class as a script of dlrm has it, for pickles of it too."""
    module = type(sys)("optim.rwsadagrad")
    module.RWSAdagrad = RWSAdagrad
    monkeypatch.setitem(sys.modules, "optim.rwsadagrad", module)
    return RWSAdagrad


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = (model(*batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def same_state(ours, theirs):
    """Of unpacked tables."""
    found, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    for number, state in expected.items():
        assert found[number].keys() == state.keys() and found[number]["step"] == state["step"]
        assert type(found[number]["step"]) is int
        for name in state.keys() - {"step"}:
            close(found[number][name], state[name])


@pytest.mark.parametrize("initial", (0.0, 0.3))
@pytest.mark.parametrize("before", (0, 2))
def test_an_unchanged_script_keeps_its_losses(dlrm, before, initial):
    model = DLRM_Net(sparse=True)
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "initial_accumulator_value": initial}
    ours, theirs = (dlrm(one.parameters(), **options) for one in (twin, model))
    batches = [batch_of(model) for _ in range(8)]
    close(train(twin, ours, batches[:before]), train(model, theirs, batches[:before]))
    report = recfuse.swap(twin, optimizers=[ours], fuse_optimizers=True)
    assert type(report.fused_optimizers[0]) is optim.RowWiseAdagrad
    for group in ours.param_groups + theirs.param_groups:
        group["lr"] = 0.2
    close(train(twin, ours, batches[before:5]), train(model, theirs, batches[before:5]))
    saved = copy.deepcopy((twin.state_dict(), ours.state_dict()))
    once = train(twin, ours, batches[5:])
    twin.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    close(train(twin, ours, batches[5:]), once)
    close(once, train(model, theirs, batches[5:]))
    recfuse.unswap(twin, optimizers=[ours])
    same_state(ours, theirs)
    batches = [batch_of(model) for _ in range(2)]
    close(train(twin, ours, batches), train(model, theirs, batches))
    for key, value in model.state_dict().items():
        close(twin.state_dict()[key], value)


def test_states_loaded_before_the_first_step_restart(dlrm):
    """As dlrm's, whose first step creates new sums."""
    model = DLRM_Net(sparse=True)
    first = dlrm(model.parameters(), lr=0.1)
    batches = [batch_of(model) for _ in range(5)]
    train(model, first, batches[:2])
    twin = copy.deepcopy(model)
    ours, theirs = (dlrm(one.parameters(), lr=0.1) for one in (twin, model))
    for one in (ours, theirs):
        one.load_state_dict(copy.deepcopy(first.state_dict()))
    recfuse.swap(twin, optimizers=[ours], fuse_optimizers=True)
    close(train(twin, ours, batches[2:]), train(model, theirs, batches[2:]))
    recfuse.unswap(twin, optimizers=[ours])
    same_state(ours, theirs)


@pytest.mark.parametrize("options", ({"lr_decay": 0.1}, {"weight_decay": 0.1}))
def test_options_that_make_another_step_are_refused(dlrm, options):
    model = DLRM_Net(sparse=True)
    with pytest.raises(ValueError, match=next(iter(options))):
        recfuse.swap(model, optimizers=[dlrm(model.parameters(), **options)], fuse_optimizers=True)
    assert type(model.emb_l) is nn.ModuleList


def test_tables_with_dense_gradients_are_refused(dlrm):
    model = DLRM_Net(sparse=False)
    with pytest.raises(ValueError, match="RWSAdagrad of a table with sparse=False makes another step"):
        recfuse.swap(model, optimizers=[dlrm(model.parameters())], fuse_optimizers=True)
    assert type(model.emb_l) is nn.ModuleList


def test_a_class_of_another_place_is_refused():
    model = DLRM_Net(sparse=True)
    other = type("RWSAdagrad", (RWSAdagrad,), {"__module__": "mine"})
    with pytest.raises(ValueError, match="RWSAdagrad cannot be fused, since it has no fused step"):
        recfuse.swap(model, optimizers=[other(model.parameters())], fuse_optimizers=True)
