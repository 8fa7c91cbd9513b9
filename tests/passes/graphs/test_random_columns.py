"""Random chains from raw values to rows: columns that are swapped agree with the original, or it is left."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.graphs import assert_same, passed

EXAMPLES = 40
ROWS, SAMPLES, DIM, WIDTH = 7, 6, 3, 4
SOURCES = ("float", "integer", "int32", "several", "jagged", "last", "slice", "unbind", "split", "turned")
VALUES = (
    *("scale", "shift", "minus", "clip", "clip_low", "bucketize", "bucketize_right", "modulo", "bounds"),
    *("least", "most", "widen", "view", "cast", "log", "where", "double", "relu_", "shared", "expanded"),
)
ENDS = ("row", "bag", "mean", "max", "weighted", "zeroed", "masked", "filled", "kept", "sparse")
AFTER = ("relu_", "add_", "output", "stack", "dropout", "write_input", "write_table", "alias", "reshaped")


class Random(nn.Module):
    """Columns by random words; each must stay in range or raise."""

    def __init__(self, columns, after):
        super().__init__()
        self.columns, self.after = columns, after
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(3))
        self.register_buffer("edges", torch.tensor([-1.0, 0.0, 0.5, 2.0]))

    def source(self, kind, at, inputs):
        floats, integers, small, values, offsets, last = inputs
        if kind == "float":
            return floats[:, at % WIDTH], None
        if kind == "integer":
            return integers[:, -1 - at % WIDTH], None
        if kind == "int32":
            return small[:, at % WIDTH], None
        if kind == "several":
            return integers, None
        if kind == "slice":
            return integers[:, at % 3 : at % 3 + 2], None
        if kind == "split":
            return integers.split([1, WIDTH - 1], -1)[1][:, at % (WIDTH - 1)], None
        if kind == "turned":
            return (integers if at % 2 else floats).t()[at % WIDTH], None
        if kind == "unbind":
            return (integers if at % 2 else floats).unbind(1)[at % WIDTH], None
        return values, offsets if kind == "jagged" else last

    def step(self, kind, value, at, seen):
        is_float = value.is_floating_point()
        if kind == "scale" and is_float:
            return value * (0.1 * at - 1)
        if kind == "shift" and is_float:
            return 0.3 * at + value
        if kind == "minus" and is_float:
            return value - 0.5 * at
        if kind == "clip" and is_float:
            return value.clamp(-1.0, 0.2 * at)
        if kind == "clip_low":
            return value.clamp(min=at - 9)
        if kind == "bucketize":
            edges = torch.tensor([-1.0, -0.5, 0.25, 0.25, 1.0]) if at % 3 else self.edges
            return torch.bucketize(value, edges) if is_float else value
        if kind == "bucketize_right" and is_float:
            return torch.bucketize(
                value, torch.tensor([0.0, 0.5, float("inf")]), right=True, out_int32=at % 2 == 1
            )
        if kind == "modulo" and not is_float:
            return value % (1 + at % ROWS) if at % 2 else value.remainder(ROWS)
        if kind == "bounds" and not is_float:
            return value.clamp(0, ROWS - at % 2)
        if kind == "least":
            return value.clamp_min(-at)
        if kind == "most":
            return value.clamp_max(at)
        if kind == "widen" and not is_float:
            return value.long()
        if kind == "view":
            return value.unsqueeze(1)[:, 0] if at % 2 else value.view(value.shape)
        if kind == "cast" and is_float:
            return value.clamp(-9, 9).long()
        if kind == "log" and is_float:
            return torch.log1p(value.abs())
        if kind == "where":
            return torch.where(value > 0, value, at if not is_float else 0.5)
        if kind == "double" and is_float:
            return value.double().float()
        if kind == "relu_":
            return (value + 0).relu_()
        if kind == "shared" and seen:
            other = seen[at % len(seen)]
            return other if other.shape == value.shape else value
        if kind == "expanded" and value.dim() == 1:
            return value[:1].expand(value.shape[0])
        return value

    def end(self, kind, value, offsets, table, at, weights):
        if value.is_floating_point():
            value = torch.bucketize(value, torch.tensor([-0.5, 0.0, 1.0, 1.5]))
        if at % 5:
            value = value % ROWS
        mode = {"mean": "mean", "max": "max"}.get(kind, "sum")
        if offsets is not None:
            last = offsets.shape[0] == SAMPLES + 1
            given = weights[: value.shape[0]] if kind == "weighted" else None
            padding = 2 if kind == "sparse" else None
            return F.embedding_bag(
                value, table.weight, offsets, mode=mode, include_last_offset=last, per_sample_weights=given,
                padding_idx=padding,
            )  # fmt: skip
        if value.dim() == 2 or kind in ("bag", "mean", "max", "weighted", "sparse"):
            value = value if value.dim() == 2 else value[:, None]
            given = weights[: value.numel()].reshape(value.shape) if kind == "weighted" else None
            if kind == "row":
                return table(value).sum(1)
            return F.embedding_bag(value, table.weight, mode=mode, per_sample_weights=given)
        if kind in ("zeroed", "masked", "filled"):
            index = torch.where(value > at % 3, value, -1)
            rows = table(index.clamp(min=0))
            condition = (index >= 0).unsqueeze(1)
            if kind == "masked":
                return rows.masked_fill(~condition, 0.0)
            zeros = torch.zeros(1, DIM)
            if at % 3 == 0:
                zeros.add_(1)
            return torch.where(condition, rows, zeros if kind == "zeroed" else 2.0)
        return table(value)

    def forward(self, floats, integers, small, values, offsets, last, weights):
        floats, integers = floats + 0, integers + 0
        found, seen = [], []
        for source, steps, end, at in self.columns:
            value, own = self.source(source, at, (floats, integers, small, values, offsets, last))
            for kind, number in steps:
                value = self.step(kind, value, number, seen)
                if value.dim() == 1 and own is None:
                    seen.append(value)
            found.append(self.end(end, value, own, self.tables[at % 3], at, weights))
        others = []
        for kind, at in self.after:
            one = found[at % len(found)]
            if kind == "relu_":
                one.relu_()
            elif kind == "add_":
                one[:, : 1 + at % DIM].add_(1.5)
            elif kind == "output":
                others.append(one)
            elif kind == "stack":
                others.append(torch.stack([one, found[0]], 1).sum(1))
            elif kind == "dropout":
                others.append(F.dropout(one, 0.5, training=True))
            elif kind == "write_input":
                (floats if at % 2 else integers).zero_()
            elif kind == "write_table":
                with torch.no_grad():
                    self.tables[at % 3].weight[at % ROWS] = float(at)
            elif kind == "alias":
                found.append(one)
            else:
                others.append(one.reshape(-1, DIM) * 2)
        return torch.cat(found, 1), *others, *seen

    def batch(self, form):
        lengths = torch.randint(0, 3, (SAMPLES,))
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        floats = torch.randn(SAMPLES, WIDTH) * 2
        floats[0, 0], floats[1, 1], floats[2, 2] = float("nan"), float("inf"), -0.0
        integers = torch.randint(-20, 20, (SAMPLES, WIDTH))
        if form == "strided":
            floats, integers = floats.t().contiguous().t(), integers.repeat(1, 2)[:, ::2]
        if form == "expanded":
            floats, integers = floats[:1].expand(SAMPLES, WIDTH), integers[:, :1].expand(SAMPLES, WIDTH)
        small = torch.randint(-20, 20, (SAMPLES, WIDTH), dtype=torch.int32)
        values = torch.randint(-20, 20, (int(ends[-1]),))
        return floats, integers, small, values, ends[:-1], ends, torch.randn(SAMPLES * WIDTH)


NUMBERS = st.integers(0, 20)
COLUMN = st.tuples(
    st.sampled_from(SOURCES),
    st.lists(st.tuples(st.sampled_from(VALUES), NUMBERS), max_size=4),
    st.sampled_from(ENDS),
    NUMBERS,
)


def run(model, call, batch):
    """Returns results and weights afterwards, or the kind of an error."""
    torch.manual_seed(1)
    try:
        results = [output.clone() for output in call(*copy.deepcopy(batch))]
    except (RuntimeError, IndexError):
        return None, None
    return results, [parameter.clone() for parameter in model.parameters()]


@pytest.mark.long
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(COLUMN, min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from(AFTER), NUMBERS), max_size=3),
    st.sampled_from(("plain", "strided", "expanded")),
)
def test_swapped_and_original_agree(columns, after, form):
    torch.manual_seed(0)
    model = Random(columns, after).requires_grad_(False)
    batch, twin, third = model.batch(form), copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        expected, weights = run(model, model, batch)
        try:
            swapped, report = passed(twin, copy.deepcopy(batch), "eager")
        except (RuntimeError, IndexError):
            assert expected is None
            return
        assert not any("cannot be rewritten" in entry.detail for entry in report.left), report
        twin.load_state_dict(third.state_dict())
        found, changed = run(twin, swapped, batch)
        assert (found is None) == (expected is None)
        if found is not None:
            assert_same(found, expected, rtol=1e-4, atol=1e-4)
            assert_same(changed, weights)
