"""Embedding columns of graphs: matched, folded, and zeros for missing values."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm import tqdm

import recfuse
from support.graphs import assert_same, jagged, passed

pytestmark = pytest.mark.long


class Columns(nn.Module):
    """A feature-column list: every form of column before one cat."""

    def __init__(self, columns):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(13, 4, mode=("sum", "mean", "max")[k % 3]) if k % 5 == 4 else nn.Embedding(13, 4)
            for k in range(columns)
        )
        self.top = nn.Linear(4 * columns, 2)

    def column(self, k, floats, integers):
        table, raw, number = self.tables[k], floats[:, k], integers[:, k]
        if k % 5 == 0:
            boundaries = torch.tensor([-1.0, -0.5, 0.25, 0.5, 2.0])
            return table(torch.bucketize((raw * 0.7 + 0.1).clamp(-3, 3), boundaries, right=k % 2 == 0))
        if k % 5 == 1:
            return table(number % 13)
        if k % 5 == 2:
            return table(number.clamp(0, 12))
        if k % 5 == 3:
            found = torch.where(number > 0, number % 13, -1)
            rows = table(found.clamp(min=0))
            return torch.where((found >= 0).unsqueeze(1), rows, 0.0)
        return table(integers[:, :3] % 13)

    def forward(self, floats, integers):
        found = [self.column(k, floats, integers) for k in range(len(self.tables))]
        return self.top(torch.cat(found, 1))

    def batch(self, samples):
        columns = len(self.tables)
        return torch.randn(samples, columns) * 2, torch.randint(-50, 10**9, (samples, columns))


@pytest.mark.parametrize(
    "way, columns", (("eager", 30), ("aot_eager", 30), ("inductor", 10), ("exported", 60))
)
def test_columns_of_every_form(way, columns):
    model = Columns(columns).requires_grad_(False)
    options = {}
    if way == "exported":
        size = torch.export.Dim("samples", min=2, max=1 << 16)
        options["dynamic_shapes"] = ({0: size}, {0: size})
    swapped, report = passed(model, model.batch(8), way, **options)
    assert len(report.found("columns")) == columns
    assert f"{columns // 5 * 11} operators" in report.swapped[0].detail
    assert not report.left and {entry.pattern for entry in report.swapped} == {"columns"}
    for samples in (8, 100):
        batch = model.batch(samples)
        assert_same(swapped(*batch), model(*batch))


def test_steps_are_folded():
    model = Columns(10).requires_grad_(False)
    swapped, report = passed(model, model.batch(8), "exported")
    names = [str(node.target) for node in swapped.graph.nodes if node.op == "call_function"]
    assert sum("embedding_columns" in name for name in names) == 1
    for folded in ("bucketize", "clamp", "aten.embedding", "lift_fresh", "detach"):
        assert not any(folded in name for name in names), names
    assert "columns in one call" in report.swapped[0].detail


class OneHot(nn.Module):
    """Bags of one lookup each, in every spelling."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(13, 4, mode=mode) for mode in ("sum", "mean", "max", "mean", "sum", "mean")
        )

    def forward(self, x):
        weights = [table.weight for table in self.tables]
        pooled = [self.tables[0]((x[:, 0] % 13).unsqueeze(1)), self.tables[1](x[:, 1:2] % 13)]
        pooled += [F.embedding_bag((x[:, 2] % 13).view(-1, 1), weights[2], mode="max")]
        pooled += [F.embedding((x[:, 3] % 13)[:, None], weights[3]).mean(1)]
        pooled += [F.embedding(x[:, 4:5] % 13, weights[4]).sum(dim=-2)]
        pooled += [F.embedding_bag(x[:, 5] % 13, weights[5], torch.arange(x.shape[0]), mode="mean")]
        return torch.cat(pooled, 1)


def test_bags_of_one_lookup_are_not_pooled():
    """They are dense columns of one value: nothing counts their lookups."""
    model = OneHot().requires_grad_(False)
    x, batch = torch.randint(0, 10**6, (8, 6)), torch.export.Dim("batch", min=2)
    swapped, report = passed(model, (x,), "exported", dynamic_shapes=({0: batch},))
    assert len(report.swapped) == 6
    names = {str(node.target) for node in swapped.graph.nodes if node.op == "call_function"}
    assert names == {"recfuse.embedding_columns.default", "aten.sym_size.int"}
    (call,) = (node for node in swapped.graph.nodes if "embedding_columns" in str(node.target))
    assert [len(inputs) for inputs in call.args[2:4]] == [1, 0]  # dense and jagged
    for samples in (8, 100):
        x = torch.randint(0, 10**6, (samples, 6))
        assert_same(swapped(x), model(x))


def test_trained_columns_are_bags():
    model = Columns(10)
    batch = model.batch(8)
    _, report = passed(model, batch, "eager")
    assert len(report.found("bags")) == 10 and not report.found("columns")
    with torch.no_grad():
        swapped, report = passed(model, batch, "eager")
        assert len(report.found("columns")) == 10
        assert_same(swapped(*batch), model(*batch))
        for table in model.tables:
            table.weight.mul_(-1)
        assert_same(swapped(*batch), model(*batch))


def test_boundaries_that_may_change_are_read_at_each_call():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(3))
            self.register_buffer("boundaries", torch.linspace(-1, 1, 8))

        def forward(self, x):
            rows = [t(torch.bucketize(x[:, k], self.boundaries) % 9) for k, t in enumerate(self.tables)]
            return torch.cat(rows, 1)

    model = Model().requires_grad_(False)
    x = torch.randn(20, 3)
    swapped, report = passed(model, (x,), "aot_eager")
    before = model(x)
    model.boundaries.add_(0.5)
    assert report.swapped and not torch.equal(model(x), before)
    assert_same(swapped(x), model(x))


