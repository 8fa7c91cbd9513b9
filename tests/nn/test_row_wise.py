"""Optimizers whose step depends on the whole Parameter: equal steps after a swap, or an error."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util

import pytest
import torch
from torch import optim

import recfuse
from recfuse.nn.packed.by_table.known_optimizers import KNOWN
from recfuse.nn.packed.row_wise import is_row_wise
from support.dlrm import DLRM_Net, batch_of, train

close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


class Lamb(optim.Optimizer):
    """Scales the step of a Parameter by norms of the whole; its state has entries of no table's shape."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"], state["norms"] = torch.zeros_like(parameter), []
                state["average"].mul_(0.9).add_(parameter.grad.to_dense(), alpha=0.1)
                state["norms"].append(parameter.norm().item())
                ratio = parameter.norm() / (state["average"].norm() + 1e-6)
                parameter.sub_(state["average"] * (group["lr"] * ratio))


class LarsAround(optim.Optimizer):
    """Scales each gradient by its Parameter, then calls another optimizer, with that optimizer's groups."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad *= parameter.norm() / (parameter.grad.norm() + 1e-6)
        self.inner.step()


def around(params):
    return LarsAround(optim.SGD(params, lr=0.1, momentum=0.9))


def muon(params):
    return optim.Muon([parameter for parameter in params if parameter.dim() == 2], lr=0.01)


MAKERS = {"LAMB": Lamb, "LARS": around, "Adafactor": optim.Adafactor}
if hasattr(optim, "Muon"):
    MAKERS["Muon"] = muon
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
@pytest.mark.parametrize("steps", (0, 2))
def test_an_optimizer_of_whole_parameters_keeps_tables_separate(make, steps):
    model = DLRM_Net(sparse=False)
    twin = copy.deepcopy(model)
    theirs, ours = (make(list(one.parameters())) for one in (model, twin))
    batches = [batch_of(model) for _ in range(7)]

    def same(some):
        close(train(twin, ours, some), train(model, theirs, some))
        for name, value in model.state_dict().items():
            close(twin.state_dict()[name], value)

    same(batches[:steps])
    assert recfuse.swap(twin, optimizers=[ours]).fused
    same(batches[steps:5])
    recfuse.unswap(twin, optimizers=[ours])
    same(batches[5:])


@every_maker
def test_such_an_optimizer_of_packed_tables_is_refused_at_its_first_step(make):
    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    model = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = make(list(model.parameters()))
    with pytest.raises(ValueError, match=r"packed Parameter of shape \[.*\], in which 4 tables lie"):
        train(model, optimizer, [batch_of(model)])
    for name, value in before.items():
        if "emb_l" in name:
            assert torch.equal(model.state_dict()[name], value)


def test_a_compiled_step_of_such_an_optimizer_is_refused():
    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    optimizer = Lamb(model.parameters())
    model(*batch_of(model)).sum().backward()
    with pytest.raises(ValueError, match="Lamb is about to make a step of a packed Parameter"):
        torch.compile(optimizer.step, backend="eager")()


def test_a_user_may_vouch_for_an_optimizer():
    class Own(Lamb):
        recfuse_row_wise = True

    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    train(model, Own(model.parameters()), [batch_of(model)])


def test_a_user_may_have_each_table_keep_a_parameter():
    model = DLRM_Net(sparse=False)
    optimizer = optim.AdamW(model.parameters())
    optimizer.recfuse_row_wise = False
    recfuse.swap(model, optimizers=[optimizer])
    assert len(list(model.emb_l.parameters())) == 4


def test_optimizers_of_other_parameters_may_step():
    model = DLRM_Net(sparse=False)
    recfuse.swap(model)
    linear = torch.nn.Linear(3, 3)
    other = Lamb(linear.parameters())
    linear(torch.ones(1, 3)).sum().backward()
    other.step()
    tables = recfuse.nn.FusedEmbeddingBagCollection([(11, 4), (7, 8)])
    single = Lamb(tables.parameters())
    tables(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
    single.step()


class _Renamed(optim.Adam):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.name = "renamed"


class _Centred(optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class _Grouped(optim.SGD):
    def _init_group(self, group, *rest):
        return super()._init_group(group, *rest)


def test_known_optimizer_classes():
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Rprop, optim.SparseAdam, _Renamed):
        assert is_row_wise(kind(params)), kind
    assert is_row_wise(recfuse.optim.Adam(params))
    for kind in (_Centred, _Grouped, Lamb, optim.Adafactor):
        assert not is_row_wise(kind(params)), kind


@pytest.mark.parametrize("package", ("torch", "torchrec", "accelerate", "recfuse"))
def test_the_classes_of_the_list_exist(package):
    pytest.importorskip(package)
    names = [name for name in KNOWN if name.split(".")[0] == package]
    assert names
    peers = all(importlib.util.find_spec(peer) for peer in ("torchrec", "fbgemm_gpu"))
    for name in names:
        module, _, kind = name.rpartition(".")
        if module.startswith("recfuse.torchrec") and not peers:
            continue
        assert issubclass(getattr(importlib.import_module(module), kind), optim.Optimizer), name
