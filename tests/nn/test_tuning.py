"""A module's knowledge of its features for a GPU: expected lookups, schedules, mappings. Without a GPU."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

import recfuse
from recfuse import _C
from recfuse.nn import FusedEmbeddingBagCollection, Mapping, Table
from recfuse.nn.packed import module as packed_module
from support.collection import SPECS, by_hand, collection_of, lookups_of
from support.dlrm import DLRM_Net, batch_of

FEATURES = 6


@pytest.fixture
def collection(monkeypatch):
    """A collection that regards its device as a GPU."""
    for name in ("on_gpu", "is_planned"):
        monkeypatch.setattr(packed_module, name, lambda weights: True)
    return collection_of()


@pytest.fixture
def calls(monkeypatch):
    """Schedules, warps and mapping of each call of the operator; () without them."""
    seen = []
    real = packed_module.fused_embedding_bag

    def call(*arguments, **options):
        seen.append(tuple(options[name] for name in ("schedules", "warps", "mapping") if name in options))
        return real(*arguments, **options)

    monkeypatch.setattr(packed_module, "fused_embedding_bag", call)
    return seen


@pytest.fixture
def maps(monkeypatch):
    """The C library's part of `map`: a row per bag, and its arguments."""
    seen = []

    def fake(described, offsets, *more):
        seen.append((*described, offsets, *more[:2]))
        rows = np.zeros((offsets.size - 1, 8), np.int32)
        return more[2](len(rows)) if len(more) > 2 else rows

    monkeypatch.setattr(_C, "fused_embedding_bag_describe", lambda *arguments: arguments)
    monkeypatch.setattr(_C, "fused_embedding_bag_map", fake)
    return seen


