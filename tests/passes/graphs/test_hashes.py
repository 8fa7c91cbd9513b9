"""Hashes and crosses of graphs: XXH64 as recfuse's columns have it is found, others are left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recfuse.nn.columns.reference_values import hash_integers, scaled
from support.graphs import assert_same, passed


class Model(nn.Module):
    """Columns by a function of raw values [samples, 2]."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions
        self.tables = nn.ModuleList(nn.Embedding(50, 4) for _ in functions)

    def forward(self, x):
        indices = [function(x) for function in self.functions]
        return torch.cat([table(own) for table, own in zip(self.tables, indices, strict=True)], 1)


def hashed(x):
    return scaled(hash_integers([x[:, 0]], 3), 50)


def crossed(x):
    return scaled(hash_integers([x[:, 0] % 100, x[:, 1]], 2**64 - 5), 37)


def crossed_buckets(x):
    edges = torch.tensor([0.0, 10.0, 20.0])
    return scaled(hash_integers([torch.bucketize(x[:, 0].float(), edges), x[:, 1].clamp(0, 9)], 0), 50)


def other_prime(x):
    return (x[:, 0] * 2654435761 + x[:, 1]) % 50


def other_constants(x):
    return scaled(hash_integers([x[:, 0]], 0) ^ 1, 50)


def steps_behind(x):
    return scaled(hash_integers([x[:, 0], x[:, 1]], 1), 1000) % 50


def written_between(x):
    bits = hash_integers([x[:, 0]], 0)
    bits[0] = 5
    return scaled(bits, 50)


def one_for_all(x):
    return scaled(hash_integers([x[:, 0], x[:1, 1].expand(x.shape[0])], 1), 50)


@pytest.mark.parametrize("way", ("eager", "aot_eager", "exported"))
def test_hashes_and_crosses_are_folded(way):
    model = Model(hashed, crossed, crossed_buckets).requires_grad_(False)
    x = torch.randint(-(2**62), 2**62, (20, 2))
    swapped, report = passed(model, (x,), way)
    assert len(report.found("columns")) == 3 and not report.left
    steps = [entry.kind.split(", ")[2] for entry in report.found("columns")]
    assert steps == ["1 steps", "a cross of 1 and 0 steps", "a cross of 1 and 1 steps"]
    assert_same(swapped(x), model(x))
    if way == "exported":
        names = [str(node.target) for node in swapped.graph.nodes if node.op == "call_function"]
        assert not any("shift" in name or "xor" in name for name in names)


@pytest.mark.parametrize(
    "function", (other_prime, other_constants, steps_behind, written_between, one_for_all, crossed)
)
def test_other_computations_keep_their_results(function):
    model = Model(function, hashed, lambda x: x[:, 1] % 50).requires_grad_(False)
    x = torch.randint(-(2**62), 2**62, (20, 2))
    swapped, report = passed(model, (x,), "aot_eager")
    assert report.swapped
    assert_same(swapped(x), model(x))
