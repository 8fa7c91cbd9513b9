"""Graphs that resemble a pattern but differ: results, dtypes, random numbers and memory stay the model's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import assert_same, passed


class Model(nn.Module):
    """A function of tables, a weight and inputs."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.t = nn.ModuleList(nn.Embedding(10, 4) for _ in range(2)).to(dtype)
        self.w = nn.Parameter(torch.randn(6, 6))
        self.function = function
        self.requires_grad_(False)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def written_boundaries(s, x):
    edges = torch.tensor([1.0, 2.0, 3.0])
    edges[1:].fill_(5.0)
    return torch.cat([s.t[0](torch.bucketize(x[:, 0], edges)), s.t[1](torch.bucketize(x[:, 1], edges))], 1)


def start_before_the_first(s, x):
    return torch.cat([s.t[0](x[:, -10:2] % 10).sum(1), s.t[1](x[:, 2:9] % 10).sum(1)], 1)


def zeros_of_more(shape):
    def function(s, x):
        found = []
        for k, table in enumerate(s.t):
            value = x[:, k].clamp(max=9)
            rows = table(value.clamp(min=0))
            found.append(torch.where((value >= 0).unsqueeze(1), rows, torch.zeros(*shape)))
        return torch.cat(found, -1)

    return function


def draws(s, x):
    index = x % 5
    drawn = torch.randint(0, 5, (6,))
    return s.t[0](torch.where(index < 100, index, drawn)), torch.rand(3)


def written_after_the_condition(s, x):
    x = x.clone()
    condition = x >= 0
    x.sub_(100)
    return torch.where(condition, x, 0).clamp(min=0) + 0


def other_bits(s, x):
    return s.t[0]((x % 5).view(torch.int32).clamp(0, 9)).sum() + s.t[1](x.view(torch.int32)[:1] % 3)


def float_bits(s, x):
    edges = torch.tensor([0.0, 1.0])
    return torch.cat([s.t[0](torch.bucketize(x.view(torch.float32), edges)), s.t[1](x % 10)], 1)


INDICES = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
SIGNED = torch.tensor([[1, -2], [-3, 4], [5, 6]])
BYTES = torch.tensor([0, 50, 100, 200, 255], dtype=torch.uint8)
SMALL = torch.tensor([0, 50, 100, -100, 127], dtype=torch.int8)
NUMBERS = torch.arange(6)
CASES = {
    "written boundaries": (written_boundaries, torch.float32, torch.tensor([[2.5, 4.0], [0.0, 6.0]])),
    "a start before the first": (start_before_the_first, torch.float32, INDICES),
    "zeros of float32": (zeros_of_more((1,)), torch.float16, SIGNED),
    "zeros of three dimensions": (zeros_of_more((2, 3, 4)), torch.float32, SIGNED),
    "remainder 300": (lambda s, x: (x % 300) + 0, torch.float32, BYTES),
    "below 300": (lambda s, x: torch.where(x < 300, x, x * 0) + 0, torch.float32, BYTES),
    "at least 256": (lambda s, x: torch.where(x >= 256, x * 0, x) + 0, torch.float32, BYTES),
    "divided by 300": (lambda s, x: (x // 300).clamp(0, 0) + 0, torch.float32, BYTES),
    "remainder of int8": (lambda s, x: (x.clamp(0, 60) % 300) + 0, torch.float32, SMALL),
    "counts": (
        lambda s, x: torch.repeat_interleave(x.clamp(0, 3), output_size=12).clamp(0, 3) * 1,
        torch.float32,
        torch.tensor([2, 3, 1, 1, 2, 3]),
    ),
    "random numbers": (draws, torch.float32, NUMBERS),
    "written after": (written_after_the_condition, torch.float32, torch.tensor([5, -3, 200])),
    "other bits": (other_bits, torch.float32, NUMBERS),
    "float bits": (float_bits, torch.float32, torch.arange(6, dtype=torch.int32)),
}


@pytest.mark.parametrize("way", ("aot_eager", "exported"))
@pytest.mark.parametrize("name", CASES)
def test_similar_graphs_keep_their_results(name, way):
    function, dtype, given = CASES[name]
    model = Model(function, dtype)
    with torch.no_grad():
        swapped, _ = passed(copy.deepcopy(model), (given.clone(),), way)
        torch.manual_seed(3)
        expected = model(given.clone())
        torch.manual_seed(3)
        assert_same(swapped(given.clone()), expected)


BIASES = {"wide": (12, 6), "tall": (12, 1), "one": (1,), "none": (), "row": (6,)}


@pytest.mark.parametrize("turn", ("t", "permute", "not"))
@pytest.mark.parametrize("bias", BIASES)
def test_biases_and_transpositions_of_layers_over_broadcasts(bias, turn):
    turned = {"t": lambda w: w.t(), "permute": lambda w: w.permute(1, 0), "not": lambda w: w.permute(0, 1)}[
        turn
    ]
    model = Model(lambda s, u, c, i, b: torch.addmm(b, torch.cat([u[i], c], 1), turned(s.w)))
    batch = torch.randn(3, 2), torch.randn(12, 4), torch.randint(0, 3, (12,)), torch.randn(BIASES[bias])
    with torch.no_grad():
        swapped, report = passed(model, batch, "aot_eager")
        assert_same(swapped(*batch), model(*batch))
    assert bool(report.swapped) == (bias == "row" and turn != "not")


def joined_twice(s, x):
    found = [table(x[:, k]) for k, table in enumerate(s.t)]
    return torch.cat(found, 1), torch.cat(found, 1), torch.stack(found, 1), torch.stack(found[:1], 1)


def guarded(s, x):
    bucket = x % 3
    kept = bucket.clamp(0, 2)
    return bucket, kept.view(-1, 1), x.clamp(-(2**63), 2**63 - 1)[:1], F.embedding(kept[:, 0], s.t[0].weight)


@pytest.mark.parametrize("way", ("aot_eager", "exported"))
@pytest.mark.parametrize("function", (joined_twice, guarded))
def test_results_share_no_memory(function, way):
    model = Model(function)
    x = torch.randint(0, 9, (5, 2))
    with torch.no_grad():
        swapped, _ = passed(model, (x,), way)
        found, expected, before = swapped(x), model(x), x.clone()
        assert_same(found, expected)
        for one, right in zip(found, expected, strict=True):
            assert one.stride() == right.stride()
            one.add_(100)
            right.add_(100)
            assert_same(found, expected)
            assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    (
        ("indcutor", {}, "inner is 'indcutor'; expected a callable .* Try 'inductor'"),
        ("inductor", {"mode": "fastest"}, "mode is 'fastest'"),
        ("inductor", {"options": {"no_such_option": 1}}, "no_such_option"),
    ),
)
def test_a_backend_that_torch_does_not_know_is_refused_at_once(inner, options, message):
    with pytest.raises(ValueError, match=message):
        recfuse.backend(inner, **options)
