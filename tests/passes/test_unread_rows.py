"""Computations moved from candidates to users: users without candidates affect no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import passed

USERS, READ, CANDIDATES = 6, 4, 24
WAYS = ("eager", "aot_eager", "exported", "decomposed")


class Model(nn.Module):
    """Copies users' features to candidates, then computes with them, by `form`."""

    def __init__(self, form, copy="index"):
        super().__init__()
        self.form, self.copy = form, copy
        self.user, self.both, self.norm = nn.Linear(8, 8), nn.Linear(16, 5), nn.LayerNorm(8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x_user, x_cand, users, history):
        copied, past = (
            one[users] if self.copy == "index"
            else one.index_select(0, users) if self.copy == "select"
            else one.repeat_interleave(users, 0, output_size=CANDIDATES)
            for one in (x_user, history)
        )  # fmt: skip
        if self.form == "linear":
            return self.both(torch.cat((F.relu(self.user(copied)), x_cand), 1))
        if self.form == "quotient":
            return self.both(torch.cat((copied / copied.square().sum(1, keepdim=True).sqrt(), x_cand), 1))
        if self.form == "late gather":
            return self.norm(self.user(copied)).sigmoid() * x_cand
        q, k, v = (head(one) for head, one in zip(self.heads, (x_cand[:, None], past, past), strict=True))
        q, k, v = (one.unflatten(2, (2, 4)).transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)


def batch(copy, unread):
    """`unread` fills the rows of users without candidates."""
    x_user, history = torch.randn(USERS, 8), torch.randn(USERS, 7, 8)
    x_user[READ:], history[READ:] = unread, unread
    users = torch.arange(CANDIDATES) % READ
    if copy == "counts":
        users = torch.tensor([6, 6, 6, 6, 0, 0])
    if copy == "select":
        users = users.int()
    return x_user, torch.randn(CANDIDATES, 8), users, history


def gradients(model, run, given):
    """Of Parameters, users' features and histories."""
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in given]
    model.zero_grad()
    run(*leaves).square().sum().backward()
    return [one.grad for one in (*model.parameters(), leaves[0], leaves[3])]


@pytest.mark.parametrize(
    "unread",
    (
        torch.nan,
        pytest.param(torch.inf, marks=pytest.mark.long),
        pytest.param(0.0, marks=pytest.mark.long),
    ),
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ("linear", "quotient", "late gather", "attention"))
def test_gradients(form, way, unread):
    for copy in ("index", "select", "counts"):
        model, given = Model(form, copy), batch(copy, unread)
        if way in ("exported", "decomposed"):
            run, report = passed(model, given, way)
            run.load_state_dict(model.state_dict())
            ours = gradients(run, run, given)
        else:
            run, report = passed(
                model, [one.clone().requires_grad_(one.is_floating_point()) for one in given], way
            )
            ours = gradients(model, run, given)
        ours = [None if one is None else one.clone() for one in ours]
        assert report.swapped or way == "decomposed", str(report)
        for got, want in zip(ours, gradients(model, model, given), strict=True):
            if want is None or got is None:
                assert want is None or not want.any()
                assert got is None or not got.any()
                continue
            assert want.isfinite().all() and got.isfinite().all()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_inference_copies_no_users():
    """Only gradients need it."""
    model, given = Model("linear").requires_grad_(False), batch("index", torch.nan)
    with torch.no_grad():
        program = torch.export.export(model, given)
    recfuse.swap(program)
    selects = [node for node in program.graph.nodes if "index_select" in str(node.target)]
    assert not selects
    torch.testing.assert_close(program.module()(*given), model(*given))
