"""Plain calls of ``embedding_bag`` on the CPU, which take a shorter way: to the same results and errors."""

from __future__ import annotations

import importlib
import itertools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import recfuse

OPS = torch.ops.recfuse
MODULES = [importlib.import_module("recfuse.ops.embedding_bag")]
INDICES, OFFSETS = torch.tensor([3, 5, 3, 1, 0, 5, 5, 2]), torch.tensor([0, 2, 2, 5])


@pytest.fixture
def plain_calls(monkeypatch):
    """Counts the plain calls."""
    made, operator = [], MODULES[0].plain

    def watched(*arguments):
        made.append(arguments)
        return operator(*arguments)

    for module in MODULES:
        monkeypatch.setattr(module, "plain", watched)
    return made


def bits(output, weight, grad):
    """Output and gradient, as bits of floats."""
    (found,) = torch.autograd.grad(output, weight, grad)
    if found.is_sparse:
        assert found.is_coalesced() and found.shape == weight.shape
        return output, found.indices(), found.values()
    return output, found


class Passive(TorchDispatchMode):
    """Changes no operator, but keeps gradients from the shorter way."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


CALLS = list(itertools.product(("sum", "mean"), (False, True), (False, True), (None, 5, -1)))


@pytest.mark.parametrize("mode, sparse, last, padding_idx", CALLS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_the_fast_path_is_bit_identical_to_the_full_path(plain_calls, dtype, mode, sparse, last, padding_idx):
    torch.manual_seed(1)
    weight = torch.randn(7, 19).to(dtype).requires_grad_()
    offsets = torch.cat((OFFSETS, torch.tensor([7]))) if last else OFFSETS
    grad = torch.randn(4, 19).to(dtype)
    row = -1 if padding_idx is None else padding_idx % 7
    for indices, ends in ((INDICES, offsets), (INDICES.int(), offsets), (INDICES, offsets.int())):
        want = OPS.embedding_bag(weight, indices, ends, mode, None, last, row, False, sparse)
        options = {"mode": mode, "sparse": sparse, "include_last_offset": last, "padding_idx": padding_idx}
        found = recfuse.embedding_bag(indices, weight, ends, **options)
        with Passive():
            expected = bits(want, weight, grad)
        for ours, theirs in zip(bits(found, weight, grad), expected, strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        with torch.no_grad():
            assert torch.equal(recfuse.embedding_bag(indices, weight, ends, **options), want)
    assert len(plain_calls) == 6


def test_gradients_by_frequency_of_a_plain_call():
    weight, grad = torch.randn(7, 4, requires_grad=True), torch.randn(4, 4)
    want = OPS.embedding_bag(weight, INDICES, OFFSETS, "sum", None, False, -1, True)
    found = recfuse.embedding_bag(INDICES, weight, OFFSETS, mode="sum", scale_grad_by_freq=True)
    for ours, theirs in zip(bits(found, weight, grad), bits(want, weight, grad), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "mode, last, padding_idx", itertools.product(("sum", "mean"), (False, True), (None, 5))
)
def test_a_fused_optimizer_makes_the_same_steps(plain_calls, mode, last, padding_idx):
    torch.manual_seed(1)
    start, offsets = torch.randn(7, 19), torch.cat((OFFSETS, torch.tensor([7]))) if last else OFFSETS
    grads, found = torch.randn(3, 4, 19), []
    for options in ({}, {"prefetch_distance": 1}):
        weight = torch.nn.Parameter(start.clone())
        optimizer = recfuse.optim.SGD([weight], lr=0.1)
        options |= {"mode": mode, "include_last_offset": last, "padding_idx": padding_idx}
        for grad in grads:
            recfuse.embedding_bag(INDICES, weight, offsets, **options).backward(grad)
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found) and not torch.equal(found[0], start)
    assert len(plain_calls) == 3


@pytest.mark.parametrize("sparse", (False, True))
def test_gradients_of_a_plain_call_without_bags_or_lookups(plain_calls, sparse):
    weight, none = torch.randn(7, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    for offsets in (none, none.new_zeros(3)):
        recfuse.embedding_bag(none, weight, offsets, mode="sum", sparse=sparse).sum().backward()
        assert weight.grad.shape == (7, 4) and not weight.grad.to_dense().any()
    assert len(plain_calls) == 2


@pytest.mark.parametrize(
    "change",
    (
        {"mode": "max"},
        {"per_sample_weights": torch.ones(8)},
        {"max_norm": 1.0},
        {"offsets": None, "input": INDICES.view(2, 4)},
        {"prefetch_distance": 2},
        {"bounds_check": "off"},
        {"weight": torch.randn(7, 4, dtype=torch.float64)},
    ),
    ids=lambda change: next(iter(change)),
)
def test_other_calls_are_not_plain(plain_calls, change):
    weight = torch.randn(7, 4)
    call = {"input": INDICES, "weight": weight, "offsets": OFFSETS, "mode": "sum"}
    recfuse.embedding_bag(**{**call, **change})
    with torch.autograd.forward_ad.dual_level():
        recfuse.embedding_bag(**call)
    assert not plain_calls
    recfuse.embedding_bag(**call)
    assert len(plain_calls) == 1


def test_a_dispatch_mode_sees_the_public_operator():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    weight = torch.randn(7, 4, requires_grad=True)
    with Watch():
        recfuse.embedding_bag(INDICES, weight, OFFSETS, mode="sum", sparse=True).sum().backward()
    outside = recfuse.embedding_bag(INDICES, weight, OFFSETS, mode="sum", sparse=True)
    with Watch():
        outside.sum().backward()
    found = [name for name in seen if "embedding_bag" in name]
    backward = "recfuse.fused_embedding_bag_sparse_backward.default"
    assert found == ["recfuse.embedding_bag.default", backward, backward]


class Wrapped(torch.Tensor):
    """A tensor in another, which sees the operators that get it, but not the functions."""

    seen: ClassVar[list[str]] = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args, kwargs = tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.parametrize("wrapped", ("input", "weight", "offsets"))
def test_a_subclass_with_dispatch_sees_the_public_operator(wrapped):
    call = {"input": INDICES, "weight": torch.randn(7, 4), "offsets": OFFSETS, "mode": "sum"}
    want = recfuse.embedding_bag(**call)
    for weight in (call["weight"], call["weight"].clone().requires_grad_()):
        given = call | {"weight": weight}
        given[wrapped] = Wrapped(given[wrapped].detach().requires_grad_(given[wrapped].requires_grad))
        Wrapped.seen.clear()
        assert torch.equal(recfuse.embedding_bag(**given), want)
        assert [name for name in Wrapped.seen if "bag" in name] == ["recfuse.embedding_bag.default"]


@pytest.mark.parametrize(
    "change",
    (
        {"input": INDICES + 2},
        {"input": -INDICES},
        {"offsets": OFFSETS + 1},
        {"offsets": OFFSETS * 2},
        {"offsets": torch.zeros(0, dtype=torch.int64), "include_last_offset": True},
        {"input": INDICES.float()},
        {"input": INDICES.view(2, 4)},
        {"weight": torch.randn(7)},
        {"padding_idx": 7},
        {"padding_idx": 7, "input": INDICES.float()},
    ),
    ids=", ".join,
)
def test_errors_are_those_of_any_other_call(change):
    call = {"input": INDICES, "weight": torch.randn(7, 4, requires_grad=True), "offsets": OFFSETS, **change}
    raised = []
    for options in ({}, {"prefetch_distance": 0}):
        with pytest.raises(Exception) as caught:
            recfuse.embedding_bag(**call, **options)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def test_the_fast_path_raises_the_errors_of_the_full_path():
    weight = torch.randn(7, 4, requires_grad=True)
    for sparse in (False, True):
        output = recfuse.embedding_bag(INDICES, weight, OFFSETS, mode="sum", sparse=sparse)
        (grad,) = torch.autograd.grad(output.cos().sum(), weight, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            grad.to_dense().sum().backward()
        ones = torch.ones(4, 4)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(output, weight, forward_ad.make_dual(ones, ones))
    offsets = OFFSETS.clone()
    output = recfuse.embedding_bag(INDICES, weight, offsets, mode="sum")
    offsets.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_batched_gradients_of_a_plain_call():
    weight, grads = torch.randn(7, 4, requires_grad=True), torch.randn(3, 4, 4)
    output = recfuse.embedding_bag(INDICES, weight, OFFSETS, mode="mean")
    (found,) = torch.autograd.grad(output, weight, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        assert torch.equal(one, torch.autograd.grad(output, weight, grad, retain_graph=True)[0])


@pytest.mark.parametrize(
    "dim, dtype", ((1, torch.float32), (19, torch.float16), (64, torch.float32), (200, torch.bfloat16))
)
@pytest.mark.parametrize("rows, bags", ((300, 40), (300, 900), (1 << 17, 900)))
def test_sparse_gradients_are_the_dense_ones(rows, bags, dim, dtype):
    """With few lookups and many, near rows and far rows, gradients that fit a core's first cache or not."""
    torch.manual_seed(2)
    indices, offsets = torch.randint(rows, (5 * bags,)), torch.arange(0, 5 * bags, 5)
    weight, grad = torch.zeros(rows, dim, dtype=dtype, requires_grad=True), torch.randn(bags, dim).to(dtype)
    found = [
        bits(recfuse.embedding_bag(indices, weight, offsets, mode="mean", sparse=sparse), weight, grad)[1:]
        for sparse in (False, True)
    ]
    (dense,), (places, values) = found
    used = indices.unique()
    assert torch.equal(places[0], used) and torch.equal(values, dense[used])
    assert torch.count_nonzero(dense) == torch.count_nonzero(values)


