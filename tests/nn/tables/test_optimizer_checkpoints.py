"""Checkpoints of optimizers: saved by torch's modules or packed modules, loaded by the other; training
continues unchanged; impossible cases are refused by name."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as tool
from torch.distributed.optim import ZeroRedundancyOptimizer

import recfuse
from recfuse.nn import FusedEmbeddingBagCollection
from support.dlrm import DLRM_Net, batch_of
from support.processes.fresh import run_python
from support.tables.model import Model, assert_equal, backward

KINDS = {
    "SGD": {},
    "SGD, momentum": dict(momentum=0.9, weight_decay=0.01),
    "Adam": dict(amsgrad=True),
    "AdamW": {},
    "Adagrad": dict(initial_accumulator_value=0.1),
    "RMSprop": dict(centered=True),
    "NAdam": {},
}
DIRECTIONS = ((False, True), (True, False), (True, True))


def made(packed, kind="Adam", lr=0.1, groups=None, **options):
    model = Model(packed=packed)
    parameters = model.parameters() if groups is None else groups(model)
    return model, getattr(torch.optim, kind.partition(",")[0])(parameters, lr=lr, **options)


def steps(model, optimizer, number=2):
    for _ in range(number):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def with_torch(folder):
    def save(_, optimizer):
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    return save, lambda _, optimizer: optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))


def with_accelerate(folder):
    accelerate = pytest.importorskip("accelerate")

    def of(model, optimizer):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        return accelerator

    return lambda *pair: of(*pair).save_state(str(folder)), lambda *pair: of(*pair).load_state(str(folder))


def with_dcp(flat):
    options = tool.StateDictOptions(flatten_optimizer_state_dict=flat)

    def of(folder):
        def save(model, optimizer):
            state = tool.get_optimizer_state_dict(model, optimizer, options=options)
            dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=True)

        def load(model, optimizer):
            state = {"optimizer": tool.get_optimizer_state_dict(model, optimizer, options=options)}
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            tool.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)

        return save, load

    return of


def with_whole_state(folder):
    options = tool.StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(*pair):
        torch.save(tool.get_state_dict(*pair, options=options), folder / "state.pt")

    def load(model, optimizer):
        of_model, of_optimizer = torch.load(folder / "state.pt")
        tool.set_state_dict(
            model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options
        )

    return save, load


TOOLS = {
    "torch": with_torch,
    "accelerate": with_accelerate,
    "DCP": with_dcp(False),
    "DCP, flat": with_dcp(True),
    "DCP, whole": with_whole_state,
}


@pytest.mark.parametrize("saved, loaded", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOOLS)
def test_training_continues(name, kind, saved, loaded, tmp_path):
    if kind == "SGD" and name == "DCP, whole":
        pytest.skip("torch's function expects a state")
    save, load = TOOLS[name](tmp_path)
    source, target = made(saved, kind, **KINDS[kind]), made(loaded, kind, lr=0.7, **KINDS[kind])
    steps(*source)
    save(*source)
    target[0].load_state_dict(source[0].state_dict())
    load(*target)
    steps(*source)
    steps(*target)
    assert_equal(dict(target[0].state_dict()), dict(source[0].state_dict()))
    assert target[1].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_as_torchs(kind):
    pairs = [made(packed, kind, **KINDS[kind]) for packed in (False, True)]
    for pair in pairs:
        steps(*pair)
    theirs, ours = (optimizer.state_dict() for _, optimizer in pairs)
    assert_equal(ours, theirs)
    for number, state in ours["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.untyped_storage().nbytes() == value.nbytes, (number, key)
    for flat in (False, True):
        options = tool.StateDictOptions(flatten_optimizer_state_dict=flat)
        theirs, ours = (tool.get_optimizer_state_dict(*pair, options=options) for pair in pairs)
        assert sorted(ours) == sorted(theirs)
        assert_equal({key: ours[key] for key in theirs}, theirs) if flat else assert_equal(
            {**ours, "state": {name: ours["state"][name] for name in theirs["state"]}}, theirs
        )


def test_states_are_those_of_the_optimizer():
    model, optimizer = made(True)
    steps(model, optimizer)
    optimizer.state_dict()["state"][2]["exp_avg"].fill_(5)
    matrix = model.emb_l.packed_dim4
    assert optimizer.state[matrix]["exp_avg"][:10].eq(5).all()
    step = optimizer.state_dict()["state"][2]["step"]
    step += 1
    assert optimizer.state[matrix]["step"] == 2, "of each table, as torch's"


def named(model):
    return list(model.named_parameters())


def two_groups(model):
    return [
        {"params": model.emb_l.parameters(), "lr": 0.2},
        {"params": model.top.parameters()},
    ]


@pytest.mark.parametrize("saved, loaded", DIRECTIONS)
@pytest.mark.parametrize("groups", (named, two_groups))
def test_names_and_groups(groups, saved, loaded):
    source, target = made(saved, groups=groups), made(loaded, lr=0.7, groups=groups)
    steps(*source)
    state = copy.deepcopy(source[1].state_dict())
    if groups is named:
        assert "emb_l.2.weight" in state["param_groups"][0]["param_names"]
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(state)
    steps(*source)
    steps(*target)
    assert_equal(dict(target[0].state_dict()), dict(source[0].state_dict()))
    assert_equal(target[1].state_dict(), source[1].state_dict())


def reordered(model):
    weights = [bag.weight for bag in model.emb_l]
    return [weights[3], model.top.weight, weights[1], weights[0], model.top.bias, weights[2]]


@pytest.mark.parametrize("row_wise", (True, False))
@pytest.mark.parametrize("saved, loaded", DIRECTIONS)
def test_the_order_of_a_group_stays_when_tables_are_packed(saved, loaded, row_wise):
    torch.manual_seed(4)

    def of(packed):
        model = DLRM_Net((9, 9, 9), sparse=False)
        weights = [bag.weight for bag in model.emb_l]
        others = [p for p in model.parameters() if all(p is not weight for weight in weights)]
        entries = [weights[2], *others, weights[0], weights[1]]
        optimizer = torch.optim.Adam(entries, lr=0.1)
        optimizer.recfuse_row_wise = row_wise
        if packed:
            recfuse.swap(model, optimizers=[optimizer])
            assert (len(optimizer.param_groups[0]["params"]) < len(entries)) == row_wise
        return model, optimizer

    (model, optimizer), (twin, of_twin) = of(saved), of(loaded)
    batch = batch_of(model)

    def train(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(*batch).square().mean().backward()
            optimizer.step()

    twin.load_state_dict(model.state_dict())
    train(model, optimizer)
    twin.load_state_dict(model.state_dict())
    of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(twin, of_twin)
    assert_equal(dict(twin.state_dict()), dict(model.state_dict()))
    if loaded:
        recfuse.unswap(twin, optimizers=[of_twin])
    (_, plain) = of(False)
    plain.load_state_dict(of_twin.state_dict())
    for parameter, state in plain.state.items():
        assert parameter.shape == state["exp_avg"].shape
    states = (dict(sorted(one.state_dict()["state"].items())) for one in (plain, optimizer))
    assert_equal(*states)


@pytest.mark.parametrize("ours, theirs", (("Adam", "SparseAdam"), ("Adagrad", "Adagrad"), ("SGD", "SGD")))
def test_an_optimizer_of_recfuse_and_torchs(ours, theirs):
    sizes = [(9, 4), (5, 8), (7, 4)]
    lookups = torch.tensor([0, 3, 4, 1, 2, 4]), torch.tensor([0, 2, 4, 6])

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            bags = (nn.EmbeddingBag(*size, mode="sum", sparse=True) for size in sizes)
            self.embedding_bags = nn.ModuleDict({f"t{number}": bag for number, bag in enumerate(bags)})

        def forward(self, indices, offsets):
            parts = zip(self.embedding_bags.values(), offsets[:-1], offsets[1:], strict=True)
            return torch.cat([bag(indices[a:b][None]) for bag, a, b in parts], 1)

    plain, packed = Loop(), FusedEmbeddingBagCollection(sizes)
    packed.load_state_dict(plain.state_dict())
    torchs = getattr(torch.optim, theirs)(plain.parameters(), lr=0.1)
    fused = getattr(recfuse.optim, ours)(packed, lr=0.1)
    for number in range(6):
        for model, optimizer in ((plain, torchs), (packed, fused)):
            optimizer.zero_grad()
            model(*lookups).square().sum().backward()
            optimizer.step()
        if number == 1:
            state = copy.deepcopy(torchs.state_dict())
            fused = getattr(recfuse.optim, ours)(packed, lr=0.3)
            fused.load_state_dict(state)
        if number == 3:
            state = copy.deepcopy(fused.state_dict())
            torchs = getattr(torch.optim, theirs)(plain.parameters(), lr=0.3)
            torchs.load_state_dict(state)
    assert_equal(dict(packed.state_dict()), dict(plain.state_dict()))
    assert fused.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("saved, loaded", DIRECTIONS)
def test_a_state_of_tables_that_were_fused_with_torchs_optimizer(saved, loaded):
    def of(packed, lr=0.1):
        torch.manual_seed(4)
        model = DLRM_Net((9, 7, 5), sparse=True)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
        if packed:
            recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
        return model, optimizer

    (model, optimizer), (twin, of_twin) = of(saved), of(loaded, 0.7)
    batch = batch_of(model)

    def train(model, optimizer):
        optimizer.zero_grad()
        model(*batch).square().mean().backward()
        optimizer.step()

    train(model, optimizer)
    twin.load_state_dict(model.state_dict())
    of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(twin, of_twin)
    assert_equal(dict(twin.state_dict()), dict(model.state_dict()))
    assert_equal(of_twin.state_dict(), optimizer.state_dict())


def without_table(model, optimizer, which=2):
    """Steps in which a table of torch's takes no part."""
    optimizer.zero_grad()
    backward(model)
    model.emb_l[which].weight.grad = None
    optimizer.step()


