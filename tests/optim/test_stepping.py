"""step() and zero_grad() have the effects of torch's optimizers: hooks, records, gradients."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recfuse import optim
from support.collection import collection_of

INDICES, OFFSETS = torch.tensor([1, 2, 0, 1]), torch.tensor([0, 2, 4])


def trained(deferred=False):
    collection = collection_of([(5, 4), (3, 2)])
    optimizer = optim.SGD(collection, lr=0.5, deferred=deferred)
    collection(INDICES, OFFSETS).sum().backward()
    return collection, optimizer


@pytest.mark.parametrize("everywhere", (False, True))
def test_hooks_run_before_and_after_each_step(everywhere):
    _, optimizer = trained()
    _, other = trained()
    seen = []
    before = register_optimizer_step_pre_hook if everywhere else optimizer.register_step_pre_hook
    after = register_optimizer_step_post_hook if everywhere else optimizer.register_step_post_hook
    handles = [
        before(lambda one, args, kwargs: seen.append(("before", one, args, kwargs))),
        after(lambda one, args, kwargs: seen.append(("after", one, args, kwargs))),
    ]
    try:
        optimizer.step()
        assert seen == [("before", optimizer, (optimizer,), {}), ("after", optimizer, (optimizer,), {})]
        other.step()
        assert len(seen) == (4 if everywhere else 2)
    finally:
        for handle in handles:
            handle.remove()
    seen.clear()
    optimizer.step()
    assert not seen


def test_a_hook_may_give_the_closure():
    _, optimizer = trained()
    optimizer.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: 7.0), kwargs))
    assert optimizer.step(lambda: 3.0) == 7.0


def test_a_step_with_hooks_is_that_without():
    rows = []
    for hooked in (False, True):
        torch.manual_seed(0)
        collection, optimizer = trained(deferred=True)
        if hooked:
            optimizer.register_step_post_hook(lambda *_: None)
        optimizer.step()
        rows.append([weight.detach().clone() for weight in collection.parameters()])
    for one, other in zip(*rows, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_profiler_finds_steps():
    _, optimizer = trained()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("to_none", (False, True))
def test_zero_grad_clears_gradients(to_none):
    collection, optimizer = trained(deferred=True)
    assert all(weight.grad is not None for weight in collection.parameters())
    optimizer.zero_grad(set_to_none=to_none)
    for weight in collection.parameters():
        assert weight.grad is None if to_none else weight.grad.to_dense().count_nonzero() == 0


def test_zero_grad_resets_one_of_many_gradients():
    collection, optimizer = trained()
    last = list(collection.parameters())[-1]
    last.grad = torch.ones_like(last)
    optimizer.zero_grad()
    assert last.grad is None
    optimizer.step()
