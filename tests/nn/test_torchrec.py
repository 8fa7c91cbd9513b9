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
from torchrec.datasets.utils import Batch  # noqa: E402
from torchrec.modules.embedding_configs import DataType, PoolingType  # noqa: E402

from support.jagged import CONFIGS, configs, keyed  # noqa: E402


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


def attributes(features):
    """The attributes of a KeyedJaggedTensor, except for numbers that TorchRec caches in it."""
    return {
        name: value
        for name, value in vars(features).items()
        if name not in ("_stride", "_stride_per_key", "_length_per_key", "_jt_dict")
    }


@pytest.mark.parametrize("form", ("lengths", "offsets"))
@pytest.mark.parametrize("keys", (("f1", "f2", "f3"), ("f3", "f1", "f2")))
@pytest.mark.parametrize("kind", ("swapped", "collection", "columns"))
def test_a_call_does_not_change_the_batch(form, keys, kind):
    """A program exported with it accepts new batches."""
    ours, _ = swapped(nn.Sequential(EmbeddingBagCollection(tables=configs())))
    if kind == "collection":
        ours = FusedEmbeddingBagCollection(configs())
    elif kind == "columns":
        ours = recfuse.nn.EmbeddingColumns(
            [recfuse.nn.columns.Identity(key, num_embeddings=30, embedding_dim=4) for key in keys]
        )

    def batch():
        lengths = torch.tensor([1, 0, 2, 0, 1, 0])
        given = (
            {"lengths": lengths} if form == "lengths" else {"offsets": torch.tensor([0, 1, 1, 3, 3, 4, 4])}
        )
        return KeyedJaggedTensor(list(keys), torch.tensor([1, 2, 3, 4]), **given)

    def values(out):
        return out if isinstance(out, torch.Tensor) else out.values()

    features = batch()
    before = attributes(features)
    want = values(ours(features))
    after = attributes(features)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if after[name] is not value] == []
    program = torch.export.export(ours, (features,), strict=False).module()
    for given in (batch(), features):
        torch.testing.assert_close(values(program(given)), want)


def test_collection_names_a_missing_key():
    ours = FusedEmbeddingBagCollection(configs())
    with pytest.raises(ValueError, match="no key 'f2'"):
        ours(keyed(("f1", "f3")))
    with pytest.raises(ValueError, match="with a KeyedJaggedTensor, which has its own; expected None"):
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
    for table, other in zip(twin[0].tables.values(), parameters, strict=True):
        torch.testing.assert_close(table.weight.grad, other.grad, rtol=5e-3, atol=5e-3)


def test_checkpoints_load_before_and_after_a_swap():
    model = EmbeddingBagCollection(tables=configs())
    state, keys = copy.deepcopy(model.state_dict()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer])
    assert list(model.state_dict()) == keys
    features = keyed()
    before = model(features).values()
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(features).values(), before)
    assert model.load_state_dict(state).missing_keys == []
    assert torch.equal(model(features).values(), before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double().float()):
        assert torch.equal(other(features).values(), before)
        assert other.has_kernel
    again = recfuse.swap(model)
    assert [(entry.name, entry.detail) for entry in again.entries] == [("", "already swapped")]
    assert repr(model).startswith("FusedKeyedEmbeddingBagCollection(")
    fresh = EmbeddingBagCollection(tables=configs())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(features).values(), before)
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.t2\.weight"):
        model.load_state_dict({key: value for key, value in state.items() if "t2" not in key})


@pytest.mark.parametrize("weighted", (False, True))
def test_unswap_gives_torchrecs_module_back(weighted):
    changes = {"pooling": PoolingType.SUM} if weighted else {}
    model = nn.Sequential(EmbeddingBagCollection(tables=configs(**changes), is_weighted=weighted).eval())
    attributes, features = set(vars(model[0])), keyed(weighted=weighted)
    want, kinds = model(features).values(), [type(module) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer])
    report = recfuse.unswap(model, optimizers=[optimizer])
    assert [entry.name for entry in report.restored] == ["0"]
    assert [type(module) for module in model.modules()] == kinds
    assert set(vars(model[0])) == attributes
    assert [bag.include_last_offset for bag in model[0].embedding_bags.values()] == [True] * 3
    assert not model[0].embedding_bags["t1"].training
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(model.state_dict(), state)
    torch.testing.assert_close(model(features).values(), want)
    assert recfuse.unswap(model).entries == []


def test_tools_of_torchrec_work_after_unswap():
    from torchrec.fx import symbolic_trace
    from torchrec.inference.modules import quantize_embeddings

    model = nn.Sequential(EmbeddingBagCollection(tables=configs()))
    recfuse.swap(model)
    with pytest.raises(TypeError, match=r"recfuse\.unswap\(model\)"):
        symbolic_trace(model)
    with pytest.raises(TypeError, match=r"recfuse\.unswap\(model\)"):
        torch.fx.symbolic_trace(model)
    recfuse.unswap(model)
    features = keyed()
    torch.testing.assert_close(symbolic_trace(model)(features).values(), model(features).values())
    quantized = quantize_embeddings(model, dtype=torch.qint8, inplace=False)
    assert "quant" in type(quantized[0]).__module__


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