def test_a_module_pools_the_weight_that_it_has_now():
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    bag = recfuse.nn.EmbeddingBag(7, 4, mode="sum")
    once, twice = bag(INDICES, OFFSETS), 2 * bag.weight.detach()
    given = torch.func.functional_call(bag, {"weight": twice}, (INDICES, OFFSETS))
    torch.testing.assert_close(given, 2 * once)
    bag.weight = torch.nn.Parameter(3 * bag.weight.detach())
    torch.testing.assert_close(bag(INDICES, OFFSETS), 3 * once)
    torch.nn.utils.parametrize.register_parametrization(bag, "weight", Double())
    torch.testing.assert_close(bag(INDICES, OFFSETS), 6 * once)
    plain = recfuse.nn.EmbeddingBag(7, 4, mode="sum")
    del plain.weight
    plain.weight = twice  # no Parameter
    torch.testing.assert_close(plain(INDICES, OFFSETS), 2 * once)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_replaced_torch_function_does_not_recurse(monkeypatch, dtype):
    weight, indices, offsets = torch.randn(9, 4, dtype=dtype), torch.tensor([1, 8, 2]), torch.tensor([0, 2])
    tables = recfuse.nn.FusedEmbeddingBagCollection([recfuse.nn.Table(9, 4, dtype=dtype)])
    want = F.embedding_bag(indices, weight, offsets)
    pooled = tables(indices, torch.tensor([0, 2, 3]))
    monkeypatch.setattr(F, "embedding_bag", recfuse.embedding_bag)
    torch.testing.assert_close(F.embedding_bag(indices, weight, offsets), want)
    torch.testing.assert_close(tables(indices, torch.tensor([0, 2, 3])), pooled)
