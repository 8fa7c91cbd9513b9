"""Swapped ``EmbeddingCollection``s of TorchRec: the same interface, outputs, training and state."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recfuse

torchrec = pytest.importorskip(
    "torchrec", reason="torchrec is not installed (the test extra's peers are optional)"
)
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor  # noqa: E402
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig  # noqa: E402

from recfuse.nn.lookups import keyed as lookups_keyed  # noqa: E402
from recfuse.nn.lookups.keyed import FusedKeyedEmbeddingCollection  # noqa: E402

KEYS = ["clicks", "cart", "brand"]


def collection(need_indices: bool = False, **changes: Any) -> EmbeddingCollection:
    """Three tables; two of them have the feature "clicks", and the second has two features."""
    torch.manual_seed(0)
    features = {"item": ["clicks"], "shop": ["clicks", "cart"], "brand": ["brand"]}
    configs = [
        EmbeddingConfig(
            name=name, num_embeddings=20 + len(names), embedding_dim=4, feature_names=names, **changes
        )
        for name, names in features.items()
    ]
    return EmbeddingCollection(tables=configs, need_indices=need_indices)


def keyed(keys: list[str] | None = None, bags: int = 4, form: str = "lengths") -> KeyedJaggedTensor:
    keys = KEYS if keys is None else keys
    generator = torch.Generator().manual_seed(len(keys))
    lengths = torch.randint(0, 4, (len(keys) * bags,), generator=generator)
    values = torch.randint(20, (int(lengths.sum()),), generator=generator)
    if form == "offsets":
        return KeyedJaggedTensor(keys, values, offsets=torch.cat((lengths.new_zeros(1), lengths.cumsum(0))))
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def swapped(model: nn.Module, **options: Any) -> nn.Module:
    report = recfuse.swap(model, **options)
    assert len(report.fused) == 1
    return model


def assert_same_outputs(ours: dict[str, Any], theirs: dict[str, Any], exact: bool = True) -> None:
    assert list(ours) == list(theirs)
    for name, want in theirs.items():
        found = ours[name]
        assert type(found) is type(want) and found.values().dtype == want.values().dtype
        if exact:
            assert torch.equal(found.values(), want.values())
        else:
            torch.testing.assert_close(found.values(), want.values())
        assert torch.equal(found.lengths(), want.lengths())
        assert torch.equal(found.offsets(), want.offsets())
        weights = found.weights_or_none(), want.weights_or_none()
        assert (weights[0] is None) == (weights[1] is None)
        assert weights[0] is None or torch.equal(*weights)


def test_jagged_tensors_are_torchrecs(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = collection(need_indices=True)
    ours = swapped(nn.Sequential(copy.deepcopy(theirs)))[0]
    assert lookups_keyed._is_plain()
    fast = ours(keyed())
    assert {frozenset(vars(one)) for one in fast.values()} == {
        frozenset(vars(one)) for one in theirs(keyed()).values()
    }
    assert_same_outputs(copy.copy(fast), theirs(keyed()))
    lookups_keyed._is_plain.cache_clear()
    with monkeypatch.context() as patch:  # a later TorchRec, whose constructor may set more
        patch.setattr(JaggedTensor, "__init__", of_later_torchrec)
        slow = ours(keyed())
        assert {one.later for one in slow.values()} == {1}
        assert_same_outputs(slow, fast)
    lookups_keyed._is_plain.cache_clear()


def of_later_torchrec(
    self: Any, values: Tensor, weights: Any = None, lengths: Any = None, offsets: Any = None
) -> None:
    self._values, self._weights, self._lengths, self._offsets, self.later = (
        values,
        weights,
        lengths,
        offsets,
        1,
    )


@pytest.mark.parametrize("need_indices", (False, True))
@pytest.mark.parametrize("form", ("lengths", "offsets"))
@pytest.mark.parametrize("keys", (KEYS, KEYS[::-1], ["x", *KEYS[1:], KEYS[0]]))
def test_outputs_are_torchrecs(need_indices: bool, form: str, keys: list[str]) -> None:
    theirs = collection(need_indices)
    model = nn.Sequential(copy.deepcopy(theirs))
    ours = swapped(model)[0]
    assert isinstance(ours, EmbeddingCollection) and type(ours) is FusedKeyedEmbeddingCollection
    found = ours(keyed(keys, form=form))
    assert_same_outputs(found, theirs(keyed(keys, form=form)))
    assert list(found) == ["clicks@item", "clicks@shop", "cart", "brand"]
    assert len({one.values().untyped_storage().data_ptr() for one in found.values()}) == 1
    assert ours.need_indices() == need_indices and ours.embedding_dim() == 4


def test_half_tables_give_float32() -> None:
    theirs = collection(data_type=DataType.FP16)
    ours = swapped(nn.Sequential(copy.deepcopy(theirs)))[0]
    assert_same_outputs(ours(keyed()), theirs(keyed()))
    ours(keyed())["cart"].values().sum().backward()
    theirs(keyed())["cart"].values().sum().backward()
    want = theirs.embeddings["shop"].weight.grad
    assert torch.equal(ours.embeddings["shop"].weight.grad, want)


def test_empty_batches() -> None:
    theirs = collection()
    ours = swapped(nn.Sequential(copy.deepcopy(theirs)))[0]
    empty, lengths = torch.zeros(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    features = KeyedJaggedTensor(KEYS, empty, lengths=lengths)
    assert_same_outputs(ours(features), theirs(KeyedJaggedTensor(KEYS, empty, lengths=lengths)))
    found = ours(KeyedJaggedTensor(KEYS, empty, lengths=empty))  # TorchRec's own fails without a sample
    assert [one.values().shape for one in found.values()] == [(0, 4)] * 4


def test_a_batch_size_per_key_goes_to_torchrec() -> None:
    theirs = collection()
    ours = swapped(nn.Sequential(copy.deepcopy(theirs)))[0]

    def features() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            KEYS, torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 0, 2]),
            stride_per_key_per_rank=[[2], [1], [1]],
        )  # fmt: skip

    assert_same_outputs(ours(features()), theirs(features()))
    with pytest.raises(ValueError, match="a KeyedJaggedTensor has a batch size per key"):
        recfuse.nn.FusedEmbeddingCollection([(9, 4)] * 3)(features())


def test_the_interface_is_kept() -> None:
    theirs = collection()
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    model = swapped(nn.Sequential(theirs))
    assert list(model.state_dict()) == [f"0.{name}" for name in state]
    for name, value in state.items():
        assert torch.equal(model[0].state_dict()[name], value)
    fresh = collection()
    with torch.no_grad():
        for table in fresh.embeddings.values():
            table.weight.add_(1)
    model[0].load_state_dict(fresh.state_dict())
    assert_same_outputs(model[0](keyed()), fresh(keyed()))
    indices = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(model[0].embeddings["shop"](indices), fresh.embeddings["shop"](indices))
    bad = KeyedJaggedTensor(KEYS, torch.tensor([22]), lengths=torch.tensor([0, 0, 0, 1, 0, 0]))
    with pytest.raises(IndexError, match=r"history\[0\] is 22, for feature 2, bag 1; expected 0 to 21"):
        model[0](bad)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        found = model(keyed(bags=3 + step))
        sum(one.values().square().sum() for one in found.values()).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ("SGD", "Adagrad", "Adam"))
@pytest.mark.parametrize("when", ("before", "after a step"))
def test_optimizers_move(kind: str, when: str) -> None:
    theirs = nn.Sequential(collection())
    ours = copy.deepcopy(theirs)
    optimizers = [getattr(torch.optim, kind)(model.parameters(), lr=0.1) for model in (theirs, ours)]
    if when != "before":
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            train(model, optimizer, 1)
    swapped(ours, optimizers=[optimizers[1]])
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        train(model, optimizer)
    for name, want in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], want, rtol=1e-6, atol=1e-6)


def test_fused_optimizers() -> None:
    theirs = nn.Sequential(collection())
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (theirs, ours)]
    report = recfuse.swap(ours, optimizers=[optimizers[1]], fuse_optimizers=True)
    assert len(report.fused_optimizers) == 1
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        train(model, optimizer)
    for name, want in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], want, rtol=1e-5, atol=1e-6)


def test_tables_outside_the_loss_keep_their_rows() -> None:
    ours = swapped(nn.Sequential(collection()))
    optimizer = recfuse.optim.Adam(recfuse.optim.embedding_parameters(ours), lr=0.1)
    for step in range(3):
        name = ("cart", "brand", "clicks@shop")[step]
        before = {key: value.clone() for key, value in ours.state_dict().items()}
        ours(keyed())[name].values().square().sum().backward()
        optimizer.step()
        table = "brand" if name == "brand" else "shop"
        moved = {key for key, value in ours.state_dict().items() if not torch.equal(value, before[key])}
        assert moved == {f"0.embeddings.{table}.weight"}


def test_unswap_restores_torchrecs_modules() -> None:
    model = nn.Sequential(collection())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    swapped(model, optimizers=[optimizer])
    train(model, optimizer)
    state, want = model.state_dict(), model(keyed())
    report = recfuse.unswap(model, optimizers=[optimizer])
    assert len(report.restored) == 1 and type(model[0]) is EmbeddingCollection
    assert {type(table) for table in model[0].embeddings.values()} == {nn.Embedding}
    assert_same_outputs(model(keyed()), want)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
    train(model, optimizer)
    assert len(recfuse.swap(model, optimizers=[optimizer]).fused) == 1
    assert [entry.action for entry in recfuse.swap(model).entries if entry.name == "0"] == ["already"]


def test_collections_that_cannot_be_packed_are_left() -> None:
    hooked, replaced, normed = (nn.Sequential(collection()) for _ in range(3))
    hooked[0].embeddings["item"].register_forward_hook(lambda *_: None)
    replaced[0].forward = replaced[0].forward
    normed[0].embeddings["shop"].max_norm = 1.0
    for model, reason in ((hooked, "hooks"), (replaced, "forward was replaced"), (normed, "max_norm")):
        report = recfuse.swap(model)
        assert reason in str(report) and type(model[0]) is EmbeddingCollection


def test_bags_and_histories_of_one_model() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(
                name="item", num_embeddings=21, embedding_dim=4, feature_names=["clicks"]
            )
            self.bags = EmbeddingBagCollection(tables=[config])
            self.histories = collection()

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            rows = self.histories(features)
            return self.bags(features).values().sum() + sum(one.values().sum() for one in rows.values())

    theirs = Model()
    ours = copy.deepcopy(theirs)
    assert len(recfuse.swap(ours).fused) == 2
    torch.testing.assert_close(ours(keyed()), theirs(keyed()))
    theirs.histories.embeddings["item"].weight = theirs.bags.embedding_bags["item"].weight
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"its weight belongs to histories.embeddings.item \(Embedding\) too"
    ):
        recfuse.swap(theirs, optimizers=[optimizer], fuse_optimizers=True)
    theirs(keyed()).backward()
    optimizer.step()


def test_calls_during_a_swap_see_complete_tables() -> None:
    model = nn.Sequential(collection())
    want, features = model(keyed()), [keyed() for _ in range(400)]
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for one in features:
                with torch.no_grad():
                    assert_same_outputs(model(one), want)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        recfuse.swap(model)
        recfuse.unswap(model)
    thread.join()
    assert failures == []


def test_collections_take_keyed_jagged_tensors() -> None:
    theirs = collection()
    ours = recfuse.nn.FusedEmbeddingCollection(theirs.embedding_configs())
    ours.load_state_dict(theirs.state_dict())
    assert ours.feature_names == ["clicks", "clicks", "cart", "brand"]
    features = keyed(KEYS[::-1])
    for one, want in zip(ours(features), theirs(keyed(KEYS[::-1])).values(), strict=True):
        assert torch.equal(one, want.values())
    padded = ours(features, layout="padded", length=3)
    assert padded.shape == (4, 3, 16)
    with pytest.raises(ValueError, match="has no key 'brand'"):
        ours(keyed(KEYS[:2]))


@pytest.mark.parametrize("lengths", ([1, 1, 2, 0, 1, 0], [1, 1, 3, 0, 3, 0], [9, -7, 2, 0, 1, 1]))
def test_lengths_of_other_values_are_refused(lengths: list[int]) -> None:
    """A reordered key is copied by its lengths; longer ones would read and write behind the values."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    config = EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["brand", "cart"])
    pooled, model = nn.Sequential(EmbeddingBagCollection(tables=[config])), nn.Sequential(collection())
    tables = recfuse.nn.FusedEmbeddingCollection(model[0].embedding_configs())
    swapped(model)
    recfuse.swap(pooled)
    for call in (model, pooled, tables, lambda features: tables(features, layout="padded", length=2)):
        features = KeyedJaggedTensor(keys=KEYS, values=torch.arange(6), lengths=torch.tensor(lengths))
        with pytest.raises(ValueError, match=r"a KeyedJaggedTensor has (lengths of the sum|the length -7)"):
            call(features)


def test_a_collection_with_keys_in_order_refuses_lengths_of_other_values() -> None:
    config = EmbeddingConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=KEYS)
    model = nn.Sequential(EmbeddingCollection(tables=[config]))
    swapped(model)
    for lengths in ([1, 1, 2, 0, 1, 0], [1, 1, 3, 0, 3, 0]):
        features = KeyedJaggedTensor(keys=KEYS, values=torch.arange(6), lengths=torch.tensor(lengths))
        with pytest.raises(ValueError, match=r"has lengths of the sum .; expected 6"):
            model(features)
