"""swap replaces a model's apply_emb only where it does what one call for all tables does."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from torch import nn

import recfuse
from support.dlrm import DLRM_Net, batch_of


def _pooled(self, lS_o, lS_i, emb_l, v_W_l):
    return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)


def _scaled(self, lS_o, lS_i, emb_l, v_W_l):
    return [pooled * 2 for pooled in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _scaled_in_training(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [one * 1.5 for one in pooled] if self.training else pooled


def _normalised(self, lS_o, lS_i, emb_l, v_W_l):
    return [nn.functional.normalize(pooled) for pooled in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _reordered(self, lS_o, lS_i, emb_l, v_W_l):
    return _pooled(self, lS_o, lS_i, emb_l, v_W_l)[::-1]


def _noisy(self, lS_o, lS_i, emb_l, v_W_l):
    return [nn.functional.dropout(pooled, 0.0001) for pooled in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _detached(self, lS_o, lS_i, emb_l, v_W_l):
    return [pooled.detach() for pooled in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _frozen(self, lS_o, lS_i, emb_l, v_W_l):
    with torch.no_grad():
        return _pooled(self, lS_o, lS_i, emb_l, v_W_l)


def _half_gradient(self, lS_o, lS_i, emb_l, v_W_l):
    return [(pooled + pooled.detach()) / 2 for pooled in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def _without_weights(self, lS_o, lS_i, emb_l, v_W_l):
    return [bag(i, o) for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)]


def _shifted(self, lS_o, lS_i, emb_l, v_W_l):
    return _pooled(self, lS_o, [(i + 1) % b.num_embeddings for i, b in zip(lS_i, emb_l)], emb_l, v_W_l)  # noqa: B905


def _tuple(self, lS_o, lS_i, emb_l, v_W_l):
    return tuple(_pooled(self, lS_o, lS_i, emb_l, v_W_l))


def _counting(self, lS_o, lS_i, emb_l, v_W_l):
    self.calls = getattr(self, "calls", 0) + 1
    return _pooled(self, lS_o, lS_i, emb_l, v_W_l)


def _listing(self, lS_o, lS_i, emb_l, v_W_l):
    self.v_W_l.append(None)
    return _pooled(self, lS_o, lS_i, emb_l, v_W_l)


def _buffering(self, lS_o, lS_i, emb_l, v_W_l):
    self.seen += 1
    return _pooled(self, lS_o, lS_i, emb_l, v_W_l)


def _by_function(self, lS_o, lS_i, emb_l, v_W_l):
    return [
        nn.functional.embedding_bag(i, bag.weight, o, mode="sum")
        for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)
    ]


def _failing(self, lS_o, lS_i, emb_l, v_W_l):
    raise KeyError("no such feature")


@pytest.mark.parametrize(
    ("method", "words"),
    (
        (_scaled, "changes what table 0 returns"),
        (_scaled_in_training, "changes what table 0 returns"),
        (_normalised, "changes what table 0 returns"),
        (_reordered, "at another place"),
        (_noisy, "draws random numbers"),
        (_detached, "does not pass the gradient to table 0"),
        (_frozen, "without gradients"),
        (_half_gradient, "does not pass the gradient to table 0"),
        (_without_weights, "other row weights than v_W_l[0]"),
        (_shifted, "other lookups than lS_i[0]"),
        (_tuple, "does not return a list"),
        (_counting, "changes the model (calls)"),
        (_listing, "changes the model"),
        (_buffering, "changes the model (a buffer"),
        (_by_function, "does not call each table once"),
        (_failing, "raised KeyError on a probe batch: 'no such feature'"),
    ),
)
@pytest.mark.parametrize("zeros", (False, True))
def test_an_apply_emb_that_does_something_else_is_left(method, words, zeros):
    model = type("OtherNet", (DLRM_Net,), {"apply_emb": method})()
    model.register_buffer("seen", torch.zeros(3))
    if zeros:
        for bag in model.emb_l:
            nn.init.zeros_(bag.weight)
    model.eval()
    attributes, random_state = list(vars(model)), torch.get_rng_state()
    batch = batch_of(model)
    want = None
    if method is not _failing and method is not _noisy:
        twin = copy.deepcopy(model)
        want = twin(*batch)
    torch.set_rng_state(random_state)
    report = recfuse.swap(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    (entry,) = [entry for entry in report.left if entry.name == "emb_l"]
    assert words in entry.detail
    assert "FusedEmbeddingBagList(bags)" in entry.detail
    assert list(vars(model)) == attributes
    assert not any(module.training for module in model.modules())
    assert len(model.v_W_l) == 4
    assert model.seen.sum() == 0
    assert all(bag.weight.grad is None and "forward" not in vars(bag) for bag in model.emb_l)
    if want is not None:
        torch.testing.assert_close(model(*batch), want)


def _default_weights(self, lS_o, lS_i, emb_l, v_W_l=None):
    return _pooled(self, lS_o, lS_i, emb_l, v_W_l if v_W_l is not None else [None] * len(emb_l))


def _default_tables(self, lS_o, lS_i, emb_l=None, v_W_l=None):
    return _default_weights(self, lS_o, lS_i, self.emb_l if emb_l is None else emb_l, v_W_l)


def _by_forward(self, lS_o, lS_i, emb_l, v_W_l):
    out = []
    for bag, i, o, w in zip(emb_l, lS_i, lS_o, v_W_l, strict=True):
        out.append(bag.forward(i, o, None if w is None else w[i]))
    return out


def _static(lS_o, lS_i, emb_l, v_W_l):
    return _by_forward(None, lS_o, lS_i, emb_l, v_W_l)


@pytest.mark.parametrize(
    "method", (_default_weights, _default_tables, _by_forward, staticmethod(_static), torch.no_grad)
)
def test_an_apply_emb_that_does_the_same_is_fused_with_its_signature(method):
    if method is torch.no_grad:  # a decorated method, which frozen tables allow

        @functools.wraps(DLRM_Net.apply_emb)
        def method(self, *args, **kwargs):
            return DLRM_Net.apply_emb(self, *args, **kwargs)

    model = type("OtherNet", (DLRM_Net,), {"apply_emb": method})()
    _, lS_o, lS_i = batch_of(model)
    signature = inspect.signature(model.apply_emb)
    want = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    assert len(recfuse.swap(model).fused) == 1
    assert inspect.signature(model.apply_emb) == signature
    defaults = [p.default for p in signature.parameters.values()]
    calls = [
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l),
        model.apply_emb(lS_o, lS_i, v_W_l=model.v_W_l, emb_l=model.emb_l),
    ]
    if defaults[3] is None:
        calls.append(model.apply_emb(lS_o, lS_i, model.emb_l))
    if defaults[2] is None:
        calls.append(model.apply_emb(lS_o, lS_i))
    for got in calls:
        torch.testing.assert_close(got, want)
        assert all(pooled._base is got[0]._base for pooled in got)  # one call for all
    with pytest.raises(TypeError):
        model.apply_emb(lS_o)
    with pytest.raises(TypeError):
        model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l, 5)
    with pytest.raises(TypeError):
        model.apply_emb(lS_o, lS_i, model.emb_l, lS_o=lS_o)


def test_a_flag_that_apply_emb_reads_goes_back_to_its_own():
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
        return [one * 2 for one in pooled] if self.double else pooled

    model = type("OtherNet", (DLRM_Net,), {"apply_emb": apply_emb, "double": False})()
    model.double = False
    assert len(recfuse.swap(model).fused) == 1
    _, lS_o, lS_i = batch_of(model)
    once = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    model.double = True
    twice = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    torch.testing.assert_close([one * 2 for one in once], twice)


def _by_text(self, lS_o, lS_i, emb_l, v_W_l):
    pooled = _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [one * 2 for one in pooled] if getattr(self, "doubled", False) else pooled


def _inside(self, lS_o, lS_i, emb_l, v_W_l):
    return [
        (lambda one: one * 2 if self.doubled else one)(x) for x in _pooled(self, lS_o, lS_i, emb_l, v_W_l)
    ]


def _by_method(self, lS_o, lS_i, emb_l, v_W_l):
    return [one * self.factor() for one in _pooled(self, lS_o, lS_i, emb_l, v_W_l)]


@pytest.mark.parametrize("method", (_by_text, _inside, _by_method))
@pytest.mark.parametrize("copied", (False, True))
def test_a_flag_is_found_wherever_it_is_read(method, copied):
    members = {"apply_emb": method, "factor": lambda self: 2 if self.doubled else 1}
    if method is not _by_text:
        members["doubled"] = False
    model = type("OtherNet", (DLRM_Net,), members)()
    assert len(recfuse.swap(model).fused) == 1
    if copied:
        model = copy.deepcopy(model)
    _, lS_o, lS_i = batch_of(model)
    once = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    assert once[1]._base is once[0]._base  # one call for all
    model.doubled = True
    twice = model.apply_emb(lS_o, lS_i, model.emb_l, model.v_W_l)
    torch.testing.assert_close([one * 2 for one in once], twice)