def expected_of(*batches):
    """Computed by hand."""
    bags = sum((offsets.numel() - 1) // FEATURES for offsets in batches)
    lookups = sum(o[:: (o.numel() - 1) // FEATURES].diff() for o in batches)
    return [max(round(16 * one / bags), 1) for one in lookups.tolist()]


def test_only_the_first_call_calibrates(collection, calls):
    assert collection.schedules is None and collection.plan is None
    first, second = lookups_of(collection), lookups_of(collection, 9, 20)
    for given in (first, second):
        got = collection(*given)
        torch.testing.assert_close(got, by_hand(collection, *given))
    schedules = collection.schedules
    assert schedules.dtype == torch.int32 and schedules.device.type == "cpu"
    assert schedules[:, :-1].eq(0).all() and schedules[:, -1].tolist() == expected_of(first[1])
    assert calls == [(schedules, 0, None)] * 2
    with torch.no_grad():
        torch.testing.assert_close(collection(*second), by_hand(collection, *second))
    assert calls[-1] == (schedules, 0, None)
    assert not any("schedules" in name for name in collection.state_dict())


def test_a_feature_without_lookups_is_expected_to_have_some(collection):
    offsets = torch.tensor([0, 1, *[1] * 2, *[2] * 3])
    collection(torch.zeros(2, dtype=torch.int64), offsets)
    assert collection.schedules[:, -1].tolist() == [16, 1, 1, 16, 1, 1]


@pytest.mark.parametrize(
    "offsets",
    (torch.zeros(1, dtype=torch.int64), torch.zeros(13, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
     torch.tensor([0, 9, 3, 4, 5, 6, 7]), torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([0, 2]),
     torch.zeros(2, 7, dtype=torch.int64), torch.arange(7.0)),
    ids=str,
)  # fmt: skip
def test_empty_and_bad_batches_do_not_calibrate(collection, offsets):
    collection._tuning.learn(offsets)
    assert collection.schedules is None


def test_learning_in_inference_mode_binds_nothing(collection):
    given = lookups_of(collection)
    with torch.inference_mode():
        collection(*given)
    collection(*given).sum().backward()
    assert not collection.schedules.is_inference()


def test_calibrating_learns_from_several_in_any_order(collection):
    batches = [lookups_of(collection, bags, longest) for bags, longest in ((3, 9), (8, 2), (5, 4))]
    collection.calibrate(batches)
    found = collection.schedules
    assert found[:, -1].tolist() == expected_of(*(offsets for _, offsets in batches))
    collection.calibrate([(i.numpy(), o.numpy().astype(np.int32), None) for i, o in reversed(batches)])
    assert torch.equal(collection.schedules, found)
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    with pytest.raises(ValueError, match="no batch of 2"):
        collection.calibrate([nothing, nothing])
    assert torch.equal(collection.schedules, found)


def rows_of(kind=0):
    return torch.tensor([[kind, 8, 2, 1, 32]] * FEATURES, dtype=torch.int32)


def test_calls_use_a_plan_until_the_tables_change(collection, calls):
    rows = rows_of(1)
    collection.set_plan(rows, 24)
    collection.plan = "the plan"
    rows.zero_()
    assert torch.equal(collection.schedules, rows_of(1)) and collection.warps == 24
    given = lookups_of(collection)
    collection(*given)
    assert calls[-1][1] == 24 and torch.equal(calls[-1][0], rows_of(1))
    collection.calibrate([given])
    assert collection.schedules[:, 0].eq(1).all() and collection.plan == "the plan"
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection)), copy.copy(collection)):
        assert torch.equal(other.schedules, collection.schedules)
        assert (other.warps, other.plan) == (24, "the plan")
    collection.load_state_dict(collection.state_dict())
    collection.float()
    assert collection.plan == "the plan" and collection.warps == 24
    expected = collection.schedules[:, -1].clone()
    collection.half()
    assert collection.plan is None and collection.warps == 0
    assert collection.schedules[:, :-1].eq(0).all()
    assert torch.equal(collection.schedules[:, -1], expected)
    collection.set_plan(None)
    assert collection.schedules is None


def test_other_dtypes_forget_the_plan(collection):
    collection.set_plan(rows_of(2), 8)
    collection.load_state_dict(collection.state_dict())
    assert collection.warps == 8
    halves = {name: weight.half() for name, weight in collection.state_dict().items()}
    collection.load_state_dict(halves, assign=True)
    assert collection.warps == 0
    assert collection.schedules.tolist() == [[0, 0, 0, 0, 32]] * FEATURES


@pytest.mark.parametrize(
    ("schedules", "warps", "kind", "words"),
    (
        (
            torch.zeros(6, 6, dtype=torch.int32),
            0,
            ValueError,
            r"\[6, 6\]; expected \[6, 5\], .* split, expected lookups",
        ),
        (torch.zeros(6, 5), 0, TypeError, "float32"),
        (torch.full((6, 5), -2), 0, ValueError, "-2"),
        (np.full((6, 5), 2**31), 0, ValueError, str(2**31)),
        ("kind=pool", 0, TypeError, "str"),
        (7, 0, TypeError, "int"),
        (None, -1, ValueError, "warps is -1"),
        (None, 1.5, TypeError, "float"),
        (None, True, TypeError, "bool"),
    ),
)
def test_bad_plans(collection, schedules, warps, kind, words):
    collection.set_plan(rows_of(), 4)
    with pytest.raises(kind, match=words):
        collection.set_plan(schedules, warps)
    assert collection.warps == 4


def test_calls_on_the_cpu_take_no_plan(calls):
    collection = collection_of()
    given = lookups_of(collection)
    collection.set_plan(rows_of(), 4)
    with torch.no_grad():
        collection(*given)
    assert calls == [()]


@pytest.mark.parametrize("dtype", (np.int32, np.int64))
def test_mapping(collection, calls, maps, dtype):
    indices, offsets = lookups_of(collection)
    mapping = collection.map(offsets.numpy().astype(dtype))
    assert isinstance(mapping, Mapping) and (mapping.bags, mapping.tensor.shape[1]) == (6, 8)
    (buffers, features, code, stride), schedules, warps, given, *gpu = maps[0]
    assert buffers == [(one.data_ptr(), one.numel(), 0) for one in collection.packed_weights()]
    assert np.array_equal(features, collection.layout.features.numpy()) and (code, stride) == (0, 40)
    assert given.dtype == dtype and given.tolist() == offsets.tolist() and warps == 0
    assert gpu == [132, False]  # of an unknown GPU
    assert schedules[:, -1].tolist() == expected_of(offsets)  # learned on the way
    assert torch.equal(collection.map(offsets).tensor, mapping.tensor)
    collection.set_plan(rows_of(1), 24)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            got = collection(indices, offsets, mapping=mapping)
        torch.testing.assert_close(got, by_hand(collection, indices, offsets))
        used, warps, tensor = calls[-1]
        assert (used is mapping.schedules) and warps == 0 and torch.equal(tensor, mapping.tensor)
    again = collection.map(offsets)
    assert again.warps == 24 and torch.equal(again.schedules, rows_of(1))


def test_features_are_described_again_where_they_changed(collection, monkeypatch):
    described = []
    real = _C.fused_embedding_bag_describe

    def describe(call, schedules, warps):
        described.append((call[0][0][0], warps))
        return real(call, schedules, warps)

    monkeypatch.setattr(_C, "fused_embedding_bag_describe", describe)
    offsets = lookups_of(collection)[1]
    mapping = collection.map(offsets)
    assert torch.equal(collection.map(offsets).tensor, mapping.tensor) and len(described) == 1
    collection.set_plan(torch.tensor([[2, 0, 0, 0, 32]] * FEATURES), 24)
    assert not torch.equal(collection.map(offsets).tensor, mapping.tensor)
    collection.share_memory()  # moves the buffers
    collection.map(offsets)
    collection.map(offsets.numpy())
    assert [warps for _, warps in described] == [0, 24, 24]
    assert described[2][0] == collection.packed_weights()[0].data_ptr() != described[1][0]
    assert torch.equal(copy.deepcopy(collection).map(offsets).tensor, collection.map(offsets).tensor)


def test_a_mapping_is_written_to_page_locked_memory(collection, maps, monkeypatch):
    class Properties:
        multi_processor_count, major = 16, 9

    asked = []

    def empty(*shape, pin_memory, **options):
        asked.append((shape, pin_memory))
        return real(*shape, **options)

    real = torch.empty
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch, "empty", empty)
    collection._mapper.use(torch.device("cuda", 0))
    offsets = lookups_of(collection)[1]
    mapping = collection.map(offsets)
    assert asked == [((offsets.numel() - 1, 8), True)] and maps[0][-2:] == (16, True)
    assert mapping.tensor.shape == (offsets.numel() - 1, 8) and mapping.tensor.dtype == torch.int32


