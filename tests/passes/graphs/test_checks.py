"""``check``: batches are tried, and leave no trace in the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recfuse
from support.graphs import assert_same


class Counting(nn.Module):
    """Tables behind a counter of calls, which results depend on."""

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
def test_a_check_leaves_counters_as_they_were(kind, is_exported):
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
