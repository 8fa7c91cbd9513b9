"""LinearCompression and IKBOLinear: the layer over concatenated features, however the weight changes."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import recfuse
from recfuse.nn import IKBOLinear, LinearCompression
from support.ikbo import ACTIVATIONS

KU, KC, M, N, USERS, CANDIDATES = 11, 5, 7, 6, 4, 23


def inputs(two_dimensions, users=USERS, candidates=CANDIDATES, dtype=torch.float64):
    """x_user, x_cand and cand_to_user."""
    tail = () if two_dimensions else (N,)
    found = torch.randint(0, users, (candidates,))
    return torch.randn(users, KU, *tail, dtype=dtype), torch.randn(candidates, KC, *tail, dtype=dtype), found


def concatenated(layer, x_user, x_cand, cand_to_user):
    """The equivalent of the layer."""
    x = torch.cat((x_user[cand_to_user], x_cand), 1)
    if x.dim() == 2:
        return ACTIVATIONS[layer.activation](F.linear(x, layer.weight, layer.bias))
    out = layer.weight @ x
    return ACTIVATIONS[layer.activation](out if layer.bias is None else out + layer.bias[:, None])


LAYERS = {
    "compression": lambda: LinearCompression((KU, KC), M, dtype=torch.float64),
    "compression with a bias": lambda: LinearCompression((KU, KC), M, bias=True, dtype=torch.float64),
    "linear": lambda: IKBOLinear((KU, KC), M, dtype=torch.float64),
    "linear without a bias": lambda: IKBOLinear((KU, KC), M, bias=False, dtype=torch.float64),
    "linear, gelu": lambda: IKBOLinear((KU, KC), M, activation="gelu", dtype=torch.float64),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer_and_inputs(name):
    return LAYERS[name](), inputs("linear" in name)


def assert_same(function, layer, given):
    """Equal outputs, and gradients of the layer's parameters and of the inputs."""
    found = []
    for one in (function, lambda *tensors: concatenated(layer, *tensors)):
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in given]
        layer.zero_grad()
        out = one(*leaves)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        found.append((out, [*(p.grad for p in layer.parameters()), *(leaf.grad for leaf in leaves[:2])]))
    torch.testing.assert_close(found[0], found[1])


@each_layer
def test_output_equals_the_layer_over_concatenated_features(name):
    layer, given = layer_and_inputs(name)
    assert_same(layer, layer, given)
    users, candidates, found = given
    assert_same(layer, layer, (users, candidates[:0], found[:0]))
    with torch.no_grad():
        torch.testing.assert_close(layer(*given), concatenated(layer, *given))


def step(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(*inputs(isinstance(layer, IKBOLinear), dtype=layer.weight.dtype)).square().sum().backward()
    optimizer.step()


def load(layer, assign=False):
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def set_data(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def change_in_place(layer):
    with torch.no_grad():
        layer.weight[:, 3:].mul_(-2)


def replace(layer):
    layer.weight = torch.nn.Parameter(torch.randn(layer.weight.shape[::-1], dtype=layer.weight.dtype).t())


def move(layer):
    layer.to(torch.float32).to(torch.float64)


CHANGES = {
    "optimizer": step,
    "load_state_dict": load,
    "load_state_dict, assign": lambda layer: load(layer, assign=True),
    "data": set_data,
    "in place": change_in_place,
    "parameter": replace,
    "to": move,
}


@each_layer
@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.long)))
def test_no_change_of_the_weight_is_missed(name, compiled):
    torch._dynamo.reset()
    layer, given = layer_and_inputs(name)
    function = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else layer
    assert_same(function, layer, given)
    for change in CHANGES.values():
        before = layer(*given).detach()
        change(layer)
        assert_same(function, layer, given)
        assert change is move or not torch.allclose(layer(*given), before)


@each_layer
def test_functional_call(name):
    layer, given = layer_and_inputs(name)
    state = {key: torch.randn_like(value) for key, value in layer.state_dict().items()}
    other = copy.deepcopy(layer)
    other.load_state_dict(state)
    torch.testing.assert_close(functional_call(layer, state, given), concatenated(other, *given))
    torch.testing.assert_close(layer(*given), concatenated(layer, *given))


@each_layer
def test_exported(name, tmp_path):
    layer, given = layer_and_inputs(name)
    users, candidates = torch.export.Dim("users", min=2), torch.export.Dim("candidates", min=2)
    exported = torch.export.export(
        layer, given, dynamic_shapes=({0: users}, {0: candidates}, {0: candidates})
    )
    assert str(exported.graph).count("recfuse.ikbo_linear") == 1
    torch.export.save(exported, tmp_path / "layer.pt2")
    before = copy.deepcopy(layer)  # the program has its parameters
    for program in (exported, torch.export.load(tmp_path / "layer.pt2")):
        module = program.module()
        for sizes in ((2, 9), (9, 2), (30, 31)):
            other = inputs("linear" in name, *sizes)
            torch.testing.assert_close(module(*other), concatenated(before, *other))
        state = {key: torch.randn_like(value) for key, value in layer.state_dict().items()}
        module.load_state_dict(state)
        copied = copy.deepcopy(layer)
        copied.load_state_dict(state)
        torch.testing.assert_close(module(*given), concatenated(copied, *given))
        with torch.no_grad():
            module.weight.mul_(-1)
            copied.weight.mul_(-1)
        torch.testing.assert_close(module(*given), concatenated(copied, *given))


