"""Tables whose results give no gradient: None in a rewritten program, as in torch, not zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recfuse


def no_grad(pooled):
    with torch.no_grad():
        return pooled * 2


def written(pooled):
    found = torch.zeros_like(pooled)
    found[:, :2] = pooled[:, :2]
    return found


USES = {
    "as it is": lambda pooled: pooled,
    "detach": torch.Tensor.detach,
    "data": lambda pooled: pooled.data,
    "no_grad": no_grad,
    "integers": lambda pooled: pooled.argmax(1, keepdim=True).float(),
    "a condition": lambda pooled: torch.where(pooled > 0, torch.ones(()), torch.zeros(())),
    "its shape": torch.zeros_like,
    "detached later": lambda pooled: (pooled.view(-1) * 3).view(-1, 4).detach() + 1,
    "half of it": lambda pooled: torch.cat((pooled[:, :2].detach(), pooled[:, 2:]), 1),
    "written into another": written,
    "rounded": torch.round,
}


class Model(nn.Module):
    """Three bags; the second is used in another way; weighted bags share a weight that learns."""

    def __init__(self, use, weighted, sparse):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum", sparse=sparse) for _ in range(3))
        self.factors = nn.ParameterList(nn.Parameter(torch.rand(6)) for _ in range(3)) if weighted else None
        self.use = use

    def forward(self, indices, offsets):
        factors = self.factors or (None, None, None)
        pooled = [bag(indices, offsets, each) for bag, each in zip(self.bags, factors, strict=True)]
        return torch.cat((pooled[0], self.use(pooled[1]), pooled[2]), 1)


def gradients(model, call, batch):
    call(*batch).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


BATCH = torch.tensor([1, 3, 3, 8, 0, 5]), torch.tensor([0, 2, 4])
FORMS = ((False, False), (True, False), (False, True))


@pytest.mark.parametrize(("weighted", "sparse"), FORMS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_bag_without_gradient_gives_its_table_no_gradient(use, weighted, sparse):
    torch.compiler.reset()
    model = Model(use, weighted, sparse)
    twin = copy.deepcopy(model)
    want = gradients(model, model, BATCH)
    backend = recfuse.backend("aot_eager")
    found = gradients(twin, torch.compile(twin, backend=backend), BATCH)
    assert backend.reports[0].swapped
    for name, expected in want.items():
        if expected is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name].to_dense(), expected.to_dense())


def test_a_detached_table_is_not_moved_by_decay():
    model = Model(torch.Tensor.detach, False, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = model.bags[1].weight.detach().clone()
    compiled = torch.compile(model, backend=recfuse.backend("aot_eager"))
    for _ in range(2):
        compiled(*BATCH).sum().backward()
        optimizer.step()
    assert torch.equal(model.bags[1].weight, before)


def test_one_table_detached_in_one_bag_and_not_in_another():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode="sum")

        def forward(self, indices, offsets):
            return torch.cat((self.bag(indices, offsets).detach(), self.bag(indices + 0, offsets)), 1)

    model = Twice()
    twin = copy.deepcopy(model)
    want = gradients(model, model, BATCH)
    found = gradients(twin, torch.compile(twin, backend=recfuse.backend("aot_eager")), BATCH)
    torch.testing.assert_close(found, want)


def test_an_exported_program_gives_a_detached_table_no_gradient():
    model = Model(torch.Tensor.detach, False, False)
    program = torch.export.export(model, BATCH)
    assert recfuse.swap(program).swapped
    module = program.module()
    module(*BATCH).sum().backward()
    found = {name: parameter.grad is None for name, parameter in module.named_parameters()}
    assert [found[f"bags.{number}.weight"] for number in range(3)] == [False, True, False]


def test_a_fake_tensor_that_the_tracer_has_lost_never_gets_into_a_program(monkeypatch):
    class Lost(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode="sum")

        def forward(self, indices, offsets):
            return self.bag(indices, offsets).data * 2

    monkeypatch.setattr("recfuse.passes.graph.recorder._DATA", None)
    model, backend = Lost(), recfuse.backend("eager")
    found = torch.compile(model, backend=backend)(*BATCH)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, model(*BATCH))
    assert "does not see the function that computes" in str(backend)
