"""Columns of one tensor, however they are taken out of it, are one input of one call; their views go."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import recfuse
from support.graphs import assert_same

FEATURES = 6
WAYS = {
    "index": lambda x: [x[:, k] for k in range(FEATURES)],
    "ellipsis": lambda x: [x[..., k] for k in range(FEATURES)],
    "from the end": lambda x: [x[:, k - FEATURES] for k in range(FEATURES)],
    "select": lambda x: [x.select(-1, k) for k in range(FEATURES)],
    "slice": lambda x: [x[:, k : k + 1].squeeze(1) for k in range(FEATURES)],
    "narrow": lambda x: [x.narrow(1, k, 1).reshape(-1) for k in range(FEATURES)],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: [part.squeeze(1) for part in x.split(1, 1)],
    "split by sizes": lambda x: [part[:, k] for part in x.split([2, 1, 3], -1) for k in range(part.shape[1])],
    "slice of a slice": lambda x: [x[:, 1:][:, k - 1] if k else x[:, :][:, k] for k in range(FEATURES)],
    "rows of the transpose": lambda x: list(x.t()),
    "rows of a transpose": lambda x: [x.transpose(0, 1)[k] for k in range(FEATURES)],
    "columns of two transposes": lambda x: [x.permute(1, 0).t()[:, k] for k in range(FEATURES)],
    "bags": lambda x: [x[:, k : k + 2] for k in range(FEATURES - 1)],
}


class Model(nn.Module):
    """A column a part of the batch."""

    def __init__(self, parts, bags=False):
        super().__init__()
        kind = nn.EmbeddingBag if bags else nn.Embedding
        self.tables, self.parts = nn.ModuleList(kind(9 + k, 4) for k in range(FEATURES)), parts
        self.requires_grad_(False)

    def forward(self, x):
        parts = zip(self.parts(x), self.tables, strict=False)  # bags are one fewer
        return torch.cat([table(part % (9 + k)) for k, (part, table) in enumerate(parts)], 1)


def captured(model, x, **options):
    """A compiled model and the graph that the inner backend is given."""
    torch.compiler.reset()
    graphs = []
    backend = recfuse.backend(lambda module, inputs: graphs.append(module) or module)
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    with torch.no_grad():
        compiled(x)
    return compiled, graphs[-1]


def operators(graph):
    """Counts the operators of a graph; sizes do not count."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(name.removesuffix(".default") for name in names if "sym_size" not in name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ("any batch", "exported"))
def test_columns_of_one_tensor_are_one_input(form, way):
    model, x = Model(WAYS[way], way == "bags"), torch.randint(-99, 99, (32, FEATURES))
    if form == "exported":
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
        recfuse.swap(program)
        swapped, graph = program.module(), program.graph_module
    else:
        torch._dynamo.mark_dynamic(x, 0)
        swapped, graph = captured(model, x)
    assert operators(graph) == {"recfuse.embedding_columns": 1}
    (call,) = (node for node in graph.graph.nodes if "embedding_columns" in str(node.target))
    assert len(call.args[2]) == 1
    for samples in (32, 50):
        y = torch.randint(-99, 99, (samples, FEATURES))
        with torch.no_grad():
            assert_same(swapped(y), model(y))


@pytest.mark.parametrize("way", ("index", "slice", "rows of a transpose"))
def test_as_many_features_as_samples(way):
    """torch.compile(dynamic=True): the number of columns is a symbol, too."""
    model, x = Model(WAYS[way]), torch.randint(-99, 99, (32, FEATURES))
    swapped, graph = captured(model, x, dynamic=True)
    assert operators(graph) == {"recfuse.embedding_columns": 1}
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for shape in ((50, FEATURES), (2048, FEATURES + 3)):
            y = torch.randint(-99, 99, shape)
            assert_same(swapped(y), model(y))


def test_features_first():
    """``[features, batch]``, a row a feature: the call reads the tensor turned, and copies nothing."""
    model, x = Model(lambda x: list(x)), torch.randint(-99, 99, (FEATURES, 32))
    torch._dynamo.mark_dynamic(x, 1)
    swapped, graph = captured(model, x)
    assert operators(graph) == {"aten.t": 1, "recfuse.embedding_columns": 1}
    with torch.no_grad():
        assert_same(swapped(x[:, :20]), model(x[:, :20]))


def test_parts_of_the_batch_are_inputs_of_their_own():
    def parts(x):
        return [x[2:, k] if k % 2 else x[:-2, k] for k in range(FEATURES)]

    model, x = Model(parts), torch.randint(-99, 99, (32, FEATURES))
    swapped, graph = captured(model, x, dynamic=True)
    assert operators(graph)["recfuse.embedding_columns"] == 1
    with torch.no_grad():
        assert_same(swapped(x), model(x))
