"""Gradients in every setting that torch has: transforms, forward mode, tracers, meta tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import recfuse
from recfuse.nn import EmbeddingBag
from support.fused import Problem, every_mode

MODES = ("sum", "mean", "max")
OPS = torch.ops.recfuse
INDICES, OFFSETS = torch.tensor([1, 4, 4, 0, 2, 5]), torch.tensor([0, 2, 3])


def problem_of():
    specs = [(9, 4, torch.float32), (5, 8, torch.float32), (7, 4, torch.float32)]
    problem = Problem(specs, every_mode(specs))
    return problem, *problem.lookups(4)


def pooled(problem, indices, offsets):
    """A function of the weights."""
    return lambda weights: problem.run(indices, offsets, weights=list(weights))


def by_backward(problem, indices, offsets):
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    pooled(problem, indices, offsets)(weights).cos().sum().backward()
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("mode", MODES)
def test_a_table_without_rows_has_a_gradient_whatever_its_strides(mode):
    no_lookups, two_bags = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for rows in (torch.zeros(6, 0).t(), torch.zeros(0, 1).expand(0, 6)):  # torch calls both contiguous
        table = rows.detach().requires_grad_()
        recfuse.embedding_bag(no_lookups, table, two_bags, mode=mode).sum().backward()
        assert table.grad.shape == (0, 6)


# T11: strided indices once gave wrong gradients of max, or reads outside the tensor.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ("column", "expanded", "1-D"))
def test_gradients_of_strided_indices(mode, form):
    base = torch.randint(0, 12, (6, 5))
    input, offsets = {
        "column": (base[:, :1], None),
        "expanded": (base[:, :1].expand(6, 4), None),
        "1-D": (base[:, 2], torch.tensor([0, 2, 5])),
    }[form]
    ours, theirs = (torch.linspace(-2, 3, 48).view(12, 4).clone().requires_grad_() for _ in range(2))
    (recfuse.embedding_bag(input, ours, offsets, mode=mode).cos()).sum().backward()
    (F.embedding_bag(input.contiguous(), theirs, offsets, mode=mode).cos()).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_of_strided_factors():
    base, factors = torch.randint(0, 12, (6, 5)), torch.rand(6, 5)
    found = []
    for function, adapt in ((recfuse.embedding_bag, lambda one: one[:, ::2]),
                            (F.embedding_bag, lambda one: one[:, ::2].contiguous())):  # fmt: skip
        weight, own = torch.ones(12, 4).cumsum(0).requires_grad_(), factors.clone().requires_grad_()
        function(adapt(base), weight, mode="sum", per_sample_weights=adapt(own)).cos().sum().backward()
        found.append((weight.grad, own.grad))
    torch.testing.assert_close(*found)


def test_gradients_of_strided_lookups_of_a_fused_call():
    problem, indices, offsets = problem_of()
    want = by_backward(problem, indices, offsets)
    spread = (torch.stack((one, one + 10**6), 1)[:, 0] for one in (indices, offsets))
    for ours, theirs in zip(by_backward(problem, *spread), want, strict=True):
        assert torch.equal(ours, theirs)


# T5


def test_transforms_of_a_fused_call():
    problem, *given = problem_of()
    function, weights = pooled(problem, *given), tuple(problem.weights)
    want = by_backward(problem, *given)
    for found in (
        grad(lambda weights: function(weights).cos().sum())(weights),
        vjp(lambda weights: function(weights).cos().sum(), weights)[1](torch.tensor(1.0))[0],
    ):
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs)
    two = tuple(torch.stack((weight, 2 * weight)) for weight in weights)
    for number, one in enumerate(vmap(function)(two)):
        torch.testing.assert_close(one, function([weight[number] for weight in two]), equal_nan=True)
    per_model = vmap(grad(lambda weights: function(weights).cos().sum()))(two)
    for ours, theirs in zip(per_model, want, strict=True):
        torch.testing.assert_close(ours[0], theirs)


def test_forward_mode_of_a_fused_call_is_refused():
    problem, *given = problem_of()
    function, weights = pooled(problem, *given), tuple(problem.weights)

    def dual():
        with torch.no_grad(), forward_ad.dual_level():
            function([forward_ad.make_dual(weight, weight) for weight in weights])

    for call in (
        lambda: jvp(function, (weights,), (weights,)),
        lambda: jacfwd(function)(weights),
        lambda: hessian(lambda weights: function(weights).cos().sum())(weights),
        dual,
    ):
        with pytest.raises(NotImplementedError, match=r"recfuse\.fused_embedding_bag: forward-mode"):
            call()
    with forward_ad.dual_level():  # without a dual tensor there is nothing to refuse
        function(weights)


def test_second_derivatives_of_a_fused_call_are_refused():
    problem, *given = problem_of()
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    found = torch.autograd.grad(pooled(problem, *given)(weights).cos().sum(), weights, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        found[0].sum().backward()


# T15


def test_two_calls_with_max_norm_before_one_backward():
    found = []
    for bag in (
        EmbeddingBag(6, 3, mode="max", max_norm=0.5),
        torch.nn.EmbeddingBag(6, 3, mode="max", max_norm=0.5),
    ):
        with torch.no_grad():
            bag.weight.copy_(torch.linspace(-2, 2, 18).view(6, 3))
        (bag(INDICES, OFFSETS).cos() + bag(INDICES.flip(0), OFFSETS).cos()).sum().backward()
        found.append((bag.weight.detach(), bag.weight.grad))
    torch.testing.assert_close(*found)


def test_the_weights_of_a_fused_call_may_change_before_backward():
    problem, *given = problem_of()
    want = by_backward(problem, *given)
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    loss = pooled(problem, *given)(weights).cos().sum()
    with torch.no_grad():
        for weight in weights:
            weight.mul_(-3)
    loss.backward()
    for weight, theirs in zip(weights, want, strict=True):
        assert torch.equal(weight.grad, theirs)


# T12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_norm", (None, 0.5))
def test_jit_trace_of_trained_weights(mode, max_norm):
    bag = EmbeddingBag(6, 3, mode=mode, max_norm=max_norm)
    traced = torch.jit.trace(bag, (INDICES, OFFSETS))
    other = torch.tensor([3, 3, 5, 1]), torch.tensor([0, 1])
    torch.testing.assert_close(traced(*other), bag(*other))
    traced(*other).cos().sum().backward()
    found, bag.weight.grad = bag.weight.grad, None
    bag(*other).cos().sum().backward()
    torch.testing.assert_close(found, bag.weight.grad)


def test_joint_graphs():
    from torch._functorch.aot_autograd import aot_export_joint_simple

    problem, indices, offsets = problem_of()

    def bag(weight, indices, offsets):
        return [recfuse.embedding_bag(indices, weight, offsets, mode="max")]

    def fused(features, indices, offsets, *weights):
        return [recfuse.fused_embedding_bag(weights, features, indices, offsets, problem.output_dim)]

    weight = torch.randn(6, 3, requires_grad=True)
    graph = aot_export_joint_simple(bag, (weight, INDICES, OFFSETS), trace_joint=True)
    assert "fused_embedding_bag_backward" in str(graph.graph)
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    graph = aot_export_joint_simple(fused, (problem.rows, indices, offsets, *weights), trace_joint=True)
    assert str(graph.graph).count("recfuse.fused_embedding_bag_backward") == len(weights)


def test_make_fx_with_max_norm():
    weight = torch.linspace(-2, 2, 18).view(6, 3)
    for kind in ("real", "fake", "symbolic"):
        graph = make_fx(
            lambda weight: recfuse.embedding_bag(INDICES, weight, OFFSETS, max_norm=0.5),
            tracing_mode=kind,
            _allow_non_fake_inputs=True,
        )(weight.clone())
        torch.testing.assert_close(
            graph(weight.clone()), F.embedding_bag(INDICES, weight.clone(), OFFSETS, max_norm=0.5)
        )


@pytest.mark.parametrize("sparse", (False, True))
def test_backward_of_fake_tensors(sparse):
    problem = Problem([(9, 4, torch.float32), (5, 8, torch.float32)])
    indices, offsets = problem.lookups(3)
    with torch._subclasses.FakeTensorMode() as mode:
        weights = [mode.from_tensor(weight).requires_grad_() for weight in problem.weights]
        given = [mode.from_tensor(one) for one in (problem.rows, indices, offsets)]
        recfuse.fused_embedding_bag(weights, *given, problem.output_dim, sparse=sparse).sum().backward()
        for weight in weights:
            assert weight.grad.shape == weight.shape and weight.grad.is_sparse == sparse


# T3, for the operators themselves


@pytest.mark.parametrize("strict", (False, True))
def test_an_exported_program_has_gradients(strict):
    class Both(torch.nn.Module):
        def __init__(self, problem):
            super().__init__()
            self.problem = problem
            self.weights = torch.nn.ParameterList(problem.weights)

        def forward(self, features, indices, offsets):
            weights = list(self.weights)
            out = recfuse.fused_embedding_bag(weights, features, indices, offsets, self.problem.output_dim)
            return out, recfuse.embedding_bag(indices[:6] * 0, weights[0][3:], offsets[:2] * 0, mode="max")

    problem, indices, offsets = problem_of()
    module = Both(problem)
    given = problem.rows, indices, offsets
    exported = torch.export.export(module, given, strict=strict).module()
    for one in (module, exported):
        sum(out.cos().nansum() for out in one(*given)).backward()
    parameters = dict(exported.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad)


# T9, T17


def test_meta_tensors():
    problem, *given = problem_of()
    weights = [weight.to("meta").requires_grad_() for weight in problem.weights]
    out = problem.run(*[one.to("meta") for one in given], weights=weights)
    assert out.is_meta and out.shape == (4, problem.output_dim)
    out.sum().backward()
    assert all(weight.grad.is_meta and weight.grad.shape == weight.shape for weight in weights)


def test_functional_call_uses_its_weights():
    bag = EmbeddingBag(6, 3, mode="sum")
    other = torch.ones(6, 3, requires_grad=True)
    out = functional_call(bag, {"weight": other}, (INDICES, OFFSETS))
    assert torch.equal(out, F.embedding_bag(INDICES, other, OFFSETS, mode="sum"))
    out.sum().backward()
    assert other.grad is not None and bag.weight.grad is None


@pytest.mark.parametrize("changes", ({"input": INDICES.float()}, {"offsets": OFFSETS.double()}), ids=str)
def test_float_integers_are_refused_in_words(changes):
    arguments = {"input": INDICES, "weight": torch.randn(6, 3), "offsets": OFFSETS, **changes}
    with pytest.raises(TypeError, match=r"recfuse\.embedding_bag: (input|offsets) is float.*int32 or int64"):
        recfuse.embedding_bag(**arguments)


def test_errors_name_the_public_operators():
    problem, indices, offsets = problem_of()
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    for change in ({"weights": weights[:1]}, {"indices": indices.float()}, {"offsets": offsets[:-1]}):
        call = {"weights": weights, "features": problem.rows, "indices": indices, "offsets": offsets}
        with pytest.raises((ValueError, TypeError), match=r"^recfuse\.fused_embedding_bag: "):
            recfuse.fused_embedding_bag(**{**call, **change}, output_dim=problem.output_dim)
