"""Operations of model code on its tables, before and after packing: equal results, or an error with a
remedy. Each operation runs on a model of torch's tables and on a model of packed tables; results,
weights, outputs and gradients are compared."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from support.tables.model import LOOKUPS, OFFSETS, Model, assert_equal, backward, init


def init_data(model):
    for module in model.modules():
        if isinstance(module, nn.EmbeddingBag):
            torch.manual_seed(module.num_embeddings)
            module.weight.data.normal_(0, 0.02)


def init_numpy(model):
    for bag in model.emb_l:
        bag.weight.data = torch.full((bag.num_embeddings, bag.embedding_dim), 0.5)


def train(model, optimizer=torch.optim.SGD, **options):
    steps = optimizer(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(3):
        steps.zero_grad()
        backward(model)
        steps.step()


def frozen_by(freeze):
    def operation(model):
        freeze(model)
        train(model, momentum=0.9, weight_decay=0.1)
        return [bag.weight.grad is None for bag in model.emb_l]

    return operation


def freeze_by_name(model):
    for name, module in model.named_modules():
        if name == "emb_l.2":
            module.requires_grad_(False)


def freeze_all(model):
    for bag in model.emb_l:
        bag.requires_grad_(False)


def freeze_in_place(model):
    model.emb_l[2].weight.requires_grad = False


def frozen_between(model):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for trained in (True, False, False, True):
        model.emb_l[0].requires_grad_(trained)
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return [bag.weight.requires_grad for bag in model.emb_l]


def all_trained_again(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.emb_l[3].requires_grad_(False)
    model.requires_grad_(True)
    backward(model)
    optimizer.step()


def one_of_frozen(model):
    model.requires_grad_(False)
    model.emb_l[1].requires_grad_(True)
    model.emb_l[3].requires_grad_(True)
    train(model, torch.optim.Adam, weight_decay=0.1)


def pickled(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return copied_by(lambda _: torch.load(stream, weights_only=False))(model)


def copied_by(function):
    def operation(model):
        model.emb_l[0].requires_grad_(False)
        twin = function(model)
        with torch.no_grad():
            twin.emb_l[1].weight.fill_(3)
        train(twin)
        twin.emb_l[0].requires_grad_(True)
        train(twin)
        return twin().detach(), [p.detach() for p in twin.emb_l[1].parameters()], twin.state_dict()

    return operation


def table_copied(model):
    twin = copy.deepcopy(model.emb_l[1])
    with torch.no_grad():
        twin.weight.fill_(3)
    return twin(LOOKUPS, OFFSETS).detach(), [list(p.shape) for p in twin.parameters()], twin.state_dict()


def error_of(function):
    def operation(model):
        with pytest.raises(Exception) as error:
            function(model)
        return type(error.value)

    return operation


def loaded(state, **options):
    return lambda model: str(model.emb_l[0].load_state_dict(state, **options))


def weight_used(model):
    (model.emb_l[1].weight.norm() + nn.functional.embedding(LOOKUPS, model.emb_l[0].weight).sum()).backward()
    return [bag.weight.grad for bag in list(model.emb_l)[:2]]


def clipped(model):
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.emb_l[1].parameters(), 0.01)
    return norm, model.emb_l[1].weight.grad


def vector(model):
    found = nn.utils.parameters_to_vector(model.emb_l[1].parameters())
    nn.utils.vector_to_parameters(found.detach() * 2, model.emb_l[1].parameters())
    return found.detach()


def moved_to_meta(model):
    model.to("meta").to_empty(device="cpu")
    torch.manual_seed(2)
    for parameter in model.top.parameters():
        nn.init.normal_(parameter)
    init_data(model)


def buffered(model):
    model.emb_l[1].register_buffer("counts", torch.ones(3))
    state = model.state_dict()
    state["emb_l.1.counts"] = torch.zeros(3)
    model.load_state_dict(state)
    return model.emb_l[1].counts, sorted(model.state_dict())


def noted(model):
    for module in model.modules():
        module._is_initialised = True
    return [bag._is_initialised for bag in copy.deepcopy(model).emb_l]


def frozen_weight(model):
    model.emb_l[2].weight = nn.Parameter(torch.ones(12, 4), requires_grad=False)
    train(model)


def tied_rows(model):
    model.emb_l[0].weight.data.copy_(model.emb_l[2].weight.data[:10])


SAME = {
    "parameters": lambda model: [p.detach().clone() for p in model.emb_l[1].parameters()],
    "named_parameters": lambda model: [(n, list(p.shape)) for n, p in model.emb_l[1].named_parameters("x")],
    "a Parameter": lambda model: isinstance(model.emb_l[1].weight, nn.Parameter),
    "state_dict": lambda model: model.emb_l[1].state_dict(),
    "names of the state_dict": lambda model: list(model.state_dict()),
    "load_state_dict": loaded({"weight": torch.ones(10, 4)}),
    "load_state_dict, assign": loaded({"weight": torch.ones(10, 4)}, assign=True),
    "load_state_dict, not strict": loaded({"bias": torch.ones(1)}, strict=False),
    "load_state_dict, missing": error_of(loaded({})),
    "load_state_dict, unexpected": error_of(loaded({"weight": torch.ones(10, 4), "bias": torch.ones(1)})),
    "load_state_dict, another shape": error_of(loaded({"weight": torch.ones(9, 4)})),
    "load_state_dict, no tensor": error_of(loaded({"weight": 1})),
    "reset_parameters": lambda model: [
        torch.manual_seed(1) and bag.reset_parameters() for bag in model.emb_l
    ],
    "apply(init)": lambda model: model.apply(init) and None,
    "init of .data": init_data,
    "weight.data = tensor": init_numpy,
    "weight = Parameter": lambda model: setattr(model.emb_l[1], "weight", nn.Parameter(torch.ones(7, 8))),
    "weight = frozen Parameter": frozen_weight,
    "rows from another table": tied_rows,
    "training": lambda model: [model.eval().emb_l[1].training, model.train().emb_l[1].training],
    "eval of one": lambda model: [model.emb_l[1].eval().training, model.emb_l[0].training],
    "attributes": lambda model: [
        (bag.max_norm, bag.norm_type, bag.scale_grad_by_freq, bag.mode, bag.padding_idx, bag.sparse)
        for bag in model.emb_l
    ],
    "the same value": lambda model: setattr(model.emb_l[0], "max_norm", None),
    "get_parameter": lambda model: model.get_parameter("emb_l.3.weight").detach().clone(),
    "get_submodule": lambda model: model.get_submodule("emb_l.3").embedding_dim,
    "named_modules": lambda model: [name for name, _ in model.named_modules()],
    "isinstance": lambda model: sum(isinstance(module, nn.EmbeddingBag) for module in model.modules()),
    "gradients": lambda model: [backward(model), *(bag.weight.grad for bag in model.emb_l)][1:],
    "zero_grad": lambda model: [backward(model), model.zero_grad(), *(b.weight.grad for b in model.emb_l)],
    "clip_grad_norm_": clipped,
    "parameters_to_vector": vector,
    "the weight used": weight_used,
    "a call": lambda model: [bag(LOOKUPS, OFFSETS) for bag in model.emb_l],
    "list": lambda model: [len(model.emb_l), len(model.emb_l[1:3]), model.emb_l[1] in model.emb_l],
    "index": lambda model: [model.emb_l[-1].num_embeddings, [bag.embedding_dim for bag in model.emb_l]],
    "index out of range": error_of(lambda model: model.emb_l[4]),
    "freeze: requires_grad_": frozen_by(lambda model: model.emb_l[2].requires_grad_(False)),
    "freeze: the weight": frozen_by(freeze_in_place),
    "freeze: weight.requires_grad_": frozen_by(lambda model: model.emb_l[2].weight.requires_grad_(False)),
    "freeze: get_parameter": frozen_by(lambda m: m.get_parameter("emb_l.0.weight").requires_grad_(False)),
    "freeze: by name": frozen_by(freeze_by_name),
    "freeze: all": frozen_by(freeze_all),
    "freeze for some steps": frozen_between,
    "freeze, then train all": all_trained_again,
    "train two of a frozen model": one_of_frozen,
    "deepcopy": copied_by(copy.deepcopy),
    "pickle": copied_by(lambda model: pickle.loads(pickle.dumps(model))),
    "torch.save": pickled,
    "deepcopy of a table": table_copied,
    "half and back": lambda model: model.half().float() and None,
    "float64": lambda model: model.double() and None,
    "meta and back": moved_to_meta,
    "the same device": lambda model: model.emb_l[1].to("cpu").float() and None,
    "a buffer": buffered,
    "another attribute": noted,
    "repr": lambda model: repr(model.emb_l[1]).partition("(")[2],
}


@pytest.mark.parametrize("name", SAME)
def test_table_modules_keep_their_behaviour(name):
    plain, packed = Model(packed=False), Model(packed=True)
    assert_equal(SAME[name](packed), SAME[name](plain))
    torch.testing.assert_close(dict(packed.state_dict()), dict(plain.state_dict()))
    for frozen in (True, False):
        if not frozen:
            for model in (plain, packed):
                model.zero_grad()
        outs = [model() for model in (packed, plain)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.sum().backward()
        for ours, theirs in zip(packed.emb_l, plain.emb_l, strict=True):
            assert ours.weight.requires_grad == theirs.weight.requires_grad
            torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


REFUSED = {
    "forward hook": lambda table: table.register_forward_hook(print),
    "forward pre-hook": lambda table: table.register_forward_pre_hook(print),
    "hook before loading": lambda table: table.register_load_state_dict_pre_hook(print),
    "backward hook": lambda table: table.register_full_backward_hook(print),
    "backward pre-hook": lambda table: table.register_full_backward_pre_hook(print),
    "hook of the weight": lambda table: table.weight.register_hook(print),
    "hook after accumulation": lambda table: table.weight.register_post_accumulate_grad_hook(print),
    "parametrization": lambda table: parametrize.register_parametrization(table, "weight", nn.Identity()),
    "weight norm": lambda table: parametrizations.weight_norm(table),
    "old weight norm": lambda table: nn.utils.weight_norm(table),
    "spectral norm": lambda table: nn.utils.spectral_norm(table),
    "pruning": lambda table: prune.l1_unstructured(table, "weight", 2),
    "optimizer": lambda table: torch.optim.SGD(table.parameters(), lr=0.1),
    "optimizer of a frozen one": lambda table: torch.optim.Adam(table.requires_grad_(False).parameters()),
    "functional_call": lambda table: torch.func.functional_call(
        table, {"weight": torch.zeros(10, 4)}, (LOOKUPS, OFFSETS)
    ),
    "half": lambda table: table.half(),
    "to": lambda table: table.to("meta"),
    "to_empty": lambda table: table.to_empty(device="meta"),
    "share_memory": lambda table: table.share_memory(),
    "mode": lambda table: setattr(table, "mode", "mean"),
    "max_norm": lambda table: setattr(table, "max_norm", 1.0),
    "forward": lambda table: setattr(table, "forward", print),
    "a Parameter": lambda table: setattr(table, "scale", nn.Parameter(torch.ones(1))),
    "register_parameter": lambda table: table.register_parameter("scale", None),
    "weight removed": lambda table: delattr(table, "weight"),
    "gradient": lambda table: setattr(table.weight, "grad", None),
    "qconfig": lambda table: setattr(table, "qconfig", torch.ao.quantization.default_dynamic_qconfig),
    "another shape": lambda table: setattr(table, "weight", nn.Parameter(torch.ones(3, 3))),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_uses_of_table_modules_are_refused(name):
    model = Model(packed=True)
    with pytest.raises(
        (AttributeError, ValueError, TypeError), match=r"(?is)recfuse: .*(packed|table '0')"
    ) as raised:
        REFUSED[name](model.emb_l[0])
    assert not re.search(r"\w\(?\)?\.\. ", str(raised.value)), "no stop is doubled"
    assert torch.equal(model.emb_l[0].weight, Model(packed=False).emb_l[0].weight)
    assert torch.equal(model(), Model(packed=False)())
