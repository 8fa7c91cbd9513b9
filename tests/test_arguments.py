"""Mistakes of a new user outside of the operators: an error that names the argument, its value and the
allowed values, never an internal error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import recfuse
from recfuse import Plan
from recfuse.data import traces, workloads
from recfuse.errors import ArgumentTypeError, ArgumentValueError
from recfuse.nn import EmbeddingBag, FusedEmbeddingBagCollection, Table

TRACE = np.arange(50)
WEIGHT = torch.zeros(3, 2)
BATCHES = [(torch.tensor([1, 2]), torch.tensor([0, 1]))]
HUGE = 10**5000


def model():
    return workloads.model("D")


def collection():
    return FusedEmbeddingBagCollection([(10, 4), (5, 4)])


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: workloads.model("A", seed="x"), "workloads: seed is a str; expected a whole number"),
        (lambda: workloads.model("A", seed=1.5), "seed is a float"),
        (lambda: workloads.model("A", seed=None), "seed is a NoneType"),
        (lambda: workloads.model("A", skew="x"), "skew is a str; expected a number"),
        (lambda: workloads.model("A", rows_scale=1.5), "rows_scale is a float"),
        (lambda: model().batch("x", 0), "workloads: size is a str"),
        (lambda: model().batch(True, 0), "workloads: size is a bool"),
        (lambda: model().batch(1, None), "workloads: seed is a NoneType"),
        (lambda: model().batch(1, 0, torch.int64), "dtype is torch.int64; expected NumPy's int32 or int64"),
        (lambda: workloads.batch_sizes(None, 0), "workloads: count is a NoneType"),
        (lambda: workloads.batch_sizes(1, 0, "x"), "workloads: median is a str; expected a number"),
        (lambda: workloads.batch_sizes(1, 0, 1, 1, 1.5), "workloads: maximum is a float"),
        (lambda: traces.generate("high", "x"), "traces: rows is a str"),
        (lambda: traces.generate("high", 100, 1.5), "traces: lookups is a float"),
        (lambda: traces.generate("high", 100, 10, 1.5), "traces: seed is a float"),
        (lambda: traces.bags(TRACE, "x", 1), "traces: batch is a str"),
        (lambda: traces.bags(TRACE, 1, 1.5), "traces: pooling is a float"),
        (lambda: traces.bags([1.5], 1, 1), "traces: trace is of float64; expected integers"),
        (lambda: traces.bags(["a"], 1, 1), "traces: trace is of <U1; expected integers"),
        (lambda: traces.bags(None, 1, 1), "traces: trace is a NoneType; expected an array of integers"),
        (lambda: traces.hottest("x"), "traces: trace is a str"),
        (lambda: traces.hottest(TRACE, 1.5), "traces: count is a float"),
        (lambda: traces.statistics(TRACE, "x"), "traces: rows is a str"),
        (lambda: traces.statistics(TRACE, bag=1.5), "traces: bag is a float"),
        (lambda: traces.read(None), "recfuse.data.traces.read: path is a NoneType"),
        (lambda: recfuse.PinnedRows(None, rows=[1]), "PinnedRows: weight is a NoneType"),
        (lambda: recfuse.PinnedRows(WEIGHT, rows="x"), "PinnedRows: rows is a str"),
        (lambda: recfuse.PinnedRows(WEIGHT, rows=[1.5]), "PinnedRows: rows is of float64"),
        (lambda: recfuse.PinnedRows(WEIGHT, "x"), "PinnedRows: trace is a str"),
        (
            lambda: recfuse.PinnedRows(WEIGHT, statistics="x"),
            "PinnedRows: statistics is a str; expected the result of recfuse.traces",
        ),
        (lambda: recfuse.PinnedRows(WEIGHT, [1], l2_fraction="x"), "PinnedRows: l2_fraction is a str"),
        (lambda: recfuse.PinnedRows(WEIGHT, [1], every=1.5), "PinnedRows: every is a float"),
        (lambda: recfuse.tune(EmbeddingBag(9, 2), BATCHES, "x"), "recfuse.tune: budget_s is a str"),
        (lambda: recfuse.tune(EmbeddingBag(9, 2), BATCHES, 0, seed=1.5), "recfuse.tune: seed is a float"),
        (lambda: recfuse.tune(None, BATCHES), "recfuse.tune: module is a NoneType"),
        (lambda: collection().set_plan([3, 4]), 'schedules[0] is an int; expected a text such as "kind=pool'),
        (lambda: FusedEmbeddingBagCollection(3), "tables is an int; expected an iterable"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, dtype="float32")]), "dtype of t0 is 'float32'"),
        (lambda: FusedEmbeddingBagCollection([Table(3, 2, dtype=torch.int32)]), "dtype of t0 is torch.int32"),
        (
            lambda: FusedEmbeddingBagCollection([Table(3, 2, feature_names="ab")]),
            "feature_names of t0 is the",
        ),
        (lambda: FusedEmbeddingBagCollection([torch.nn.EmbeddingBag(3, 2)]), "a table is an EmbeddingBag"),
    ),
)
def test_wrong_types_name_the_argument(call, words):
    with pytest.raises(TypeError) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: workloads.model(None), "workloads: name is None; expected A, B"),
        (lambda: workloads.model("A", seed=-1), "workloads: seed is -1; expected [0, 2^64 - 1]"),
        (lambda: workloads.model("A", seed=HUGE), "seed is over 40 digits long; expected [0, 2^64 - 1]"),
        (lambda: model().batch(10**30, 0), "workloads: size is 1000000000000000000000000000000; expected"),
        (lambda: model().batch(1, 0, np.float32), "dtype is float32; expected int32 or int64"),
        (lambda: workloads.batch_sizes(-1, 0), "workloads: count is -1"),
        (lambda: workloads.batch_sizes(1, 0, float("nan")), "median is nan"),
        (lambda: traces.generate(None), "traces: hotness is None"),
        (lambda: traces.generate("high", 0), "traces: rows is 0; expected [1, 2147483646]"),
        (lambda: traces.bags(TRACE, 10**30, 1), "traces: batch is 1000"),
        (lambda: traces.bags([], 1, 1), "expected one dimension that is not empty"),
        (lambda: traces.hottest(TRACE, -1), "traces: count is -1"),
        (lambda: traces.statistics(TRACE, -1), "traces: rows is -1"),
        (lambda: traces.statistics([[1]]), "traces: trace has the shape (1, 1)"),
        (
            lambda: recfuse.PinnedRows(WEIGHT[0], [1]),
            "PinnedRows: weight has shape [2]; expected [rows, dim]",
        ),
        (lambda: recfuse.PinnedRows(WEIGHT, [1], every=0), "PinnedRows: every is 0"),
        (lambda: recfuse.tune(EmbeddingBag(9, 2), BATCHES, float("nan")), "recfuse.tune: budget_s is nan"),
        (lambda: recfuse.tune(EmbeddingBag(9, 2), BATCHES, -HUGE), "recfuse.tune: budget_s is -inf"),
        (lambda: recfuse.tune(EmbeddingBag(9, 2), []), "recfuse.tune: batches is empty"),
    ),
)
def test_wrong_values_name_the_argument(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.parametrize("module", (None, torch.nn.Linear(2, 2), "x"))
def test_a_plan_refuses_other_modules(module):
    plan = recfuse.tune(EmbeddingBag(9, 2, mode="sum"), BATCHES, 0)
    for call in (plan.apply, plan.matches, lambda given: plan.drift(BATCHES, given or 3)):
        with pytest.raises(ArgumentTypeError, match=r"module is an? .*expected a recfuse\.nn\.EmbeddingBag"):
            call(module)
    assert plan.matches(EmbeddingBag(9, 2, mode="sum")) and isinstance(plan, Plan)


def test_tensors_are_row_ids_too():
    trace = torch.arange(6) % 4
    assert traces.hottest(trace).tolist() == [0, 1, 2, 3]
    assert traces.bags(trace, 2, 2)[0].tolist() == [0, 1, 2, 3]
    assert traces.statistics(trace).unique == 4
    assert recfuse.PinnedRows(torch.zeros(4, 2), trace).rows.tolist() == [0, 1, 2, 3]
    assert traces.hottest([]).tolist() == []


def test_numbers_of_numpy_are_numbers():
    assert workloads.model("A", seed=np.int64(3), skew=np.float32(0.5)).seed == 3
    assert len(workloads.batch_sizes(np.int32(2), np.uint64(7))) == 2
    with pytest.raises(ArgumentValueError):
        workloads.model("A", seed=np.int64(-3))
