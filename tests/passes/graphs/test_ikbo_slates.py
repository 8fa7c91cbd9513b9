"""Linear layers over users and a slate of candidates for each, ``[users, slate, features]``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recfuse
from support.graphs import assert_same, gradients, passed

USERS, SLATE = 5, 9
WAYS = ("eager", "aot_eager", "exported")


class Model(nn.Module):
    """A function of the module, users' features and candidates'."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer, self.tower = nn.Linear(20, 6), nn.Linear(8, 8)
        self.plain = nn.Linear(20, 3, bias=False)

    def forward(self, users, candidates):
        return self.function(self, users, candidates)


def batch(users=USERS, slate=SLATE):
    return torch.randn(users, 8), torch.randn(users, slate, 12)


def expanded(m, users, candidates):
    copied = users.unsqueeze(1).expand(-1, candidates.shape[1], -1)
    return m.layer(torch.cat([copied, candidates], -1)).relu()


def as_wide(m, users, candidates):
    return m.plain(torch.cat([m.tower(users)[:, None].expand_as(candidates[..., :8]), candidates], 2))


def repeated(m, users, candidates):
    copied = m.tower(users)[:, None].repeat(1, candidates.shape[1], 1)
    return m.layer(torch.cat([candidates[..., :6], copied, candidates[..., 6:]], 2))


def first_of_each(m, users, candidates):
    copied = candidates[:, :1, :8].expand(-1, candidates.shape[1], -1)
    return m.layer(torch.cat([copied, candidates], 2)) + m.tower(users).sum()


TAKEN = (expanded, as_wide, repeated, first_of_each)


def name_of(function):
    return function.__name__


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", TAKEN, ids=name_of)
def test_layers_over_slates(function, way):
    model, given = Model(function), batch()
    model.requires_grad_(way != "exported")
    swapped, report = passed(model, given, way)
    assert [entry.action for entry in report.found("ikbo_linear")] == ["swapped"], report
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)
    if way != "exported":
        results = []
        for run in (swapped, model):
            inputs = [tensor.clone().requires_grad_() for tensor in given]
            run(*inputs).square().sum().backward()
            results.append([tensor.grad for tensor in inputs])
        assert_same(*results, rtol=1e-4, atol=1e-4)


def test_gradients_of_the_layer():
    model, given = Model(repeated), batch()
    model.plain = model.layer  # no Parameter that has no gradient
    swapped, _ = passed(model, given, "aot_eager")
    assert_same(gradients(model, swapped, given), gradients(model, model, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", TAKEN, ids=name_of)
def test_programs_of_any_slate(function):
    model, any_size = Model(function), torch.export.Dim.DYNAMIC
    shapes = {0: any_size}, {0: any_size, 1: any_size}
    program = torch.export.export(model, batch(), dynamic_shapes=shapes)
    assert len(recfuse.swap(program).swapped) == 1
    for users, slate in ((5, 9), (2, 3), (3, 2), (1, 4), (4, 1), (0, 3)):
        given = batch(users, slate)
        assert_same(program.module()(*given), model(*given), rtol=1e-5, atol=1e-5)


# ---- graphs that stay


def written(m, users, candidates):
    candidates = candidates.clone()
    joined = torch.cat([users[:, None].expand_as(candidates[..., :8]), candidates], 2)
    candidates.mul_(2)
    return m.layer(joined)


def of_one_user(m, users, candidates):
    copied = users[:1, None].expand(candidates.shape[0], candidates.shape[1], -1)
    return m.layer(torch.cat([copied, candidates], 2))


def along_the_slate(m, users, candidates):
    return m.tower(torch.cat([users[:, None].expand(-1, 3, -1), candidates[..., :8]], 1))


def without_gradients(m, users, candidates):
    with torch.no_grad():
        copied = m.tower(users)[:, None].expand(-1, candidates.shape[1], -1)
    return m.layer(torch.cat([copied, candidates], 2))


@pytest.mark.parametrize("way", ("aot_eager", "exported"))
@pytest.mark.parametrize("function", (written, of_one_user, along_the_slate, without_gradients), ids=name_of)
def test_other_layers_are_left(function, way):
    model, given = Model(function), batch()
    swapped, report = passed(model, given, way)
    assert not report.swapped
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)


def test_a_slate_of_one_candidate_is_not_a_copy():
    model, given = Model(expanded), batch(slate=1)
    swapped, report = passed(model, given, "exported")
    assert not report.swapped
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)
