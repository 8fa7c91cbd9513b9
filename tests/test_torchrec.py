"""With the real TorchRec: KeyedJaggedTensor input, and swapped EmbeddingBagCollections."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection

torchrec = pytest.importorskip(
    "torchrec", reason="torchrec is not installed (the test extra's peers are optional)"
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.modules.embedding_configs import DataType, PoolingType  # noqa: E402

CONFIGS = [
    {"name": "t1", "embedding_dim": 8, "num_embeddings": 20, "feature_names": ["f1"]},
    {
        "name": "t2",
        "embedding_dim": 4,
        "num_embeddings": 9,
        "feature_names": ["f2", "f3"],
        "pooling": PoolingType.MEAN,
    },
    {"name": "t3", "embedding_dim": 16, "num_embeddings": 30, "feature_names": ["f3"]},
]


def configs(**changes):
    return [EmbeddingBagConfig(**{**config, **changes}) for config in CONFIGS]


def keyed(keys=("f1", "f2", "f3"), bags=5, weighted=False):
    lengths = torch.randint(0, 4, (len(keys) * bags,))
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, 9, (count,)),
        lengths=lengths,
        weights=torch.rand(count) if weighted else None,
    )


def swapped(model):
    twin = copy.deepcopy(model)
    return twin, recfuse.swap(twin)


@pytest.mark.parametrize("keys", (("f1", "f2", "f3"), ("f3", "f1", "f2"), ("f2", "x", "f3", "f1")))
def test_collection_takes_keyed_jagged_tensors(keys):
    theirs = EmbeddingBagCollection(tables=configs())
    ours = FusedEmbeddingBagCollection(configs())
    ours.load_state_dict(theirs.state_dict())
    features = keyed(keys)
    torch.testing.assert_close(ours(features), theirs(features).values())


def test_collection_names_a_missing_key():
    ours = FusedEmbeddingBagCollection(configs())
    with pytest.raises(ValueError, match="no key 'f2'"):
        ours(keyed(("f1", "f3")))
    with pytest.raises(ValueError, match="must be None with a KeyedJaggedTensor"):
        ours(keyed(), torch.arange(4))
    with pytest.raises(ValueError, match="batch size per key"):
        values = torch.zeros(4, dtype=torch.int64)
        ours(
            KeyedJaggedTensor(
                keys=["f1", "f2"],
                values=values,
                lengths=torch.ones(4).long(),
                stride_per_key_per_rank=[[1], [3]],
            )
        )


def test_collection_initialises_as_its_configs_say():
    def fill(weight):
        return weight.fill_(3)

    ours = FusedEmbeddingBagCollection(configs(init_fn=fill))
    assert all(weight.eq(3).all() for weight in ours.parameters())


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("data_type", (DataType.FP32, DataType.FP16))
def test_swapped_collection_is_the_same(weighted, data_type):
    changes = {"data_type": data_type, **({"pooling": PoolingType.SUM} if weighted else {})}
    model = nn.Sequential(EmbeddingBagCollection(tables=configs(**changes), is_weighted=weighted))
    parameters = [p for p in model.parameters()]
    twin, report = swapped(model)
    assert [entry.name for entry in report.fused] == ["0"]
    assert isinstance(twin[0], EmbeddingBagCollection)
    assert list(twin.state_dict()) == list(model.state_dict())
    features = keyed(("f2", "f3", "f1"), weighted=weighted)
    if data_type == DataType.FP16 and weighted:
        with pytest.raises(RuntimeError):  # TorchRec's own cannot: its weights are float32
            model(features)
        assert twin(features).values().dtype == torch.float32
        return
    theirs, ours = model(features), twin(features)
    assert ours.keys() == theirs.keys() == ["f1", "f2", "f3@t2", "f3@t3"]
    assert ours.offset_per_key() == theirs.offset_per_key()
    assert ours.values().dtype == theirs.values().dtype
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-3, atol=1e-3)
    for kind in (theirs, ours):
        kind.values().square().sum().backward()
    for mine, other in zip(twin.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=5e-3, atol=5e-3)


def test_swap_keeps_parameters_and_state_round_trips():
    model = EmbeddingBagCollection(tables=configs())
    parameters, state = [p for p in model.parameters()], copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recfuse.swap(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    features = keyed()
    before = model(features).values()
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(features).values(), before)
    model.load_state_dict(state)
    assert torch.equal(model(features).values(), before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double().float()):
        assert torch.equal(other(features).values(), before)
        assert other._packed.in_place(other._packed_modules())
    assert recfuse.swap(model).entries == []
    fresh = EmbeddingBagCollection(tables=configs())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(features).values(), before)


def test_swapped_collection_makes_one_call():
    model = EmbeddingBagCollection(tables=configs())
    recfuse.swap(model)
    features = keyed()
    with torch.profiler.profile() as profile:
        model(features)
    assert {e.key: e.count for e in profile.key_averages()}["recfuse::fused_embedding_bag"] == 1


def test_input_that_torchrec_treats_apart():
    model = EmbeddingBagCollection(tables=configs())
    twin, _ = swapped(model)
    inverse = (["f1", "f2", "f3"], torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 1]]))
    features = KeyedJaggedTensor(
        keys=["f1", "f2", "f3"],
        values=torch.arange(6),
        lengths=torch.ones(6, dtype=torch.int64),
        inverse_indices=inverse,
    )
    torch.testing.assert_close(twin(features).values(), model(features).values())


def test_errors_of_a_swapped_collection():
    model = EmbeddingBagCollection(tables=configs(pooling=PoolingType.SUM), is_weighted=True)
    twin, _ = swapped(model)
    for one in (model, twin):
        with pytest.raises(AssertionError, match="weights"):
            one(keyed())
    features = keyed(weighted=True)
    features.values()[:] = 10
    with pytest.raises(IndexError, match="feature"):
        twin(features)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (lambda m: m.embedding_bags["t2"].register_forward_pre_hook(lambda *_: None), "hooks"),
        (lambda m: setattr(m, "forward", m.forward), "forward"),
        (lambda m: m.double(), "float64"),
    ),
)
def test_collections_that_are_left(change, words):
    model = EmbeddingBagCollection(tables=configs())
    change(model)
    report = recfuse.swap(model)
    assert type(model) is EmbeddingBagCollection
    assert words in next(entry.detail for entry in report.left if entry.name == "")
    model(keyed())


def test_a_weighted_collection_of_means_is_left():
    model = EmbeddingBagCollection(tables=configs(), is_weighted=True)
    report = recfuse.swap(model)
    assert "weighted" in report.left[0].detail


def test_without_fusing_the_tables_are_replaced():
    model = EmbeddingBagCollection(tables=configs())
    features = keyed()
    want = model(features).values()
    report = recfuse.swap(model, fuse=False)
    assert len(report.replaced) == 3
    torch.testing.assert_close(model(features).values(), want)
