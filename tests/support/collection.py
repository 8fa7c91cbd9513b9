"""A collection of many kinds of tables, its lookups, and their expected results."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from recfuse.nn import FusedEmbeddingBagCollection, Table
from support.inputs import ragged

SPECS = (
    Table(30, 4),
    Table(20, 16, mode="mean", padding_idx=2),
    Table(7, 3, mode="max"),
    Table(50, 8, feature_names=("a", "b")),
    (5, 1),
)


def collection_of(specs=SPECS, **options) -> FusedEmbeddingBagCollection:
    torch.manual_seed(5)
    return FusedEmbeddingBagCollection(specs, **options)


def tables_of(collection):
    """The table of each feature."""
    tables = collection.tables.values()
    return [tables[number] for number in collection.layout.table_of_feature]


def lookups_of(collection, bags=6, longest=5):
    parts = [ragged(table.num_embeddings, bags, longest) for table in tables_of(collection)]
    lengths = torch.cat([offsets.diff() for _, offsets in parts])
    return torch.cat([i for i, _ in parts]), torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def by_hand(collection, indices, offsets, factors=None, weights=None):
    """Each feature by torch's own function; `weights`: of each table, others than its own."""
    tables = tables_of(collection)
    weights = weights or {number: t.weight for number, t in enumerate(collection.tables.values())}
    bags = (offsets.numel() - 1) // len(tables)
    out = []
    for number, table in enumerate(tables):
        own = offsets[number * bags : (number + 1) * bags + 1]
        part = slice(int(own[0]), int(own[-1]))
        out.append(
            nn.functional.embedding_bag(
                indices[part],
                weights[collection.layout.table_of_feature[number]],
                own - own[0],
                mode=table.mode,
                padding_idx=table.padding_idx,
                per_sample_weights=None if factors is None else factors[part],
                include_last_offset=True,
            )
        )
    return torch.cat(out, dim=1)


def assert_packed(collection):
    """Tables are in the Parameters, aligned to cache lines, and do not overlap."""
    weights, used = collection.packed_weights(), {}
    assert list(collection.parameters()) == weights
    for spec in {(spec.matrix, spec.first_row): spec for spec in collection.layout.tables}.values():
        table = collection.tables[spec.name]
        weight = weights[spec.matrix]
        assert weight.shape[1] == table.embedding_dim and weight.is_contiguous()
        begin, end = spec.first_row, spec.first_row + spec.num_embeddings
        assert begin >= used.get(spec.matrix, 0) and end <= weight.shape[0]
        assert not weight[used.get(spec.matrix, 0) : begin].any(), "gap rows are zero"
        used[spec.matrix] = end
        assert table.weight.shape == (spec.num_embeddings, spec.embedding_dim)
        if table.weight.numel() and weight.dtype == torch.float32:
            assert table.weight.data_ptr() % 64 == 0


def _saved(collection):
    stream = io.BytesIO()
    torch.save(collection, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda collection: pickle.loads(pickle.dumps(collection)),
    "torch.save": _saved,
}
