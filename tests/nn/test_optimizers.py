"""Optimizers across swap and unswap: training continues unchanged, or is refused with a message."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn, optim
from torch.nn import Parameter

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection, FusedEmbeddingBagList
from recfuse.nn.packed.holders import check_holders
from recfuse.nn.packed.optimizer_state import Piece, Target
from recfuse.nn.packed.optimizers import Move
from support.dlrm import DLRM_Net, batch_of

SIZES = ((11, 4), (7, 4), (3, 8), (1, 4), (29, 8))


class Net(DLRM_Net):
    """Tables of two dims, of which the second has its own learning rate."""

    def __init__(self, sparse=False):
        super().__init__(sizes=[rows for rows, _ in SIZES], sparse=sparse)
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, d, mode="sum", sparse=sparse) for n, d in SIZES])
        self.bot_l = nn.Linear(5, 4)
        self.top_l = nn.Linear(sum(d for _, d in SIZES) + 4, 1)

    def forward(self, dense_x, lS_o, lS_i):
        return super().forward(dense_x, lS_o, lS_i) * 0.2


def step(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = (model(*batch) - batch[0][:, :1]).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, optim.Optimizer) and type(optimizer).__module__.startswith("torch.optim"):
        return optimizer.step(closure).item()
    loss = closure()
    optimizer.step()
    return loss.item()


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def same_steps(batches, *pairs):
    for batch in batches:
        close(*(step(model, optimizer, batch) for model, optimizer in pairs))


def groups_of(model, named=True):
    """Param groups with another order, and another learning rate for one table."""
    own = list(model.named_parameters())
    if not named:
        own = [parameter for _, parameter in own]
    return [{"params": [own[-1], *own[:1], *own[2:-1]]}, {"params": [own[1]], "lr": 0.02}]


class RowWise(optim.Optimizer):
    """Adagrad with one sum per row; the first step creates its state."""

    recfuse_row_wise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad, state = parameter.grad.to_dense(), self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros(parameter.shape[0])
                    state["step"] = 0
                state["step"] += 1
                state["momentum"] += grad.square().reshape(len(grad), -1).mean(1)
                root = state["momentum"].sqrt().add(1e-10)
                parameter -= group["lr"] * grad / root.view(-1, *[1] * (grad.dim() - 1))


DENSE = {
    "SGD": functools.partial(optim.SGD, lr=0.1),
    "SGD with momentum": functools.partial(
        optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, foreach=True
    ),
    "SGD, fused": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adam": functools.partial(optim.Adam, lr=0.1, amsgrad=True),
    "Adam, foreach": functools.partial(optim.Adam, lr=0.1, foreach=True),
    "Adam, lr a tensor": functools.partial(optim.Adam, lr=torch.tensor(0.1)),
    "Adam, fused": functools.partial(optim.Adam, lr=0.1, fused=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.1),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "by row": RowWise,
}
SPARSE = {
    "SGD": DENSE["SGD"],
    "SGD with momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": DENSE["Adagrad"],
    "by row": RowWise,
}
CASES = [(name, make, False) for name, make in DENSE.items()] + [
    (name, make, True) for name, make in SPARSE.items()
]


@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize(
    ("make", "sparse"),
    [case[1:] for case in CASES],
    ids=[f"{name}, {'sparse' if sparse else 'dense'}" for name, _, sparse in CASES],
)
def test_training_continues_across_swap_and_unswap(make, sparse, steps):
    model = Net(sparse)
    twin = copy.deepcopy(model)
    ours, theirs = (make(groups_of(one)) for one in (twin, model))
    batches = [batch_of(model) for _ in range(7)]
    same_steps(batches[:steps], (twin, ours), (model, theirs))
    report = recfuse.swap(twin, optimizers=[ours])
    assert len(report.fused) == 1
    names = [group["param_names"] for group in ours.param_groups]
    assert names[1] == [next(n for n, p in twin.named_parameters() if p is ours.param_groups[1]["params"][0])]
    assert set(names[0]) | set(names[1]) == {name for name, _ in twin.named_parameters()}
    same_steps(batches[steps:5], (twin, ours), (model, theirs))
    for name, value in model.state_dict().items():
        close(twin.state_dict()[name], value)
    recfuse.unswap(twin, optimizers=[ours])
    same_steps(batches[5:], (twin, ours), (model, theirs))
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    for number, state in theirs.state_dict()["state"].items():
        for key, value in state.items():
            mine = ours.state_dict()["state"][number][key]
            if isinstance(value, torch.Tensor) and value.is_sparse:  # coalesced or not
                mine, value = mine.to_dense(), value.to_dense()
            close(mine, value)


def test_sparse_adam():
    model = Net(sparse=True)
    twin = copy.deepcopy(model)
    pairs = [
        [optim.SparseAdam(list(one.emb_l.parameters()), lr=0.1), optim.Adam(one.top_l.parameters(), lr=0.1)]
        for one in (twin, model)
    ]

    def train(one, both, batch):
        loss = (one(*batch) - 1).square().mean()
        one.zero_grad()
        loss.backward()
        for optimizer in both:
            optimizer.step()
        return loss.item()

    batches = [batch_of(model) for _ in range(6)]
    for number, batch in enumerate(batches):
        if number == 2:
            recfuse.swap(twin, optimizers=pairs[0])
        if number == 4:
            recfuse.unswap(twin, optimizers=pairs[0])
        close(train(twin, pairs[0], batch), train(model, pairs[1], batch))


@pytest.mark.parametrize("sparse", (False, True))
def test_existing_gradients_move_along(sparse):
    model = Net(sparse)
    twin = copy.deepcopy(model)
    ours, theirs = (optim.SGD(one.parameters(), lr=0.1) for one in (twin, model))
    first, second = batch_of(model), batch_of(model)
    for one in (model, twin):
        one(*first).sum().backward()
    olds = [bag.weight for bag in twin.emb_l]
    recfuse.swap(twin, optimizers=[ours])
    assert all(old.grad is None for old in olds)
    assert twin.emb_l.packed_weights()[0].grad.is_sparse == sparse
    for table, bag in zip(twin.emb_l, model.emb_l, strict=True):
        close(table.weight.grad.to_dense(), bag.weight.grad.to_dense())
    for one, optimizer in ((model, theirs), (twin, ours)):
        one(*second).sum().backward()
        optimizer.step()
    recfuse.unswap(twin, optimizers=[ours])
    for bag, other in zip(twin.emb_l, model.emb_l, strict=True):
        close(bag.weight, other.weight)
        close(bag.weight.grad.to_dense(), other.weight.grad.to_dense())


def test_schedulers_continue():
    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = (optim.Adam(groups_of(one, named=False), lr=0.2) for one in (twin, model))
    schedulers = [optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5) for one in (ours, theirs)]
    for number in range(6):
        if number == 3:
            recfuse.swap(twin, optimizers=[ours])
        batch = batch_of(model)
        same_steps([batch], (twin, ours), (model, theirs))
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in ours.param_groups] == [0.2 / 8, 0.02 / 8]


def test_tables_with_other_numbers_of_steps_lie_in_other_parameters():
    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = (optim.Adam(one.parameters(), lr=0.1) for one in (twin, model))
    for one, optimizer in ((model, theirs), (twin, ours)):
        one.emb_l[0](torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    recfuse.swap(twin, optimizers=[ours])
    assert len(twin.emb_l.packed_weights()) == 3
    same_steps([batch_of(model) for _ in range(3)], (twin, ours), (model, theirs))


def test_frozen_tables_have_parameters_of_their_own():
    model = Net()
    model.emb_l[1].requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    frozen = model.emb_l[1].weight.detach().clone()
    recfuse.swap(model, optimizers=[optimizer])
    assert [weight.requires_grad for weight in model.emb_l.packed_weights()].count(False) == 1
    step(model, optimizer, batch_of(model))
    assert torch.equal(model.emb_l[1].weight, frozen)
    recfuse.unswap(model, optimizers=iter([optimizer]))
    assert [bag.weight.requires_grad for bag in model.emb_l] == [True, False, True, True, True]


def unchanged(model, optimizer, action, error, words):
    """The action raises, and nothing has changed."""
    kinds = [type(module) for module in model.modules()]
    state, listed = str(optimizer.state_dict()), optimizer.param_groups[0]["params"][:]
    with pytest.raises(error, match=words):
        action()
    assert [type(module) for module in model.modules()] == kinds
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], listed, strict=True))
    assert str(optimizer.state_dict()) == state


def test_an_optimizer_that_is_not_handed_over_is_named():
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, batch_of(model))
    words = r"recfuse\.swap: .*Adam.*table 0.*\(11, 4\).*optimizers=\[optimizer\].*after recfuse\.swap"
    unchanged(model, optimizer, lambda: recfuse.swap(model), ValueError, words)
    other = optim.SGD(model.top_l.parameters(), lr=0.1)
    unchanged(model, optimizer, lambda: recfuse.swap(model, optimizers=[other]), ValueError, "Adam")
    recfuse.swap(model, fuse=False)
    step(model, optimizer, batch_of(model))
    recfuse.swap(model, optimizers=[optimizer, other])
    words = r"recfuse\.unswap: .*Adam.*optimizers=\[optimizer\]"
    unchanged(model, optimizer, lambda: recfuse.unswap(model), ValueError, words)
    step(model, optimizer, batch_of(model))


@pytest.mark.parametrize("make", (FusedEmbeddingBagList, FusedEmbeddingBagCollection.from_embedding_bags))
def test_modules_made_by_hand_ask_for_optimizers_too(make):
    bags = [nn.EmbeddingBag(n, 4, mode="sum") for n in (5, 9)]
    optimizer = optim.Adagrad([bag.weight for bag in bags], lr=0.1)
    with pytest.raises(ValueError, match=r"Adagrad.*optimizers="):
        make(bags)
    with pytest.raises(TypeError, match=r"recfuse\.nn\.Fused.*expected a sequence of optimizers"):
        make(bags, optimizers=optimizer)
    module = make(bags, optimizers=iter([optimizer]))
    assert optimizer.param_groups[0]["params"] == module.packed_weights()
    assert optimizer.state[module.packed_weights()[0]]["sum"].shape == module.packed_weights()[0].shape


def test_deleted_optimizers_are_ignored():
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    optimizer.itself = optimizer  # only the garbage collector ends it
    del optimizer
    assert len(recfuse.swap(model).fused) == 1
    step(model, optim.SGD(model.parameters(), lr=0.1), batch_of(model))
    gc.collect()


def test_wrappers_that_hold_old_parameters_are_named(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        for target in (wrapped, model):
            with pytest.raises(ValueError, match=r"DistributedDataParallel wraps.*then wrap the model"):
                recfuse.swap(target)
        assert type(model.emb_l) is nn.ModuleList
        del wrapped, target
        gc.collect()
        recfuse.swap(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        before = model.emb_l[0].weight.clone()
        step(wrapped, optim.SGD(wrapped.parameters(), lr=0.1), batch_of(model))
        assert not torch.equal(model.emb_l[0].weight, before)
        with pytest.raises(ValueError, match=r"DistributedDataParallel.*recfuse\.unswap first"):
            recfuse.unswap(model)
    finally:
        torch.distributed.destroy_process_group()


def test_optimizers_that_step_in_backward_are_kept_or_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(optim.SGD, [model.emb_l[0].weight], {"lr": 0.1})
    report = recfuse.swap(model)
    assert "applied in the backward pass" in report.left[0].detail
    with pytest.raises(ValueError, match="SGD was applied in the backward"):
        FusedEmbeddingBagList(model.emb_l)


class _Column(optim.SGD):
    """An optimizer whose state has another shape."""

    recfuse_row_wise = True

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["columns"] = torch.zeros(parameter.shape[-1] + 1)
        return super().step(closure)


class _Object(optim.SGD):
    """An optimizer whose state is not a tensor."""

    recfuse_row_wise = True

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.sum()]
        return super().step(closure)


class _List(optim.SGD):
    """An optimizer with a list of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.all_params = list(self.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("make", "words"),
    (
        (_Column, r"state entry 'columns' of _Column is a Tensor of shape \(5,\).*\(11, 4\)"),
        (_Object, "state entry 'history' of _Object is a list"),
        (_List, "_List holds Parameters of the tables in its attribute 'all_params'"),
        (optim.LBFGS, "LBFGS has made steps"),
    ),
)
def test_optimizers_that_cannot_be_moved_are_refused(make, words):
    model = Net()
    optimizer = make(list(model.parameters()), lr=0.01)
    step(model, optimizer, batch_of(model))
    unchanged(model, optimizer, lambda: recfuse.swap(model, optimizers=[optimizer]), ValueError, words)
    step(model, optimizer, batch_of(model))