@pytest.mark.parametrize("name", ("torch", "DCP"))
def test_tables_with_other_states_are_refused(name, tmp_path):
    save, load = TOOLS[name](tmp_path)
    plain, packed = made(False), made(True)
    steps(*packed)
    steps(*plain, 1)
    without_table(*plain)
    save(*plain)
    before = copy.deepcopy(packed[1].state_dict())
    text = (
        r"load_state_dict\(\) of Adam: 'step' is \[2.0, 1.0, 2.0\] for tables .* recfuse.swap\(model, optimi"
    )
    if name == "DCP":
        state = tool.get_optimizer_state_dict(*plain)
        with pytest.raises(ValueError, match=text):
            tool.set_optimizer_state_dict(*packed, state)
    else:
        with pytest.raises(ValueError, match=text):
            load(*packed)
    assert_equal(packed[1].state_dict(), before)
    plain = made(False)
    without_table(*plain)
    with pytest.raises(
        ValueError, match=r"table '2' has the state \[\], table '0' has \['exp_avg', .*swap\("
    ):
        packed[1].load_state_dict(plain[1].state_dict())


def test_states_of_another_shape_are_refused():
    packed = made(True)
    steps(*packed)
    state = copy.deepcopy(packed[1].state_dict())
    state["state"][4]["exp_avg"] = state["state"][4]["exp_avg"][:9]
    with pytest.raises(
        ValueError,
        match=r"'exp_avg' of table '2' is .*\(9, 4\).*; expected a value that fits its shape \(12, 4\)",
    ):
        packed[1].load_state_dict(state)


