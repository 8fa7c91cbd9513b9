"""Batches have one form a class of modules, that of its own call, wherever they are given: calibrate, map,
tune and drift.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import recfuse
from recfuse.data.collection import trace_of
from recfuse.data.forms import of_list
from recfuse.data.table import batches_of
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, FusedEmbeddingBagList, Table
from recfuse.tuner.collection import problem as fused_problem
from recfuse.tuner.collection.problem import FusedProblem
from support import bag_plan, collection_plan
from support.inputs import ragged

ROWS, BAGS = (20, 9, 30), 5
FORMS = ("tuple", "tuple int32", "weighted tuple", "list", "stacked list", "weighted list", "keyed",
         "torchrec", "weighted torchrec", "tensor dict")  # fmt: skip


def lookups_of(number):
    """Indices and offsets of each table, of the same bags in every form."""
    torch.manual_seed(number)
    return [ragged(rows, BAGS, 4) for rows in ROWS]


def feature_major(number):
    parts = lookups_of(number)
    lengths = torch.cat([offsets.diff() for _, offsets in parts])
    indices = torch.cat([indices for indices, _ in parts])
    return indices, torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def tables():
    torch.manual_seed(3)
    return [torch.nn.EmbeddingBag(rows, 4, mode="sum") for rows in ROWS]


def torchrec_collection(weighted=False):
    torchrec = pytest.importorskip("torchrec")
    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t{n}", embedding_dim=4, num_embeddings=rows, feature_names=[f"f{n}"]
        )
        for n, rows in enumerate(ROWS)
    ]
    torch.manual_seed(3)
    model = torch.nn.Sequential(torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted))
    recfuse.swap(model)
    return model[0]


def keyed(number, weighted=False):
    torchrec = pytest.importorskip("torchrec")
    indices, offsets = feature_major(number)
    weights = torch.rand(indices.numel()) if weighted else None
    return torchrec.KeyedJaggedTensor(["f0", "f1", "f2"], indices, weights, offsets=offsets).permute(
        [2, 0, 1]
    )


def made(form):
    """Returns a module, a function that creates a batch of the form, and a function that calls it."""
    if "tuple" in form:
        module = FusedEmbeddingBagCollection.from_embedding_bags(tables())
        dtype = torch.int32 if "int32" in form else torch.int64

        def batch(number):
            given = tuple(one.to(dtype) for one in feature_major(number))
            return (*given, torch.rand(given[0].numel())) if "weighted" in form else given

        return module, batch, lambda given, **options: module(*given, **options)
    if "list" in form:
        module = FusedEmbeddingBagList(tables())

        def batch(number):
            parts = lookups_of(number)
            offsets, indices = [offsets[:-1] for _, offsets in parts], [indices for indices, _ in parts]
            if "stacked" in form:
                offsets = torch.stack(offsets)
            more = ([torch.rand(rows) for rows in ROWS],) if "weighted" in form else ()
            return (offsets, indices, *more)

        return module, batch, lambda given, **options: torch.cat(module.pool(*given, **options), dim=1)
    weighted = "weighted" in form
    if "torchrec" in form:
        module = torchrec_collection(weighted)
        return module, lambda number: keyed(number, weighted), lambda given, **o: module(given, **o).values()
    if form == "tensor dict":
        tensordict = pytest.importorskip("tensordict")
        module = torchrec_collection()

        def batch(number):
            parts = {
                f"f{n}": torch.nested.nested_tensor_from_jagged(indices, offsets)
                for n, (indices, offsets) in enumerate(lookups_of(number))
            }
            return tensordict.TensorDict(parts, batch_size=[BAGS])

        return module, batch, lambda given, **options: module(given, **options).values()
    module = FusedEmbeddingBagCollection([Table(rows, 4, name=f"f{n}") for n, rows in enumerate(ROWS)])
    return module, keyed, lambda given, **options: module(given, **options)


@pytest.fixture
def gpu(monkeypatch):
    """A CPU whose collections can be tuned, as far as their batches are concerned."""
    monkeypatch.setattr(fused_problem, "_check_kernel", lambda packed: None)


def plan_of(module, problem):
    """A plan of the batches of a problem."""
    plan = collection_plan.plan_for(collection_plan.collection_of())
    return type(plan)(**{
        **vars(plan), "schedules": [""], "schedule_of": [0] * 3,
        "expected": problem.expected_sixteenths.tolist(), "tables": problem.tables, "table_of": [0, 1, 2],
        "trace": trace_of(problem.batches, problem.tables),
    })  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_has_the_form_of_the_call_everywhere(gpu, form):
    module, batch, call = made(form)
    batches = [batch(number) for number in range(3)]
    problem = FusedProblem.of(module, batches)
    assert problem.form.weighted == ("weighted" in form)
    for number, given in enumerate(problem.batches):
        indices, offsets = feature_major(number)
        assert given.indices.tolist() == indices.tolist() and given.offsets.tolist() == offsets.tolist()
        own = call(batches[number])
        torch.testing.assert_close(module._pool(given.indices, given.offsets, given.weights), own)
        torch.testing.assert_close(call(batches[number], mapping=module.map(batches[number])), own)
        assert torch.equal(module.map(batches[number]).tensor, module.map(offsets).tensor)
    module.calibrate(batches)
    lookups = sum(feature_major(number)[1][::BAGS].diff() for number in range(3))
    assert module.schedules[:, -1].tolist() == (16 * lookups / (3 * BAGS)).round().int().tolist()
    plan = plan_of(module, problem)
    drift = plan.drift(batches, module)
    assert not drift.moved and drift.now == drift.before
    plan.apply(module)
    assert module.plan is plan


@pytest.mark.parametrize("form", ("tuple", "list", "keyed", "torchrec"))
@pytest.mark.parametrize("other", ("tuple", "list", "keyed"))
def test_batches_of_another_form_raise_clear_errors(gpu, form, other):
    if form == other or (form, other) in (("keyed", "tuple"), ("torchrec", "keyed")):
        return
    if (form, other) == ("tuple", "keyed"):
        words, kind = "has no key 't0'", ValueError
    else:
        words = {
            "tuple": "expected a tuple (indices, offsets)",
            "list": "expected a tuple (offsets, indices)",
            "keyed": "or a KeyedJaggedTensor",
            "torchrec": "expected a KeyedJaggedTensor",
        }[form]
        kind = (TypeError, ValueError)
    module, batch, _ = made(form)
    plan = plan_of(module, FusedProblem.of(module, [batch(0)]))
    wrong = made(other)[1](0)
    if (form, other) == ("list", "tuple"):  # two tensors: one a table, by their form
        words = "one tensor of each a table"
    name = f"recfuse.nn.{type(module).__name__}"
    for function, call in (
        ("recfuse.tune: batches[1]", lambda: recfuse.tune(module, [batch(0), wrong], 0)),
        (f"{name}.calibrate: batches[1]", lambda: module.calibrate([batch(0), wrong])),
        (f"{name}.map: batch", lambda: module.map(wrong)),
        ("recfuse.Plan.drift: batches[1]", lambda: plan.drift([batch(0), wrong], module)),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert str(raised.value).startswith(function) and words in str(raised.value)


INTEGERS = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    (
        (3, TypeError, "is an int; expected a tuple (indices, offsets)"),
        ("ab", TypeError, "is a str; expected"),
        ((), TypeError, "is a tuple of nothing; expected"),
        (INTEGERS[:1], TypeError, "is a tuple of Tensor; expected"),
        ((*INTEGERS, 3), TypeError, "is a tuple of Tensor, Tensor, int; expected"),
        (([0], [0]), TypeError, "is a tuple of list, list; expected"),
        ((torch.zeros(2), INTEGERS[1]), TypeError, "has torch.float32 indices and torch.int64 offsets"),
        ((INTEGERS[0], INTEGERS[1].short()), TypeError, "torch.int16 offsets; expected int32 or int64"),
        ((*INTEGERS, INTEGERS[0]), TypeError, "has torch.int64 per_sample_weights; expected a floating"),
        (
            (*INTEGERS, torch.ones(3)),
            ValueError,
            "has per_sample_weights [3]; expected a weight for",
        ),
        ((INTEGERS[0], INTEGERS[1][:3]), ValueError, "and offsets [3]; expected [lookups] and"),
        ((INTEGERS[0][None], INTEGERS[1]), ValueError, "has indices [1, 2]"),
        ((INTEGERS[0], INTEGERS[1][:0]), ValueError, "offsets [0]"),
    ),
)
def test_bad_batches_of_a_collection(gpu, batch, kind, words):
    collection = FusedEmbeddingBagCollection([(rows, 4) for rows in ROWS])
    for call in (collection.calibrate, lambda given: recfuse.tune(collection, given, 0)):
        with pytest.raises(kind) as raised:
            call([batch])
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    (
        ((3, 4), "is a tuple of int, int; expected a tuple (offsets, indices)"),
        (([torch.zeros(1)], [3]), "is a tuple of list, list"),
        (([], []), "is a tuple of list, list; expected"),
        (
            ([torch.zeros(1).long()], [torch.zeros(1).long()]),
            "offsets has 1 tensors and indices 1 for 2 tables",
        ),
        (
            ([torch.zeros(1).long()] * 2, [torch.zeros(1).long()] * 2, [None]),
            "row_weights has 1 elements for 2 tables",
        ),
        (([torch.zeros(1).long()] * 2, [torch.zeros(1)] * 2), "has torch.float32 indices"),
        (([torch.zeros(1)] * 2, [torch.zeros(1).long()] * 2), "offsets are torch.float32; expected int32 or"),
        (([torch.ones(1).long()] * 2, [torch.zeros(1).long()] * 2), "offsets of table 0 begin with 1"),
    ),
)
def test_bad_batches_of_a_list(batch, words):
    with pytest.raises((TypeError, ValueError, IndexError)) as raised:
        of_list(batch, 2, "here")
    assert str(raised.value).startswith("here") and words in str(raised.value)


@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    (
        ((torch.rand(3), torch.tensor([0])), TypeError, "has torch.float32 input and torch.int64 offsets"),
        ((torch.tensor([1, 2]).short(), torch.tensor([0])), TypeError, "torch.int16 input"),
        ((INTEGERS[0], torch.tensor([0.0])), TypeError, "torch.float32 offsets; expected int32 or int64"),
        ((INTEGERS[0], torch.tensor([0]), INTEGERS[0]), TypeError, "torch.int64 per_sample_weights"),
        ((INTEGERS[0], torch.tensor([0]), torch.rand(3)), ValueError, "per_sample_weights [3]; expected"),
        (torch.tensor(3), ValueError, "an input of 0 dimensions without offsets"),
    ),
)
def test_bad_batches_of_a_table(batch, kind, words):
    bag = EmbeddingBag(10, 4, mode="sum")
    plan = bag_plan.plan_for(bag)
    for function, call in (
        ("recfuse.tune", lambda: recfuse.tune(bag, [batch], 0)),
        ("recfuse.Plan.drift", lambda: plan.drift([batch], bag)),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert str(raised.value).startswith(f"{function}: batches[0] has") and words in str(raised.value)


def test_a_keyed_batch_of_a_table_has_one_key():
    torchrec = pytest.importorskip("torchrec")
    bag, indices, offsets = EmbeddingBag(10, 4, mode="sum"), torch.tensor([1, 2, 5]), torch.tensor([0, 2, 3])
    plan, weights = bag_plan.plan_for(bag), torch.rand(3)
    batch = torchrec.KeyedJaggedTensor(["f"], indices, weights, offsets=offsets)
    (found,) = batches_of([batch])
    assert found.include_last_offset and found.bags == 2 and torch.equal(found.weights, weights)
    assert plan.drift([batch], bag).now == plan.drift([(indices, offsets[:-1])], bag).now
    two = torchrec.KeyedJaggedTensor(["f", "g"], indices, offsets=offsets)
    for call in (lambda: recfuse.tune(bag, [two], 0), lambda: plan.drift([two], bag)):
        with pytest.raises(ValueError, match=r"batches\[0\] has the keys \['f', 'g'\]; expected one"):
            call()


@pytest.mark.parametrize("batches", (None, 3, "ab", torch.arange(4), torch.zeros(2, 3), {}))
def test_one_batch_is_no_list_of_batches(gpu, batches):
    bag, collection = EmbeddingBag(10, 4), FusedEmbeddingBagCollection([(3, 2)])
    for call in (
        lambda: recfuse.tune(bag, batches, 0),
        lambda: recfuse.tune(collection, batches, 0),
        lambda: collection.calibrate(batches),
        lambda: bag_plan.plan_for(bag).drift(batches),
    ):
        with pytest.raises(TypeError, match=r"batches is an? \w+; expected an iterable of batches"):
            call()


def test_a_keyed_batch_is_no_list_of_batches(gpu):
    module, batch, _ = made("torchrec")
    with pytest.raises(TypeError, match="batches is a KeyedJaggedTensor; expected an iterable"):
        module.calibrate(batch(0))


def test_drift_of_a_table_counts_bags_as_its_module_does():
    bag = EmbeddingBag(100, 4, mode="sum", include_last_offset=True)
    indices, offsets = torch.arange(100), torch.arange(0, 101, 50)
    plan = bag_plan.plan_for(bag)
    assert plan.drift([(indices, offsets)], bag).now.bags == 2
    assert plan.drift([(indices, offsets)]).now.bags == 3


def test_arrays_are_taken_too():
    collection = FusedEmbeddingBagCollection([(rows, 4) for rows in ROWS])
    other = copy.deepcopy(collection)
    collection.calibrate([feature_major(0)])
    other.calibrate([tuple(one.numpy().astype(np.int32) for one in feature_major(0))])
    assert torch.equal(collection.schedules, other.schedules)


def test_batches_come_from_any_iterable():
    class Dataset:
        def __getitem__(self, number):
            if number == 3:
                raise IndexError
            return feature_major(number)

    several = [FusedEmbeddingBagCollection([(rows, 4) for rows in ROWS]) for _ in range(3)]
    given = [feature_major(number) for number in range(3)]
    for collection, batches in zip(several, (given, iter(given), Dataset()), strict=True):
        collection.calibrate(batches)
        assert torch.equal(collection.schedules, several[0].schedules)


def test_a_plan_of_other_features_is_reported():
    collection = FusedEmbeddingBagCollection([(rows, 4) for rows in ROWS])
    plan = collection_plan.plan_for(collection_plan.collection_of())
    with pytest.raises(ValueError, match=r"Plan\.drift: the plan has 5 features, the collection has 3"):
        plan.drift([feature_major(0)], collection)
    with pytest.raises(TypeError, match=r"Plan\.drift: module is a Linear"):
        plan.drift([feature_major(0)], torch.nn.Linear(2, 2))
