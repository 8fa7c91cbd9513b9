"""Lookups after the last offset: they belong to no bag if torch ignores them, and fused calls refuse them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import EmbeddingColumns, FusedEmbeddingBagCollection, FusedEmbeddingBagList, Table
from recfuse.nn.columns import Identity

INDICES, OFFSETS = torch.arange(10), torch.tensor([0, 2, 4])
REFUSED = r"offsets\[2\], the last offset, is 4; expected 10"
close = torch.testing.assert_close


@pytest.mark.parametrize(
    ("mode", "weighted"), (("sum", False), ("sum", True), ("mean", False), ("max", False))
)
def test_a_bag_ignores_lookups_after_the_last_offset(mode, weighted):
    """As torch without them: its CPU kernels add them to the last bag, except for sums."""
    weight = torch.randn(20, 4, requires_grad=True)
    factors = torch.rand(10, requires_grad=True) if weighted else None
    options = {"mode": mode, "include_last_offset": True}
    found = recfuse.embedding_bag(INDICES, weight, OFFSETS, per_sample_weights=factors, **options)
    given = None if factors is None else factors.detach()
    for lookups in (10, 4) if mode == "sum" else (4,):
        own = None if given is None else given[:lookups]
        want = nn.functional.embedding_bag(
            INDICES[:lookups], weight.detach(), OFFSETS, per_sample_weights=own, **options
        )
        close(found, want)
    found.sum().backward()
    assert weight.grad[4:].count_nonzero() == 0 and weight.grad[:4].count_nonzero() > 0
    assert factors is None or factors.grad[4:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_fused_call_refuses_lookups_after_the_last_offset(dtype):
    collection = FusedEmbeddingBagCollection([Table(20, 4, "a", dtype=dtype)])
    with pytest.raises(ValueError, match=REFUSED):
        collection(INDICES, OFFSETS)


@pytest.mark.parametrize("pooling", ("sum", "mean", "max"))
@pytest.mark.parametrize("is_packed", (False, True))
def test_a_column_ignores_them_as_torch_does(pooling, is_packed):
    names = ("a", "b")
    columns = EmbeddingColumns(
        [Identity(name, num_embeddings=20, embedding_dim=4, pooling=pooling) for name in names]
    )
    values = INDICES.clone()
    values[7] = 99  # no row
    batch = dict.fromkeys(names, (values, OFFSETS))
    found = columns(columns.pack(batch) if is_packed else batch)
    close(found, columns.to_torch()(batch))
    close(found, columns({name: (INDICES[:4], OFFSETS) for name in names}))
    found.sum().backward()
    for name in names:
        (packed,) = columns.parameters()
        first = columns.tables[name].weight.storage_offset() // 4
        assert packed.grad[first + 4 : first + 20].count_nonzero() == 0


def test_a_list_refuses_offsets_with_the_last_offset():
    """Its calls would make another bag of it."""
    bags = [nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=at == 1) for at in range(2)]
    want = bags[1](INDICES, OFFSETS)
    tables = FusedEmbeddingBagList(bags)
    close(tables[1](INDICES, OFFSETS), want)
    batch = [OFFSETS] * 2, [INDICES] * 2
    for call in (lambda: tables.pool(*batch), lambda: tables.map(batch)):
        with pytest.raises(ValueError, match="include_last_offset of table 1 is True; expected False"):
            call()
