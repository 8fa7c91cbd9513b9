"""PyTorch's own samples of embedding_bag, in every layout: torch's result, or a refusal of the same kind."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import recfuse

pytest.importorskip("expecttest")  # torch's own tests need it
from torch.testing._internal.common_methods_invocations import op_db

OPERATOR = next(one for one in op_db if one.name == "nn.functional.embedding_bag")
SAMPLES = list(OPERATOR.sample_inputs("cpu", torch.float32, requires_grad=False))


def strided(values):
    return torch.stack((values, values + 7), -1)[..., 0]


def sliced(values):
    return torch.cat((values.new_full((3, *values.shape[1:]), 99), values))[3:]


def expanded(values):
    """Its first column or element, again and again."""
    return values[..., :1].expand(values.shape) if values.numel() else values


LAYOUTS = {"plain": (lambda values: values,) * 2, "strided": (strided,) * 2, "sliced": (sliced,) * 2}
LAYOUTS["expanded"] = expanded, strided  # offsets must rise


def calls(layout):
    """Yields each sample as (weight, per_sample_weights or None, a function that calls a function with
    them)."""
    of_indices, of_offsets = LAYOUTS[layout]
    for sample in SAMPLES:
        options = dict(sample.kwargs)
        indices, factors = of_indices(sample.args[0]), options.pop("per_sample_weights", None)
        if options.get("offsets") is not None:
            options["offsets"] = of_offsets(options["offsets"])
        weight = sample.input.detach()
        weight = weight.t().contiguous().t() if layout == "strided" else weight.clone()

        def call(function, weight, factors, indices=indices, options=options):
            return function(indices, weight, per_sample_weights=factors, **options)

        yield weight, factors, call, options


def outcome(way, function, weight, factors):
    """Returns the result of a way to call a function, or the exception."""
    try:
        return way(function, weight.clone(), factors)
    except Exception as error:
        return error


def same(ours, theirs):
    """Compares values, or the kinds of refusals."""
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), (ours, theirs)
        return
    assert not isinstance(ours, Exception), ours
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def both(layout, way, kept=lambda options: True):
    """Compares the results of both functions by a way to call them."""
    count = 0
    for weight, factors, call, options in calls(layout):
        if kept(options):
            count += 1
            ours, theirs = (
                outcome(way, functools.partial(call, f), weight, factors)
                for f in (recfuse.embedding_bag, F.embedding_bag)
            )
            same(ours, theirs)
    assert count


def right_by_frequency(options):
    """torch's gradient by frequency divides by other rows' counts on the CPU."""
    return not options.get("scale_grad_by_freq", False)


def gradients(function, weight, factors):
    weight.requires_grad_()
    factors = None if factors is None else factors.clone().requires_grad_()
    # max_norm changes the weight in place, which torch allows for leaves only.
    out = function(weight, factors)
    (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    return out.detach(), weight.detach(), weight.grad.to_dense(), None if factors is None else factors.grad


def loss(function, weight, factors):
    return function(weight, factors).cos().sum()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(layout):
    both(layout, lambda function, weight, factors: (function(weight, factors), weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    both(layout, gradients, right_by_frequency)


@pytest.mark.parametrize("layout", ("plain", "strided"))
def test_transforms(layout):
    func = torch.func

    def grad(function, weight, factors):
        return func.grad(functools.partial(loss, function))(weight, factors).to_dense()

    def vjp(function, weight, factors):
        out, pull = func.vjp(lambda weight: function(weight, factors), weight)
        return out, pull(torch.ones_like(out))[0].to_dense()

    def vmap(function, weight, factors):
        return func.vmap(function, (0, None))(torch.stack((weight, weight + 1)), factors)

    def vmap_grad(function, weight, factors):
        one = func.grad(functools.partial(loss, function))
        return func.vmap(one, (0, None))(torch.stack((weight, weight + 1)), factors)

    def grad_vmap(function, weight, factors):
        one = lambda weight: func.vmap(function, (0, None))(weight, factors).cos().sum()  # noqa: E731
        return func.grad(one)(torch.stack((weight, weight + 1)))

    for way in (grad, vjp, vmap):
        both(layout, way, right_by_frequency)
    for way in (vmap_grad, grad_vmap):
        both(layout, way, lambda options: right_by_frequency(options) and not options.get("sparse"))


def test_forward_mode_is_refused():
    def jvp(function, weight, factors):
        return torch.func.jvp(lambda weight: function(weight, factors), (weight,), (weight,))

    def dual(function, weight, factors):
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            return function(torch.autograd.forward_ad.make_dual(weight, weight), factors)

    def jacfwd(function, weight, factors):
        return torch.func.jacfwd(lambda weight: function(weight, factors))(weight)

    def jvp_of_vmap(function, weight, factors):
        two = torch.stack((weight, weight))
        return torch.func.jvp(lambda two: torch.func.vmap(function, (0, None))(two, factors), (two,), (two,))

    def hessian(function, weight, factors):
        return torch.func.hessian(functools.partial(loss, function))(weight, factors)

    for way in (jvp, dual, jacfwd, jvp_of_vmap, hessian):
        for weight, factors, call, _ in calls("plain"):
            found = outcome(way, functools.partial(call, recfuse.embedding_bag), weight, factors)
            assert isinstance(found, NotImplementedError), (way, found)
            assert "forward-mode" in str(found), found


def test_second_derivatives_are_refused():
    def twice(function, weight, factors):
        grad = torch.func.grad(functools.partial(loss, function))
        return torch.func.grad(lambda weight: grad(weight, factors).to_dense().sum())(weight)

    def through_the_graph(function, weight, factors):
        weight.requires_grad_()
        (grad,) = torch.autograd.grad(loss(function, weight, factors), weight, create_graph=True)
        return torch.autograd.grad(grad.to_dense().sum(), weight)

    for way in (twice, through_the_graph):
        both("plain", way, lambda options: options.get("max_norm") is None)


def test_fake():
    def shape(function, weight, factors):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            weight = mode.from_tensor(weight).requires_grad_()
            factors = None if factors is None else mode.from_tensor(factors)
            out = function(weight, factors)
            out.sum().backward()
        return list(out.shape), list(weight.grad.shape)

    both("plain", shape, lambda options: not options.get("sparse"))  # torch's own fails on fake tensors


@pytest.mark.parametrize(
    "mode",
    (
        pytest.param("real", marks=pytest.mark.long),
        pytest.param("fake", marks=pytest.mark.long),
        "symbolic",
    ),
)
def test_make_fx(mode):
    def traced(function, weight, factors):
        run = lambda weight: function(weight, factors)  # noqa: E731
        graph = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(weight.clone())
        return graph(weight)

    both("plain", traced)


def test_traced_gradients():
    """The forward and backward pass of a training step in one graph."""

    def step(function, weight, factors):
        def run(weight):
            weight = weight.detach().requires_grad_()
            return torch.autograd.grad(loss(function, weight, factors), weight)[0]

        return make_fx(run)(weight.clone())(weight)

    both(
        "plain",
        step,
        lambda options: (
            right_by_frequency(options) and not options.get("sparse") and options.get("max_norm") is None
        ),
    )
