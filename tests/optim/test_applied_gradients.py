"""Reads of gradients between backward() and step() of tables that backward() updates."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch import nn

import recfuse
from recfuse import optim
from recfuse.ops.training.applied_gradients import AppliedGradient
from recfuse.ops.updates import unfinished, update_of

close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
INDICES = torch.tensor([[1, 2], [3, 3], [0, 8]])


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 1))


def swapped(kind=torch.optim.SGD, **options):
    model = model_of()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    report = recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    return model, optimizer, report


def by_hand():
    model = nn.Sequential(recfuse.nn.EmbeddingBag(9, 4), nn.Linear(4, 1))
    return model, optim.SGD(model[0], lr=0.1), None


def loss_of(model, indices=INDICES):
    return (model(indices) - 1).square().mean()


def total(model):
    return sum(p.grad.norm() for p in model.parameters() if p.grad is not None)


def averaged(model):
    for parameter in model.parameters():
        parameter.grad /= 2


READERS = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_, foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "get_total_norm": lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "clip_grads_with_norm_": lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(9.0)),
    "a norm to log": total,
    "a mean over steps": averaged,
    "data": lambda m: m[0].weight.grad.data,
    "a row": lambda m: m[0].weight.grad[0],
    "detach": lambda m: m[0].weight.grad.detach(),
    "clone": lambda m: [p.grad.clone() for p in m.parameters()],
    "numpy": lambda m: m[0].weight.grad.numpy(),
    "tolist": lambda m: m[0].weight.grad.tolist(),
    "data_ptr": lambda m: m[0].weight.grad.data_ptr(),
    "dlpack": lambda m: torch.from_dlpack(m[0].weight.grad),
    "pickle": lambda m: pickle.dumps([p.grad for p in m.parameters()]),
    "isfinite": lambda m: all(torch.isfinite(p.grad).all() for p in m.parameters()),
    "another optimizer": lambda m: torch.optim.Adagrad(m.parameters()).step(),
    "another optimizer, foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True).step(),
    "a penalty": lambda m: m[0].weight.square().sum().backward(),
}


@pytest.mark.parametrize("make", (swapped, by_hand))
@pytest.mark.parametrize("name", READERS)
def test_gradients_that_are_applied_cannot_be_read(name, make):
    model, _optimizer, _ = make()
    loss_of(model).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    instead = "recfuse.swap without fuse_optimizers" if make is swapped else r"SGD\(\.\.\., deferred=True\)"
    with pytest.raises(ValueError, match=rf"reads the gradient of a Parameter of shape \[9, 4\].*{instead}"):
        READERS[name](model)
    if name not in ("another optimizer", "a mean over steps"):  # it was created with other Parameters
        assert all(map(torch.equal, model.parameters(), before))
    gradient = model[0].weight.grad
    assert gradient.shape == (9, 4) and gradient.dtype == torch.float32 and not gradient.is_sparse
    assert "AppliedGradient" in repr(gradient)


C_READERS = {
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "a versioned capsule": torch._C._to_dlpack_versioned,
    "the capsule of torch's class": torch.Tensor.__dlpack__,
    "the address of torch's class": torch.Tensor.data_ptr,
}


@pytest.mark.parametrize("name", C_READERS)
@pytest.mark.parametrize("moved", (False, True))
def test_reads_of_memory_in_c_raise(name, moved):
    model, _optimizer, _ = by_hand()
    loss_of(model).backward()
    gradient = model[0].weight.grad.half() if moved else model[0].weight.grad
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        C_READERS[name](gradient)


def test_a_gradient_is_there_until_torch_would_drop_it():
    model, optimizer, _ = swapped()
    assert model[0].weight.grad is None
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="reads the gradient"):
        total(model)
    model.share_memory().half().float().to_empty(device="cpu")  # gradients too
    assert type(model[0].weight.grad) is AppliedGradient
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    model, optimizer, _ = by_hand()
    loss_of(model).backward()
    optimizer.step()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("foreach", (False, True))
def test_zero_grad_may_keep_tensors(foreach):
    model, optimizer, _ = swapped(foreach=foreach)
    reference = model_of()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=foreach)
    for module, one in ((model, optimizer), (reference, theirs)):
        for step in range(4):
            (one if step % 2 else module).zero_grad(set_to_none=False)
            loss_of(module).backward()
            one.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", (torch.optim.SGD, torch.optim.Adagrad))
def test_closures(kind):
    model, optimizer, _ = swapped(kind)
    reference = model_of()
    theirs = kind(reference.parameters(), lr=0.1)
    for module, one in ((model, optimizer), (reference, theirs)):
        for step in range(3):

            def closure(module=module, one=one):
                one.zero_grad()
                loss = loss_of(module)
                loss.backward()
                return loss

            assert one.step(closure) > 0 if step else one.step(closure=closure) > 0
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", ("pre", "post"))
@pytest.mark.parametrize("when", ("before", "after"))
def test_hooks_of_a_step_find_the_gradients(kind, when):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    register = getattr(optimizer, f"register_step_{kind}_hook")
    if when == "before":
        register(clip)
    recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True)
    if when == "after":
        register(clip)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="reads the gradient"):
        optimizer.step()


def evaluate(model, _):
    with torch.no_grad():
        model(INDICES)


def without_gradient(model, _):
    model[0].weight.grad = None


BETWEEN = {
    "zero_grad": (lambda _, optimizer: optimizer.zero_grad(), r"zero_grad\(\) came between"),
    "module.zero_grad": (
        lambda model, optimizer: (model.zero_grad(), optimizer.step()),
        "setting the gradient of a table to None came between",
    ),
    "grad = None": (
        lambda m, o: (without_gradient(m, o), o.step()),
        "setting the gradient of a table to None came between",
    ),
    "zeros": (lambda model, _: model.zero_grad(set_to_none=False), r"zero_grad\(\) came between"),
    "evaluation": (evaluate, "a call of tables came between"),
    "training": (lambda model, _: loss_of(model), "a call of tables came between"),
    "bags by offsets": (
        lambda model, _: model[0](torch.arange(4), torch.tensor([0, 2])),
        "a call of tables came between",
    ),
    "unswap": (
        lambda model, optimizer: recfuse.unswap(model, optimizers=[optimizer]),
        "unswap.* came between",
    ),
    "swap": (
        lambda model, optimizer: recfuse.swap(model, optimizers=[optimizer], fuse_optimizers=True),
        "another swap came between",
    ),
    "the optimizer's state": (lambda _, optimizer: optimizer.state_dict(), r"state_dict\(\) came between"),
    "the model's state": (lambda model, _: model.state_dict(), r"state_dict\(\) came between"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_backward_without_step_is_refused(name):
    model, optimizer, _ = swapped()
    loss_of(model).backward()
    act, text = BETWEEN[name]
    with pytest.raises(ValueError, match=f"recfuse.swap: SGD of tables: .*{text}.*without fuse_optimizers"):
        act(model, optimizer)
    del model, optimizer
    gc.collect()
    assert not unfinished


def test_a_collection_between_backward_and_step_is_refused():
    tables = recfuse.nn.FusedEmbeddingBagCollection([(9, 4), (9, 4)])
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    recfuse.swap(nn.Sequential(tables), optimizers=[optimizer], fuse_optimizers=True)
    given = torch.arange(8), torch.arange(0, 9, 2)
    tables(*given).sum().backward()
    with torch.no_grad(), pytest.raises(ValueError, match="a call of tables came between"):
        tables(*given)
    with pytest.raises(ValueError, match=r"state_dict\(\) came between"):
        tables.state_dict()
    optimizer.step()
    with torch.no_grad():
        tables(*given)


def test_without_zero_grad_is_refused_before_it_does_harm():
    model, optimizer, _ = swapped()
    loss_of(model).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"backward\(\) came without zero_grad\(\) since the last backward"):
        loss_of(model).backward()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def test_a_second_step_of_one_backward_is_refused():
    model, optimizer, _ = swapped()
    loss_of(model).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"a second step\(\) came for the gradients of one backward\(\)"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("scheduled", (False, True))
def test_another_optimizer_takes_over_at_once(scheduled):
    gc.collect()
    gc.disable()
    try:
        model, optimizer, report = swapped(torch.optim.Adagrad)
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        reference = model_of()
        theirs = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        for module, one in ((model, optimizer), (reference, theirs)):
            loss_of(module).backward()
            one.step()
        pending = model[0](INDICES).sum()
        optimizer = one = torch.optim.SGD(model.parameters(), lr=0.5)
        assert update_of(model[0].weight) is None and model[0].weight.grad is None
        theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
        for module, one in ((model, optimizer), (reference, theirs)):
            for _ in range(2):
                one.zero_grad()
                loss_of(module).backward()
                one.step()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            close(one, other)
        with pytest.raises(ValueError, match=r"optimizer that the tables .* belonged to is gone"):
            pending.backward()
        assert report.fused_optimizers[0].param_groups == []
    finally:
        gc.enable()


def test_another_optimizer_of_tables_that_have_one_is_refused():
    model, first, _ = swapped()
    second = torch.optim.SGD(model.parameters(), lr=0.5)
    second.zero_grad()
    loss_of(model).backward()
    with pytest.raises(ValueError, match="another optimizer or another use of the Parameter"):
        second.step()
    assert first.param_groups


def test_gradients_of_a_wrapped_scheduler_step():
    model, optimizer, _ = swapped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (step + 1)
