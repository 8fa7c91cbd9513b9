"""Embeddings times a mask or weights, summed over the lookups: bags with a factor a lookup."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recfuse
from support.graphs import assert_same, gradients, passed

WAYS = ("eager", "aot_eager", "exported", "decomposed")


class Masked(nn.Module):
    """A function of each embedding, the indices of its table and weights."""

    def __init__(self, function, frozen=False, **options):
        super().__init__()
        self.function = function
        self.tables = nn.ModuleList(nn.Embedding(20 + k, 4 + k, **options) for k in range(3))
        self.requires_grad_(not frozen)

    def forward(self, indices, weights):
        pooled = [self.function(t(indices[:, k]), indices[:, k], weights) for k, t in enumerate(self.tables)]
        return torch.cat(pooled, 1)


def batch(samples=6, lookups=5):
    return torch.randint(0, 20, (samples, 3, lookups)), torch.randn(samples, lookups)


def masked(rows, indices, weights):
    return (rows * (indices > 3).unsqueeze(-1)).sum(1)


def masked_mean(rows, indices, weights):
    mask = (indices > 3).float()
    return (rows * mask[:, :, None]).sum(dim=1) / mask.sum(1, keepdim=True).clamp(min=1)


def weighted(rows, indices, weights):
    return (weights.unsqueeze(2) * rows).sum(-2)


TAKEN = {"masked": masked, "masked mean": masked_mean, "weighted": weighted}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("way", WAYS)
def test_factors_of_lookups(name, way):
    model, given = Masked(TAKEN[name]), batch()
    swapped, report = passed(model, given, way)
    assert len(report.found("bags")) == 3 and not report.left, report
    assert "weighted embedding + sum" in str(report)
    given = batch()
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)
    if way in ("eager", "aot_eager"):
        assert_same(gradients(model, swapped, given), gradients(model, model, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TAKEN)
def test_gradients_of_factors(name):
    model, (indices, weights) = Masked(TAKEN[name]), batch()
    swapped, _ = passed(model, (indices, weights), "aot_eager")
    found, expected = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    for run, given in ((swapped, found), (model, expected)):
        run(indices, given).square().sum().backward()
    assert_same(found.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("padding_idx", (None, 0))
def test_frozen_tables_in_programs_of_any_batch(name, padding_idx):
    model, given = Masked(TAKEN[name], frozen=True, padding_idx=padding_idx), batch()
    batch_dim = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, given, dynamic_shapes=({0: batch_dim}, {0: batch_dim}))
    assert len(recfuse.swap(program).swapped) == 3
    for samples in (6, 1, 0, 31):
        given = batch(samples)
        assert_same(program.module()(*given), model(*given), rtol=1e-5, atol=1e-5)


def test_an_infinite_row_times_zero_is_nan():
    model, given = Masked(masked, frozen=True), batch()
    with torch.no_grad():
        model.tables[0].weight[2] = torch.inf
    given[0][0, 0] = 2
    swapped, _ = passed(model, given, "exported")
    assert torch.isnan(model(*given)[0, :4]).all()
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)


LEFT = {
    "a mean": lambda rows, indices, weights: (rows * weights.unsqueeze(-1)).mean(1),
    "weights of a sample": lambda rows, indices, weights: (rows * weights[:, :1].unsqueeze(-1)).sum(1),
    "weights of a column": lambda rows, indices, weights: (rows * rows[:1].detach()).sum(1),
    "float64": lambda rows, indices, weights: (rows * weights.double().unsqueeze(-1)).sum(1),
    "of lookups before": lambda rows, indices, weights: (rows * weights.unsqueeze(1)[..., :1]).sum(1),
}


def written(rows, indices, weights):
    weights = weights.clone()
    factors = weights.unsqueeze(-1)
    found = (rows * factors).sum(1)
    weights.mul_(2)
    return found + weights.sum()


@pytest.mark.parametrize("name", (*LEFT, "written"))
@pytest.mark.parametrize("way", ("aot_eager", "exported"))
def test_other_products_of_rows_are_left(name, way):
    model, given = Masked(LEFT.get(name, written), frozen=True), batch()
    swapped, report = passed(model, given, way)
    assert not report.swapped
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)
