"""The modules: EmbeddingBag as a drop-in, and the collection with packed weights."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, Table
from support.collection import COPIES, SPECS, assert_packed, by_hand, collection_of, lookups_of

# EmbeddingBag


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"mode": "sum", "padding_idx": -1},
        {"mode": "max", "padding_idx": 3},
        {"max_norm": 1.0, "norm_type": 1.0},
        {"scale_grad_by_freq": True, "include_last_offset": True},
        {"mode": "sum", "sparse": True, "dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ),
    ids=str,
)
def test_drop_in(options):
    torch.manual_seed(1)
    ours = EmbeddingBag(10, 6, **options)
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(10, 6, **options)
    assert repr(ours) == f"{repr(theirs)[:-1]}, recfuse)"
    assert torch.equal(ours.weight, theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    indices, offsets = torch.tensor([0, 1, 1, 9, 3, 3, 4, 9]), torch.tensor([0, 3, 3, 8])
    by_freq, theirs.scale_grad_by_freq = theirs.scale_grad_by_freq, False
    for bag in (ours, theirs):
        bag(indices, offsets).sum().backward()
    if by_freq:  # torch's on the CPU divides by other rows' counts
        theirs.scale_grad_by_freq = True
        theirs.weight.grad /= indices.bincount().clamp(min=1)[:, None]
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())
    two = torch.tensor([[0, 9], [4, 4]])
    want = theirs(two)
    for bag in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(bag) is EmbeddingBag
        torch.testing.assert_close(bag(two), want)


def test_a_schedule_is_the_objects_own():
    bag = EmbeddingBag(10, 4, mode="sum")
    want = bag(torch.tensor([[1, 2]]))
    bag.schedule = "distance=2"
    assert (EmbeddingBag.schedule, EmbeddingBag.pinned) == ("", None)
    for other in (bag, copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert other.schedule == "distance=2" and list(other.state_dict()) == ["weight"]
        assert torch.equal(other(torch.tensor([[1, 2]])), want)
    bag.schedule = "distance=fast"
    with pytest.raises(ValueError, match="distance"):
        bag(torch.tensor([[1, 2]]))


def test_from_pretrained_and_wrong_constructor_arguments():
    weight = torch.randn(5, 3)
    bag = EmbeddingBag.from_pretrained(weight, mode="sum")
    assert type(bag) is EmbeddingBag
    assert not bag.weight.requires_grad
    torch.testing.assert_close(bag(torch.tensor([[1, 2]])), weight[1:3].sum(0)[None])
    with pytest.raises(AssertionError):
        EmbeddingBag(5, 3, padding_idx=5)


# FusedEmbeddingBagCollection


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_pools_as_torch_does(dtype):
    specs = [
        Table(20 + d, d, mode=("sum", "mean", "max")[d % 3], dtype=dtype) for d in (1, 4, 8, 33, 64, 128, 5)
    ]
    collection = collection_of(specs)
    assert_packed(collection)
    for bags in (1, 5):
        indices, offsets = lookups_of(collection, bags)
        with torch.no_grad():
            got = collection(indices, offsets)
            assert got.dtype == dtype
            torch.testing.assert_close(got, by_hand(collection, indices, offsets))


@pytest.mark.parametrize("sparse", (False, True))
@pytest.mark.parametrize("weighted", (False, True))
def test_gradients_are_torchs(sparse, weighted):
    specs = (
        [Table(9, 4), Table(7, 8), Table(5, 4, feature_names=("x", "y")), (6, 3)]
        if sparse or weighted
        else SPECS
    )
    collection = collection_of(specs, sparse=sparse)
    frozen = collection.packed_weights()[collection.layout.tables[1].matrix].requires_grad_(False)
    indices, offsets = lookups_of(collection)
    found = []
    dense = [
        (i, t.weight.detach().clone().requires_grad_()) for i, t in enumerate(collection.tables.values())
    ]

    def loop(indices, offsets, factors):
        return by_hand(collection, indices, offsets, factors, dict(dense))

    for function in (collection, loop):
        factors = torch.linspace(-1, 1, indices.numel()).requires_grad_() if weighted else None
        out = function(indices, offsets, factors)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        found.append(factors.grad if weighted else None)
    assert frozen.grad is None
    for number, table in enumerate(collection.tables.values()):
        if number != 1:
            assert (table.weight.grad.layout is torch.sparse_coo) == sparse
            torch.testing.assert_close(table.weight.grad.to_dense(), dense[number][1].grad)
    for parameter in collection.parameters():
        if sparse and parameter.requires_grad:
            assert parameter.grad.is_coalesced()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_packed_and_their_own(way):
    collection = collection_of()
    indices, offsets = lookups_of(collection)
    want = collection(indices, offsets)
    other = COPIES[way](collection)
    assert_packed(other)
    assert torch.equal(other(indices, offsets), want)
    with torch.no_grad():
        other.tables.t0.weight.fill_(9)
    assert torch.equal(collection(indices, offsets), want)
    assert not torch.equal(other(indices, offsets), want)


def _in_inference_mode(collection):
    with torch.inference_mode():
        collection(*lookups_of(collection))
        return (
            FusedEmbeddingBagCollection.from_embedding_bags(
                [nn.EmbeddingBag.from_pretrained(torch.ones(3, 2))]
            )
            and collection
        )


MOVES = {
    "half and back": lambda c: c.half().float(),
    "bfloat16": lambda c: c.bfloat16(),
    "to dtype": lambda c: c.to(torch.float16),
    "requires_grad_": lambda c: c.requires_grad_(False),
    "cpu": lambda c: c.cpu(),
    "share_memory": lambda c: c.share_memory(),
    "to_empty": lambda c: c.to_empty(device="cpu"),
    "through meta": lambda c: c.to("meta").to_empty(device="cpu"),
    "repeatedly, in inference mode": lambda c: _in_inference_mode(c),
    "in a parent": lambda c: nn.Sequential(nn.Linear(2, 2), c).half()[1],
}


@pytest.mark.parametrize("way", MOVES)
def test_moves_keep_it_packed(way):
    collection = collection_of()
    parameters = list(collection.parameters())
    indices, offsets = lookups_of(collection)
    collection(indices, offsets)
    assert MOVES[way](collection) is collection
    if "meta" not in way:
        assert all(a is b for a, b in zip(collection.parameters(), parameters, strict=True))
    if way != "requires_grad_":
        collection(indices, offsets).sum().backward()
    with torch.no_grad():
        collection.reset_parameters()
        got = collection(indices, offsets)
        got = collection(indices, offsets)
        torch.testing.assert_close(got, by_hand(collection, indices, offsets))


@pytest.mark.parametrize("assign", (False, True))
def test_state_dict_round_trip(assign):
    collection, other = collection_of(), FusedEmbeddingBagCollection(SPECS)
    indices, offsets = lookups_of(collection)
    state = {name: value.clone() for name, value in collection.state_dict().items()}
    nn.ModuleDict({"sparse": other}).load_state_dict(
        {f"sparse.{k}": v for k, v in state.items()}, assign=assign
    )
    assert_packed(other)
    assert torch.equal(other(indices, offsets), collection(indices, offsets))
    with torch.device("meta"):
        empty = FusedEmbeddingBagCollection(SPECS)
    empty.load_state_dict(state, assign=True)
    assert_packed(empty)
    assert torch.equal(empty(indices, offsets), collection(indices, offsets))


def test_float64_goes_to_torch():
    collection = collection_of().double()
    indices, offsets = lookups_of(collection)
    torch.testing.assert_close(collection(indices, offsets), by_hand(collection, indices, offsets))
    assert collection(indices, offsets).dtype == torch.float64
    assert_packed(collection.float())
    for sums in ([Table(30, 4, dtype=torch.float64)], [Table(30, 4, dtype=torch.float64), Table(9, 2)]):
        collection = collection_of(sums)
        indices, offsets = lookups_of(collection)
        factors = torch.rand(indices.numel(), requires_grad=True)
        pooled = collection(indices, offsets, factors)
        assert pooled.dtype == torch.float64
        expected = copy.deepcopy(collection).float()(indices, offsets, factors)
        torch.testing.assert_close(pooled, expected.double())
        pooled.sum().backward()
        assert factors.grad.dtype == torch.float32


def test_names_features_and_text():
    collection = collection_of()
    assert collection.feature_names == ["t0", "t1", "t2", "a", "b", "t4"]
    assert collection.feature_dims == [4, 16, 3, 8, 8, 1]
    assert "output_dim=40" in repr(collection)
    assert collection.embedding_bags.t1.weight[2].abs().sum() == 0
    negative = FusedEmbeddingBagCollection([Table(30, 4, padding_idx=-1)])
    assert negative.tables.t0.padding_idx == 29 and not negative.tables.t0.weight[29].any()


@pytest.mark.parametrize("compiled", (False, True))
def test_sizes_and_padding_may_be_numpys(compiled):
    rows, dim, padding = np.int64(10), np.int32(4), np.int64(2)
    bag, indices = EmbeddingBag(rows, dim, mode="sum", padding_idx=padding), torch.tensor([[2, 3], [2, 2]])
    new = FusedEmbeddingBagCollection([Table(rows, dim, padding_idx=padding)])
    packed = FusedEmbeddingBagCollection.from_embedding_bags([copy.deepcopy(bag)])
    call = torch.compile(backend="eager") if compiled else lambda module: module
    assert torch.equal(call(bag)(indices), torch.stack((bag.weight[3], torch.zeros(4))))
    for collection in (new, packed):
        spec = collection.layout.tables[0]
        assert {type(spec.num_embeddings), type(spec.embedding_dim), type(spec.padding_idx)} == {int}
        want = torch.stack((collection.tables.t0.weight[3], torch.zeros(4)))
        assert torch.equal(call(collection)(indices.reshape(-1), torch.tensor([0, 2, 4])), want)


def test_a_table_that_was_changed_by_hand_is_as_its_calls_are():
    bag = nn.EmbeddingBag(10, 4, mode="sum")
    bag.weight, bag.padding_idx = nn.Parameter(torch.randn(20, 4)), -1
    want = bag(torch.tensor([[15, 19]]))
    wrong = copy.deepcopy(bag)
    collection = FusedEmbeddingBagCollection.from_embedding_bags([bag])
    assert torch.equal(collection(torch.tensor([15, 19]), torch.tensor([0, 2])), want)
    assert collection.state_dict()["embedding_bags.t0.weight"].shape == (20, 4)
    wrong.padding_idx, weight = 20, wrong.weight
    with pytest.raises(ValueError, match="padding_idx is 20; expected"):
        FusedEmbeddingBagCollection.from_embedding_bags([nn.EmbeddingBag(3, 4), wrong])
    assert wrong.weight is weight


def test_a_collection_made_in_inference_mode_is_trained_outside():
    with torch.inference_mode():
        new, packed = (
            collection_of(),
            FusedEmbeddingBagCollection.from_embedding_bags([nn.EmbeddingBag(3, 4)]),
        )
    for collection in (new, packed):
        with torch.enable_grad():
            collection(*lookups_of(collection)).sum().backward()
        assert all(parameter.grad is not None for parameter in collection.parameters())


def test_new_tables_are_drawn_as_torchs():
    collection = collection_of([Table(30, 4), Table(20, 4, padding_idx=2)])
    torch.manual_seed(5)
    bags = [nn.EmbeddingBag(30, 4), nn.EmbeddingBag(20, 4, padding_idx=2)]
    for table, bag in zip(collection.tables.values(), bags, strict=True):
        assert torch.equal(table.weight, bag.weight)


def test_a_meta_collection_gives_a_meta_tensor():
    for dtype in (torch.float32, torch.float64):
        collection = collection_of(device="meta").to(dtype)
        indices, offsets = torch.zeros(12, dtype=torch.int64, device="meta"), torch.arange(13, device="meta")
        assert collection(indices, offsets).is_meta
        with torch.no_grad():
            assert collection(indices, offsets).shape == (2, 40)


def test_large_buffers_ask_for_huge_pages_once_before_they_are_filled(monkeypatch):
    from recfuse.nn import memory
    from recfuse.nn.packed import parameters

    advised = []
    monkeypatch.setattr(parameters, "advise_huge_pages", lambda buffer: advised.append(buffer.numel()))
    collection_of([(1024, 1024)])
    assert advised == [1024 * 1024]
    monkeypatch.undo()
    memory.advise_huge_pages(torch.zeros(2 << 20))
    advised.clear()
    monkeypatch.setattr(memory, "_library", lambda: advised.append("asked"))
    EmbeddingBag.from_pretrained(torch.zeros(1, 64).expand(1 << 20, 64))  # of 256 bytes
    assert not advised


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    (
        (lambda: FusedEmbeddingBagCollection([]), ValueError, "empty"),
        (
            lambda: FusedEmbeddingBagCollection([Table(3, 2, name="x"), Table(3, 2, name="x")]),
            ValueError,
            "'x'",
        ),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, mode="avg")]), ValueError, "avg"),
        (lambda: FusedEmbeddingBagCollection([Table(-3, 2)]), ValueError, "-3"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, mode="max")], sparse=True), ValueError, "sparse"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, padding_idx=3)]), ValueError, "padding_idx"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, padding_idx=1.5)]), TypeError, "padding_idx"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, name="a.b")]), ValueError, "a.b"),
        (lambda: FusedEmbeddingBagCollection([(3.5, 2)]), TypeError, "float"),
        (lambda: FusedEmbeddingBagCollection([3]), TypeError, "int"),
        (lambda: FusedEmbeddingBagCollection([nn.EmbeddingBag(3, 2)]), TypeError, "from_embedding_bags"),
        (
            lambda: FusedEmbeddingBagCollection.from_embedding_bags([nn.EmbeddingBag(3, 2, max_norm=1)]),
            ValueError,
            "max_norm",
        ),
        (
            lambda: FusedEmbeddingBagCollection.from_embedding_bags([nn.EmbeddingBag(3, 2)], names=[]),
            ValueError,
            "names",
        ),
        (lambda: collection_of()(torch.zeros(0, dtype=torch.int64)), ValueError, "offsets"),
        (lambda: collection_of()([1, 2]), TypeError, "list"),
        (lambda: collection_of()(torch.zeros(3, dtype=torch.int64), torch.arange(4)), ValueError, "features"),
        (lambda: collection_of()(torch.full((6,), 9), torch.arange(7)), IndexError, "feature 2"),
        (
            lambda: collection_of().double()(torch.zeros(3, dtype=torch.int64), torch.arange(4)),
            ValueError,
            "features",
        ),
        (
            lambda: collection_of().double()(torch.zeros(8, dtype=torch.int64), torch.arange(1, 8)),
            ValueError,
            "expected 0, where the first bag begins",
        ),
    ),
)
def test_errors(make, kind, words):
    with pytest.raises(kind, match=words) as caught:
        make()
    assert "recfuse" in str(caught.value)


def test_an_error_with_gradients_is_translated_too():
    collection = collection_of()
    with torch.enable_grad(), pytest.raises(IndexError, match="feature 2"):
        collection(torch.full((6,), 9), torch.arange(7))
    assert recfuse.nn.FusedEmbeddingBagCollection is FusedEmbeddingBagCollection


@pytest.mark.parametrize("requires_grad", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("tables, offsets", ((1, [0, 2, 4]), (2, [0, 2, 4]), (2, [0])))
def test_lookups_of_no_bag_are_refused(requires_grad, dtype, tables, offsets):
    collection = FusedEmbeddingBagCollection([(20, 4)] * tables).to(dtype).requires_grad_(requires_grad)
    end = f"offsets\\[{len(offsets) - 1}\\], the last offset, is {offsets[-1]}; expected 10"
    with pytest.raises((ValueError, IndexError), match=end):
        collection(torch.arange(10), torch.tensor(offsets))
    out = collection(torch.arange(offsets[-1]), torch.tensor(offsets))
    assert out.shape[0] == (len(offsets) - 1) // tables


def test_include_last_offset_takes_the_inputs_of_torch():
    """Only for this form torch's page says that the last offset may be an earlier end."""
    bag = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True)
    packed = FusedEmbeddingBagCollection.from_embedding_bags([copy.deepcopy(bag)])
    given = torch.arange(10), torch.tensor([0, 2, 4])
    for requires_grad in (True, False):
        packed.requires_grad_(requires_grad)
        torch.testing.assert_close(packed.tables["t0"](*given), bag(*given), check_stride=False)
