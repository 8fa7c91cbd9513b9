"""Weights that change after the pass, in every way there is: the next call of every pattern reads them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import recfuse
from support.graphs import assert_same

USERS, SAMPLES, DIM = 3, 9, 8
WAYS = ("in place", ".data", "load", "load assign", "step", "another parameter")


class Parts(nn.Module):
    """Each pattern once, with its own Parameters."""

    def __init__(self):
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(11, DIM) for _ in range(3))
        self.bags = nn.ModuleList(nn.EmbeddingBag(11, DIM, mode="sum", padding_idx=3) for _ in range(2))
        self.mixed, self.gate = nn.Linear(2 * DIM, DIM), nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.tower = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))

    def forward(self, floats, integers, users, history, of):
        edges = torch.tensor([-1.0, 0.0, 1.0])
        rows = [self.columns[0](torch.bucketize(floats, edges)), self.columns[1](integers[:, 0] % 11)]
        filled = torch.where(integers[:, 1] > 0, integers[:, 1] % 11, -1)
        other = torch.where((filled >= 0).unsqueeze(1), self.columns[2](filled.clamp(min=0)), 0.0)
        bags = [bag(integers % 11) for bag in self.bags]
        mixed = self.mixed(torch.cat([self.tower(users)[of], rows[0]], 1))
        history = history[of]
        attended, _ = self.attention(mixed.unsqueeze(1), history, history, need_weights=False)
        gated = self.gate(users[of]).sigmoid() * mixed
        return torch.cat([*rows, other], 1), torch.cat(bags, 1), mixed, attended, gated

    def batch(self, samples=SAMPLES):
        integers = torch.randint(-9, 10**6, (samples, 2))
        users, history = torch.randn(USERS, DIM), torch.randn(USERS, 4, DIM)
        return torch.randn(samples), integers, users, history, torch.randint(0, USERS, (samples,))


def change(model, way):
    """Changes every Parameter."""
    if way == "step":
        model.zero_grad()
        with torch.enable_grad():
            sum(result.square().sum() for result in model(*model.batch(30))).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return
    with torch.no_grad():
        if way.startswith("load"):
            state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=way.endswith("assign"))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if way == "in place":
                    parameter.mul_(-2)
                elif way == ".data":
                    parameter.data = torch.randn_like(parameter)
                elif way == "another parameter":
                    setattr(module, name, nn.Parameter(torch.randn_like(parameter)))


def kinds_of(backend):
    return {entry.pattern for entry in backend.reports[-1].swapped}


@pytest.mark.parametrize("inner", ("eager", "aot_eager"))
@pytest.mark.parametrize("way", WAYS)
def test_every_pattern_reads_the_current_weights(way, inner):
    torch.compiler.reset()
    model = Parts()
    backend, batch = recfuse.backend(inner), model.batch()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            expected = model(*batch)
            assert_same(compiled(*batch), expected, rtol=1e-4, atol=1e-4)
            change(model, way)
            assert all(not torch.equal(*pair) for pair in zip(model(*batch), expected, strict=True))
        assert_same(compiled(*batch), model(*batch), rtol=1e-4, atol=1e-4)
    assert kinds_of(backend) == {"columns", "bags", "ikbo_linear", "ikbo_attention", "late_gather"}


@pytest.mark.parametrize("inner", ("eager", "aot_eager"))
def test_steps_of_training(inner):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, twin = Parts(), Parts()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(twin, backend=recfuse.backend(inner), fullgraph=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for _ in range(4):
        batch = model.batch()
        for one, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            sum(F.mse_loss(result, result.detach() * 0.5) for result in one(*batch)).backward()
            optimizer.step()
    assert_same(list(twin.parameters()), list(model.parameters()), rtol=1e-3, atol=1e-4)


def test_functional_calls():
    torch.compiler.reset()
    model, batch = Parts(), Parts().batch()

    def call(state, batch):
        return functional_call(model, state, batch)

    compiled = torch.compile(call, backend=recfuse.backend("aot_eager"), fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            assert_same(compiled(state, batch), call(state, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ("in place", ".data", "load", "load assign"))
def test_exported_programs_read_the_current_weights(way):
    model = Parts().requires_grad_(False)
    batch = model.batch()
    program = torch.export.export(model, batch)
    report = recfuse.swap(program)
    assert {"columns", "ikbo_linear", "ikbo_attention"} <= {entry.pattern for entry in report.swapped}
    swapped = program.module()
    change(swapped, way)
    names = {name: value.clone() for name, value in swapped.state_dict().items()}
    model.load_state_dict({name: names[name] for name in model.state_dict()})
    assert_same(swapped(*batch), model(*batch), rtol=1e-4, atol=1e-4)


class Padded(nn.Module):
    """Embeddings whose row 0 has no gradient, although it is read."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11, DIM, padding_idx=0) for _ in range(2))
        nn.init.normal_(self.tables[0].weight)

    def forward(self, indices):
        return torch.cat([table(indices).sum(1) for table in self.tables], 1)


@pytest.mark.parametrize("lookups", ("fixed", "any number"))
def test_weights_unfrozen_after_the_pass_get_correct_gradients_or_none(lookups):
    model, indices = Padded().requires_grad_(False), torch.arange(12).reshape(4, 3) % 11
    shapes = ({0: torch.export.Dim.DYNAMIC} | ({1: torch.export.Dim.DYNAMIC} if lookups != "fixed" else {}),)
    program = torch.export.export(model, (indices,), dynamic_shapes=shapes)
    expected = model(indices)
    report = recfuse.swap(program)
    actions = [entry.action for entry in report.entries if entry.pattern != "sequences"]
    assert actions == ["swapped" if lookups == "fixed" else "left"] * 2
    swapped = program.module()
    assert_same(swapped(indices), expected)
    swapped.requires_grad_()
    if lookups == "fixed":
        with pytest.raises(NotImplementedError, match="no gradient"):
            swapped(indices).sum().backward()
        return
    swapped(indices).sum().backward()
    assert not any(parameter.grad[0].any() for parameter in swapped.parameters())
