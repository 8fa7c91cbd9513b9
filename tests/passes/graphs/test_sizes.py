"""Samples that are not as many in every feature: the original raises, and so does the rewritten graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import recfuse
from support.graphs import assert_same, jagged

FORMS = ("offsets", "last offset", "matrix", "sum", "one")
PAIRS = [*((form, form) for form in FORMS), ("offsets", "one"), ("one", "last offset"), ("matrix", "offsets")]
SIZES = ((6, 12), (12, 6), (6, 7), (1, 6), (6, 1), (3, 6), (6, 0))


class Model(nn.Module):
    """A table a feature, before one cat."""

    def __init__(self, forms, steps):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in forms)
        self.forms, self.steps = forms, steps
        self.requires_grad_(False)

    def pooled(self, form, table, given):
        values, offsets = given if isinstance(given, tuple) else (given, None)
        values = values % 9 if self.steps else values
        if form in ("sum", "one"):
            return table(values).sum(1) if form == "sum" else table(values)
        last = form == "last offset"
        return F.embedding_bag(values, table.weight, offsets, mode="sum", include_last_offset=last)

    def forward(self, *features):
        return torch.cat(list(map(self.pooled, self.forms, self.tables, features)), 1)

    def batch(self, *sizes):
        return [
            torch.randint(0, 9, (size,) if form == "one" else (size, 3))
            if form in ("matrix", "sum", "one")
            else jagged(size, 9, last=form == "last offset")
            for form, size in zip(self.forms, sizes, strict=True)
        ]


def exported(model, batch):
    any_number = {0: torch.export.Dim.AUTO}
    dims = tuple((any_number,) * 2 if isinstance(given, tuple) else any_number for given in batch)
    program = torch.export.export(model, tuple(batch), dynamic_shapes=(dims,))
    report = recfuse.swap(program)
    return program.module(check_guards=False), report


def recorded(model, batch):
    traced = make_fx(model, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)
    graph = traced(*batch)
    return graph, recfuse.swap(graph)


@pytest.mark.parametrize("steps", (False, True), ids=("bags", "columns"))
@pytest.mark.parametrize("forms", PAIRS, ids="-".join)
@pytest.mark.parametrize("way", (exported, recorded))
def test_features_with_equal_numbers_of_samples(way, forms, steps):
    model = Model(forms, steps)
    with torch.no_grad():
        swapped, report = way(model, model.batch(6, 6))
        assert report.swapped
        for samples in (6, 9, 2):
            batch = model.batch(samples, samples)
            assert_same(swapped(*batch), model(*batch))
        for sizes in SIZES:
            batch = model.batch(*sizes)
            for run in (model, swapped):
                with pytest.raises((RuntimeError, ValueError, AssertionError)):
                    run(*batch)
