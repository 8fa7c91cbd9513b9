"""Models that resemble patterns but differ: their results do not change, or the graph stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from recfuse.passes.graph.broadcasts import Broadcasts
from recfuse.passes.patterns import late_gather
from support.graphs import assert_same, passed

each_way = pytest.mark.parametrize("way", ("aot_eager", "exported"))


class Model(nn.Module):
    """A function of its arguments and of a module of tables or a matrix."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.tables = nn.ModuleList(nn.Embedding(10, 4, dtype=dtype) for _ in range(2))
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.requires_grad_(False)

    def forward(self, *args):
        return self.function(self, *args)


def run(model, args):
    """Returns the results of a model, and its arguments after the call."""
    args = [arg.clone() for arg in args]
    torch.manual_seed(0)
    return model(*args), args


def check(function, args, way, dtype=torch.float32):
    model = Model(function, dtype)
    with torch.no_grad():
        swapped, report = passed(model, args, way)
        assert_same(run(swapped, args), run(model, args), rtol=1e-5, atol=1e-5)
    return report


# ---- constants that are written to


def edges_written_through_a_view(m, x):
    edges = torch.tensor([1.0, 2.0, 3.0])
    edges[1:].fill_(5.0)
    return torch.cat([t(torch.bucketize(x[:, k], edges)) for k, t in enumerate(m.tables)], 1)


def edges_whose_copy_is_written(m, x):
    edges = torch.tensor([1.0, 2.0, 3.0]).clone()
    edges.unsqueeze(0)[:, 2].mul_(3)
    return torch.cat([t(torch.bucketize(x[:, k], edges)) for k, t in enumerate(m.tables)], 1)


def edges_written_after_a_copy(m, x):
    edges = torch.tensor([1.0, 2.0, 3.0])
    copied = edges.detach()
    edges.add_(2)
    return torch.cat([t(torch.bucketize(x[:, k], copied)) for k, t in enumerate(m.tables)], 1)


def mask_written(m, x):
    valid = ~(x.long().clamp(0, 9) < 0)
    valid[:, 0] = False
    return torch.where(valid, x.long().clamp(0, 9), 7) + 0


CONSTANTS = (
    edges_written_through_a_view,
    edges_whose_copy_is_written,
    edges_written_after_a_copy,
    mask_written,
)


@each_way
@pytest.mark.parametrize("function", CONSTANTS)
def test_written_tensors_are_no_constants(function, way):
    check(function, (torch.tensor([[2.5, 4.0], [0.0, 6.0]]),), way)


# ---- slices

SLICES = ((-10, 2), (-10, 9), (-4, -2), (2, 9), (None, 2), (0, 0), (-1, None))


@each_way
@pytest.mark.parametrize("start, end", SLICES)
def test_slices_begin_where_torch_begins(start, end, way):
    def function(m, x):
        first, second = x[:, start:end] % 10, x[:, 2:9] % 10
        return torch.cat([m.tables[0](first).sum(1), m.tables[1](second).sum(1)], 1)

    check(function, (torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),), way)


# ---- numbers that a type has not

NUMBERS = {
    "remainder": lambda x, n: x % n,
    "clamp max": lambda x, n: x.clamp(max=n),
    "clamp min": lambda x, n: x.clamp(min=-n),
    "where <": lambda x, n: torch.where(x < n, x, x * 0),
    "where >=": lambda x, n: torch.where(x >= n, x * 0, x),
    "where !=": lambda x, n: torch.where(x != n, x, x * 0 + 1),
    "where -n": lambda x, n: torch.where(x > -n, x, x * 0),
    "mask": lambda x, n: x.masked_fill(x > n, 1),
    "and": lambda x, n: torch.where((x < n) & ~(x > n), x.clamp(0, 5), 3).clamp(0, 5),
    "clamped": lambda x, n: x.clamp(max=n).clamp(max=50),
    "computed": lambda x, n: torch.where((x % n) < 200, x, x * 0),
}


@each_way
@pytest.mark.parametrize(
    "dtype",
    (
        torch.uint8,
        pytest.param(torch.int8, marks=pytest.mark.long),
        pytest.param(torch.int16, marks=pytest.mark.long),
    ),
)
def test_numbers_outside_the_dtype_behave_as_in_torch(dtype, way):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, 0, 3, 44, 50, 100, limits.max - 1, limits.max], dtype=dtype)
    numbers = 127, 128, 200, 255, 256, 300, 65536, 65580

    def attempt(of, x, number):
        try:
            return of(x, number) + 0
        except RuntimeError:  # torch refuses such a number
            return None

    for number in numbers:
        taken = [of for of in NUMBERS.values() if attempt(of, x, number) is not None]
        check(lambda m, x, number=number, taken=taken: [of(x, number) + 0 for of in taken], (x,), way)


