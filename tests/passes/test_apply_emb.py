"""swap replaces a model's apply_emb only if its code proves that one call has the same result."""

from __future__ import annotations

import copy
import inspect
import time

import pytest
import torch

import recfuse
from support.apply_emb.fused import FUSED, IGNORING, model_with
from support.apply_emb.left import LEFT
from support.apply_emb.unchanged import unchanged
from support.dlrm import DLRM_Net, batch_of


def _left(model):
    """The reason; everything but the classes of the tables is as it was."""
    with unchanged(model):
        report = recfuse.swap(model)
    assert not report.fused
    (entry,) = [entry for entry in report.left if entry.name == "emb_l"]
    assert "FusedEmbeddingBagList(bags)" in entry.detail
    return entry.detail


def _name(method):
    return getattr(method, "__name__", type(method).__name__)


@pytest.mark.parametrize("is_trained", (True, False))
@pytest.mark.parametrize(("method", "words"), LEFT.items(), ids=map(_name, LEFT))
def test_an_apply_emb_that_does_something_else_is_left(method, words, is_trained):
    model = model_with(method).train(is_trained)
    model.emb_l[0].weight.grad = torch.ones_like(model.emb_l[0].weight)
    twin = copy.deepcopy(model)
    detail = _left(model)
    assert words in detail
    if "raise" in words or "other lookups" in words:  # which raise
        return
    batch = batch_of(model)
    for one in (model, twin):
        torch.manual_seed(3)
        one.result = one.apply_emb(*copy.deepcopy(batch[1:]), one.emb_l, one.v_W_l)
    torch.testing.assert_close(model.result, twin.result)


def test_a_norm_constraint_stays():
    model = model_with(next(method for method in LEFT if _name(method) == "clamped"))
    twin = copy.deepcopy(model)
    recfuse.swap(model)
    assert torch.equal(model.emb_l[1].weight, twin.emb_l[1].weight)
    batch = batch_of(model)
    model(*batch), twin(*batch)
    assert model.emb_l[1].weight.abs().max() <= 0.05
    assert torch.equal(model.emb_l[1].weight, twin.emb_l[1].weight)


@pytest.mark.parametrize("weighted", (None, "fixed", "learned"))
@pytest.mark.parametrize("method", FUSED, ids=_name)
def test_an_apply_emb_that_does_the_same_is_fused_with_its_signature(method, weighted):
    model = model_with(method, weighted=weighted, sparse=False)
    if weighted == "fixed":
        model.v_W_l[1] = None
    _, lS_o, lS_i = batch_of(model)
    signature = inspect.signature(model.apply_emb)
    want = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    assert len(recfuse.swap(model).fused) == 1
    assert inspect.signature(model.apply_emb) == signature
    defaults = [p.default for p in signature.parameters.values()]
    calls = [model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)]
    if _name(method) != "wrapped":  # its arguments may mean another thing by name
        calls.append(model.apply_emb(lS_o, lS_i, v_W_l=model.v_W_l, emb_l=model.emb_l))
    if defaults[3] is None and weighted is None:
        calls += [model.apply_emb(lS_o, lS_i, model.emb_l), model.apply_emb(lS_o, lS_i, model.emb_l, None)]
    if defaults[2] is None:
        calls.append(model.apply_emb(lS_o, lS_i, v_W_l=model.v_W_l))
    for got in calls:
        torch.testing.assert_close(got, want)
        assert all(pooled._base is got[0]._base for pooled in got)  # one call for all
    with pytest.raises(TypeError):
        model.apply_emb(lS_o)
    with pytest.raises(TypeError):
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l, 5)
    with pytest.raises(TypeError):
        model.apply_emb(lS_o, lS_i, model.emb_l, lS_o=lS_o)


@pytest.mark.parametrize("method", IGNORING, ids=_name)
@pytest.mark.parametrize("weighted", (None, "fixed"))
def test_row_weights_that_apply_emb_ignores_stay_ignored(method, weighted):
    model = model_with(method, weighted=weighted)
    _, lS_o, lS_i = batch_of(model)
    want = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    (entry,) = recfuse.swap(model).fused
    assert "without row weights" in entry.detail
    got = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    torch.testing.assert_close(got, want)
    assert got[1]._base is got[0]._base


def _raising(self, lS_o, lS_i, emb_l, v_W_l=None):
    if v_W_l is not None:
        raise NotImplementedError("no row weights")
    return [bag(i, o) for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)]


def test_calls_that_are_not_proven_are_the_models_own():
    model = model_with(_raising)
    _, lS_o, lS_i = batch_of(model)
    want = model.apply_emb(lS_o, lS_i, model.emb_l)
    (entry,) = recfuse.swap(model).fused
    assert "where v_W_l is None" in entry.detail
    got = model.apply_emb(lS_o, lS_i, model.emb_l)
    torch.testing.assert_close(got, want)
    assert got[1]._base is got[0]._base
    with pytest.raises(NotImplementedError):
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)


def test_a_function_without_source_is_left():
    names = {}
    exec("def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):\n    return 5", names)
    assert "source is missing" in _left(model_with(names["apply_emb"]))


def test_source_that_differs_from_the_code_is_no_proof():
    """As in a file that was edited after its import, or a function with another's code."""

    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)

    def other(self, lS_o, lS_i, emb_l, v_W_l):
        return [pooled * 2 for pooled in DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)]

    first = apply_emb.__code__.co_firstlineno
    apply_emb.__code__ = other.__code__.replace(co_firstlineno=first, co_name="apply_emb")
    assert "source is missing or differs from its code" in _left(model_with(apply_emb))


def test_a_thousand_tables_take_seconds():
    model = DLRM_Net(sizes=(3,) * 1000, dim=4)
    begin = time.perf_counter()
    assert len(recfuse.swap(model).fused) == 1
    assert time.perf_counter() - begin < 30


SECRET = [True]


class Secret:
    @property
    def count(self):
        return SECRET[0]


def test_a_property_is_read_as_the_function_that_it_is():
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l) if self.count else []

    model = type("OtherNet", (Secret, DLRM_Net), {"apply_emb": apply_emb})()
    assert "reads the global SECRET" in _left(model)


def test_tables_that_are_no_part_of_the_model_take_its_own_method():
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return [bag(i, o) for bag, i, o in zip(self.emb_l, lS_i, lS_o, strict=True)]

    model, other = model_with(apply_emb), model_with(apply_emb)
    assert len(recfuse.swap(model).fused) == len(recfuse.swap(other).fused) == 1
    _, lS_o, lS_i = batch_of(model)
    want = model.apply_emb(lS_o, lS_i, model.emb_l, None)
    torch.testing.assert_close(model.apply_emb(lS_o, lS_i, other.emb_l, None), want)
    assert isinstance(model.emb_l, recfuse.nn.FusedEmbeddingBagList)
