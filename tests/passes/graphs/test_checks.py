"""``check``: batches are tried, and leave no trace in the model."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import recfuse
from support.apply_emb.unchanged import unchanged
from support.graphs import assert_same


class Counting(nn.Module):
    """Tables after a counter of calls, on which results depend."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum") for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("wide", torch.ones(1).expand(4), persistent=False)

    def forward(self, indices):
        self.calls.add_(1)
        return torch.cat([bag(indices) for bag in self.bags], 1) * self.calls, self.calls


class Assigning(Counting):
    """Its counter is another tensor after each call."""

    def forward(self, indices):
        self.calls = self.calls + 1
        return torch.cat([bag(indices) for bag in self.bags], 1) * self.calls


@pytest.mark.parametrize("kind", (Counting, Assigning))
@pytest.mark.parametrize("is_exported", (False, True))
def test_a_check_does_not_change_counters(kind, is_exported):
    model, indices = kind(), torch.randint(0, 10, (3, 5))
    given = torch.export.export(model, (indices,)) if is_exported else model
    report = recfuse.swap(given, check=[(indices,), (indices,)])
    assert len(report.swapped if is_exported else report.replaced) == 2
    swapped = given.module() if is_exported else model
    assert all(float(buffer) == 0 for name, buffer in swapped.named_buffers() if name == "calls")
    assert_same(swapped(indices), kind.forward(_like(swapped, kind), indices))


def _like(swapped, kind):
    model = kind()
    model.load_state_dict(swapped.state_dict())
    model.calls.zero_()
    return model


def test_buffers_that_were_made_in_inference_mode():
    with torch.inference_mode():
        model = Counting()
        model.requires_grad_(False)
    with torch.inference_mode():
        report = recfuse.swap(model, check=[(torch.randint(0, 10, (3, 5)),)])
    assert len(report.replaced) == 2 and float(model.calls) == 0


class Normed(nn.Module):
    """Two bags after norms; every call moves the statistics of the last norm, also in eval mode."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10, 4, mode="sum") for _ in range(2))
        self.norm, self.seen, self.calls = nn.BatchNorm1d(8, track_running_stats=True), [], 0
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, indices):
        x = self.norm(torch.cat([bag(indices) for bag in self.bags], 1))
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


class Remembering(Normed):
    """Keeps Python objects, writes to its weights, and draws random numbers of three kinds."""

    def forward(self, indices):
        self.bags[0].weight.data.clamp_(-0.5, 0.5)
        self.seen.append(len(indices))
        self.calls += 1
        self.last = random.random() + np.random.rand()
        return super().forward(indices) + torch.rand(()) + self.last + self.calls


@pytest.mark.parametrize("is_training", (True, False))
def test_a_check_moves_no_statistics_of_a_program(is_training):
    model = Normed().train(is_training)
    batch = (torch.randint(0, 10, (6, 5)),)
    program = torch.export.export(model, batch)
    states = {**program.state_dict, **program.constants}
    before = {name: (id(value), value._version, value.detach().clone()) for name, value in states.items()}
    generator = torch.get_rng_state()
    report = recfuse.swap(program, check=[batch, batch])
    assert len(report.swapped) == 2
    for name, (identity, version, value) in before.items():
        now = {**program.state_dict, **program.constants}[name]
        assert (id(now), now._version) == (identity, version), name
        assert torch.equal(now, value), name
    assert torch.equal(generator, torch.get_rng_state())
    want = model(*batch)
    for name, value in program.state_dict.items():  # the call has moved both's statistics: they are the same
        value.data.copy_(before[name][2])
    assert_same(program.module()(*batch), want)


@pytest.mark.parametrize("kind", (Normed, Remembering))
@pytest.mark.parametrize("is_training", (True, False))
def test_a_check_runs_copies_of_a_module(kind, is_training):
    model = kind().train(is_training)
    model.norm.eval()
    batch = (torch.randint(0, 10, (6, 5)),)
    with unchanged(model):
        report = recfuse.swap(model, check=[batch, batch])
    assert len(report.replaced) == 2


class Telling(Normed):
    """Its result depends on the class of its tables."""

    def forward(self, indices):
        return super().forward(indices) * (1 + (type(self.bags[0]) is not nn.EmbeddingBag))


def test_a_failing_check_does_not_change_the_module():
    model = Telling()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.randint(0, 10, (6, 5)),)
    classes = [type(module) for module in model.modules()]
    with unchanged(model):
        report = recfuse.swap(model, check=[batch], optimizers=[optimizer])
    assert not report.replaced and "differs from the original's" in report.left[-1].detail
    assert [type(module) for module in model.modules()] == classes


def test_a_module_that_cannot_be_copied_is_refused():
    model = Normed()
    model.lock, batch = threading.Lock(), (torch.randint(0, 10, (6, 5)),)
    with (
        unchanged(model),
        pytest.raises(ValueError, match="check needs a copy of the model, which TypeError"),
    ):
        recfuse.swap(model, check=[batch])


def test_objects_of_a_batch_are_copied():
    model, batch = Caching(), Batch(torch.randint(0, 10, (6, 5)))
    recfuse.swap(model, check=[((batch,), {})])
    assert vars(batch).keys() == {"indices"}


class Batch:
    def __init__(self, indices):
        self.indices = indices


class Caching(Normed):
    def forward(self, batch):
        batch.offsets = torch.zeros(1)
        return super().forward(batch.indices)