def test_a_mapping_of_something_else_is_refused(collection, maps):
    indices, offsets = lookups_of(collection)
    mapping = collection.map(lookups_of(collection, 5)[1])
    with pytest.raises(ValueError, match="6 features and 5 bags, this batch has 6 features and 6 bags"):
        collection(indices, offsets, mapping=mapping)
    with pytest.raises(TypeError, match="mapping is a Tensor"):
        collection(indices, offsets, mapping=mapping.tensor)
    mapping = collection.map(offsets)
    other = FusedEmbeddingBagCollection([Table(31, 4), *SPECS[1:]])
    with pytest.raises(ValueError, match="other tables"):
        other(indices, offsets, mapping=mapping)
    twin = copy.deepcopy(collection)
    twin(indices, offsets, mapping=mapping)
    assert pickle.loads(pickle.dumps(mapping)).bags == 6


@pytest.mark.parametrize(
    ("offsets", "kind", "words"),
    (
        (np.zeros(6, np.int64), ValueError, "6 features"),
        (np.zeros((7, 1), np.int64), ValueError, r"\[7, 1\]"),
        (np.zeros(0, np.int64), ValueError, "0"),
        (np.zeros(7), TypeError, "float64"),
        ([0] * 7, TypeError, "list"),
        (torch.zeros(7, dtype=torch.int64, device="meta"), ValueError, "expected the CPU"),
    ),
)
def test_bad_offsets_of_a_mapping(collection, maps, offsets, kind, words):
    with pytest.raises(kind, match=words):
        collection.map(offsets)
    assert maps == []


def test_tables_that_are_pooled_one_by_one_have_no_mapping():
    with pytest.raises(ValueError, match="not pooled in one call"):
        collection_of().double().map(np.zeros(7, np.int64))


def test_a_dlrm_learns_too(monkeypatch):
    model = DLRM_Net()
    recfuse.swap(model)
    batches = [batch_of(model, form=form) for form in ("tensor", "list", "stacked")]
    model.emb_l.calibrate((lS_o, lS_i) for _, lS_o, lS_i in batches)
    lookups = [sum(len(lS_i[table]) for _, _, lS_i in batches) for table in range(4)]
    want = [max(round(16 * one / 48), 1) for one in lookups]
    assert model.emb_l.schedules[:, -1].tolist() == want


def test_threads_see_one_collection(collection):
    batches = [lookups_of(collection, bags) for bags in (3, 5, 7, 9)]
    wants = [by_hand(collection, *given) for given in batches]
    failures = []

    def work(number):
        try:
            for _ in range(50):
                with torch.no_grad():
                    torch.testing.assert_close(collection(*batches[number]), wants[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and collection.schedules is not None
