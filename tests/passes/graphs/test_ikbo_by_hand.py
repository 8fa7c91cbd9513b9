"""Attention by hand, ``softmax(q @ k^T * scale) @ v``, to keys that were copied from users."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import assert_same, gradients, passed

USERS, CANDIDATES, KEYS, DIM, HEADS = 3, 24, 7, 8, 2
WAYS = ("eager", "aot_eager", "exported")


class Model(nn.Module):
    """A function of the module, queries ``[B, Sq, dim]``, a history ``[users, keys, dim]`` and the map."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.seconds = nn.MultiheadAttention(DIM, HEADS)

    def forward(self, queries, history, of):
        return self.function(self, queries, history, of)


def batch(candidates=CANDIDATES, positions=2):
    of = torch.arange(candidates) * USERS // max(candidates, 1)
    return torch.randn(candidates, positions, DIM), torch.randn(USERS, KEYS, DIM), of


def heads(x):
    return x.view(x.shape[0], -1, HEADS, DIM // HEADS).transpose(1, 2)


def of_heads(m, queries, history, of):
    q, k, v = heads(m.q(queries)), heads(m.k(history[of])), heads(m.v(history)[of])
    weights = torch.softmax(q @ k.transpose(-2, -1) / (DIM // HEADS) ** 0.5, -1)
    return (weights @ v).transpose(1, 2).reshape(queries.shape[0], -1, DIM)


def of_one_head(m, queries, history, of):
    keys = history[of]
    return torch.bmm(F.softmax(torch.bmm(m.q(queries), keys.transpose(1, 2)) * 0.3, dim=2), keys)


def turned_keys(m, queries, history, of):
    scores = torch.matmul(m.q(queries) * 0.25, m.k(history.index_select(0, of)).permute(0, 2, 1))
    return F.dropout(scores.softmax(-1), 0.3, training=False) @ m.v(history.index_select(0, of))


def multihead(m, queries, history, of):
    keys = history[of]
    return m.attention(queries, keys, keys)[0]  # with weights, by default, which are unused


def multihead_of_sequences(m, queries, history, of):
    keys = history[of].transpose(0, 1)
    found, _ = m.seconds(queries.transpose(0, 1), keys, keys, average_attn_weights=False)
    return found


TAKEN = (of_heads, of_one_head, turned_keys, multihead, multihead_of_sequences)


def name_of(function):
    return function.__name__


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", TAKEN, ids=name_of)
def test_attention_by_hand(function, way):
    model, given = Model(function), batch()
    swapped, report = passed(model, given, way)
    assert [entry.action for entry in report.found("ikbo_attention")] == ["swapped"], report
    assert_same(swapped(*given), model(*given), rtol=1e-4, atol=1e-5)
    if way != "exported":
        found, expected = gradients(model, swapped, given), gradients(model, model, given)
        assert_same(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("function", TAKEN, ids=name_of)
def test_programs_of_any_batch(function):
    model, sizes = Model(function), {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(model, batch(), dynamic_shapes=(sizes, None, sizes))
    assert recfuse.swap(program).found("ikbo_attention")[0].action == "swapped"
    for candidates in (CANDIDATES, 5, 1):
        given = batch(candidates)
        assert_same(program.module()(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_unread_nodes_are_removed():
    program = torch.export.export(Model(multihead), batch())
    recfuse.swap(program)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not names & {"aten.softmax.int", "aten.bmm.default", "aten.mean.dim"}, names


# ---- other computations


def with_weights(m, queries, history, of):
    keys = history[of]
    return m.attention(queries, keys, keys)


def negative(m, queries, history, of):
    return torch.bmm(torch.softmax(torch.bmm(queries, history[of].transpose(1, 2)) * -0.3, 2), history[of])


def other_dimension(m, queries, history, of):
    return torch.bmm(torch.softmax(torch.bmm(queries, history[of].transpose(1, 2)), 1), history[of])


def masked(m, queries, history, of):
    scores = torch.bmm(queries, history[of].transpose(1, 2))
    return torch.bmm(scores.masked_fill(scores < 0, -torch.inf).softmax(-1), history[of])


def masked_in_place(m, queries, history, of):
    scores = torch.bmm(queries, history[of].transpose(1, 2))
    scores[:, :, 0] = -torch.inf
    return torch.bmm(scores.softmax(-1), history[of])


def scores_of_their_own(m, queries, history, of):
    scores = torch.bmm(queries, history[of].transpose(1, 2))
    return torch.bmm(scores.softmax(-1), history[of]), scores


def in_float64(m, queries, history, of):
    scores = torch.bmm(queries, history[of].transpose(1, 2))
    return torch.bmm(scores.softmax(-1, dtype=torch.float64), history[of].double())


def other_values(m, queries, history, of):
    scores = torch.bmm(queries, history[of].transpose(1, 2))
    return torch.bmm(scores.softmax(-1), history[of.flip(0)])


LEFT = (
    with_weights,
    negative,
    other_dimension,
    masked,
    masked_in_place,
    scores_of_their_own,
    in_float64,
    other_values,
)


@pytest.mark.parametrize("way", ("aot_eager", "exported"))
@pytest.mark.parametrize("function", LEFT, ids=name_of)
def test_other_computations_are_left(function, way):
    model, given = Model(function), batch()
    swapped, report = passed(model, given, way)
    assert not any(entry.action == "swapped" for entry in report.found("ikbo_attention"))
    assert_same(swapped(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_dropout_is_left():
    def function(m, queries, history, of):
        scores = torch.bmm(queries, history[of].transpose(1, 2))
        return torch.bmm(F.dropout(scores.softmax(-1), 0.5), history[of])

    model, given = Model(function), batch()
    swapped, report = passed(model, given, "exported")
    assert not report.swapped
    results = []
    for run in (swapped, model):
        torch.manual_seed(0)
        results.append(run(*given))
    assert_same(*results)
