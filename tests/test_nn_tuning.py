"""What a module knows of its features for a GPU: expected lookups, schedules, mappings. Without a GPU."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

import recfuse
from recfuse import _C
from recfuse.nn import FusedEmbeddingBagCollection, Mapping, Table
from recfuse.nn import packed_tables as packed_module
from test_nn import SPECS, by_hand, collection_of, lookups_of
from test_swap import DLRM_Net, batch_of

FEATURES = 6


@pytest.fixture
def collection():
    """One that takes itself to be on a GPU."""
    made = collection_of()
    made._packed.on_cuda = True  # but for the device, whose memory it would lock
    return made


@pytest.fixture
def calls(monkeypatch):
    """Arguments of each call of an operator."""
    seen = []
    real = packed_module.call

    def call(operator, arguments, differentiable):
        seen.append((operator, arguments))
        return real(operator, arguments, differentiable)

    monkeypatch.setattr(packed_module, "call", call)
    return seen


@pytest.fixture
def maps(monkeypatch):
    """The C library's part of `map`: a row a bag, and what it was asked."""
    seen = []

    def fake(described, offsets, *more):
        seen.append((*described, offsets, *more[:2]))
        rows = np.zeros((offsets.size - 1, 8), np.int32)
        return more[2](len(rows)) if len(more) > 2 else rows

    monkeypatch.setattr(_C, "fused_embedding_bag_describe", lambda *arguments: arguments)
    monkeypatch.setattr(_C, "fused_embedding_bag_map", fake)
    return seen