def test_more_levels():
    features, items = (3, 4, 5), (2, 6, 20)
    for layer, tail in ((LinearCompression(features, M), (N,)), (IKBOLinear(features, M), ())):
        given = [torch.randn(count, k, *tail) for count, k in zip(items, features, strict=True)]
        maps = [torch.randint(0, parents, (count,)) for parents, count in itertools.pairwise(items)]
        wide = given[0]
        for found, more in zip(maps, given[1:], strict=True):
            wide = torch.cat((wide[found], more), 1)
        want = layer.weight @ wide if tail else F.linear(wide, layer.weight, layer.bias)
        torch.testing.assert_close(layer(given, maps), want)
        with pytest.raises(TypeError, match=r"the layer has 3\. Pass two lists"):
            layer(given[0], given[1], maps[0])


def test_from_linear():
    for bias in (True, False):
        linear = torch.nn.Linear(KU + KC, M, bias=bias).eval()
        layer = IKBOLinear.from_linear(linear, (KU, KC), activation="relu")
        assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
        assert layer.state_dict().keys() == linear.state_dict().keys()
        users, candidates, found = inputs(True, dtype=torch.float32)
        for _ in range(2):
            want = linear(torch.cat((users[found], candidates), 1)).relu()
            torch.testing.assert_close(layer(users, candidates, found), want)
            with torch.no_grad():
                linear.weight.mul_(2)
    with pytest.raises(ValueError, match=r"in_features is \(2, 3\), 5 in all; expected the 16 of linear"):
        IKBOLinear.from_linear(linear, (2, 3))
    with pytest.raises(TypeError, match=r"linear is a Conv1d; expected a torch\.nn\.Linear"):
        IKBOLinear.from_linear(torch.nn.Conv1d(1, 1, 1), (2, 3))
    torch.nn.utils.parametrizations.weight_norm(linear)
    with pytest.raises(TypeError, match="computed from other parameters"):
        IKBOLinear.from_linear(linear, (KU, KC))


def test_parameters_are_drawn_as_linears():
    torch.manual_seed(1)
    ours = IKBOLinear((KU, KC), M)
    torch.manual_seed(1)
    theirs = torch.nn.Linear(KU + KC, M)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    assert LinearCompression((KU, KC), M).bias is None
    assert LinearCompression((KU, KC), M, device="meta").weight.is_meta
    empty = IKBOLinear((0, 0), M)
    assert empty.bias.abs().max() <= 1 and empty(
        torch.zeros(2, 0), torch.zeros(3, 0), torch.zeros(3).int()
    ).shape == (3, M)


def test_printing_and_copies():
    layer = IKBOLinear((KU, KC), M, activation="silu")
    assert repr(layer) == "IKBOLinear(in_features=(11, 5), out_features=7, bias=True, activation='silu')"
    assert "in_features=(11, 5), out_features=7, bias=False" in repr(LinearCompression((KU, KC), M))
    given = inputs(True, dtype=torch.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(*given), layer(*given))


def test_bad_layers_and_calls():
    for make, kind, words in (
        (lambda: IKBOLinear(16, M), TypeError, "in_features is an int; expected a tuple"),
        (lambda: IKBOLinear((16,), M), ValueError, "in_features has 1 levels; expected 2 to 4"),
        (lambda: IKBOLinear((1,) * 5, M), ValueError, "in_features has 5 levels"),
        (lambda: IKBOLinear((1, -1), M), ValueError, r"in_features\[1\] is -1"),
        (lambda: IKBOLinear((1, 2.5), M), TypeError, r"in_features\[1\] is a float"),
        (lambda: LinearCompression((1, 1), "x"), TypeError, "LinearCompression: out_features is a str"),
        (
            lambda: IKBOLinear((1, 1), M, activation="tanh"),
            ValueError,
            "activation is 'tanh'; expected one of",
        ),
    ):
        with pytest.raises(kind, match=words):
            make()
    layer = IKBOLinear((KU, KC), M, path="fused")
    users, candidates, found = inputs(True, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="fused"):
        layer(users, candidates, found)
    with pytest.raises(TypeError, match="cand_to_user is None"):
        layer(users, candidates)
    with pytest.raises(
        TypeError, match="x_user or x_cand is no tensor, but cand_to_user is given; expected tensors"
    ):
        layer([users], [candidates], found)
    with pytest.raises(recfuse.errors.IndexRangeError, match=r"cand_to_user\[0\] is 4"):
        IKBOLinear((KU, KC), M)(users, candidates, torch.full((CANDIDATES,), USERS))
