"""swap(fuse_optimizers=True): a script continues with torch's optimizer, and its tables with a fused
optimizer."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn

import recfuse
from recfuse.ops.training.applied_gradients import AppliedGradient
from support.dlrm import DLRM_Net, batch_of

close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Net(DLRM_Net):
    """With a separate bag in addition to the tables that one call pools."""

    def __init__(self, sparse, dtype=torch.float32):
        super().__init__(sparse=sparse)
        self.alone = nn.EmbeddingBag(9, 4, mode="mean", sparse=sparse)
        self.last = nn.Linear(5, 1)
        if dtype != torch.float32:
            for bag in self.emb_l:
                bag.to(dtype)

    def forward(self, dense_x, lS_o, lS_i):
        out = super().forward(dense_x, lS_o, lS_i)
        more = self.alone((dense_x[:, :2].abs() * 3).long() % 9)
        return self.last(torch.cat((out, more), dim=1)) * 0.1


def tables_of(model):
    own = {id(p) for p in recfuse.optim.embedding_parameters(model)}
    own |= {id(m.weight) for m in model.modules() if isinstance(m, nn.EmbeddingBag)}
    return [p for p in model.parameters() if id(p) in own], [
        p for p in model.parameters() if id(p) not in own
    ]


def all_of_it(kind, **options):
    def make(model):
        tables, others = tables_of(model)
        return [kind([{"params": others + tables[:1]}, {"params": tables[1:], "lr": 0.2}], lr=0.1, **options)]

    return make


def two(model):
    tables, others = tables_of(model)
    return [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(others, lr=0.01)]


MAKERS = {
    "SGD": (all_of_it(torch.optim.SGD), True),
    "SGD, dense": (all_of_it(torch.optim.SGD, foreach=True), False),
    "Adagrad": (all_of_it(torch.optim.Adagrad, initial_accumulator_value=0.1), True),
    "Adagrad, dense": (all_of_it(torch.optim.Adagrad, eps=1e-4), False),
    "SparseAdam and Adam": (two, True),
}


def train(model, optimizers, schedulers, batches):
    losses = []
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(*batch) - 1).square().mean()
        loss.backward()
        for step in (*optimizers, *schedulers):
            step.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def schedulers_of(optimizers):
    return [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in optimizers]


@pytest.mark.parametrize("before", (0, 2))
@pytest.mark.parametrize("name", MAKERS)
def test_an_unchanged_script_keeps_its_losses(name, before):
    make, sparse = MAKERS[name]
    model = Net(sparse)
    twin = copy.deepcopy(model)
    ours, theirs = make(twin), make(model)
    schedules = [schedulers_of(ours), schedulers_of(theirs)]
    batches = [batch_of(model) for _ in range(8)]
    pairs = (twin, ours, schedules[0]), (model, theirs, schedules[1])

    def go_on(part):
        close(*(train(*pair, part) for pair in pairs))
        for key, value in model.state_dict().items():
            close(twin.state_dict()[key], value)

    go_on(batches[:before])
    report = recfuse.swap(twin, optimizers=ours, fuse_optimizers=True)
    assert len(report.fused_optimizers) == 1 and "optimizers[0]" in str(report)
    go_on(batches[before : before + 3])
    tables = recfuse.optim.embedding_parameters(twin)
    assert len(tables) > 1 and all(type(table.grad) is AppliedGradient for table in tables)
    recfuse.unswap(twin, optimizers=ours)
    gc.collect()
    go_on(batches[before + 3 :])
    assert type(twin.alone) is nn.EmbeddingBag and twin.alone.weight.grad is not None
    ours[0].param_groups[0]["momentum"] = 0.5  # a dict as others: nothing is refused any more


@pytest.mark.parametrize("name", MAKERS)
def test_training_resumes_from_a_saved_state(name):
    make, sparse = MAKERS[name]
    model = Net(sparse)
    optimizers = make(model)
    recfuse.swap(model, optimizers=optimizers, fuse_optimizers=True)
    batches = [batch_of(model) for _ in range(5)]
    train(model, optimizers, [], batches[:2])
    weights, states = copy.deepcopy((model.state_dict(), [one.state_dict() for one in optimizers]))
    expected = train(model, optimizers, [], batches[2:])
    for group in optimizers[0].param_groups:
        group["lr"] = 0.7
    model.load_state_dict(weights)
    for optimizer, state_dict in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state_dict)
    close(train(model, optimizers, [], batches[2:]), expected)
    assert all(type(table.grad) is AppliedGradient for table in recfuse.optim.embedding_parameters(model))


def test_the_state_is_that_of_torch():
    model = Net(True)
    twin = copy.deepcopy(model)
    ours, theirs = two(twin), two(model)
    recfuse.swap(twin, optimizers=ours, fuse_optimizers=True)
    batches = [batch_of(model) for _ in range(3)]
    train(twin, ours, [], batches)
    train(model, theirs, [], batches)
    assert len(ours[0].state) < len(theirs[0].state)
    assert [state["step"] for state in ours[0].state_dict()["state"].values()] == [3] * len(theirs[0].state)
    both = copy.deepcopy((twin, ours))
    assert all(s["step"] == 3 for s in both[1][0].state.values())
    recfuse.unswap(twin, optimizers=ours)
    for mine, other in zip(
        ours[0].state_dict()["state"].values(), theirs[0].state_dict()["state"].values(), strict=True
    ):
        assert mine["step"] == other["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            close(mine[key], other[key])


def test_states_of_half_tables_are_float32_meanwhile():
    model = Net(True, torch.bfloat16)
    tables, others = tables_of(model)
    optimizer = torch.optim.Adagrad(tables + others, lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    half = next(p for p in recfuse.optim.embedding_parameters(model) if p.dtype == torch.bfloat16)
    assert optimizer.state[half]["sum"].dtype == torch.float32
    fused = optimizer.state[half]["sum"]
    fused.fill_(1 / 3)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.state[half]["sum"] is not None and float(optimizer.state[half]["sum"][0, 0]) == float(
        fused[0, 0]
    )
    assert optimizer.state[half]["sum"].data_ptr() == fused.data_ptr()
    recfuse.unswap(model, optimizers=[optimizer])
    assert all(s["sum"].dtype == p.dtype for p, s in optimizer.state.items())


REFUSED = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum is 0.9; expected 0"),
    "weight_decay": (
        lambda p: torch.optim.Adagrad(p, weight_decay=0.1),
        "weight_decay is 0.1, by which torch changes each row of a table at each step",
    ),
    "lr_decay": (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay is 0.1; expected 0"),
    "Adam": (lambda p: torch.optim.Adam(p), "Adam cannot be fused, since it moves each row of a table"),
    "AdamW": (lambda p: torch.optim.AdamW(p), "AdamW cannot be fused, since it moves each row of a table"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p), "RMSprop cannot be fused, since it has no fused step"),
    "lr": (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), "lr is a Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_without_an_equal_fused_step_are_refused(name):
    make, text = REFUSED[name]
    model = Net(False)
    optimizer = make(model.parameters())
    with pytest.raises((ValueError, TypeError), match=text):
        recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    assert type(model.emb_l) is nn.ModuleList and type(model.alone) is nn.EmbeddingBag
    with pytest.raises(ValueError, match="fuse_optimizers is True without optimizers"):
        recfuse.swap(model, fuse_optimizers=True)


def test_options_that_come_later_are_refused():
    model = Net(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    for key, value in (("momentum", 0.9), ("weight_decay", 0.1), ("lr", -1.0)):
        with pytest.raises(ValueError, match=f"{key} is {value}"):
            optimizer.param_groups[0][key] = value
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"momentum is 0\.9"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["momentum"] == 0


def test_an_optimizer_without_tables_is_left():
    model = Net(True)
    tables, others = tables_of(model)
    dense = torch.optim.AdamW(others)
    report = recfuse.swap(model, optimizers=[torch.optim.SGD(tables, lr=0.1), dense], fuse_optimizers=True)
    assert len(report.fused_optimizers) == 1 and type(dense.param_groups[0]) is dict


def test_two_backward_passes_before_step_are_refused():
    model = Net(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    losses = [model(*batch_of(model)).sum() for _ in range(2)]
    losses[0].backward()
    with pytest.raises(ValueError, match=r"a second backward\(\) came before step"):
        losses[1].backward()
    optimizer.step()


def test_a_second_swap_uses_the_packed_tables():
    model = Net(True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    recfuse.swap(model, optimizers=[optimizer])
    train(model, [optimizer], [], [batch_of(model)])
    sums = [state["sum"].clone() for state in optimizer.state.values()]
    for _ in range(2):
        report = recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
        assert len(report.fused_optimizers) == 1
    for state, old in zip(optimizer.state.values(), sums, strict=True):
        assert torch.equal(state["sum"], old) and state["step"] == 1
    train(model, [optimizer], [], [batch_of(model)])
    assert all(state["step"] == 2 for state in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("other", (nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)))
def test_a_table_shared_with_a_torch_module_is_refused(other):
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4, mode="sum"), "other": copy.deepcopy(other)})
    model.other.weight = model.bag.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reason = rf"the table 'bag' cannot be fused, since its weight belongs to other \({type(other).__name__}"
    with pytest.raises(ValueError, match=reason):
        recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    assert type(model.bag) is nn.EmbeddingBag
    assert len(recfuse.swap(model, optimizers=[optimizer]).replaced) == 1


def test_bags_that_share_a_table_are_fused():
    model = nn.ModuleDict({name: nn.EmbeddingBag(9, 4, mode="sum") for name in "ab"})
    model.b.weight = model.a.weight
    want = copy.deepcopy(model)
    for own, swap in ((model, True), (want, False)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        if swap:
            recfuse.swap(own, optimizers=[optimizer], fuse_optimizers=True)
        indices = torch.tensor([[1, 2], [2, 3]])
        (own.a(indices).square().sum() + own.b(indices).sum()).backward()
        optimizer.step()
    close(model.a.weight.detach(), want.a.weight.detach())