def test_an_entry_that_no_table_can_have_is_refused():
    model, optimizer = made(True)
    steps(model, optimizer)
    optimizer.state[model.emb_l.packed_dim4]["basis"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"state_dict\(\) of Adam: state entry 'basis' .* table '0'.*unswap"):
        optimizer.state_dict()


def test_groups_of_one_parameter_are_refused_by_dcp():
    def apart(model):
        weights = [bag.weight for bag in model.emb_l]
        return [{"params": [*weights[1:], *model.top.parameters()]}, {"params": weights[:1], "lr": 0.5}]

    plain, packed = made(False, groups=apart), made(True)
    for pair in (plain, packed):
        steps(*pair)
    for flat in (False, True):
        options = tool.StateDictOptions(flatten_optimizer_state_dict=flat)
        state = tool.get_optimizer_state_dict(*plain, options=options)
        with pytest.raises(ValueError, match=r"checkpoint.state_dict: emb_l.0.weight, .* packed"):
            tool.set_optimizer_state_dict(*packed, state, options=options)


@pytest.mark.parametrize("kind, options", (("SGD", dict(momentum=0.9)), ("Adam", {})))
@pytest.mark.parametrize("before", (0, 2))
def test_a_table_that_is_frozen_alone(kind, options, before, tmp_path):
    pairs = [made(packed, kind, **options) for packed in (False, True)]
    for pair in pairs:
        steps(*pair, before)
        pair[0].emb_l[2].requires_grad_(False)
        steps(*pair)
    theirs, ours = (optimizer.state_dict() for _, optimizer in pairs)
    if kind == "Adam" or before:
        assert_equal(ours, theirs)
    for name in ("torch", "DCP"):
        save, load = TOOLS[name](tmp_path)
        for saved, loaded in DIRECTIONS:
            source, (model, optimizer) = pairs[saved], made(loaded, kind, 0.7, **options)
            model.emb_l[2].requires_grad_(False)
            model.load_state_dict(source[0].state_dict())
            if name == "torch":
                save(*source)
                load(model, optimizer)
            else:
                state = tool.get_optimizer_state_dict(*source)
                tool.set_optimizer_state_dict(model, optimizer, copy.deepcopy(state))
            twin = copy.deepcopy(pairs[0])
            steps(*twin)
            steps(model, optimizer)
            assert_equal(dict(model.state_dict()), dict(twin[0].state_dict()))
            if name == "DCP" and not loaded:  # torch's function leaves the state of a frozen Parameter out
                continue
            for one in (twin[0], model):
                one.emb_l[2].requires_grad_(True)
            if kind == "Adam" and loaded:
                with pytest.raises(ValueError, match="'2' was frozen alone"):
                    steps(model, optimizer)
                continue
            steps(*twin)
            steps(model, optimizer)
            assert_equal(dict(model.state_dict()), dict(twin[0].state_dict()))


