"""Collections of tables that torch's operators have quantised."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import recfuse
from recfuse.nn import QuantizedEmbeddingBagCollection as Collection

PACK = {8: torch.ops.quantized.embedding_bag_byte_prepack, 4: torch.ops.quantized.embedding_bag_4bit_prepack}
POOL = {
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}


def packed(bits, dims=(16, 24, 6), rows=40):
    torch.manual_seed(2)
    return [PACK[bits](torch.randn(rows + dim, dim)) for dim in dims]


def lookups(features, bags=7):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 5, (features * bags,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.randint(0, 40, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("mode", ("sum", "mean"))
def test_agrees_with_torch_s_operators(bits, mode):
    tables = packed(bits)
    collection = Collection.from_prepacked(tables, bits, mode=mode)
    indices, offsets = lookups(3)
    got = collection(indices, offsets)
    column = 0
    for number, table in enumerate(tables):
        own = offsets[number * 7 : number * 7 + 8]
        begin, end = int(own[0]), int(own[-1])
        theirs = POOL[bits](table, indices[begin:end], own[:-1] - begin)
        lengths = own.diff().clamp(min=1)[:, None] if mode == "mean" else 1
        torch.testing.assert_close(
            got[:, column : column + theirs.shape[1]], theirs / lengths, atol=1e-4, rtol=1e-4
        )
        column += theirs.shape[1]
    assert column == got.shape[1]


@pytest.mark.parametrize("bits", (8, 4))
def test_reads_the_codes_where_they_lie(bits):
    tables = packed(bits)
    collection = Collection.from_prepacked(dict(zip("abc", tables, strict=True)), bits)
    for table, own in zip(tables, collection.tables.values(), strict=True):
        assert own.codes.data_ptr() == table.data_ptr()
        assert own.dtype == f"int{bits}"
        shift = 4 if bits == 4 else 0
        codes = table[:, : own.codes.shape[1]].clone()
        table[:, : own.codes.shape[1]] = codes ^ (1 << shift)
        assert torch.equal(own.codes, codes ^ (1 << shift))


@pytest.mark.parametrize("bits", (8, 4))
def test_state_dicts_copies_and_moves(bits):
    tables = packed(bits)
    collection = Collection.from_prepacked(tables, bits)
    batch = lookups(3)
    expected = collection(*batch)
    saved = io.BytesIO()
    torch.save(collection.state_dict(), saved)
    saved.seek(0)
    other = Collection.from_prepacked([torch.zeros_like(table) for table in tables], bits)
    other.load_state_dict(torch.load(saved))
    for one in (other, copy.deepcopy(collection), collection.half()):
        assert torch.equal(one(*batch), expected)
    if bits == 4:  # the parameters of quantize
        planar = Collection([(56, 16), (64, 24), (46, 6)], "int4")
        planar.load_state_dict(collection.state_dict())
        assert torch.equal(planar(*batch), expected)
    recfuse.dequantize(collection)
    torch.testing.assert_close(collection(*batch), expected, atol=1e-4, rtol=1e-4)


def test_bad_arguments():
    table = packed(8)[0]
    with pytest.raises(ValueError, match="bits is 2; expected 8 or 4"):
        Collection.from_prepacked([table], 2)
    with pytest.raises(TypeError, match="tables is a Tensor"):
        Collection.from_prepacked(table, 8)
    with pytest.raises(TypeError, match="table 't0' is an int"):
        Collection.from_prepacked([3], 8)
    with pytest.raises(TypeError, match=r"table 't0' is torch\.float32; expected torch\.uint8"):
        Collection.from_prepacked([table.float()], 8)
    with pytest.raises(
        ValueError, match=r"has shape \[56, 8\] .* expected contiguous rows of codes and 8 bytes"
    ):
        Collection.from_prepacked([table[:, :8]], 8)
    with pytest.raises(TypeError, match=r"output_dtype is torch\.float64"):
        Collection.from_prepacked([table], 8, output_dtype=torch.float64)
    with pytest.raises(ValueError, match="mode of t0 is"):
        Collection.from_prepacked([table], 8, mode="median")
