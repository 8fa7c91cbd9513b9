"""TargetAttention: multi-head attention over gathered histories, however the weights change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from recfuse.nn import TargetAttention

E, EK, EV, USERS, CANDIDATES, SQ, SKV, SU = 24, 10, 7, 5, 23, 3, 9, 4
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "shared heads": {"kv_heads": 2, "kdim": EK},
    "one head of keys": {"kv_heads": 1, "head_dim": 5, "kdim": EK, "vdim": EV},
}
FORMS = ("dense", "lengths", "jagged", "self", "jagged and self")
each_layer = pytest.mark.parametrize("name", LAYERS)
each_form = pytest.mark.parametrize("form", FORMS)


def layer_of(name):
    return TargetAttention(E, 4, **LAYERS[name], dtype=torch.float64)


def inputs(layer, form, users=USERS, candidates=CANDIDATES):
    """Arguments by name; histories are NaN where they must not be read."""
    lengths = torch.tensor([SKV, 0, 1, *torch.randint(1, SKV + 1, (users,)).tolist()][:users])
    draw = lambda *sizes: torch.randn(sizes, dtype=torch.float64)  # noqa: E731
    given = {"x_cand": draw(candidates, SQ, layer.embed_dim)}
    shape: tuple[int, ...] = users, SKV
    if "jagged" in form:
        given["kv_offsets"] = F.pad(lengths.cumsum(0), (1, 0))
        shape = (int(lengths.sum()),)
    given["x_user"] = draw(*shape, layer.kdim)
    if layer.vdim != layer.kdim:
        given["x_values"] = draw(*shape, layer.vdim)
    if form == "lengths":
        given["kv_lengths"] = lengths.int()
        for name in {"x_user", "x_values"} & set(given):
            for user, length in enumerate(lengths.tolist()):
                given[name][user, length:] = torch.nan
    if "self" in form:
        given["x_user_queries"] = draw(users, SU, layer.embed_dim)
    given["cand_to_user"] = torch.randint(0, users, (candidates,))
    return given


def expected(layer, x_cand, x_user, cand_to_user, kv_lengths=None, kv_offsets=None, x_values=None,
             x_user_queries=None):  # fmt: skip
    """Each candidate by itself, by torch's scaled_dot_product_attention."""
    x_values = x_user if x_values is None else x_values
    users = len(x_user) if kv_offsets is None else len(kv_offsets) - 1

    def history(of, user):
        if kv_offsets is not None:
            return of[kv_offsets[user] : kv_offsets[user + 1]]
        return of[user] if kv_lengths is None else of[user, : kv_lengths[user]]

    def heads(linear, given, count):
        return linear(given).unflatten(-1, (count, layer.head_dim)).transpose(0, 1)

    def one(queries, user):
        keys, values = history(x_user, user), history(x_values, user)
        q = heads(layer.q_proj, queries, layer.num_heads)
        if len(keys) == 0:
            found = torch.zeros_like(q)
        else:
            k, v = heads(layer.k_proj, keys, layer.kv_heads), heads(layer.v_proj, values, layer.kv_heads)
            found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return layer.out_proj(found.transpose(0, 1).flatten(1))

    def all_of(queries, owners):
        found = [one(queries[item], owners[item]) for item in range(len(queries))]
        return torch.stack(found) if found else queries.new_zeros(queries.shape)

    out = all_of(x_cand, cand_to_user.tolist())
    return out if x_user_queries is None else (all_of(x_user_queries, list(range(users))), out)


def changed(given, function):
    return {name: function(one) if one.is_floating_point() else one for name, one in given.items()}


