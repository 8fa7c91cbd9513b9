"""Offsets of many tables are joined by one call in C if possible, otherwise by torch's functions; both
agree."""

from __future__ import annotations

import random

import pytest
import torch

from recfuse import _storage
from recfuse.data import joined
from recfuse.data.joined import join_tables
from recfuse.nn import FusedEmbeddingBagList
from support.inputs import ragged

WHERE = "recfuse.nn.FusedEmbeddingBagList"


def by_torch(monkeypatch, offsets, indices):
    """Returns the result of the same call without C."""
    with monkeypatch.context() as patch:
        patch.setattr(joined, "join_offsets", lambda *_: None)
        return join_tables(offsets, indices, tables=len(offsets), prefix=WHERE)


def batch_of(seed):
    """Returns offsets and indices of one of the forms of ``pool``."""
    source = random.Random(seed)
    tables, bags = source.randrange(1, 6), source.randrange(5)
    torch.manual_seed(seed)
    dtypes = torch.int32, torch.int64
    wide, narrow = source.choice(dtypes), source.choice(dtypes)
    if source.random() < 0.3:
        each = source.randrange(4)
        indices = torch.randint(9, (tables, each), dtype=wide)
        offsets = torch.zeros(tables, bags, dtype=narrow)
        offsets[:, 1:] = each
        indices = indices if source.random() < 0.5 else list(indices)
    else:
        parts = [ragged(9, bags, 3) for _ in range(tables)]
        indices = [own.to(wide) for own, _ in parts]
        offsets = [begin[:bags].to(narrow) for _, begin in parts]
        indices = indices if source.random() < 0.5 else tuple(indices)
        offsets = offsets if source.random() < 0.5 else torch.stack(offsets)
    if isinstance(offsets, torch.Tensor) and source.random() < 0.5:
        offsets = offsets.t().contiguous().t()
    return offsets, indices


@pytest.mark.parametrize("seed", range(60))
def test_c_and_torch_join_offsets_alike(monkeypatch, seed):
    offsets, indices = batch_of(seed)
    stacked = offsets if isinstance(offsets, torch.Tensor) else torch.stack(list(offsets))
    assert _storage.join_offsets(stacked, indices) is not None
    ours = join_tables(offsets, indices, tables=len(offsets), prefix=WHERE)
    for found, wanted in zip(ours, by_torch(monkeypatch, offsets, indices), strict=True):
        assert found is wanted or (found.dtype == wanted.dtype and found.equal(wanted))


def shrunk(tensor):
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize(
    "offsets, indices",
    (
        (lambda t: t.float(), lambda t: t),
        (lambda t: t[0], lambda t: t),
        (lambda t: t + 1, lambda t: t),
        (lambda t: t.to("meta"), lambda t: t),
        (lambda t: shrunk(t.clone()), lambda t: t),
        (lambda t: torch._neg_view(t), lambda t: t),
        (lambda t: t, lambda t: t.short()),
        (lambda t: t, lambda t: t[None]),
        (lambda t: t, lambda t: shrunk(t.clone())),
        (lambda t: t, lambda t: t.to("meta")),
        (lambda t: t, lambda t: t.tolist()),
        (lambda t: t, lambda t: t.as_subclass(type("Other", (torch.Tensor,), {}))),
        (lambda t: t, lambda t: t.to_sparse()),
    ),
)
def test_c_leaves_all_else_to_torch(offsets, indices):
    table = torch.arange(6)
    assert _storage.join_offsets(torch.tensor([[0, 2], [0, 3]]), [table, table]) is not None
    assert _storage.join_offsets(offsets(torch.tensor([[0, 2], [0, 3]])), [table, indices(table)]) is None


def test_a_view_with_other_signs_is_pooled_as_torch_sees_it(monkeypatch):
    offsets, indices = torch._neg_view(torch.tensor([[0, -1], [0, -2]])), [torch.arange(3)] * 2
    for found, wanted in zip(
        join_tables(offsets, indices, tables=2, prefix=WHERE),
        by_torch(monkeypatch, offsets, indices),
        strict=True,
    ):
        assert found is wanted or found.equal(wanted)
    assert join_tables(offsets, indices, tables=2, prefix=WHERE)[1].tolist() == [0, 1, 3, 5, 6]


def test_many_offsets_are_joined_by_torch():
    count = _storage._MOST_JOINED
    for offsets, is_joined in ((torch.zeros(1, count), True), (torch.zeros(1, count + 1), False)):
        assert (_storage.join_offsets(offsets.long(), [torch.arange(1)]) is not None) == is_joined


def test_a_traced_program_reads_the_offsets_of_its_input():
    bags = [torch.nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2)]
    tables = FusedEmbeddingBagList(bags).requires_grad_(False)

    class Pool(torch.nn.Module):
        def forward(self, offsets, first, second):
            return torch.cat(tables.pool(offsets, [first, second]), dim=1)

    lookups = torch.arange(8), torch.arange(8)
    traced = torch.jit.trace(Pool(), (torch.tensor([[0, 2], [0, 3]]), *lookups), check_trace=False)
    other = torch.tensor([[0, 5], [0, 7]])
    torch.testing.assert_close(traced(other, *lookups), Pool()(other, *lookups))
    assert not traced(other, *lookups).equal(traced(torch.tensor([[0, 2], [0, 3]]), *lookups))
