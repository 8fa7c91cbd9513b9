"""The tuner, mappings and lists of rows refuse a tensor whose storage shrank."""

from __future__ import annotations

import pytest
import torch

import recfuse
from recfuse import nn
from recfuse.data import traces
from recfuse.data.collection import jagged_batches
from recfuse.nn.columns.steps import ToBucket
from recfuse.nn.pinning import PinnedRows
from recfuse.tuner.collection.problem import FusedBench, FusedProblem
from recfuse.tuner.native import address
from recfuse.tuner.table.measure import Bench
from recfuse.tuner.table.problem import Problem
from support.library_cases import freed
from support.modelled_gpu import calls, collection_of, install

REFUSED = r"{}(\[\d\])? has no memory for its elements"
NAMES = "indices", "offsets", "per_sample_weights"


def batch_with(cut: str) -> tuple[torch.Tensor, ...]:
    batch = dict(zip(NAMES, (torch.arange(6), torch.tensor([0, 3, 6]), torch.rand(6)), strict=True))
    freed(batch[cut], 1)
    return tuple(batch.values())


@pytest.mark.parametrize("cut", NAMES)
def test_batches_of_the_tuner(cut):
    module = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)
    with pytest.raises(ValueError, match=r"recfuse.tune: batches\[0\]: " + REFUSED.format(cut)):
        recfuse.tune(module, [batch_with(cut)], 1, progress=False)
    with pytest.raises(ValueError, match=REFUSED.format(cut)):
        jagged_batches([batch_with(cut)], 1)


@pytest.mark.parametrize("name", ("weight", *NAMES))
def test_a_table_problem_that_shrinks_before_it_is_timed(name):
    module = nn.EmbeddingBag(10, 4, mode="sum")
    weighted = torch.arange(6), torch.tensor([0, 3]), torch.rand(6)
    problem = Problem.of(module, [weighted])
    Bench(problem)
    batch = problem.batches[0]
    tensors = (problem.weight, batch.indices, batch.offsets, batch.weights)
    freed(dict(zip(("weight", *NAMES), tensors, strict=True))[name], 1)
    with pytest.raises(ValueError, match=r"recfuse.tune: " + REFUSED.format(name)):
        Bench(problem)


@pytest.mark.parametrize("name", ("indices", "offsets", "weights"))
def test_a_collections_problem_that_shrinks_before_it_is_timed(monkeypatch, name):
    install(monkeypatch)
    collection = collection_of()
    problem = FusedProblem.of(collection, calls(collection))
    batch = problem.batches[1]
    batch = batch._replace(weights=torch.ones(len(batch.indices)))
    problem.batches[1] = batch._replace(**{name: freed(getattr(batch, name).clone(), 1)})
    refused = REFUSED.format("per_sample_weights" if name == "weights" else name)
    with pytest.raises(ValueError, match=r"recfuse.tune: .*" + refused):
        FusedBench(problem)


def test_tables_that_shrank_are_not_described_to_the_library(monkeypatch):
    install(monkeypatch)
    collection = collection_of()
    problem = FusedProblem.of(collection, calls(collection))
    freed(problem.buffers[0], 1)
    with pytest.raises(ValueError, match=REFUSED.format("weights")):
        _ = problem.call
    with pytest.raises(ValueError, match=REFUSED.format("weights")):
        problem.alignment(0)


def test_addresses_of_none_and_of_whole_tensors():
    whole = torch.ones(3)
    assert address("weight", None) == 0 and address("weight", whole) == whole.data_ptr()


@pytest.mark.parametrize("form", ("offsets", "batch"))
def test_a_mapping(form):
    collection = nn.FusedEmbeddingBagCollection([nn.Table(10, 4, "a")])
    batch = batch_with("offsets")
    with pytest.raises(ValueError, match="recfuse: " + REFUSED.format("offsets")):
        collection.map(batch[1] if form == "offsets" else batch)


def test_rows_and_boundaries():
    with pytest.raises(ValueError, match="recfuse.PinnedRows: " + REFUSED.format("rows")):
        PinnedRows(torch.ones(10, 4), rows=freed(torch.arange(6), 1))
    with pytest.raises(ValueError, match="traces: " + REFUSED.format("trace")):
        traces.hottest(freed(torch.arange(6), 1))
    with pytest.raises(ValueError, match=REFUSED.format("boundaries")):
        ToBucket(freed(torch.arange(6.0), 1))
