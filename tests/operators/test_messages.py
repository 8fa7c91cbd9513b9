"""The messages of lookups for invalid arguments: the table, the order of arguments, the bag; the same in
every dtype."""

from __future__ import annotations

import pytest
import torch

from recfuse.errors import OffsetError
from recfuse.nn import EmbeddingColumns, FusedEmbeddingBagCollection, FusedEmbeddingBagList
from recfuse.nn.columns import Identity, Numeric
from support.operators import calls, overload, run

OFFSETS, INDICES = [torch.tensor([0, 1])] * 2, [torch.tensor([0, 1, 2]), torch.tensor([1, 2])]
ORDER = r"Pass \(offsets, indices\) in this order"


def tables(device="cpu"):
    return FusedEmbeddingBagList([torch.nn.EmbeddingBag(5, 4, mode="sum", device=device) for _ in range(2)])


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    (
        ((INDICES, OFFSETS), ValueError, rf"offsets\[1\] has 2 bags, offsets\[0\] has 3; .*{ORDER}"),
        (([OFFSETS[0], OFFSETS[0][:1]], INDICES), ValueError, rf"offsets\[1\] has 1 bags, .*{ORDER}"),
        ((torch.tensor([[0, 3], [1, 4]]), INDICES), IndexError, rf"table 1 begin with 1; .*{ORDER}"),
        ((OFFSETS, [torch.zeros(2, 2).long(), INDICES[1]]), ValueError, r"indices\[0\] has 2 dimensions"),
        ((None, INDICES), TypeError, "offsets is a NoneType; expected a tensor or a list with one tensor"),
        ((OFFSETS, INDICES, [torch.rand(3), None]), ValueError, r"row_weights\[0\] is \[3\]; expected \[5\]"),
        ((OFFSETS, INDICES, [None, torch.rand(5, 1)]), ValueError, r"row_weights\[1\] is \[5, 1\]"),
    ),
)
def test_pool_names_table_and_order(arguments, kind, text):
    with pytest.raises(kind, match=rf"^recfuse\.nn\.FusedEmbeddingBagList: .*{text}"):
        tables().pool(*arguments)


def test_pool_of_tensors_without_memory():
    for at in range(2):
        given = [[one.clone() for one in each] for each in (OFFSETS, INDICES)]
        given[at][1].untyped_storage().resize_(8)
        with pytest.raises(ValueError, match=rf"{('offsets', 'indices')[at]}\[1\] has no memory"):
            tables().pool(*given)


def test_pool_on_meta():
    for on_meta in (True, False):
        given = [[one.to("meta") if on_meta else one for one in each] for each in (OFFSETS, INDICES)]
        found = tables("meta").pool(*given)
        assert [one.shape for one in found] == [(2, 4)] * 2 and all(one.is_meta for one in found)


@pytest.mark.parametrize(
    ("indices", "offsets", "text"),
    (
        ([0, 1, 2, 9], [0, 1, 2, 3, 4], r"indices\[3\] is 9, for feature 1, bag 1; expected 0 to 4, less"),
        ([0, 1, 2, -1], [0, 1, 2, 3, 4], r"indices\[3\] is -1, for feature 1, bag 1; expected 0 to 4"),
        ([0, 1, 2, 3], [0, 1, 2, 3, 9], r"offsets\[4\] is 9, for feature 1, bag 1; expected 3 .* to 4 "),
        ([0, 1, 2, 3], [0, 1, 9, 3, 4], r"offsets\[2\] is 9, for feature 0, bag 1; expected 1 .* to 4 "),
        ([0, 1, 2, 3], [0, 2, 1, 3, 4], r"offsets\[2\] is 1, for feature 0, bag 1; expected 2 .* to 4 "),
        ([0, 1, 2, 3], [1, 1, 2, 3, 4], r"offsets\[0\] is 1; expected 0, where the first bag begins"),
    ),
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_collections_of_every_dtype_say_the_same(dtype, indices, offsets, text):
    collection = FusedEmbeddingBagCollection([(5, 4), (5, 4)]).to(dtype)
    with pytest.raises(IndexError, match=rf"^recfuse\.fused_embedding_bag: {text}") as raised:
        collection(torch.tensor(indices), torch.tensor(offsets))
    if "offsets" in text:
        assert type(raised.value) is OffsetError and isinstance(raised.value, ValueError)


def test_from_embedding_bags_refuses_other_types():
    bag = torch.nn.EmbeddingBag(5, 4)
    for given in ({"a": bag}, torch.nn.ModuleDict({"a": bag})):
        with pytest.raises(TypeError, match=r"embedding_bags is a \w+; expected .*. Pass its values\(\)"):
            FusedEmbeddingBagCollection.from_embedding_bags(given)
    with pytest.raises(TypeError, match="embedding_bags is a NoneType"):
        FusedEmbeddingBagCollection.from_embedding_bags(None)


def test_columns_with_empty_offsets():
    columns = EmbeddingColumns([Identity("a", 9, 4)])
    empty = torch.tensor([1]), torch.empty(0, dtype=torch.int64)
    for given in (empty, list(empty)):
        for call in (columns, columns.pack):
            with torch.no_grad(), pytest.raises(ValueError, match=r"feature 'a' .* has offsets \[0\]"):
                call({"a": given})


def test_a_gradient_of_more_rows_than_any_memory_has_is_refused_at_once():
    call = calls()["fused_embedding_bag_sparse_backward"]
    for rows in (2**48, 2**56, 2**58):
        features = torch.tensor([[0, 0, rows, 4, 0, -1, 0], [0, 0, rows, 4, 0, -1, 4]])
        with pytest.raises((NotImplementedError, ValueError), match="rows"):
            overload("fused_embedding_bag_sparse_backward")(**call | {"rows": rows, "features": features})
    features = torch.tensor([[0, 0, 2**40, 4, 0, -1, 0], [0, 0, 2**40, 4, 0, -1, 4]])
    call |= {"rows": 2**40, "features": features, "winners": None}
    assert run("fused_embedding_bag_sparse_backward", call)[0].tolist() == [0, 1, 5, 8]


def test_a_batch_size_beyond_an_integer_is_refused():
    columns = EmbeddingColumns([Identity(f"a{number}", 9, 4) for number in range(3)])
    given = {f"a{number}": torch.zeros(2, dtype=torch.int64) for number in range(3)}
    places = columns._reader.read(given).places
    program, _ = columns._whole.programs.of(places, torch.device("cpu"))
    dense = [torch.zeros(1, dtype=torch.int64).expand(2**62)] * 3
    with pytest.raises(ValueError, match="batch is 4611686018427387904 for 3 tables"):
        overload("_embedding_columns_lookups")(program, dense, [], [], [], 2**62)


def test_small_unsigned_types_are_widened():
    columns = EmbeddingColumns([Identity("a", 70_000, 4), Numeric("b")])
    rows, numbers = torch.tensor([1, 65_535, 0]), torch.tensor([3, 2**32 - 1, 7])
    want = columns({"a": rows, "b": numbers})
    for kind in (torch.uint16, torch.uint32):
        found = columns({"a": rows.to(kind), "b": numbers.to(torch.uint32)})
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(columns(columns.pack({"a": rows.to(kind), "b": numbers})), want)