def test_an_index_that_is_no_row_raises():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(2))

        def forward(self, x):
            first = torch.where((x >= 0).unsqueeze(1), self.tables[0](x.clamp(min=0)), 0.0)
            return torch.cat([first, self.tables[1](x.clamp(0, 8))], 1)

    model = Model().requires_grad_(False)
    x = torch.tensor([3, -1, 8])
    swapped, report = passed(model, (x,), "eager")
    assert report.swapped
    assert_same(swapped(x), model(x))
    with pytest.raises(RuntimeError, match=r"9"):
        swapped(torch.tensor([3, 9, 1]))


class One(nn.Module):
    """A bag with its last offset and the following code, and a column that has a step."""

    def __init__(self, end):
        super().__init__()
        self.table, self.other, self.end = nn.Embedding(9, 4), nn.Embedding(9, 4), end

    def forward(self, values, lengths, beside):
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        weight = self.table.weight
        pooled = F.embedding_bag(values % 9, weight, offsets, mode="mean", include_last_offset=True)
        return torch.cat([self.end(pooled, offsets, lengths, weight), self.other(beside % 9)], 1)


def written_zeros(pooled, lengths):
    zeros = torch.zeros_like(pooled)
    zeros.add_(1)
    return torch.where((lengths > 0).unsqueeze(1), pooled, zeros)


FOLDED_ENDS = {
    "zeros": lambda p, o, n, w: torch.where((n > 0)[:, None], p, 0.0),
    "zeros_like": lambda p, o, n, w: torch.where(~(n >= 1)[:, None], torch.zeros_like(p), p),
    "number": lambda p, o, n, w: p.masked_fill((o.diff() == 0).unsqueeze(1), 2.5),
    "row": lambda p, o, n, w: torch.where((o[1:] - o[:-1] < 1).unsqueeze(-1), w[2], p),
    "last row": lambda p, o, n, w: torch.where((n != 0).unsqueeze(1), p, w[-1]),
}
LEFT_ENDS = {
    "other lengths": lambda p, o, n, w: torch.where((n.flip(0) > 0)[:, None], p, 1.0),
    "more than empty": lambda p, o, n, w: torch.where((n > 1)[:, None], p, 1.0),
    "the other way": lambda p, o, n, w: torch.where((n < 1)[:, None], p, 1.0),
    "written": lambda p, o, n, w: written_zeros(p, n),
    "used again": lambda p, o, n, w: torch.where((n > 0)[:, None], p, 1.0) + p,
    "other differences": lambda p, o, n, w: torch.where((o[:-1] - o[1:] < 1).unsqueeze(-1), w[2], p),
}


@pytest.mark.parametrize("way", ("eager", "exported"))
@pytest.mark.parametrize("end", (*FOLDED_ENDS, *LEFT_ENDS))
def test_defaults_of_empty_samples(end, way):
    model = One({**FOLDED_ENDS, **LEFT_ENDS}[end]).requires_grad_(False)
    values, offsets = jagged(8, 10**6, last=True)
    batch = values, offsets.diff(), torch.randint(0, 10**6, (8,))
    swapped, report = passed(model, batch, way)
    assert len(report.found("columns")) == 2
    assert ("5 operators" if end in FOLDED_ENDS else "2 operators") in report.found("columns")[0].detail
    if way == "exported" and end in FOLDED_ENDS:
        names = {
            str(node.target).split(".")[1] for node in swapped.graph.nodes if "aten." in str(node.target)
        }
        gone = {
            "where",
            "masked_fill",
            "zeros_like",
            "embedding_bag",
            "unsqueeze",
            "diff",
            "select",
            "remainder",
        }
        assert not names & (gone | {"gt", "ge", "lt", "eq", "ne", "logical_not", "bitwise_not"})
    assert (batch[1] == 0).any()
    assert_same(swapped(*batch), model(*batch))


def test_folded_constants_are_removed():
    """Recorded with gradients, torch.tensor is a copy that is detached in place; both are unused."""
    model, batch = Columns(10).requires_grad_(False), Columns(10).batch(8)
    graph = make_fx(model, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*batch)
    assert any("detach_" in str(node.target) for node in graph.graph.nodes)
    with torch.no_grad():
        report = recfuse.swap(graph)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert len(report.found("columns")) == 10
        assert not any("lift_fresh" in name or "detach" in name for name in names), names
        assert_same(graph(*batch), model(*batch))


def test_a_pass_over_many_columns_is_quick_and_shows_progress(monkeypatch):
    """One recording for all batches, of which a bar is shown; seconds of the processor, not of the clock."""
    shown, spent = {}, []

    class Bar(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "disable": True})
            self.what = options["desc"]

        def update(self, n=1):
            shown[self.what] = shown.get(self.what, 0) + n

    def timed(module, inputs):
        begin = time.process_time()
        try:
            return backend(module, inputs)
        finally:
            spent.append(time.process_time() - begin)

    monkeypatch.setattr("recfuse.passes.graph.progress.tqdm", Bar)
    model, backend = Columns(100).requires_grad_(False), recfuse.backend("eager")
    torch.compiler.reset()
    compiled = torch.compile(model, backend=timed, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for samples in (32, 256, 2048):
            batch = model.batch(samples)
            assert_same(compiled(*batch), model(*batch))
    assert len(backend.reports[-1].found("columns")) == 100
    assert len(spent) == 1 and spent[0] < 2
    assert shown["recfuse: recording a graph"] > 400 and shown["recfuse: graph passes"] >= 100
