"""Forms of ``apply_emb`` that swap must leave, with words of the reason."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time

import torch
from torch import nn

from support.dlrm import DLRM_Net

SCALE, DEBUG, SEEN = 1.0, False, []


def pooled(self, lS_o, lS_i, emb_l, v_W_l):
    return DLRM_Net.apply_emb(self, lS_o, lS_i, emb_l, v_W_l)


# ---- left: writes


def clamped(self, lS_o, lS_i, emb_l, v_W_l):
    for bag in self.emb_l:
        bag.weight.data.clamp_(-0.05, 0.05)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def clamped_after(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    with torch.no_grad():
        emb_l[1].weight.clamp_(-0.05, 0.05)
    return ly


def renormed(self, lS_o, lS_i, emb_l, v_W_l):
    torch.embedding_renorm_(emb_l[0].weight.detach(), lS_i[0], 1.0, 2.0)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def buffering(self, lS_o, lS_i, emb_l, v_W_l):
    self.seen += 1
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def counting(self, lS_o, lS_i, emb_l, v_W_l):
    self.calls = getattr(self, "calls", 0) + 1
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def lazily(self, lS_o, lS_i, emb_l, v_W_l):
    if not hasattr(self, "cache"):
        self.cache = torch.zeros(3)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def listing(self, lS_o, lS_i, emb_l, v_W_l):
    self.v_W_l.append(None)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def logging_to_a_global(self, lS_o, lS_i, emb_l, v_W_l):
    SEEN.append(len(lS_i))
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def printing(self, lS_o, lS_i, emb_l, v_W_l):
    print("pooling")
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def writing_indices(self, lS_o, lS_i, emb_l, v_W_l):
    lS_i[0].clamp_(max=3)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def replacing_indices(self, lS_o, lS_i, emb_l, v_W_l):
    lS_i[0] = lS_i[0] * 0
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def freezing(self, lS_o, lS_i, emb_l, v_W_l):
    emb_l[0].weight.requires_grad_(False)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


# ---- left: hooks and gradients


def hooked(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    for x in ly:
        x.register_hook(lambda g: g * 0.1)
    return ly


def hooked_in_training(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    if self.training:
        for x in ly:
            x.register_hook(lambda g: g * 0.1)
    return ly


def retaining(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    [x.retain_grad() for x in ly]
    return ly


def hooking_weights(self, lS_o, lS_i, emb_l, v_W_l):
    emb_l[0].weight.register_hook(lambda g: g * 2)
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def detached(self, lS_o, lS_i, emb_l, v_W_l):
    return [x.detach() for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def frozen(self, lS_o, lS_i, emb_l, v_W_l):
    with torch.no_grad():
        return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def autocast(self, lS_o, lS_i, emb_l, v_W_l):
    with torch.autocast("cpu"):
        return pooled(self, lS_o, lS_i, emb_l, v_W_l)


def half_gradient(self, lS_o, lS_i, emb_l, v_W_l):
    return [(x + x.detach()) / 2 for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def checkpointed(self, lS_o, lS_i, emb_l, v_W_l):
    return torch.utils.checkpoint.checkpoint(pooled, self, lS_o, lS_i, emb_l, v_W_l, use_reentrant=False)


# ---- left: statistics


def normalised_by_batch(self, lS_o, lS_i, emb_l, v_W_l):
    return [self.norm(x) for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def statistics_aside(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    nn.functional.batch_norm(ly[0], self.mean, self.var, training=True)
    return ly


# ---- left: other state


def tempered(self, lS_o, lS_i, emb_l, v_W_l):
    return [x * self.temperature for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def scaled_by_buffer(self, lS_o, lS_i, emb_l, v_W_l):
    return [x * self.one for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def branching_by_buffer(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if self.one > 1 else ly


def by_config(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if self.config["double"] else ly


def by_global(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * SCALE for x in ly] if SCALE != 1.0 else ly


def by_debug_flag(self, lS_o, lS_i, emb_l, v_W_l):
    return None if DEBUG else pooled(self, lS_o, lS_i, emb_l, v_W_l)


def by_environment(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if os.environ.get("DOUBLE") else ly


def by_time(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return ly if time.time() > 5 else None


def by_own_row_weights(self, lS_o, lS_i, emb_l, v_W_l):
    return pooled(self, lS_o, lS_i, emb_l, self.v_W_l)


def _with_closure():
    options = {"double": False}

    def by_closure(self, lS_o, lS_i, emb_l, v_W_l):
        ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
        return [x * 2 for x in ly] if options["double"] else ly

    return by_closure


def by_default_object(self, lS_o, lS_i, emb_l, v_W_l):
    def inner(x, seen=SEEN):
        return x if not seen else x * 2

    return [inner(x) for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


# ---- left: forms that depend on data, and random numbers


def by_values(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x if i.sum() > 0 else x * 2 for x, i in zip(ly, lS_i, strict=True)]


def by_shape(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if lS_i[0].shape[0] > 1000 else ly


def by_dtype(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if lS_i[0].dtype == torch.int32 else ly


def by_device(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x.cpu() for x in ly] if lS_i[0].is_cuda else ly


def by_form(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 2 for x in ly] if isinstance(lS_o, tuple) else ly


def by_grad_mode(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return ly if torch.is_grad_enabled() else [x * 2 for x in ly]


def noisy(self, lS_o, lS_i, emb_l, v_W_l):
    return [nn.functional.dropout(x, 0.0001) for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def drawing(self, lS_o, lS_i, emb_l, v_W_l):
    random.random()
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)


# ---- left: other results


def scaled(self, lS_o, lS_i, emb_l, v_W_l):
    return [x * 2 for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def scaled_in_training(self, lS_o, lS_i, emb_l, v_W_l):
    ly = pooled(self, lS_o, lS_i, emb_l, v_W_l)
    return [x * 1.5 for x in ly] if self.training else ly


def normalised(self, lS_o, lS_i, emb_l, v_W_l):
    return [nn.functional.normalize(x) for x in pooled(self, lS_o, lS_i, emb_l, v_W_l)]


def reordered(self, lS_o, lS_i, emb_l, v_W_l):
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)[::-1]


def shifted(self, lS_o, lS_i, emb_l, v_W_l):
    return pooled(self, lS_o, [i * 1 for i in lS_i], emb_l, v_W_l)


def of_another_table(self, lS_o, lS_i, emb_l, v_W_l):
    return [emb_l[k](lS_i[k], lS_o[k - 1]) for k in range(len(emb_l))]


def as_tuple(self, lS_o, lS_i, emb_l, v_W_l):
    return tuple(pooled(self, lS_o, lS_i, emb_l, v_W_l))


def without_the_last(self, lS_o, lS_i, emb_l, v_W_l):
    return pooled(self, lS_o, lS_i, emb_l, v_W_l)[:-1]


def weights_of_some(self, lS_o, lS_i, emb_l, v_W_l):
    out = []
    for k, bag in enumerate(emb_l):
        w = v_W_l[k]
        out.append(bag(lS_i[k], lS_o[k], None if w is None or k == 2 else w[lS_i[k]]))
    return out


def weights_by_those_of_another(self, lS_o, lS_i, emb_l, v_W_l):
    out = []
    for k, bag in enumerate(emb_l):
        w = v_W_l[k]
        if v_W_l[0] is None:
            w = None
        out.append(bag(lS_i[k], lS_o[k], None if w is None else w[lS_i[k]]))
    return out


def weights_of_other_rows(self, lS_o, lS_i, emb_l, v_W_l):
    out = []
    for k, bag in enumerate(emb_l):
        w = v_W_l[k]
        out.append(bag(lS_i[k], lS_o[k], None if w is None else w[lS_o[k]]))
    return out


def by_function(self, lS_o, lS_i, emb_l, v_W_l):
    return [
        nn.functional.embedding_bag(i, bag.weight, o, mode="sum")
        for bag, i, o in zip(emb_l, lS_i, lS_o, strict=True)
    ]


def failing(self, lS_o, lS_i, emb_l, v_W_l):
    raise KeyError("no such feature")


def trying(self, lS_o, lS_i, emb_l, v_W_l):
    try:
        return pooled(self, lS_o, lS_i, emb_l, v_W_l)
    finally:
        SEEN.append(1)


def iterating_twice(self, lS_o, lS_i, emb_l, v_W_l):
    pairs = zip(lS_i, lS_o, strict=True)
    [x for x in pairs]
    return [bag(i, o) for bag, (i, o) in zip(emb_l, pairs)]  # noqa: B905


def growing(self, lS_o, lS_i, emb_l, v_W_l):
    ly = [emb_l[0](lS_i[0], lS_o[0])]
    for _ in ly:
        if len(ly) < len(emb_l):
            k = len(ly)
            ly.append(emb_l[k](lS_i[k], lS_o[k]))
    return ly


class Overridden(DLRM_Net):
    def apply_emb(self, lS_o, lS_i, emb_l, v_W_l):
        return [x * 1.5 for x in super().apply_emb(lS_o, lS_i, emb_l, v_W_l)]


class Intercepting(DLRM_Net):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


def generating(self, lS_o, lS_i, emb_l, v_W_l):
    def pool():
        for k, bag in enumerate(emb_l):
            yield bag(lS_i[k], lS_o[k])

    return list(pool())


WITH_CONTEXT = torch.no_grad()(DLRM_Net.apply_emb)
COMPILED = functools.partialmethod(DLRM_Net.apply_emb)


@contextlib.contextmanager
def _context():
    yield


DECORATED = _context()(DLRM_Net.apply_emb)

LEFT = {
    clamped: "calls clamp_ of emb_l[0].weight.data",
    clamped_after: "uses a with block",
    renormed: "calls detach of emb_l[0].weight",
    buffering: "writes to self.seen",
    counting: "writes to self.calls",
    lazily: "calls torch.zeros",
    listing: "reads self.v_W_l, a list",
    logging_to_a_global: "reads the global SEEN, a list",
    printing: "calls print",
    writing_indices: "calls clamp_ of lS_i[0]",
    replacing_indices: "changes lS_i[0]",
    freezing: "calls requires_grad_ of emb_l[0].weight",
    hooked: "calls register_hook of the result of table 0",
    hooked_in_training: "calls register_hook of the result of table 0",
    retaining: "calls retain_grad of the result of table 0",
    hooking_weights: "calls register_hook of emb_l[0].weight",
    detached: "calls detach of the result of table 0",
    frozen: "uses a with block",
    autocast: "uses a with block",
    half_gradient: "calls detach of the result of table 0",
    checkpointed: "calls torch.utils.checkpoint.checkpoint",
    normalised_by_batch: "reads self.norm, a BatchNorm1d",
    statistics_aside: "reads self.mean, a Tensor",
    tempered: "changes the result of table 0",
    scaled_by_buffer: "reads self.one, a Tensor",
    branching_by_buffer: "reads self.one, a Tensor",
    by_config: "reads self.config, a dict",
    by_global: "reads the global SCALE, a float",
    by_debug_flag: "reads the global DEBUG, a bool",
    by_environment: "reads os.environ",
    by_time: "calls time.time",
    by_own_row_weights: "reads self.v_W_l, a list",
    _with_closure(): "reads options of its closure, a dict",
    by_default_object: "reads the global SEEN, a list",
    by_values: "calls sum of lS_i[0]",
    by_shape: "shape",
    by_dtype: "reads torch.int32",
    by_device: "branches on a value that is known only in a call",
    by_form: "calls isinstance",
    by_grad_mode: "calls torch.is_grad_enabled",
    noisy: "calls nn.functional.dropout",
    drawing: "calls random.random",
    scaled: "changes the result of table 0",
    scaled_in_training: "changes the result of table 0",
    normalised: "calls nn.functional.normalize",
    reordered: "returns the result of table 3 as item 0",
    shifted: "changes lS_i[0]",
    of_another_table: "other lookups than lS_i[0] and lS_o[0]",
    as_tuple: "does not return a list",
    without_the_last: "does not return a list with a tensor for each table",
    weights_of_some: "uses the row weights of some tables",
    weights_by_those_of_another: "does not return the result of table 1",
    weights_of_other_rows: "reads v_W_l[0] at other rows than lS_i[0]",
    by_function: "calls nn.functional.embedding_bag",
    failing: "uses raise",
    trying: "uses a try block",
    iterating_twice: "calls zip",
    growing: "writes to a list while it iterates over it",
    generating: "uses yield",
    WITH_CONTEXT: "uses a with block",
    DECORATED: "uses a with block",
    COMPILED: "is a partialmethod; expected a function of Python",
    Overridden: "changes the result of table 0",
    Intercepting: "class with __getattribute__",
}
