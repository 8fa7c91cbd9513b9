"""Forms of ``apply_emb`` that swap must fuse, and models with any form.

PYTEST_DONT_REWRITE: pytest's rewritten asserts would make the code differ from its source.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from support.dlrm import DLRM_Net


def pooled(self, lS_o, lS_i, emb_l, v_W_l):
    return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)


def default_weights(self, lS_o, lS_i, emb_l, v_W_l=None):
    return pooled(self, lS_o, lS_i, emb_l, v_W_l if v_W_l is not None else [None] * len(emb_l))


def default_tables(self, lS_o, lS_i, emb_l=None, v_W_l=None):
    return default_weights(self, lS_o, lS_i, self.emb_l if emb_l is None else emb_l, v_W_l)


def by_forward(self, lS_o, lS_i, emb_l, v_W_l):
    out = []
    for bag, i, o, w in zip(emb_l, lS_i, lS_o, v_W_l, strict=True):
        out.append(bag.forward(i, o, None if w is None else w[i]))
    return out


@staticmethod
def static(lS_o, lS_i, emb_l, v_W_l):
    return by_forward(None, lS_o, lS_i, emb_l, v_W_l)


@functools.wraps(DLRM_Net.apply_emb)
def wrapped(self, *args, **kwargs):
    return DLRM_Net.apply_emb(self, *args, **kwargs)


def in_branches(self, lS_o, lS_i, emb_l, v_W_l):
    """Two calls; one of them has row weights."""
    ly = [None] * len(emb_l)
    for k in range(len(lS_i)):
        if v_W_l[k] is None:
            ly[k] = emb_l[k](lS_i[k], lS_o[k])
            continue
        weights = torch.gather(v_W_l[k], 0, lS_i[k])
        ly[k] = emb_l[k](lS_i[k], lS_o[k], weights)
    return ly


def in_a_comprehension(self, lS_o, lS_i, emb_l, v_W_l):
    weights = [w if w is None else w.index_select(0, i) for w, i in zip(v_W_l, lS_i, strict=True)]
    return [
        table(i, offsets=o, per_sample_weights=w)
        for table, i, o, w in zip(emb_l, lS_i, lS_o, weights, strict=True)
    ]


def by_helper(self, lS_o, lS_i, emb_l, v_W_l):
    return [self.pool_one(k, lS_o, lS_i, emb_l, v_W_l) for k in range(self.count)]


def _pool_one(self, k, lS_o, lS_i, emb_l, v_W_l):
    w = v_W_l[k]
    if w is not None:
        w = w.take(lS_i[k])
    return emb_l[k](lS_i[k], lS_o[k], per_sample_weights=w)


def by_inner_function(self, lS_o, lS_i, emb_l, v_W_l):
    def one(k, bag):
        w = None
        if v_W_l[k] is not None:
            w = v_W_l[k].gather(dim=0, index=lS_i[k])
        return bag(lS_i[k], lS_o[k], w)

    return list(map(one, range(len(emb_l)), emb_l))


def all_or_none(self, lS_o, lS_i, emb_l, v_W_l):
    if all(w is None for w in v_W_l):
        return [bag(i, o) for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)]
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def while_counting(self, lS_o, lS_i, emb_l, v_W_l):
    ly: list = []
    k = 0
    while k < len(emb_l):
        w = v_W_l[k]
        ly += [emb_l[k](lS_i[k], lS_o[k], per_sample_weights=w[lS_i[k]] if w is not None else None)]
        k += 1
    assert len(ly) == len(emb_l)
    return ly


def in_both_modes(self, lS_o, lS_i, emb_l, v_W_l):
    if self.training:
        return pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return by_forward(self, lS_o, lS_i, emb_l, v_W_l)


class Inheriting(DLRM_Net):
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        ly = super().apply_emb(lS_o, lS_i, emb_l, v_W_l)
        return [x for x in ly]


# ---- fused, and row weights are ignored


def without_weights(self, lS_o, lS_i, emb_l, v_W_l):
    return [bag(i, o) for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)]


def without_weights_by_number(self, lS_o, lS_i, emb_l, v_W_l=None):
    ly = []
    for k, table in enumerate(emb_l):
        V = table(lS_i[k], lS_o[k])
        ly.append(V)
    return ly


FUSED = (
    default_weights, default_tables, by_forward, static, wrapped, in_branches, in_a_comprehension, by_helper,
    by_inner_function, all_or_none, while_counting, in_both_modes, Inheriting, DLRM_Net,
)  # fmt: skip
IGNORING = (without_weights, without_weights_by_number)


def model_with(method, **arguments):
    """Returns a model with one of these forms."""
    if isinstance(method, type):
        kind = method
    else:
        kind = type("OtherNet", (DLRM_Net,), {"apply_emb": method, "pool_one": _pool_one})
    model = kind(**arguments)
    model.count, model.temperature, model.config = len(model.emb_l), 1.0, {"double": False}
    model.norm = nn.BatchNorm1d(8)
    for name, value in (("seen", torch.zeros(3)), ("one", torch.ones(())), ("mean", torch.zeros(8))):
        model.register_buffer(name, value)
    model.register_buffer("var", torch.ones(8))
    return model