def test_a_new_lbfgs_continues():
    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = (optim.LBFGS(one.parameters(), lr=0.1) for one in (twin, model))
    recfuse.swap(twin, optimizers=[ours])
    same_steps([batch_of(model)] * 3, (twin, ours), (model, theirs))


def test_wrong_arguments():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for action in (recfuse.swap, recfuse.unswap):
        with pytest.raises(TypeError, match="expected a sequence of optimizers"):
            action(model, optimizers=optimizer)
        with pytest.raises(TypeError, match=r"expected torch\.optim\.Optimizer"):
            action(model, optimizers=[model])
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        recfuse.unswap([])


def test_gap_rows_of_the_state_are_zero():
    weights = [Parameter(torch.randn(rows, 4)) for rows in (3, 5)]
    optimizer = optim.Adam(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    want = [optimizer.state[weight]["exp_avg"].clone() for weight in weights]
    move = Move([optimizer], weights, "recfuse")
    assert move.tags[0] == move.tags[1]
    group = Parameter(torch.zeros(12, 4))
    move.apply([Target(group, "packed_dim4", [Piece(0, 0, 3, 0), Piece(1, 0, 5, 6)])])
    (only,) = optimizer.state
    assert only is group
    assert optimizer.param_groups[0]["params"] == [group]
    state = optimizer.state[group]
    assert state["step"].item() == 1
    assert torch.equal(state["exp_avg"][:3], want[0])
    assert torch.equal(state["exp_avg"][6:11], want[1])
    assert state["exp_avg"][3:6].abs().sum() == state["exp_avg"][11:].abs().sum() == 0
    assert group.grad[3:6].abs().sum() == 0
    check_holders(weights, [], "recfuse")


def test_torchrecs_optimizers():
    keyed = pytest.importorskip("torchrec.optim.keyed", reason="torchrec is not installed")
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    def make(model):
        own = dict(model.named_parameters())
        tables = {name: own[name] for name in own if "emb_l" in name}
        rest = {name: own[name] for name in own if "emb_l" not in name}
        sparse = keyed.KeyedOptimizerWrapper(tables, lambda params: optim.Adagrad(params, lr=0.1))
        dense = keyed.KeyedOptimizerWrapper(rest, lambda params: optim.Adam(params, lr=0.1))
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
        return keyed.CombinedOptimizer([("sparse", WarmupOptimizer(sparse, stages)), ("dense", dense)])

    model = Net(sparse=True)
    twin = copy.deepcopy(model)
    ours, theirs = make(twin), make(model)
    batches = [batch_of(model) for _ in range(9)]
    same_steps(batches[:3], (twin, ours), (model, theirs))
    recfuse.swap(twin, optimizers=[ours])
    assert "sparse.emb_l.packed_dim4" in ours.state_dict()["state"]
    same_steps(batches[3:6], (twin, ours), (model, theirs))
    recfuse.unswap(twin, optimizers=[ours])
    same_steps(batches[6:], (twin, ours), (model, theirs))
    assert list(ours.state_dict()["state"]) == list(theirs.state_dict()["state"])
