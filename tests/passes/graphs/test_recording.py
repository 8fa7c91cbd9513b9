"""The record of a captured graph: all of its effects, and no unused nodes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recfuse
from support.graphs import assert_same


class Model(nn.Module):
    """A function of tables and inputs."""

    def __init__(self, function, **options):
        super().__init__()
        self.function = function
        self.tables = nn.ModuleList(nn.Embedding(9 + k, 4, **options) for k in range(3))

    def forward(self, *inputs):
        return self.function(self.tables, *inputs)


def compiled(model, inputs, **options):
    torch.compiler.reset()
    graphs = []
    backend = recfuse.backend(lambda module, inputs: graphs.append(module) or module)
    swapped = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    swapped(*inputs)
    names = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
    return swapped, names, backend.reports[-1]


def columns(tables, x):
    return torch.cat([table(x[:, k] % 9) for k, table in enumerate(tables)], 1)


def bags(tables, x):
    return torch.cat([F.embedding_bag(x % 9, table.weight, norm_type=x.shape[0] / 3) for table in tables], 1)


@pytest.mark.parametrize("function", (columns, bags))
def test_norms_of_tables_that_have_none_are_not_read(function):
    model, x = Model(function).requires_grad_(False), torch.randint(0, 99, (8, 5))
    swapped, names, report = compiled(model, (x,))
    assert len(report.swapped) == 3
    assert not any("item" in name for name in names), names
    assert_same(swapped(x[:5]), model(x[:5]))


@pytest.mark.parametrize("norm_type", (1.0, 2.0, 3.0))
def test_norms_that_count_are_read(norm_type):
    given = {"max_norm": 0.5, "norm_type": norm_type}
    model, x = Model(columns, **given).requires_grad_(False), torch.randint(0, 99, (8, 5))
    twin = Model(columns, **given).requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    swapped, _, report = compiled(twin, (x,))
    assert not report.swapped
    assert_same(swapped(x), model(x))
    assert_same(list(twin.parameters()), list(model.parameters()))


def scaled(tables, x, y):
    factor = y.mean().item()
    return columns(tables, x) * factor + y.sum(), y[0, 0].item()


def test_numbers_that_are_read_stay():
    model, x, y = Model(scaled), torch.randint(0, 99, (8, 5)), torch.rand(8, 2)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        swapped, _, report = compiled(model.requires_grad_(False), (x, y))
        assert report.swapped
        assert_same(swapped(x[:4], y[:4] * 2), model(x[:4], y[:4] * 2))


def views(tables, x, y):
    """With every form of index, of a tensor that is written to."""
    y = y.clone()
    found = [y[:, 1], y[:, -1], y[2], y[-2], y[1, 2], y[..., 0], y[:, None, 3], y[:, 1:][:, 0], y.t()[1]]
    found += [y.view(-1, 2, 2)[:, 1, :], y.view(-1, 2, 2)[:, :, 0], y[:, [0, 2]], y[:], y[y[:, 0] > 2.0]]
    y.mul_(2)
    return columns(tables, x), *(one + 1 for one in found), y


def test_views_keep_their_memory():
    model, x, y = Model(views), torch.randint(0, 99, (8, 5)), torch.rand(8, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        swapped, _, report = compiled(model.requires_grad_(False), (x, y))
        assert report.swapped
        for rows in (8, 5):
            assert_same(swapped(x[:rows], y[:rows]), model(x[:rows], y[:rows]))


def strided(tables, x, y, z):
    """Views of tensors that are not contiguous matrices of floats."""
    return columns(tables, x), y[:, 1], y[2], z.mT[:, 1].conj(), z.real[1], z[:, 2].imag, z.conj()[:, 1] * 2


@pytest.mark.parametrize("requires_grad", (False, True))
def test_views_of_other_tensors(requires_grad):
    model, x = Model(strided), torch.randint(0, 99, (8, 5))
    y = torch.rand(4, 6)[::2, 1::2].t().requires_grad_(requires_grad)
    z = torch.randn(3, 3, dtype=torch.complex64)
    swapped, _, report = compiled(model.requires_grad_(requires_grad), (x, y, z))
    assert report.swapped
    found, expected = swapped(x, y, z), model(x, y, z)
    assert_same(found, expected)
    for one, right in zip(found, expected, strict=True):
        assert one.stride() == right.stride() and one.storage_offset() == right.storage_offset()
    if requires_grad:
        (gradient,) = torch.autograd.grad(found[1].square().sum(), y)
        assert_same(gradient, torch.autograd.grad(expected[1].square().sum(), y)[0])
