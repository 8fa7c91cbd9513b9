"""The premises of a proof of apply_emb are compared before each call: flags, absent attributes, the code."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import recfuse
from support.dlrm import DLRM_Net, batch_of


def _pooled(self, lS_o, lS_i, emb_l, v_W_l):
    return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)


def _twice(self, lS_o, lS_i, emb_l, v_W_l):
    return [x * 2 for x in DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)]


def _by_attribute(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in pooled] if self.doubled else pooled


def _by_text(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in pooled] if getattr(self, "doubled", False) else pooled


def _by_presence(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in pooled] if hasattr(self, "doubled") else pooled


def _inside(self, lS_o, lS_i, emb_l, v_W_l):
    return [(lambda x: x * 2 if self.doubled else x)(x) for x in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _by_method(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return pooled if self.factor() == 1 else [x * self.factor() for x in pooled]


def _by_property(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return pooled if self.as_property == 1 else [x * 2 for x in pooled]


class Factors:
    def factor(self):
        return 2 if self.doubled else 1

    @property
    def as_property(self):
        return self.factor()


def _calls(model):
    _, lS_o, lS_i = batch_of(model)
    while True:
        yield model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)


def _is_fused(pooled):
    return pooled[1]._base is not None and pooled[1]._base is pooled[0]._base


@pytest.mark.parametrize("method", (_by_attribute, _by_text, _by_presence, _inside, _by_method, _by_property))
@pytest.mark.parametrize("is_copied", (False, True))
@pytest.mark.parametrize("is_inherited", (False, True))
def test_a_flag_is_found_wherever_it_is_read(method, is_copied, is_inherited):
    is_absent = method in (_by_text, _by_presence)
    members = {"apply_emb": method, **({} if is_absent or not is_inherited else {"doubled": False})}
    model = type("OtherNet", (Factors, DLRM_Net), members)()
    if not is_absent and not is_inherited:
        model.doubled = False
    assert len(recfuse.swap(model).fused) == 1
    if is_copied:
        model = copy.deepcopy(model)
    calls = _calls(model)
    once = next(calls)
    assert _is_fused(once)
    model.doubled = True
    torch.testing.assert_close([x * 2 for x in once], next(calls))


def test_a_flag_of_another_type_is_another_flag():
    model = type("OtherNet", (DLRM_Net,), {"apply_emb": _by_attribute})()
    model.doubled = 0
    recfuse.swap(model)
    calls = _calls(model)
    assert _is_fused(next(calls))
    model.doubled = torch.ones(())
    assert not _is_fused(next(calls))


def test_code_that_is_replaced_in_place_is_seen():
    """As by IPython's autoreload."""

    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return _pooled(self, lS_o, lS_i, emb_l, v_W_l)

    model = type("OtherNet", (DLRM_Net,), {"apply_emb": apply_emb})()
    recfuse.swap(model)
    calls = _calls(model)
    once = next(calls)
    assert _is_fused(once)
    apply_emb.__code__ = _twice.__code__
    torch.testing.assert_close([x * 2 for x in once], next(calls))


@pytest.mark.parametrize("kind", ("class", "base", "instance", "global"))
def test_functions_that_are_replaced_are_seen(kind, monkeypatch):
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return self.first(lS_o, lS_i, emb_l, v_W_l)

    def first(self, lS_o, lS_i, emb_l, v_W_l):
        return _pooled(self, lS_o, lS_i, emb_l, v_W_l)

    model = type("OtherNet", (DLRM_Net,), {"apply_emb": apply_emb, "first": first})()
    recfuse.swap(model)
    calls = _calls(model)
    once = next(calls)
    assert _is_fused(once)
    if kind == "class":
        monkeypatch.setattr(type(model), "first", lambda self, *args: [x * 2 for x in first(self, *args)])
    elif kind == "base":
        before = DLRM_Net.apply_emb
        monkeypatch.setattr(DLRM_Net, "apply_emb", lambda self, *args: [x * 2 for x in before(self, *args)])
    elif kind == "instance":
        model.first = lambda *args: [x * 2 for x in first(model, *args)]
    else:
        before = _pooled
        monkeypatch.setitem(globals(), "_pooled", lambda self, *args: [x * 2 for x in before(self, *args)])
    torch.testing.assert_close([x * 2 for x in once], next(calls))


class Loaded(DLRM_Net):
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)


@pytest.mark.parametrize("way", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))))
def test_a_copy_is_proven_by_the_code_that_it_finds(way, monkeypatch):
    model = Loaded()
    recfuse.swap(model)
    same = way(model)
    calls = _calls(same)
    once = next(calls)
    assert _is_fused(once)
    data = pickle.dumps(model)
    monkeypatch.setattr(Loaded, "apply_emb", _twice)
    calls = _calls(pickle.loads(data) if way is not copy.deepcopy else copy.deepcopy(model))
    torch.manual_seed(3)
    assert not _is_fused(next(calls))


def test_a_compiled_model_sees_its_flags():
    model = type("OtherNet", (DLRM_Net,), {"apply_emb": _by_attribute})()
    model.doubled = False
    recfuse.swap(model)
    _, lS_o, lS_i = batch_of(model)
    compiled = torch.compile(
        lambda: model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l), backend="eager", fullgraph=True
    )
    once = compiled()
    model.doubled = True
    torch.testing.assert_close([x * 2 for x in once], compiled())