def expected_of(*batches):
    """By hand."""
    bags = sum((offsets.numel() - 1) // FEATURES for offsets in batches)
    lookups = sum(o[:: (o.numel() - 1) // FEATURES].diff() for o in batches)
    return [max(round(16 * one / bags), 1) for one in lookups.tolist()]


def test_the_first_call_learns_and_later_ones_do_not(collection, calls):
    assert collection._packed.schedules is None and collection.plan is None
    first, second = lookups_of(collection), lookups_of(collection, 9, 20)
    for given in (first, second):
        got = collection(*given)
        torch.testing.assert_close(got, by_hand(collection, *given))
    schedules = collection._packed.schedules
    assert schedules.dtype == torch.int32 and schedules.device.type == "cpu"
    assert schedules[:, :5].eq(0).all() and schedules[:, 5].tolist() == expected_of(first[1])
    assert [arguments[-3:] for _, arguments in calls] == [(schedules, 0, None)] * 2
    with torch.no_grad():
        torch.testing.assert_close(collection(*second), by_hand(collection, *second))
    assert calls[-1][1][-3:] == (schedules, 0, None)
    assert not any("schedules" in name for name in collection.state_dict())


def test_a_feature_without_lookups_is_expected_to_have_some(collection):
    offsets = torch.tensor([0, 1, *[1] * 2, *[2] * 3])
    collection(torch.zeros(2, dtype=torch.int64), offsets)
    assert collection._packed.schedules[:, 5].tolist() == [16, 1, 1, 16, 1, 1]


@pytest.mark.parametrize(
    "offsets",
    (torch.zeros(1, dtype=torch.int64), torch.zeros(13, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
     torch.tensor([0, 9, 3, 4, 5, 6, 7]), torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([0, 2]),
     torch.zeros(2, 7, dtype=torch.int64), torch.arange(7.0)),
    ids=str,
)  # fmt: skip
def test_nothing_is_learned_of_nothing_or_of_what_is_wrong(collection, offsets):
    collection._packed.tuning.learn(offsets)
    assert collection._packed.schedules is None


def test_learning_in_inference_mode_binds_nothing(collection):
    given = lookups_of(collection)
    with torch.inference_mode():
        collection(*given)
    collection(*given).sum().backward()
    assert not collection._packed.schedules.is_inference()


def test_calibrating_learns_from_several_in_any_order(collection):
    batches = [lookups_of(collection, bags, longest) for bags, longest in ((3, 9), (8, 2), (5, 4))]
    collection.calibrate(batches)
    found = collection._packed.schedules
    assert found[:, 5].tolist() == expected_of(*(offsets for _, offsets in batches))
    collection.calibrate([(i.numpy(), o.numpy().astype(np.int32), None) for i, o in reversed(batches)])
    assert torch.equal(collection._packed.schedules, found)
    with pytest.raises(ValueError, match="none of the 2 batches"):
        collection.calibrate([(None, torch.zeros(7, dtype=torch.int64)), (None, torch.zeros(2))])
    assert torch.equal(collection._packed.schedules, found)


def rows_of(kind=0):
    return torch.tensor([[kind, 8, 2, 1, 1, 32]] * FEATURES, dtype=torch.int32)


def test_a_plan_is_what_calls_use_until_the_tables_are_others(collection, calls):
    rows = rows_of(1)
    collection.set_plan(rows, 24)
    collection.plan = "the plan"
    rows.zero_()
    assert torch.equal(collection._packed.schedules, rows_of(1)) and collection._packed.warps == 24
    given = lookups_of(collection)
    collection(*given)
    assert calls[-1][1][-2] == 24 and torch.equal(calls[-1][1][-3], rows_of(1))
    collection.calibrate([given])
    assert collection._packed.schedules[:, 0].eq(1).all() and collection.plan == "the plan"
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection)), copy.copy(collection)):
        assert torch.equal(other._packed.schedules, collection._packed.schedules)
        assert (other._packed.warps, other.plan) == (24, "the plan")
    collection.load_state_dict(collection.state_dict())
    collection.float()
    assert collection.plan == "the plan" and collection._packed.warps == 24
    expected = collection._packed.schedules[:, 5].clone()
    collection.half()
    assert collection.plan is None and collection._packed.warps == 0
    assert collection._packed.schedules[:, :5].eq(0).all()
    assert torch.equal(collection._packed.schedules[:, 5], expected)
    collection.set_plan(None)
    assert collection._packed.schedules is None


def test_other_tables_forget_the_plan(collection):
    collection.set_plan(rows_of(2), 8)
    collection.embedding_bags["t0"] = recfuse.nn.EmbeddingBag(30, 4, mode="sum")
    collection.repack()
    assert collection._packed.warps == 8  # of the same shape
    collection.embedding_bags["t0"] = recfuse.nn.EmbeddingBag(30, 5, mode="sum")
    collection.repack()
    assert collection._packed.warps == 0
    assert collection._packed.schedules.tolist() == [[0, 0, 0, 0, 0, 32]] * FEATURES


@pytest.mark.parametrize(
    ("schedules", "warps", "kind", "words"),
    (
        (torch.zeros(5, 6, dtype=torch.int32), 0, ValueError, r"\[5, 6\], must have \[6, 6\]"),
        (torch.zeros(6, 6), 0, TypeError, "float32"),
        (torch.full((6, 6), -2), 0, ValueError, "-2"),
        (np.full((6, 6), 2**31), 0, ValueError, str(2**31)),
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
    assert collection._packed.warps == 4


def test_the_cpu_is_not_bothered(calls):
    collection = collection_of()
    given = lookups_of(collection)
    collection.set_plan(rows_of(), 4)
    with torch.no_grad():
        collection(*given)
    assert len(calls[-1][1]) == 6


@pytest.mark.parametrize("dtype", (np.int32, np.int64))
def test_mapping(collection, calls, maps, dtype):
    indices, offsets = lookups_of(collection)
    mapping = collection.map(offsets.numpy().astype(dtype))
    assert isinstance(mapping, Mapping) and (mapping.bags, mapping.tensor.shape[1]) == (6, 8)
    (buffers, features, code, stride), schedules, warps, given, *gpu = maps[0]
    assert buffers == [(one.data_ptr(), one.numel(), 0) for one in collection._packed.buffers]
    assert np.array_equal(features, collection._packed.features.numpy()) and (code, stride) == (0, 40)
    assert given.dtype == dtype and given.tolist() == offsets.tolist() and warps == 0
    assert gpu == [132, False]  # of a GPU that is not known
    assert schedules[:, 5].tolist() == expected_of(offsets)  # learned on the way
    assert torch.equal(collection.map(offsets).tensor, mapping.tensor)
    collection.set_plan(rows_of(1), 24)
    for training in (False, True):
        with torch.set_grad_enabled(training):
            got = collection(indices, offsets, mapping=mapping)
        torch.testing.assert_close(got, by_hand(collection, indices, offsets))
        used, warps, tensor = calls[-1][1][-3:]
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
    collection.set_plan(torch.tensor([[2, 0, 0, 0, 0, 32]] * FEATURES), 24)
    assert not torch.equal(collection.map(offsets).tensor, mapping.tensor)
    collection.share_memory()  # moves the buffers
    collection.map(offsets)
    collection.map(offsets.numpy())
    assert [warps for _, warps in described] == [0, 24, 24]
    assert described[2][0] == collection._packed.buffers[0].data_ptr() != described[1][0]
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
    collection._packed._device = torch.device("cuda", 0)
    collection._packed._mapper.use(collection._packed._device)
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
        (torch.zeros(7, dtype=torch.int64, device="meta"), ValueError, "must be on the CPU"),
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
    assert model.emb_l._packed.schedules[:, 5].tolist() == want


# Replacing what is packed, which costs a call nothing to notice.


def test_any_replaced_weight_of_many_is_seen_at_once():
    collection = collection_of([(4, 2)] * 300)
    given = torch.zeros(300, dtype=torch.int64), torch.arange(301)
    with torch.no_grad():
        collection(*given)
        zeros = {"embedding_bags.t277.weight": torch.zeros(4, 2)}
        with pytest.warns(UserWarning, match=r"repack\(\)"):
            got = torch.func.functional_call(collection, zeros, given)
        assert got[0, 554:556].eq(0).all() and got[0, :554].ne(0).all()
        assert collection(*given)[0, 554:556].ne(0).all()
        collection._packed._warned = False
        collection.embedding_bags.t100.weight = nn.Parameter(torch.full((4, 2), 5.0))
        with pytest.warns(UserWarning, match=r"repack\(\)"):
            assert collection(*given)[0, 200:202].tolist() == [5, 5]


def test_what_writes_to_parameters_is_noticed():
    from recfuse.nn.watched import latest_change, watched

    module = nn.Linear(2, 2)
    own = watched(module, "_parameters")
    assert watched(module, "_parameters") is own is module._parameters
    weight = module.weight
    changes = (
        lambda: own.__setitem__("weight", weight),
        lambda: own.update(weight=weight),
        lambda: own.__ior__({"weight": weight}),
        lambda: own.setdefault("other", None),
        lambda: own.pop("other"),
        lambda: own.__delitem__("bias"),
        lambda: setattr(module, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda: module.register_parameter("bias", None),
        lambda: own.popitem(),
        lambda: own.clear(),
    )
    for change in changes:
        before = latest_change()
        change()
        assert latest_change() is not before
    assert type(copy.deepcopy(nn.ParameterDict())._parameters) is dict
    assert type(copy.deepcopy(own)) is dict is type(pickle.loads(pickle.dumps(own)))


def test_moving_copies_whole_buffers(monkeypatch):
    """Device to device: no weight is copied by itself. Here to another CPU buffer."""
    from recfuse.nn import packing

    collection = collection_of()
    given = lookups_of(collection)
    want, before = collection(*given), collection._packed.buffers
    monkeypatch.setattr(packing, "destination", lambda convert, buffers: torch.device("cpu"))
    collection._packed.move(lambda tensor: tensor)
    monkeypatch.undo()
    assert collection._packed.buffers[0] is not before[0]
    before[0].fill_(torch.nan)
    assert torch.equal(collection(*given), want)


def test_where_a_conversion_moves_to():
    from recfuse.nn.packing import destination

    buffers = [torch.zeros(4), torch.zeros(3).half()]
    for convert in (
        lambda t: t, lambda t: t.half(), lambda t: t.cpu(), lambda t: t.share_memory_(), torch.empty_like,
        lambda t: t.to("meta"), lambda t: t.to("meta", torch.float64),
    ):  # fmt: skip
        assert destination(convert, buffers) is None


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
    assert not failures and collection._packed.schedules is not None