def outputs(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


def assert_same(function, layer, given):
    """Equal outputs, and gradients of the layer's parameters and of the inputs."""
    found = []
    for call in (function, lambda **named: expected(layer, **named)):
        leaves = {name: one.clone().requires_grad_(one.is_floating_point()) for name, one in given.items()}
        layer.zero_grad()
        out = outputs(call(**leaves))
        factors = [torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape) for one in out]
        torch.autograd.backward(out, factors)
        grads = [*layer.parameters(), *(leaf for leaf in leaves.values() if leaf.requires_grad)]
        found.append((out, [torch.zeros_like(one) if one.grad is None else one.grad for one in grads]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, equal_nan=True)


@each_layer
@each_form
def test_output_equals_attention_over_gathered_histories(name, form):
    layer = layer_of(name)
    given = inputs(layer, form)
    if form == "lengths":  # a projection of NaN has a gradient of NaN, of torch's own
        given = changed(given, torch.Tensor.nan_to_num)
    assert_same(layer, layer, given)
    with torch.no_grad():
        given = inputs(layer, form)
        torch.testing.assert_close(outputs(layer(**given)), outputs(expected(layer, **given)))
        given["x_cand"], given["cand_to_user"] = given["x_cand"][:0], given["cand_to_user"][:0]
        torch.testing.assert_close(outputs(layer(**given)), outputs(expected(layer, **given)))


@pytest.mark.parametrize("bias", (False, True))
def test_output_equals_torchs_multihead_attention(bias):
    theirs = torch.nn.MultiheadAttention(
        E, 4, bias=bias, kdim=EK, vdim=EV, batch_first=True, dtype=torch.float64
    )
    layer = TargetAttention(E, 4, kdim=EK, vdim=EV, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for name in ("q", "k", "v"):
            getattr(layer, f"{name}_proj").weight.copy_(getattr(theirs, f"{name}_proj_weight"))
        layer.out_proj.weight.copy_(theirs.out_proj.weight)
        if bias:
            theirs.in_proj_bias.normal_()
            theirs.out_proj.bias.normal_()
            for name, part in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True):
                getattr(layer, f"{name}_proj").bias.copy_(part)
            layer.out_proj.bias.copy_(theirs.out_proj.bias)
    given = inputs(layer, "dense")
    users = given["cand_to_user"]
    want, _ = theirs(given["x_cand"], given["x_user"][users], given["x_values"][users], need_weights=False)
    torch.testing.assert_close(layer(**given), want)


def step(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(**inputs(layer, "dense")).square().sum().backward()
    optimizer.step()


def load(layer, assign=False):
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def set_data(layer):
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter)


def change_in_place(layer):
    with torch.no_grad():
        layer.k_proj.weight[:, 3:].mul_(-2)
        layer.out_proj.weight.mul_(2)


def replace(layer):
    for linear in (layer.q_proj, layer.v_proj):
        linear.weight = torch.nn.Parameter(
            torch.randn(linear.weight.shape[::-1], dtype=linear.weight.dtype).t()
        )


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


@pytest.mark.parametrize("form", ("dense", "jagged and self"))
@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.long)))
def test_no_change_of_a_weight_is_missed(compiled, form):
    torch._dynamo.reset()
    layer = layer_of("shared heads")
    given = inputs(layer, form)
    function = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else layer
    assert_same(function, layer, given)
    for change in CHANGES.values():
        before = outputs(layer(**given))[-1].detach()
        change(layer)
        assert_same(function, layer, given)
        assert change is move or not torch.allclose(outputs(layer(**given))[-1], before)


@each_layer
def test_functional_call(name):
    layer = layer_of(name)
    given = inputs(layer, "lengths")
    state = {key: torch.randn_like(value) for key, value in layer.state_dict().items()}
    other = copy.deepcopy(layer)
    other.load_state_dict(state)
    torch.testing.assert_close(functional_call(layer, state, (), given), expected(other, **given))
    torch.testing.assert_close(layer(**given), expected(layer, **given))


@each_form
def test_exported(form, tmp_path):
    layer = layer_of("shared heads")
    given = inputs(layer, form)
    users, candidates, total = (torch.export.Dim(name, min=2) for name in ("users", "candidates", "total"))
    sizes = {
        "x_cand": candidates,
        "cand_to_user": candidates,
        "kv_lengths": users,
        "x_user_queries": users,
        "x_user": total if "jagged" in form else users,
        "kv_offsets": users + 1 if "self" in form else torch.export.Dim.AUTO,
    }
    dynamic = {name: {0: sizes[name]} for name in given}
    exported = torch.export.export(layer, (), given, dynamic_shapes=dynamic)
    assert str(exported.graph).count("recfuse.ikbo_attention") == 1
    torch.export.save(exported, tmp_path / "layer.pt2")
    before = copy.deepcopy(layer)  # the program has its parameters
    for program in (exported, torch.export.load(tmp_path / "layer.pt2")):
        module = program.module()
        for users_now, candidates_now in ((3, 9), (9, 2), (30, 31)):
            other = inputs(layer, form, users_now, candidates_now)
            torch.testing.assert_close(outputs(module(**other)), outputs(expected(before, **other)))
        state = {key: torch.randn_like(value) for key, value in layer.state_dict().items()}
        module.load_state_dict(state)
        copied = copy.deepcopy(layer)
        copied.load_state_dict(state)
        torch.testing.assert_close(outputs(module(**given)), outputs(expected(copied, **given)))
        with torch.no_grad():
            module.v_proj.weight.mul_(-1)
            copied.v_proj.weight.mul_(-1)
        torch.testing.assert_close(outputs(module(**given)), outputs(expected(copied, **given)))