def test_a_tool_of_torch_that_counts_parameters_has_them(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        models = [Model(packed=True), Model(packed=True)]
        optimizers = [
            ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
            for model in models
        ]
        steps(models[0], optimizers[0])
        optimizers[0].consolidate_state_dict()
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, optimizer in zip(models, optimizers, strict=True):
            steps(model, optimizer)
        assert_equal(dict(models[1].state_dict()), dict(models[0].state_dict()))
    finally:
        dist.destroy_process_group()


def test_a_state_by_parameter_still_loads():
    model, optimizer = made(True)
    steps(model, optimizer)
    numbers = {parameter: at for at, parameter in enumerate(optimizer.param_groups[0]["params"])}
    state = {
        "state": {numbers[parameter]: state for parameter, state in optimizer.state.items()},
        "param_groups": [{**optimizer.param_groups[0], "params": list(numbers.values())}],
    }
    twin, of_twin = made(True, lr=0.7)
    twin.load_state_dict(model.state_dict())
    of_twin.load_state_dict(copy.deepcopy(state))
    for pair in ((model, optimizer), (twin, of_twin)):
        steps(*pair)
    assert_equal(dict(twin.state_dict()), dict(model.state_dict()))


def test_a_pickled_state_dict_has_torchs_classes_alone():
    model, optimizer = made(True)
    steps(model, optimizer)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    assert_equal(torch.load(stream, weights_only=True), optimizer.state_dict())


IMPORTED_LATER = """
import sys, torch, recfuse
model = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (5, 4)])
optimizer = torch.optim.Adam(model.parameters())
model(torch.arange(4), torch.arange(5)).sum().backward()
optimizer.step()
assert "torch.distributed.checkpoint.state_dict" not in sys.modules
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
state = get_optimizer_state_dict(model, optimizer)
assert list(state["state"]) == ["embedding_bags.t0.weight", "embedding_bags.t1.weight"], list(state["state"])
set_optimizer_state_dict(model, optimizer, state)
"""


@pytest.mark.long
def test_the_tool_may_be_imported_after_tables_were_packed():
    run_python("-c", IMPORTED_LATER, check=True)


class Scored(nn.Module):
    """A model that transformers' Trainer can train: it returns its loss."""

    def __init__(self, packed):
        super().__init__()
        self.model = Model(packed=packed)

    def forward(self, indices, labels):
        offsets = torch.arange(0, indices.numel(), indices.shape[1])
        return {"loss": (self.model(indices.flatten(), offsets)[:, 0] - labels).square().mean()}


@pytest.mark.parametrize("saved, loaded", DIRECTIONS)
def test_torch_and_recfuse_resume_from_the_same_checkpoint(saved, loaded, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(3)
    rows = [{"indices": torch.randint(0, 5, (2,)), "labels": torch.rand(())} for _ in range(16)]

    def trained(packed, folder, resume=None):
        arguments = transformers.TrainingArguments(
            str(folder), use_cpu=True, max_steps=4, save_steps=2, per_device_train_batch_size=4, seed=5,
            report_to=[], disable_tqdm=True, learning_rate=0.1, remove_unused_columns=False,
        )  # fmt: skip
        trainer = transformers.Trainer(Scored(packed), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    whole = trained(saved, tmp_path / "whole")
    resumed = trained(loaded, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()))