def test_a_batch_size_for_each_key_is_as_in_torchrec():
    model = EmbeddingBagCollection(tables=configs())
    twin, _ = swapped(model)
    features = KeyedJaggedTensor(
        keys=["f1", "f2", "f3"],
        values=torch.arange(7),
        lengths=torch.tensor([1, 1, 2, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [3], [2]],
        inverse_indices=(["f1", "f2", "f3"], torch.tensor([[0, 0, 0], [0, 1, 2], [1, 0, 1]])),
    )
    outcomes = []
    for one in (model, twin):
        try:
            values = one(features).values()
            values.square().sum().backward()
            outcomes.append(values)
        except Exception as error:
            outcomes.append(type(error))
    torch.testing.assert_close(*outcomes) if isinstance(outcomes[0], torch.Tensor) else None
    assert isinstance(outcomes[0], torch.Tensor) == isinstance(outcomes[1], torch.Tensor)


SPECS = (
    {"name": "t1", "embedding_dim": 8, "num_embeddings": 20, "feature_names": ["f1"]},
    {"name": "t2", "embedding_dim": 4, "num_embeddings": 1, "feature_names": ["f2", "f3"]},
    {"name": "t3", "embedding_dim": 8, "num_embeddings": 30, "feature_names": ["f3"]},
    {"name": "t4", "embedding_dim": 12, "num_embeddings": 6, "feature_names": ["f4"]},
)


def outcome(model, features):
    """Values and gradients by table, or the kind of refusal."""
    try:
        values = model(features).values()
        values.square().sum().backward()
    except Exception as error:
        return error
    tables = model.embedding_bags
    return [values, *(tables[name].weight.grad for name in tables)]


@pytest.mark.parametrize("count", (1, 2, 3, 4))
@pytest.mark.parametrize("pooling", (PoolingType.SUM, PoolingType.MEAN))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("data_type", (DataType.FP32, DataType.FP16, DataType.BF16))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_grid_against_torchrec(count, pooling, weighted, data_type, dtype):
    tables = [EmbeddingBagConfig(**spec, pooling=pooling, data_type=data_type) for spec in SPECS[:count]]
    model = EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    twin, report = swapped(model)
    assert len(report.fused) == (0 if weighted and pooling == PoolingType.MEAN else 1)
    keys = sorted({name for table in tables for name in table.feature_names}, reverse=True)
    rows = {name: min(t.num_embeddings for t in tables if name in t.feature_names) for name in keys}
    for bags in (0, 1, 7):
        model.zero_grad(), twin.zero_grad()
        lengths = torch.randint(0, 4, (len(keys), bags))
        values = [torch.randint(0, rows[key], (int(n.sum()),)) for key, n in zip(keys, lengths, strict=True)]
        count_of_lookups = int(lengths.sum())
        features = KeyedJaggedTensor(
            keys=keys,
            values=torch.cat(values).to(dtype),
            lengths=lengths.reshape(-1).to(dtype),
            weights=torch.rand(count_of_lookups) if weighted else None,
        )
        theirs, ours = outcome(model, features), outcome(twin, features)
        if isinstance(theirs, Exception) or isinstance(ours, Exception):
            # TorchRec's own cannot weigh rows of half precision, nor pool no bags; one call for all can.
            able = pooling == PoolingType.SUM if weighted and data_type != DataType.FP32 else bags == 0
            assert isinstance(theirs, Exception)
            assert able or isinstance(ours, Exception)
            continue
        loose = {} if data_type == DataType.FP32 else {"rtol": 1e-2, "atol": 1e-2}
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine, other, **loose)


@pytest.mark.parametrize(
    ("optimizer", "sparse_lr"), ((torch.optim.SGD, 0.5), (torch.optim.Adagrad, 0.1), (torch.optim.Adam, 0.01))
)
def test_torchrecs_dlrm_trains_with_the_same_losses(optimizer, sparse_lr):
    from torchrec.models.dlrm import DLRM, DLRMTrain

    tables = [
        EmbeddingBagConfig(**{**config, "embedding_dim": 8, "feature_names": [name]})
        for name, config in zip(("f1", "f2", "f3"), CONFIGS, strict=True)
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables),
        dense_in_features=5,
        dense_arch_layer_sizes=[10, 8],
        over_arch_layer_sizes=[6, 1],
    )
    model = DLRMTrain(dlrm)
    twin = copy.deepcopy(model)

    def make(one):
        own = dict(one.named_parameters())
        tables = [own[name] for name in own if "embedding_bags" in name]
        rest = [own[name] for name in own if "embedding_bags" not in name]
        return optimizer([{"params": rest}, {"params": tables, "lr": sparse_lr}], lr=0.05)

    def train(one, its, batch):
        loss, _ = one(batch)
        its.zero_grad()
        loss.backward()
        its.step()
        return loss.item()

    optimizers = [make(one) for one in (twin, model)]
    keys = list(model.state_dict())
    for number in range(12):
        if number == 4:
            assert len(recfuse.swap(twin, optimizers=optimizers[:1]).fused) == 1
            assert list(twin.state_dict()) == keys
        if number == 8:
            recfuse.unswap(twin, optimizers=optimizers[:1])
        batch = Batch(torch.randn(6, 5), keyed(bags=6), torch.randint(0, 2, (6,)))
        torch.testing.assert_close(
            *(train(one, its, batch) for one, its in zip((twin, model), optimizers, strict=True)),
            rtol=1e-4,
            atol=1e-5,
        )
    assert type(dlrm.sparse_arch.embedding_bag_collection) is EmbeddingBagCollection
    for name, value in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, rtol=1e-4, atol=1e-5)


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