@each_way
@pytest.mark.parametrize("fill, dtype", ((0.1, torch.float16), (0.5, torch.int64), (0.1, None)))
def test_defaults_are_numbers_of_their_type(fill, dtype, way):
    def function(m, x, offsets):
        pooled = []
        for table in m.tables:
            rows = F.embedding_bag(x % 10, table.weight, offsets, mode="sum", include_last_offset=True)
            is_empty = ((offsets[1:] - offsets[:-1]) == 0).unsqueeze(1)
            pooled.append(torch.where(is_empty, torch.full((1,), fill, dtype=dtype), rows))
        return torch.cat(pooled, 1)

    report = check(function, (torch.arange(7), torch.tensor([0, 3, 3, 7])), way)
    assert len(report.found("columns")) == 2


# ---- broadcasts


@each_way
def test_a_map_along_another_dimension(way):
    def function(m, user, candidate, index):
        copied = user[index]  # [12, 12]
        joined = torch.cat([copied.transpose(0, 1), copied.relu(), candidate], 1)
        return F.linear(joined, m.matrix.repeat(1, 5)[:, :28])

    args = torch.randn(3, 12), torch.randn(12, 4), torch.randint(0, 3, (12,))
    assert check(function, args, way).swapped


@pytest.mark.parametrize("train", (False, True))
def test_inactive_dropout_is_removed(train):
    def function(m, user, candidate, index):
        copied = F.dropout(user[index], 0.5, train)
        return F.linear(torch.cat([copied, candidate], 1), m.matrix)

    args = torch.randn(3, 2), torch.randn(12, 4), torch.randint(0, 3, (12,))
    swapped, report = passed(Model(function), args, "exported")
    assert bool(report.swapped) == (not train)
    assert any(str(node.target).startswith("aten.index") for node in swapped.graph.nodes) == train


ATTENTIONS = {
    "no scale": lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=0.0),
    "a negative scale": lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=-1.5),
    "one query for all": lambda q, k: F.scaled_dot_product_attention(q[:1], k, k),
    "a scale": lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=0.25),
}


@each_way
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions(name, way):
    args = torch.randn(12, 2, 4, 8), torch.randn(3, 2, 5, 8), torch.randint(0, 3, (12,))
    report = check(lambda m, q, history, index: ATTENTIONS[name](q, history[index]), args, way)
    assert bool(report.swapped) == (name == "a scale")


def test_a_failing_match_keeps_other_matches(monkeypatch):
    """Nodes emitted before the error are removed."""

    class Failing(Broadcasts):
        def map_of(self, lift):
            raise RuntimeError("some shape")

    def function(m, user, candidate, index):
        tower = user[index].cos() * candidate[:, :2]
        return tower.sum(1), F.linear(torch.cat([user[index], candidate], 1), m.matrix)

    monkeypatch.setattr(late_gather, "Broadcasts", Failing)
    args = torch.randn(3, 2), torch.randn(12, 4), torch.randint(0, 3, (12,))
    swapped, report = passed(Model(function), args, "exported")
    assert [entry.pattern for entry in report.swapped] == ["ikbo_linear"]
    assert [entry.detail for entry in report.left] == [
        "the match cannot be rewritten: RuntimeError('some shape')"
    ]
    assert sum("cos" in str(node.target) for node in swapped.graph.nodes) == 1


# ---- tensors of the model that are no constants, and unrelated counters


@pytest.mark.parametrize("strict", (False, True))
def test_a_tensor_of_the_model_may_change_later(strict):
    def function(m, x):
        return torch.cat([t(torch.bucketize(x[:, k], m.edges)) for k, t in enumerate(m.tables)], 1)

    model, x = Model(function), torch.tensor([[1.5, 2.5], [0.5, 9.0]])
    model.edges = torch.tensor([1.0, 2.0, 3.0])
    program = torch.export.export(model, (x,), strict=strict)
    assert recfuse.swap(program).swapped
    model.edges.mul_(100)
    assert_same(program.module()(x), model(x))


class Counted(nn.Module):
    """Bags of a buffer that is written to or not, with a counter that is."""

    def __init__(self, shared):
        super().__init__()
        self.register_buffer("count", torch.arange(44.0).view(11, 4))
        self.register_buffer("rows", self.count[1:] if shared else torch.randn(10, 4))

    def forward(self, x):
        before = F.embedding_bag(x, self.rows, mode="sum")
        self.count.add_(1)
        return before, F.embedding_bag(x, self.rows, mode="sum")


@pytest.mark.parametrize("shared", (False, True))
def test_a_counter_is_no_other_buffer(shared):
    model, x = Counted(shared), torch.randint(0, 10, (8, 3))
    start = model.count.clone()
    expected = model(x)
    swapped, report = passed(model, (x,), "aot_eager")
    model.count.copy_(start)
    assert_same(swapped(x), expected)
    assert bool(report.swapped) != shared
