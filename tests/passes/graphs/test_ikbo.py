"""Broadcasts of graphs: linear layers, attention and row-by-row computations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import assert_same, gradients, passed

USERS, TIMES = 6, 7
WAYS = ("eager", "aot_eager", "exported")
each_way = pytest.mark.parametrize("way", WAYS)
BROADCASTS = {
    "index": lambda x, index: x[index],
    "negative": lambda x, index: x[index - USERS],
    "index_select": lambda x, index: x.index_select(0, index.int()),
    "repeat_interleave": lambda x, index: x.repeat_interleave(TIMES, 0),
    "tile": lambda x, index: x.repeat(TIMES, *[1] * (x.dim() - 1)),
    "expand": lambda x, index: x.unsqueeze(1).expand(-1, TIMES, *x.shape[1:]).reshape(-1, *x.shape[1:]),
    "one user": lambda x, index: x[:1].expand(index.shape[0], *x.shape[1:]),
    "one user, as wide": lambda x, index: x[:1].expand_as(x.new_zeros(index.shape[0], *x.shape[1:])),
}


class Model(nn.Module):
    """A function of a broadcast, of candidates and of a layer."""

    def __init__(self, function, broadcast, *layers):
        super().__init__()
        self.function, self.broadcast = function, broadcast
        self.layers = nn.ModuleList(layers)

    def forward(self, user, candidate, index):
        return self.function(lambda x: self.broadcast(x, index), user, candidate, *self.layers)


def batch(user, candidate):
    return torch.randn(USERS, *user), torch.randn(USERS * TIMES, *candidate), torch.randint(0, USERS, (42,))


def check(model, given, way, kind, count=1, tolerance=1e-5):
    swapped, report = passed(model, given, way)
    assert len(report.found(kind)) == count and not report.left, report
    assert_same(swapped(*given), model(*given), rtol=tolerance, atol=tolerance)
    if way != "exported":
        found, expected = gradients(model, swapped, given), gradients(model, model, given)
        assert_same(found, expected, rtol=10 * tolerance, atol=10 * tolerance)
    return report


@each_way
@pytest.mark.parametrize("name", BROADCASTS)
def test_linear_over_a_cat(name, way):
    model = Model(
        lambda copied, u, c, layer: layer(torch.cat([copied(u), c], 1)), BROADCASTS[name], nn.Linear(13, 5)
    )
    check(model, batch((8,), (5,)), way, "ikbo_linear")


@each_way
def test_linear_over_an_hstack_of_any_batch(way):
    torch.compiler.reset()
    layer = nn.Linear(13, 5)
    model = Model(lambda copied, u, c, layer: layer(torch.hstack([copied(u), c])), BROADCASTS["index"], layer)
    user, candidate, index = given = batch((8,), (5,))
    torch._dynamo.mark_dynamic(candidate, 0)
    torch._dynamo.mark_dynamic(index, 0)
    shapes = None, {0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}
    options = {"dynamic_shapes": shapes} if way == "exported" else {}
    swapped, report = passed(model, given, way, **options)
    assert [entry.pattern for entry in report.swapped] == ["ikbo_linear"], report
    for count in (42, 17):
        part = user, candidate[:count].clone(), index[:count].clone()
        assert_same(swapped(*part), model(*part), rtol=1e-5, atol=1e-5)


@each_way
@pytest.mark.parametrize("order", ("c u", "c u c", "u c u", "u u c"))
def test_orders_of_features(order, way):
    def function(copied, u, c, layer):
        items = [copied(u).relu() if item == "u" else c * 2 for item in order.split()]
        return layer(torch.cat(items, -1)).relu()

    width = sum(8 if item == "u" else 5 for item in order.split())
    model = Model(function, BROADCASTS["index"], nn.Linear(width, 4, bias=False))
    check(model, batch((8,), (5,)), way, "ikbo_linear")


@each_way
def test_linear_compression(way):
    weight = nn.Linear(13, 6, bias=False)

    def function(copied, u, c, layer):
        return torch.matmul(layer.weight, torch.cat([copied(u), c], 1))

    model = Model(function, BROADCASTS["index_select"], weight)
    check(model, batch((8, 3), (5, 3)), way, "ikbo_linear")


PRODUCTS = {
    "matmul": lambda w, x: torch.matmul(w, x),
    "bmm": lambda w, x: torch.bmm(w.unsqueeze(0).expand(x.shape[0], -1, -1), x),
    "bmm of an expanded matrix": lambda w, x: torch.bmm(w.expand(x.shape[0], *w.shape), x),
    "einsum": lambda w, x: torch.einsum("mk,bkn->bmn", w, x),
    "einsum, turned": lambda w, x: torch.einsum("b k n, m k -> b m n", x, w),
}
ROWS = {
    "linear": lambda w, x: F.linear(x, w),
    "matmul of rows": lambda w, x: x @ w.t(),
    "mm": lambda w, x: torch.mm(x, w.transpose(0, 1)),
    "T": lambda w, x: x @ w.T,
    "addmm": lambda w, x: torch.addmm(w[:, 0], x, w.t()),
}


@each_way
@pytest.mark.parametrize("name", (*PRODUCTS, *ROWS))
def test_spellings_of_a_layer(name, way):
    product, wide = (PRODUCTS[name], (3,)) if name in PRODUCTS else (ROWS[name], ())

    def function(copied, u, c, layer):
        return product(layer.weight, torch.concat([copied(u), c], 1))

    model = Model(function, BROADCASTS["index"], nn.Linear(13, 6, bias=False))
    check(model, batch((8, *wide), (5, *wide)), way, "ikbo_linear")


OTHER_PRODUCTS = {
    "a weight a sample": lambda w, x: torch.bmm(w[None] * x[:, :1, :1], x),
    "summed": lambda w, x: torch.einsum("mk,bkn->bm", w, x),
    "elsewhere": lambda w, x: torch.einsum("mk,bkn->mbn", w, x),
    "its own transpose": lambda w, x: torch.einsum("mk,bnk->bmn", w, x.transpose(1, 2)),
    "samples last": lambda w, x: torch.matmul(x.transpose(1, 2), w.t()),
}


@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_other_products_stay(name):
    def function(copied, u, c, layer):
        return OTHER_PRODUCTS[name](layer.weight, torch.cat([copied(u), c], 1))

    model = Model(function, BROADCASTS["index"], nn.Linear(13, 6, bias=False))
    given = batch((8, 3), (5, 3))
    swapped, report = passed(model, given, "aot_eager")
    assert not report.found("ikbo_linear")
    assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)


@each_way
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_users_with_candidates_of_their_own_number(dtype, way):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.gate = nn.Linear(13, 6), nn.Linear(8, 6)

        def forward(self, user, candidate, counts):
            copied = user.repeat_interleave(counts, 0, output_size=candidate.shape[0])
            return self.layer(torch.cat([copied, candidate], 1)) * self.gate(copied).sigmoid()

    counts = torch.tensor([0, 7, 1, 20, 3, 11], dtype=dtype)
    model, given = Counted(), (torch.randn(6, 8), torch.randn(42, 5), counts)
    swapped, report = passed(model, given, way)
    assert {entry.pattern for entry in report.swapped} == {"ikbo_linear", "late_gather"} and not report.left
    for counts in (given[2], given[2].flip(0)):
        assert_same(swapped(*given[:2], counts), model(*given[:2], counts), rtol=1e-5, atol=1e-5)


@each_way
@pytest.mark.parametrize("late", (False, True))
def test_target_attention(late, way):
    def function(copied, u, c, q, k, v):
        keys, values = (copied(k(u)), copied(v(u))) if late else (k(copied(u)), v(copied(u)))
        split = [x.view(x.shape[0], -1, 2, 4).transpose(1, 2) for x in (q(c), keys, values)]
        return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)

    model = Model(function, BROADCASTS["index"], *(nn.Linear(8, 8) for _ in range(3)))
    check(model, batch((9, 8), (2, 8)), way, "ikbo_attention")


@each_way
def test_multihead_attention(way):
    def function(copied, u, c, attention):
        history = copied(u)
        return attention(c, history, history, need_weights=False)[0]

    model = Model(function, BROADCASTS["index"], nn.MultiheadAttention(8, 2, batch_first=True))
    check(model, batch((9, 8), (1, 8)), way, "ikbo_attention")


@each_way
def test_row_by_row_is_computed_for_users(way):
    def function(copied, u, c, layer, norm):
        tower = norm(F.gelu(layer(copied(u))))
        return torch.einsum("bd,bd->b", tower, c), tower.sigmoid() * c

    model = Model(function, BROADCASTS["index"], nn.Linear(8, 5), nn.LayerNorm(5))
    check(model, batch((8,), (5,)), way, "late_gather", count=2)


def test_the_sizes_of_computed_inputs():
    def function(copied, u, c, layer):
        return layer(copied(u)).relu() * c

    model = Model(function, BROADCASTS["index"], nn.Linear(8, 5))
    program = torch.export.export(model, batch((8,), (5,)))
    recfuse.swap(program)
    (linear,) = (node for node in program.graph.nodes if "linear" in str(node.target))
    assert list(linear.meta["val"].shape) == [USERS, 5]


def drop(copied, u, c, layer):
    return layer(torch.cat([F.dropout(copied(u), 0.5, True), c], 1))


def written(copied, u, c, layer):
    copies = copied(u)
    joined = torch.cat([copies, c], 1)
    copies.zero_()
    return layer(joined) + layer(torch.cat([copies, c], 1))


def across(copied, u, c, layer):
    return layer(torch.cat([copied(u).softmax(0), c], 1))


@pytest.mark.parametrize("function", (drop, written, across))
def test_operators_that_mix_rows_are_left(function):
    model = Model(function, BROADCASTS["index"], nn.Linear(13, 5))
    given = batch((8,), (5,))
    torch.manual_seed(3)
    expected = model(*given)
    swapped, report = passed(model, given, "eager")
    assert not report.swapped
    torch.manual_seed(3)
    assert_same(swapped(*given), expected)


LEFT = {
    "mask": ({"is_causal": True}, "no kernel has a mask. Omit the mask"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p is 0.5; expected 0"),
    "scale": ({"scale": -0.5}, "scale is -0.5; expected a positive number"),
}


@pytest.mark.parametrize("name", LEFT)
def test_skipped_attention_has_a_reason(name):
    options, reason = LEFT[name]

    def function(copied, u, c):
        history = copied(u)
        return F.scaled_dot_product_attention(c, history, history, **options)

    model = Model(function, BROADCASTS["index"])
    _, report = passed(model, batch((2, 9, 4), (2, 9, 4)), "eager")
    assert reason in report.left[0].detail


def test_few_candidates_and_tables_are_left():
    model = Model(
        lambda copied, u, c, layer: layer(torch.cat([copied(u), c], 1)), BROADCASTS["index"], nn.Linear(13, 5)
    )
    _, candidate, index = batch((8,), (5,))
    _, report = passed(model, (torch.randn(40, 8), candidate, index), "eager")
    assert "42 candidates of 40 users; expected 2 a user" in report.left[0].detail

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.layer = nn.Parameter(torch.randn(6, 8)), nn.Linear(13, 5)

        def forward(self, candidate, index):
            return self.layer(torch.cat([self.rows[index], candidate], 1))

    for way in WAYS:
        _, report = passed(Table(), (candidate, index), way)
        assert not report.entries


@pytest.mark.parametrize("inner", ("eager", "aot_eager"))
def test_batches_of_any_size(inner):
    def function(copied, u, c, layer, q, k):
        first = layer(torch.cat([copied(u).mean(1), c], 1)).relu()
        heads = [x.view(x.shape[0], -1, 2, 4).transpose(1, 2) for x in (q(first[:, None]), copied(k(u)))]
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[1]).flatten(1)

    model = Model(function, BROADCASTS["index"], nn.Linear(13, 5), nn.Linear(5, 8), nn.Linear(8, 8))
    torch.compiler.reset()
    backend = recfuse.backend(inner)
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for users, times in ((4, 8), (5, 70), (29, 70), (100, 20)):
            index = torch.arange(users).repeat_interleave(times)
            given = torch.randn(users, 9, 8), torch.randn(users * times, 5), index
            assert_same(compiled(*given), model(*given), rtol=1e-5, atol=1e-5)
    kinds = [entry.pattern for entry in backend.reports[-1].swapped]
    assert "ikbo_linear" in kinds and "ikbo_attention" in kinds


def test_weights_that_change_after_the_pass():
    model = Model(
        lambda copied, u, c, layer: layer(torch.cat([copied(u), c], 1)), BROADCASTS["index"], nn.Linear(13, 5)
    )
    given = batch((8,), (5,))
    swapped, _ = passed(model, given, "aot_eager")
    before = model(*given)
    for change in (
        lambda: model.load_state_dict(
            {name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=True
        ),
        lambda: model.layers[0].weight.data.mul_(-1),
        lambda: setattr(model.layers[0].weight, "data", torch.randn(5, 13)),
    ):
        change()
        assert not torch.equal(model(*given), before)
        assert_same(swapped(*given), model(*given), rtol=1e-5, atol=1e-5)
        before = model(*given)
