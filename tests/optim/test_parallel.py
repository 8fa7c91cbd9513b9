"""DistributedDataParallel over two processes on the CPU: gradients of tables, dense and sparse."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recfuse
from recfuse import optim
from support.processes.ranks import start_ranks

WORLD = 2
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]


class Model(nn.Module):
    def __init__(self, sparse, kind):
        super().__init__()
        torch.manual_seed(4)
        if kind == "bag":
            self.tables = recfuse.nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse)
        else:
            self.tables = recfuse.nn.FusedEmbeddingBagCollection([(20, 4), (20, 4)], sparse=sparse)
        self.top = nn.Linear(8, 1)

    def forward(self, indices):
        if isinstance(self.tables, nn.EmbeddingBag):
            pooled = self.tables(indices[0])
        else:
            pooled = self.tables(indices.reshape(-1), torch.arange(0, indices.numel() + 1, indices.shape[2]))
        return self.top(pooled)


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 20, (2, 6, 3), generator=generator)


def optimizers_of(model, form):
    tables = optim.embedding_parameters(model)
    if form == "torch":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    own = optim.SGD(tables, lr=0.1, deferred=form in ("deferred", "averaged"))
    return [own, torch.optim.SGD(model.top.parameters(), lr=0.1)]


def train(model, call, optimizers, ranks, averaged=False):
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(call(batch(step, rank)).square().mean() for rank in ranks) / len(ranks)
        loss.backward()
        if averaged:
            optim.average_gradients(optim.embedding_parameters(model))
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


CASES = [
    (False, "bag", "torch"),
    (True, "bag", "torch"),
    (False, "collection", "torch"),
    (True, "bag", "deferred"),
    (False, "bag", "averaged"),
    (False, "collection", "averaged"),
]
OTHERS = [(False, "collection", form) for form in ("direct", "deferred", "ignored")]
OTHERS.append((False, "bag", "wrapped later"))


def result(rank, sparse, kind, form):
    model = Model(sparse, kind)
    if form in ("ignored", "averaged"):
        names = [name for name, _ in model.named_parameters() if name.startswith("tables.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    optimizers = optimizers_of(model, form)
    if form == "wrapped later":
        train(model, model, optimizers, [rank])
    parallel = DistributedDataParallel(model)
    try:
        return train(model, parallel, optimizers, [rank], form == "averaged")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def process(rank, folder):
    where = f"file://{folder}/rendezvous"
    limit = timedelta(minutes=2)  # a rank that waits forever fails
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD, timeout=limit)
    torch.save({case: result(rank, *case) for case in CASES + OTHERS}, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    start_ranks(process, (str(folder),), WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_averaged(results, case):
    sparse, kind, _ = case
    alone = Model(sparse, kind)
    expected = train(alone, alone, optimizers_of(alone, "torch"), range(WORLD))
    for one, other, reference in zip(results[0][case], results[1][case], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", [*OTHERS[:2], OTHERS[3]], ids=str)
def test_unsupported_parallel_modes_are_refused(results, case):
    for found in results:
        assert found[case].startswith("ArgumentValueError: recfuse.optim.SGD: a DistributedDataParallel has")


def test_tables_of_one_process_train_without_averaging(results):
    first, second = (found[OTHERS[2]] for found in results)
    assert not torch.equal(first[0], second[0]), "the tables"
    assert torch.equal(first[1], second[1]), "the layer on top"
