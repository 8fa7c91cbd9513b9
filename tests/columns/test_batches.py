"""The forms of batches that columns accept, packed batches, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recfuse.nn import EmbeddingColumns
from recfuse.nn.columns import Bucketize, Identity, Numeric, PackedColumns
from support.columns.inputs import BATCH, COLUMNS, mapping, parts


@pytest.fixture
def columns():
    return EmbeddingColumns(COLUMNS)


def check(columns, batch, given, dense=None):
    """Bit-identical to tuples, and close to the reference."""
    with torch.no_grad():
        want = columns(mapping(given))
        assert torch.equal(columns(batch, dense), want)
        torch.testing.assert_close(columns.to_torch()(batch, dense), want)
        packed = columns.pack(batch, dense)
        assert torch.equal(columns(packed), want)
    assert torch.equal(columns(batch, dense).isnan(), want.isnan())
    torch.testing.assert_close(columns(batch, dense), want, equal_nan=True)
    assert want.shape == (given["age"].numel(), columns.output_dim)


def test_columns_lie_side_by_side(columns):
    ends = [0, 8, 12, 28, 44, 60, 64, 66, 70]
    names = [column.name for column in COLUMNS]
    assert columns.columns == {name: slice(*ends[at : at + 2]) for at, name in enumerate(names)}
    assert columns.output_dim == 70
    given = parts()
    with torch.no_grad():
        out = columns(mapping(given))
        for number, name in enumerate(names):
            alone = EmbeddingColumns(COLUMNS[number : number + 1])
            alone.load_state_dict({key: columns.state_dict()[key] for key in alone.state_dict()})
            assert torch.equal(alone(mapping(given)), out[:, columns.columns[name]])


@pytest.mark.parametrize("batch", (0, 1, BATCH))
def test_mappings(columns, batch):
    given = parts(batch=batch)
    plain = mapping(given)
    check(columns, plain, given)
    check(columns, {**plain, "unread": "anything"}, given)
    lengths = {"values": given["tags"], "lengths": given["lengths"][1].int(), "weights": given["own"]}
    check(columns, {**plain, "tags": lengths}, given)
    offsets = {"values": given["place"], "offsets": given["offsets"][0].int()}
    check(columns, {**plain, "place": offsets}, given)
    check(columns, {**plain, "tags": list(plain["tags"]), "w": (given["w"], given["offsets"][1])}, given)


@pytest.mark.parametrize(
    "entry", (["Oslo", "Lima"], np.array(["Oslo", "Lima"]), [torch.ones(2), [0, 1]]), ids=str
)
def test_bad_entries_name_the_allowed_forms(columns, entry):
    words = r"'place' of column 'city' is .*; expected a tensor, .* recfuse\.data\.hash_strings"
    with pytest.raises(TypeError, match=words):
        columns({**mapping(parts()), "place": entry})


def test_nested_tensors(columns):
    given = parts()
    nested = torch.nested.nested_tensor_from_jagged(given["place"], given["offsets"][0])
    check(columns, {**mapping(given), "place": nested}, given)
    weights = torch.nested.nested_tensor_from_jagged(given["w"], given["offsets"][1])
    check(columns, {**mapping(given), "w": weights}, given)
    held = torch.nested.nested_tensor_from_jagged(
        given["place"], given["offsets"][0], lengths=torch.ones(BATCH)
    )
    with pytest.raises(ValueError, match=r"'place' of column 'city' is a nested tensor with gaps"):
        columns({**mapping(given), "place": held})


def test_torchrec(columns):
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    given = parts()
    plain = mapping(given)
    tags = jagged.JaggedTensor(given["tags"], lengths=given["lengths"][1], weights=given["own"])
    place = jagged.JaggedTensor(given["place"], offsets=given["offsets"][0])
    check(columns, {**plain, "tags": tags, "place": place}, given)
    more = torch.zeros(BATCH * 2, dtype=torch.int64)
    keyed = jagged.KeyedJaggedTensor(
        ["unread", "tags", "place"],
        torch.cat((more, given["tags"], given["place"])),
        lengths=torch.cat((torch.full((BATCH,), 2), *given["lengths"][::-1])),
        weights=torch.cat((more.float(), given["own"], torch.ones(given["place"].numel()))),
    )
    dense = {name: plain[name] for name in ("age", "price", "many", "w")}
    check(columns, keyed, given, dense)
    alone = EmbeddingColumns([COLUMNS[1]])
    want = alone(plain)
    lengths = torch.cat((given["lengths"][0], torch.full((BATCH,), 2)))
    other = jagged.KeyedJaggedTensor(["place", "unread"], torch.cat((given["place"], more)), lengths=lengths)
    for one in (keyed, keyed, other, other, keyed):  # the last one's keys are remembered
        assert torch.equal(alone(one), want)
    with pytest.raises(ValueError, match=r"feature 'age' of column 'age' is not in the batch; the Keyed"):
        columns(keyed)
    with pytest.raises(ValueError, match="'place' of column 'city' is a KeyedJaggedTensor with the keys"):
        columns({**plain, "place": keyed})
    unweighted = jagged.KeyedJaggedTensor(["tags"], given["tags"], lengths=given["lengths"][1])
    with pytest.raises(ValueError, match="feature 'tags' of column 'weighted' has no weights"):
        columns(unweighted, plain)


def test_types_without_loss():
    columns = EmbeddingColumns([Identity("a", 300, 2), Numeric("b"), Bucketize("c", [0, 1, 2], 2)])
    whole = {"a": torch.tensor([0, 1, 1]), "b": torch.tensor([1, 0, 1]), "c": torch.tensor([0, 1, 2])}
    want = columns(whole)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32):
        assert torch.equal(columns({**whole, "a": whole["a"].to(dtype)}), want)
        assert torch.equal(columns({**whole, "b": whole["b"].to(dtype)}), want)
        jagged = (whole["a"].to(dtype), torch.arange(4))
        assert torch.equal(columns({**whole, "a": jagged}), want)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(columns({**whole, "c": whole["c"].to(dtype)}), want)
        assert torch.equal(columns(columns.pack({**whole, "c": whole["c"].to(dtype)})), want)
    for dtype in (torch.float64, torch.complex64, torch.uint64):
        with pytest.raises(TypeError, match="expected float32, int32 or int64"):
            columns({**whole, "c": whole["c"].to(dtype)})


def test_strides():
    columns = EmbeddingColumns([Identity("a", 10, 4, invalid="drop"), Numeric("b", 3)])
    wide = torch.randint(0, 10, (5, 3))
    values = torch.randn(5, 3)
    want = columns({"a": wide, "b": values})
    for change in (
        lambda one: one.t().contiguous().t(),
        lambda one: torch.stack((one, one * 7), -1)[..., 0],
        lambda one: torch.cat((one, one), 1)[:, :3],
        lambda one: one.flip(0).flip(0),
    ):
        assert torch.equal(columns({"a": change(wide), "b": change(values)}), want)
    same = torch.tensor([[3, 4, 5]])
    got = columns({"a": same.expand(5, 3), "b": values})
    assert torch.equal(got, columns({"a": same.repeat(5, 1), "b": values}))


def test_packed_batches(columns):
    given = parts()
    packed = columns.pack(mapping(given))
    assert isinstance(packed, PackedColumns) and packed.batch_size == BATCH
    assert packed.to("cpu") is packed
    meta = packed.to("meta")
    assert meta.device.type == "meta" and meta.nbytes == packed.nbytes
    assert "batch_size=6" in repr(packed)
    again = columns.pack(packed)
    assert torch.equal(columns(again), columns(packed))
    leaves, spec = torch.utils._pytree.tree_flatten(packed)
    assert len(leaves) == len(torch.utils._pytree.tree_leaves(packed)) > 3
    rebuilt = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert torch.equal(columns(rebuilt), columns(packed)) and rebuilt.batch_size == BATCH
    assert rebuilt.to("meta").device.type == "meta" and rebuilt.nbytes > 0
    other = EmbeddingColumns(COLUMNS[:2])
    with pytest.raises(ValueError, match="packed for other columns"):
        other(packed)
    with pytest.raises(ValueError, match="dense is given with a packed batch; expected None"):
        columns(packed, {"age": given["age"]})


def test_packing_is_one_buffer_of_few_inputs(columns):
    given = columns.pack(mapping(parts())).inputs(columns._reader.uses)
    pointers = {one.untyped_storage().data_ptr() for each in given[2:] for one in each}
    assert len(pointers) == 1
    assert [one.dtype for one in given.dense] == [torch.float32]
    assert len(given.values) == 2 and given.dense[0].shape == (BATCH, 6)


def test_bad_offsets_stay_bad_when_packed(columns):
    plain = mapping(parts())
    for first, last in ((1, 0), (0, 1), (0, -99)):
        wrong = plain["place"][1].clone()
        wrong[0] += first
        wrong[-1] += last
        batch = {**plain, "place": (plain["place"][0], wrong)}
        for given in (batch, columns.pack(batch)):
            with pytest.raises((ValueError, IndexError)):
                columns(given)


def test_values_after_the_last_offset_are_not_read(columns):
    given = parts()
    plain = mapping(given)
    longer = torch.cat((given["place"], torch.tensor([5, 6]))), given["offsets"][0]
    check(columns, {**plain, "place": longer}, given)


BAD_BATCHES = {
    "no batch": (lambda plain: 3, TypeError, "batch is an int; expected a mapping of names"),
    "missing": (
        lambda plain: {name: one for name, one in plain.items() if name != "age"},
        ValueError,
        "feature 'age' of column 'age' is not in the batch",
    ),
    "no weights": (
        lambda plain: {**plain, "tags": plain["tags"][:2]},
        ValueError,
        "feature 'tags' of column 'weighted' has no weights",
    ),
    "weights missing": (
        lambda plain: {name: one for name, one in plain.items() if name != "w"},
        ValueError,
        "feature 'tags' of column 'aside': its weights, 'w', are not in the batch",
    ),
    "weights' size": (lambda plain: {**plain, "w": plain["w"][1:]}, ValueError, "weights"),
    "a string": (lambda plain: {**plain, "age": "x"}, TypeError, "feature 'age' of column 'age' is a str"),
    "a triple": (lambda plain: {**plain, "age": (1, 2, 3)}, TypeError, "is a tuple with an int; expected a"),
    "dimensions": (lambda plain: {**plain, "age": torch.ones(6, 1, 1)}, ValueError, r"'age' is \[6, 1, 1\]"),
    "a scalar": (lambda plain: {**plain, "age": torch.ones(())}, ValueError, r"'age' is \[\]"),
    "sparse": (lambda plain: {**plain, "age": torch.ones(6).to_sparse()}, TypeError, "'age' is a torch"),
    "a mapping": (
        lambda plain: {**plain, "place": {"values": plain["age"]}},
        ValueError,
        '; expected "values"',
    ),
    "samples": (lambda plain: {**plain, "age": plain["age"][1:]}, ValueError, "samples|batch"),
    "width": (lambda plain: {**plain, "price": plain["age"]}, ValueError, "column 'price'"),
    "offsets": (
        lambda plain: {**plain, "place": (plain["place"][0], plain["place"][1][1:])},
        ValueError,
        "offsets",
    ),
    "jagged numbers": (
        lambda plain: {**plain, "price": (torch.rand(6), torch.arange(7))},
        ValueError,
        "column 'price'",
    ),
    "float words": (
        lambda plain: {**plain, "place": (plain["place"][0].float(), plain["place"][1])},
        TypeError,
        "column 'city'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_raise_clear_errors(columns, name):
    change, kind, words = BAD_BATCHES[name]
    plain = mapping(parts())
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(kind, match=words):
            columns(change(plain))
    assert columns(plain).shape == (BATCH, 70)


def test_bad_indices_name_the_column():
    columns = EmbeddingColumns([Numeric("n"), Identity("first", 5, 4), Identity("second", 5, 4)])
    good = torch.tensor([1, 2, 3])
    for name in ("first", "second"):
        batch = {"n": good, "first": good, "second": good, name: torch.tensor([1, 7, 3])}
        for given in (batch, columns.pack(batch)):
            with pytest.raises(IndexError, match=f"'{name}'.*7"):
                columns(given)
        off = EmbeddingColumns(columns.specs, bounds_check="off")
        assert off(batch).shape == (3, 9)
