"""Calls of one thread while another one swaps, unswaps or loads: each is that of complete tables."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from torch import nn

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection
from support.dlrm import DLRM_Net
from support.processes.changes import at_each_line

TABLES, ROWS, DIM, LOOKUPS = 8, 20_000, 64, 512
TURNS = 6


def weight(number, factor=1):
    """Integers, whose sums are exact in any order."""
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None]
    return ((rows + number) % 64 + 1).expand(ROWS, DIM) * factor


class OfList(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.net = DLRM_Net((ROWS,) * TABLES, DIM)
        self.net.emb_l.to_empty(device="cpu")
        self.tables = self.net.emb_l

    def forward(self, indices):
        offsets = torch.arange(0, LOOKUPS, 4).repeat(TABLES, 1)
        return torch.cat(self.net.apply_emb(offsets, list(indices), self.net.emb_l, self.net.v_W_l), dim=1)


def of_torchrec(collection, config, children, values_of):
    """A model with a collection of TorchRec, whose outputs ``values_of`` joins."""
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    keys = [f"f{number}" for number in range(TABLES)]
    sizes = {"num_embeddings": ROWS, "embedding_dim": DIM}

    class OfTorchRec(nn.Module):
        def __init__(self):
            super().__init__()
            create = getattr(configs, config)
            self.collection = getattr(modules, collection)(
                [create(name=f"t{key}", feature_names=[key], **sizes) for key in keys]
            )
            self.tables = list(getattr(self.collection, children).values())

        def forward(self, indices):
            offsets = torch.arange(0, TABLES * LOOKUPS + 1, 4)
            batch = jagged.KeyedJaggedTensor(keys, indices.reshape(-1), offsets=offsets)
            return values_of(self.collection(batch))

    return OfTorchRec()


def keyed():
    return of_torchrec(
        "EmbeddingBagCollection", "EmbeddingBagConfig", "embedding_bags", lambda output: output.values()
    )


def looked_up():
    return of_torchrec(
        "EmbeddingCollection",
        "EmbeddingConfig",
        "embeddings",
        lambda output: torch.cat([output[f"f{number}"].values() for number in range(TABLES)]),
    )


class Caller(threading.Thread):
    """Calls a model until it is stopped; ``wrong``: results that are not among the answers."""

    def __init__(self, call, answers):
        super().__init__()
        self.call, self.answers, self.count, self.wrong = call, answers, 0, []
        self.stopped = threading.Event()

    def run(self):
        with torch.no_grad():
            while not self.stopped.is_set() and not self.wrong:
                try:
                    out = self.call()
                    if not any(torch.equal(out, answer) for answer in self.answers):
                        self.wrong.append(f"call {self.count} is none of the answers")
                except Exception as error:
                    self.wrong.append(repr(error))
                self.count += 1


def undisturbed(call, answers, change):
    """Runs ``change`` some times while another thread calls, with many changes of threads.

    An interval of 1e-6 has hung: glibc before 2.41 loses a wakeup of a condition variable once in very many
    (https://sourceware.org/bugzilla/show_bug.cgi?id=25847), and CPython's lock waits for it without a limit.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    caller = Caller(call, answers)
    caller.start()
    try:
        for turn in range(TURNS):
            change(turn)
    finally:
        caller.stopped.set()
        caller.join()
        sys.setswitchinterval(interval)
    assert not caller.wrong, caller.wrong
    assert caller.count > TURNS


def lookups():
    return torch.randint(0, ROWS, (TABLES, LOOKUPS), generator=torch.Generator().manual_seed(2))


def expected(indices, factor=1):
    pooled = [weight(number, factor)[own].view(-1, 4, DIM).sum(1) for number, own in enumerate(indices)]
    return torch.cat(pooled, dim=1)


@pytest.mark.parametrize("subject", (OfList, keyed))
def test_calls_while_a_model_is_swapped_and_unswapped(subject):
    model, indices = subject(), lookups()
    with torch.no_grad():
        for number, table in enumerate(model.tables):
            table.weight.copy_(weight(number))
    del model.tables

    def change(turn):
        report = (recfuse.unswap if turn % 2 else recfuse.swap)(model)
        assert {entry.action for entry in report.entries} & {"fused", "restored"}

    undisturbed(lambda: model(indices), [expected(indices)], change)


@pytest.mark.parametrize("subject", (OfList, keyed, looked_up))
def test_calls_before_each_line_of_a_swap(subject):
    model, indices = subject(), lookups()
    with torch.no_grad():
        for number, table in enumerate(model.tables):
            table.weight.copy_(weight(number))
    del model.tables

    @torch.no_grad()
    def call():
        return model(indices)

    want = call()
    for change in (recfuse.swap, recfuse.unswap, recfuse.swap):
        at_each_line(call, [want], lambda: change(model))  # noqa: B023


@pytest.mark.parametrize("change", ("swap", "unswap"))
def test_a_call_that_begins_before_a_change_and_ends_after_it(change, monkeypatch):
    model, indices = keyed(), lookups()
    del model.tables
    want = model(indices)
    recfuse.swap(model)
    collection, own = model.collection, vars(model.collection)
    pool, store = type(collection)._fused, own["_store"]

    def late(self, *arguments):
        if change == "unswap":
            recfuse.unswap(model)
        try:
            return pool(self, *arguments)
        finally:
            if change == "swap":
                own["_store"] = store

    monkeypatch.setattr(type(collection), "_fused", late)
    if change == "swap":
        del own["_store"]
    assert torch.equal(model(indices), want)


@pytest.mark.parametrize("run", (undisturbed, at_each_line))
def test_calls_while_a_checkpoint_is_assigned(run):
    collection, indices = FusedEmbeddingBagCollection([(ROWS, DIM)] * TABLES), lookups()
    offsets = torch.arange(0, TABLES * LOOKUPS + 1, 4)
    states = [
        {f"embedding_bags.t{number}.weight": weight(number, factor).to(dtype) for number in range(TABLES)}
        for factor, dtype in ((1, torch.float32), (2, torch.bfloat16))
    ]
    collection.load_state_dict(states[0], assign=True)
    answers = [expected(indices, factor) for factor in (1, 2)]
    answers.append(answers[1].bfloat16().float())
    turns = itertools.count(1)

    @torch.no_grad()
    def call():
        return collection(indices.reshape(-1), offsets).float()

    def change(*_):
        collection.load_state_dict(states[next(turns) % 2], assign=True)

    run(call, answers, change)