def test_parameters():
    layer = TargetAttention(E, 4, kv_heads=2, kdim=EK)
    assert {name: list(value.shape) for name, value in layer.state_dict().items()} == {
        "q_proj.weight": [24, 24], "q_proj.bias": [24], "k_proj.weight": [12, 10], "k_proj.bias": [12],
        "v_proj.weight": [12, 10], "v_proj.bias": [12], "out_proj.weight": [24, 24], "out_proj.bias": [24],
    }  # fmt: skip
    assert not any(linear.bias.any() for linear in layer.children())
    bound = (6 / (EK + 12)) ** 0.5
    assert bound / 2 < float(layer.k_proj.weight.abs().max()) <= bound
    assert TargetAttention(E, 4, device="meta").q_proj.weight.is_meta
    assert [name for name, _ in TargetAttention(E, 4, bias=False).named_parameters()] == [
        f"{name}_proj.weight" for name in ("q", "k", "v", "out")
    ]


def test_printing_and_copies():
    layer = TargetAttention(E, 4, kv_heads=2)
    assert "embed_dim=24, num_heads=4, kv_heads=2, head_dim=6" in repr(layer)
    given = changed(inputs(layer, "dense"), torch.Tensor.float)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(**given), layer(**given))


def test_autocast():
    layer = TargetAttention(E, 4, kv_heads=2)
    given = changed(inputs(layer, "self"), torch.Tensor.float)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(**given)
    for got, want in zip(found, layer(**given), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


def test_backward_within_autocast():
    gradients = []
    for within in (False, True):
        torch.manual_seed(1)
        layer = TargetAttention(E, 4, kv_heads=2)
        given = changed(inputs(layer, "self"), torch.Tensor.float)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            of_users, of_candidates = layer(**given)
            total = of_users.float().sum() + of_candidates.float().sum()
            with torch.autocast("cpu", enabled=within):
                total.backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


BAD = (
    (
        lambda: TargetAttention(25, 4),
        ValueError,
        "num_heads is 4; expected a divisor of embed_dim, 25. Pass head_dim",
    ),
    (
        lambda: TargetAttention(24, 4, kv_heads=3),
        ValueError,
        "kv_heads is 3; expected a divisor of num_heads, 4",
    ),
    (lambda: TargetAttention(24, 0), ValueError, "num_heads is 0"),
    (lambda: TargetAttention(24.0, 4), TypeError, "embed_dim is a float"),
    (lambda: TargetAttention(24, 4, kdim=-1), ValueError, "kdim is -1"),
    (lambda: TargetAttention(24, 4, head_dim="a"), TypeError, "head_dim is a str"),
)


def test_bad_layers_and_calls():
    for make, kind, words in BAD:
        with pytest.raises(kind, match=f"^TargetAttention: {words}"):
            make()
    layer = layer_of("one head of keys")
    given = inputs(layer, "dense")
    for changes, kind, words in (
        (
            {"x_cand": given["x_cand"][0]},
            ValueError,
            r"x_cand is \[3, 24\]; expected \[candidates, queries, 24\]",
        ),
        ({"x_user": given["x_user"][..., 1:]}, ValueError, r"x_user is .*expected \[users, positions, 10\]"),
        ({"x_values": None}, ValueError, r"x_values is \[5, 9, 10\]; expected \[users, positions, 7\]"),
        ({"kv_offsets": torch.arange(6)}, ValueError, r"x_user is \[5, 9, 10\]; expected \[positions, 10\]"),
        ({"x_user_queries": given["x_user"]}, ValueError, r"x_user_queries is .*\[users, queries, 24\]"),
        ({"x_cand": [1.0]}, TypeError, "x_cand is a list; expected a torch.Tensor"),
        ({"cand_to_user": torch.full((CANDIDATES,), USERS)}, IndexError, r"cand_to_user\[0\] is 5"),
        ({"cand_to_user": given["cand_to_user"][1:]}, ValueError, "cand_to_user has 22 elements"),
    ):
        with pytest.raises(kind, match=words):
            layer(**{**given, **changes})
    layer.path = "fused"
    with pytest.raises(NotImplementedError, match="fused"):
        layer(**given)


def test_target_attention_trains():
    """A candidate's result is the position of the history that it selects."""
    torch.manual_seed(3)
    layer = TargetAttention(16, 2)
    keys = torch.eye(8).expand(6, 8, 8)
    values = torch.randn(6, 8, 8)
    x_user = torch.cat((keys, values), -1)
    found, asked = torch.arange(64) % 6, torch.arange(64) % 8
    x_cand = F.pad(torch.eye(8)[asked], (0, 8))[:, None]
    want = values[found, asked]
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (layer(x_cand, x_user, found)[:, 0, :8] - want).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20, losses[::40]
