"""One test an operator, forward and backward, of training, swap, a graph pass, a kernel and the commands.

`make smoke` runs this file in less than a minute: after a build, before the other tests.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recfuse
from recfuse.nn.columns import Bucketize, Hash, Identity
from support.processes.fresh import run_python

OFFSETS = torch.tensor([0, 3, 3, 7, 12])  # of four bags, one of them empty
CANDIDATES = torch.tensor([0, 2, 2, 1, 0])  # users of five candidates


def assert_same(call: Callable[[], Tensor], expected: Callable[[], Tensor], *inputs: Tensor) -> None:
    """The results, and the gradients of `inputs`."""
    outputs = call(), expected()
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(output, inputs, cotangent) for output in outputs]
    for got, right in zip(*gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    table = torch.randn(50, 12, requires_grad=True)
    indices = torch.randint(50, (12,))
    assert_same(
        lambda: recfuse.embedding_bag(indices, table, OFFSETS[:-1], mode=mode),
        lambda: nn.functional.embedding_bag(indices, table, OFFSETS[:-1], mode=mode),
        table,
    )


def test_fused_embedding_bag() -> None:
    bags = [nn.EmbeddingBag(30, dim, mode="sum", include_last_offset=True) for dim in (4, 20, 7)]
    collection = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(copy.deepcopy(bags))
    indices = torch.randint(30, (36,))
    offsets = torch.cat((OFFSETS[:-1], OFFSETS[:-1] + 12, OFFSETS + 24))
    pooled = [bag(indices[12 * k : 12 * k + 12], OFFSETS) for k, bag in enumerate(bags)]
    torch.testing.assert_close(collection(indices, offsets), torch.cat(pooled, 1))


def test_fused_embedding() -> None:
    tables = [nn.Embedding(30, dim) for dim in (4, 20)]
    collection = recfuse.nn.FusedEmbeddingCollection.from_embeddings(copy.deepcopy(tables))
    indices, offsets = torch.randint(30, (24,)), torch.cat((OFFSETS[:-1], OFFSETS + 12))
    rows = [table(own) for table, own in zip(tables, indices.split(12), strict=True)]
    for found, right in zip(collection(indices, offsets), rows, strict=True):
        assert torch.equal(found, right)
    assert torch.equal(collection(indices, offsets, layout="joined"), torch.cat(rows, 1))


def test_embedding_columns() -> None:
    columns = recfuse.nn.EmbeddingColumns(
        [
            Bucketize("age", boundaries=[18, 40, 65], embedding_dim=8),
            Hash("city", num_embeddings=100, embedding_dim=4),
            Identity("tags", num_embeddings=50, embedding_dim=16, pooling="mean"),
        ]
    )
    torch_form = columns.to_torch()
    batch = {
        "age": torch.tensor([17.0, 18.0, float("nan"), 99.0]),
        "city": recfuse.data.hash_strings(["Oslo", "Lima", "", "Oslo"]),
        "tags": (torch.randint(50, (12,)), OFFSETS),
    }
    got, right = columns(batch), torch_form(batch)
    torch.testing.assert_close(got, right)
    cotangent = torch.randn_like(got)
    for form, output in ((columns, got), (torch_form, right)):
        output.backward(cotangent)
        assert all(weight.grad is not None for weight in form.parameters())
    pairs = zip(columns.parameters(), torch_form.parameters(), strict=True)
    assert all(torch.allclose(weight.grad, other.grad, atol=1e-5) for weight, other in pairs)


def test_ikbo_linear() -> None:
    linear = nn.Linear(24 + 8, 16)
    layer = recfuse.nn.IKBOLinear.from_linear(linear, in_features=(24, 8), activation="relu")
    users, candidates = torch.randn(3, 24, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    assert_same(
        lambda: layer(users, candidates, CANDIDATES),
        lambda: linear(torch.cat((users[CANDIDATES], candidates), 1)).relu(),
        users,
        candidates,
        linear.weight,
    )


def test_ikbo_attention() -> None:
    q = torch.randn(5, 2, 2, 8, requires_grad=True)
    k, v = (torch.randn(3, 6, 2, 8, requires_grad=True) for _ in range(2))

    def expected() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k[CANDIDATES], v[CANDIDATES]))
        return nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    assert_same(lambda: recfuse.ikbo_attention(q, k, v, CANDIDATES), expected, q, k, v)


class DLRM(nn.Module):
    """Three tables of one call after a swap, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(40, 8, mode="sum", sparse=True) for _ in range(3))
        self.top = nn.Linear(24, 1)

    def apply_emb(self, lS_o: Any, lS_i: Any, emb_l: Any, v_W_l: Any) -> list[Tensor]:
        return [table(i, o) for table, i, o in zip(emb_l, lS_i, lS_o, strict=True)]

    def forward(self, lS_o: Tensor, lS_i: Tensor) -> Tensor:
        return self.top(torch.cat(self.apply_emb(lS_o, lS_i, self.emb_l, [None] * 3), dim=1))


def test_swap_and_training() -> None:
    """A model of torch and its swapped copy, whose optimizer updates rows inside backward()."""
    losses, models = [], [DLRM()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.05) for model in models]
    report = recfuse.swap(models[1], optimizers=[optimizers[1]], fuse_optimizers=True)
    assert "3 tables in one call" in str(report)
    indices = torch.randint(40, (3, 12))
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(OFFSETS[:-1].expand(3, -1), indices) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:4], losses[4:])
    assert losses[3] < losses[0]
    recfuse.unswap(models[1], optimizers=[optimizers[1]])
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def test_graph_pass() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(30, 8) for _ in range(3))

        def forward(self, indices: Tensor) -> Tensor:
            return torch.cat([table(indices[:, k]).sum(1) for k, table in enumerate(self.tables)], 1)

    model, indices = Model(), torch.randint(30, (4, 3, 5))
    program = torch.export.export(model, (indices,))
    assert "3 bags of 3 tables in one call" in str(recfuse.swap(program, check=[(indices,)]))
    torch.testing.assert_close(program.module()(indices), model(indices))


def test_bad_index_raises() -> None:
    with pytest.raises(IndexError, match=r"indices\[1\] is 50"):
        recfuse.embedding_bag(torch.tensor([0, 50]), torch.ones(50, 4), torch.tensor([0]))


def test_a_kernel_compiles(kernel_cache: Path) -> None:
    """Without a GPU, for an H100."""
    command = ["compile", "--dim", "16", "--batch", "32", "--pooling", "5", "--arch", "H100"]
    done = run_python("-m", "recfuse", *command)
    assert done.returncode == 0, done.stderr
    assert [path for path in kernel_cache.rglob("*.cubin") if path.stat().st_size], done.stdout


def test_commands() -> None:
    done = run_python("-m", "recfuse", "info", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["library"] == torch.ops.recfuse.library_version()
