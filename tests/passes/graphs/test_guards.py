"""Ranges of indices, and guards that they make needless: a feature-column list of 300 columns."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recfuse
from recfuse.passes.graph.program import Program
from recfuse.passes.graph.ranges import Ranges
from support.graphs import assert_same, passed

COLUMNS = 40  # of four forms and five sizes


class FeatureColumns(nn.Module):
    """Columns that translate a feature to an index, guard it and look it up."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11 + k % 5, 4) for k in range(COLUMNS))
        self.register_buffer("boundaries", torch.linspace(-2, 2, 10))
        self.top = nn.Linear(4 * COLUMNS, 2)

    def index(self, k, floats, integers):
        rows = self.tables[k].num_embeddings
        if k % 4 == 0:
            return torch.bucketize(floats, self.boundaries).clamp(0, rows - 1)
        if k % 4 == 1:
            hashed = integers % rows
            return torch.where(hashed < rows, hashed, torch.zeros_like(hashed))
        if k % 4 == 2:
            hashed = torch.remainder(integers, rows)
            return hashed.masked_fill((hashed < 0) | (hashed >= rows), 0)
        safe = torch.where(integers >= 0, integers, 0)
        return safe.clamp(max=rows - 1).clamp(min=0)

    def forward(self, floats, integers):
        found = [table(self.index(k, floats[:, k], integers[:, k])) for k, table in enumerate(self.tables)]
        return self.top(torch.cat(found, 1))

    def batch(self, samples):
        columns = len(self.tables)
        return torch.randn(samples, columns) * 2, torch.randint(-50, 10**9, (samples, columns))


@pytest.mark.parametrize("way", ("eager", "exported"))
def test_feature_columns(way):
    model = FeatureColumns()
    options = {}
    if way == "exported":
        size = torch.export.Dim("samples", min=2, max=1 << 16)
        options["dynamic_shapes"] = ({0: size}, {0: size})
    swapped, report = passed(model, model.batch(8), way, **options)
    assert len(report.found("bags")) == len(report.found("guards")) == COLUMNS
    assert not report.left
    if way == "exported":  # the guards and the nodes that only they need are gone
        kept = {"bucketize": COLUMNS // 4, "remainder": COLUMNS // 2}
        kept |= dict.fromkeys(("ge", "where", "clamp"), COLUMNS // 4)  # its guard is a second clamp
        names = ("masked_fill", "lt", "__or__", "bitwise_or", "zeros_like", "clamp_min", *kept)
        packets = Counter(
            node.target._schema.name.removeprefix("aten::")
            for node in swapped.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
        assert {name: packets[name] for name in names if packets[name]} == kept
    for samples in (8, 100):
        batch = model.batch(samples)
        assert_same(swapped(*batch), model(*batch))


def test_guards_that_change_indices_stay():
    class Model(nn.Module):
        def forward(self, x):
            a = (x % 10).clamp(0, 8)
            b = torch.where(x > 3, x, 0).clamp(min=5)
            c = (x.float() % 10).clamp(0, 20)
            d = (x % 10).clamp(0, 9)
            e = x % 10
            e.add_(100)
            return a + 1, b + 1, c + 1, d, e.clamp(0, 50) + 1

    program = torch.export.export(Model(), (torch.arange(-20, 20),))
    report = recfuse.swap(program)
    assert [entry.detail for entry in report.found("guards")] == [
        "the result is returned, and is never the memory of an argument"
    ]
    x = torch.randint(-1000, 1000, (40,))
    assert_same(program.module()(x), Model()(x))


NUMBERS = st.integers(-20, 20)
POSITIVE = st.integers(1, 20)
STEPS = st.one_of(
    st.tuples(st.just("clamp"), NUMBERS, POSITIVE),
    st.tuples(st.just("remainder"), POSITIVE, POSITIVE),
    st.tuples(st.just("add"), NUMBERS, POSITIVE),
    st.tuples(st.just("mul"), NUMBERS, POSITIVE),
    st.tuples(st.just("abs"), NUMBERS, POSITIVE),
    st.tuples(st.just("floor"), POSITIVE, POSITIVE),
    st.tuples(st.just("where"), NUMBERS, NUMBERS),
    st.tuples(st.just("both"), NUMBERS, POSITIVE),
    st.tuples(st.just("mask"), NUMBERS, NUMBERS),
    st.tuples(st.just("bucketize"), NUMBERS, POSITIVE),
)


class Chain(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.register_buffer("edges", torch.arange(-5.0, 6.0))

    def forward(self, x):
        found = []
        for kind, a, b in self.steps:
            x = {
                "clamp": lambda a=a, b=b, x=x: x.clamp(a, a + b),
                "remainder": lambda a=a, x=x: x % a,
                "add": lambda a=a, x=x: x + a,
                "mul": lambda a=a, x=x: x * a,
                "abs": lambda x=x: x.abs(),
                "floor": lambda a=a, x=x: x // a,
                "where": lambda a=a, b=b, x=x: torch.where(x >= a, x, b),
                "both": lambda a=a, b=b, x=x: torch.where((x > a) & ~(x >= a + b), x, a),
                "mask": lambda a=a, b=b, x=x: x.masked_fill(x < a, b),
                "bucketize": lambda x=x: torch.bucketize(x.float(), self.edges),
            }[kind]()
            found.append(x)
        return tuple(one + 0 for one in found)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=7), st.integers(0, 2**31))
def test_ranges_have_every_value(steps, seed):
    model, generator = Chain(steps), torch.Generator().manual_seed(seed)
    x = torch.randint(-40, 40, (200,), generator=generator)
    exported = torch.export.export(model, (x,))
    program = Program(exported.graph_module)
    ranges = Ranges(program)
    outputs = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    for node, values in zip(outputs, model(x), strict=True):
        low, high = ranges.of(node.args[0])
        assert low <= int(values.min()) and int(values.max()) <= high
    expected = model(x)
    recfuse.swap(exported)
    assert_same(exported.module()(x), expected)


class WhereItHolds(nn.Module):
    """``torch.where`` of a condition only, which chooses nothing."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, mode="sum")

    def forward(self, indices):
        rows, _ = torch.where(indices.clamp(0, 19) >= 0)
        return self.table(indices) + rows.sum()


def test_a_condition_alone_is_no_guard():
    model, indices = WhereItHolds(), torch.randint(0, 20, (4, 3))
    program = torch.export.export(model, (indices,))
    report = recfuse.swap(program)
    assert len(report.swapped) == 1 and not report.left
    assert_same(program.module()(indices), model(indices))


def test_a_failing_pattern_is_reported_and_others_run(monkeypatch):
    monkeypatch.setattr(Ranges, "of", lambda self, node: {}[node])
    model, indices = Chain([("clamp", 1, 2)]), torch.randint(0, 20, (4,))
    program = torch.export.export(model, (indices,))
    (left,) = recfuse.swap(program).found("guards")
    assert left.action == "left" and "KeyError" in left.detail
    assert_same(program.module()(indices), model(indices))
