"""Values that no candidate reads, of users without candidates and past a history's end, affect no result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import recfuse
from recfuse.nn import IKBOLinear, LinearCompression, TargetAttention
from support.ikbo.unread import assert_same, chain_inputs, gathered_attention, gathered_linear, poisoned

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
MAP = torch.arange(24) % 4
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_n = pytest.mark.parametrize("n", (None, 3))


def pair_inputs(n, dtype=torch.float64, index=torch.int64):
    weights, inputs, _ = chain_inputs(n, dtype, index)
    inputs[1] = poisoned(inputs[1], slice(4, None))
    return weights[1:], inputs[1:], MAP.to(index)


@each_n
@each_dtype
@pytest.mark.parametrize("path", ("auto", "decomposed", "aligned", "broadcast", "concatenated"))
def test_linear(path, dtype, n):
    if path == "concatenated" and n is not None:
        pytest.skip("the path is for inputs of two dimensions")
    for index in INTEGERS:
        weights, inputs, users = pair_inputs(n, dtype, index)
        ours = lambda *given: recfuse.ikbo_linear(*given, users, path=path)  # noqa: B023, E731
        theirs = lambda *given: gathered_linear(given[:2], given[2:], [users])  # noqa: B023, E731
        assert_same(ours, theirs, (*weights, *inputs))


@each_n
@each_dtype
def test_a_level_that_only_unread_items_read(dtype, n):
    for index in INTEGERS:
        weights, inputs, maps = chain_inputs(n, dtype, index)
        ours = lambda *given: recfuse.ikbo_linear_chain(given[:3], given[3:], maps)  # noqa: B023, E731
        theirs = lambda *given: gathered_linear(given[:3], given[3:], maps)  # noqa: B023, E731
        assert_same(ours, theirs, (*weights, *inputs))


@each_n
def test_no_candidates_at_all(n):
    weights, inputs, users = pair_inputs(n)
    inputs = [poisoned(inputs[0], slice(None)), inputs[1][:0]]
    weights = [one.requires_grad_() for one in weights]
    recfuse.ikbo_linear(*weights, *inputs, users[:0]).sum().backward()
    assert not any(one.grad.any() for one in weights)


@each_n
def test_second_derivatives_of_linear(n):
    weights, inputs, users = pair_inputs(n)
    factors = [torch.randn_like(one) for one in (*weights, *inputs)]

    def derivatives(call):
        leaves = [one.detach().requires_grad_() for one in (*weights, *inputs)]
        first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, factors)

    got = derivatives(lambda *given: recfuse.ikbo_linear(*given, users))
    want = derivatives(lambda *given: gathered_linear(given[:2], given[2:], [users]))
    torch.testing.assert_close(got, want)
    assert all(one.isfinite().all() for one in got)


@each_n
def test_transforms_of_linear(n):
    weights, inputs, users = pair_inputs(n)

    def loss(call, users):
        return lambda *given: call(*given, users).square().sum()

    def gathered(*given):
        return gathered_linear(given[:2], given[2:4], [given[4]])

    many = torch.stack((users, users.flip(0), users // 2))
    for call_grad in (
        lambda call: torch.func.grad(loss(call, users), (0, 1, 2, 3))(*weights, *inputs),
        lambda call: (
            torch.stack([torch.func.grad(loss(call, one))(*weights, *inputs) for one in many])
            if call is gathered
            else torch.vmap(lambda one: torch.func.grad(loss(call, one))(*weights, *inputs))(many)
        ),
    ):
        torch.testing.assert_close(call_grad(recfuse.ikbo_linear), call_grad(gathered))


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled_linear(dynamic):
    torch._dynamo.reset()
    weights, inputs, users = pair_inputs(None)
    compiled = torch.compile(
        lambda *given: recfuse.ikbo_linear(*given, users),
        backend="aot_eager",
        fullgraph=True,
        dynamic=dynamic,
    )
    assert_same(compiled, lambda *given: gathered_linear(given[:2], given[2:], [users]), (*weights, *inputs))


@pytest.mark.parametrize("kind", (IKBOLinear, LinearCompression))
def test_modules_of_linear(kind):
    _, inputs, users = pair_inputs(None)
    layer = kind((8, 16), 32, bias=True, dtype=torch.float64)
    if kind is LinearCompression:
        inputs = [one[..., None].expand(*one.shape, 3) for one in inputs]
    layer(*inputs, users).sum().backward()
    assert layer.weight.grad.isfinite().all() and layer.bias.grad.isfinite().all()
    gathered = torch.cat((inputs[0][users], inputs[1]), 1).sum(0)
    want = (gathered if gathered.dim() == 1 else gathered.sum(1)).expand(32, 24)
    torch.testing.assert_close(layer.weight.grad, want)


# ---- attention


def attention_inputs(form, dtype=torch.float64):
    """Six users; the first four have candidates, the third has no keys."""
    lengths = torch.tensor((9, 3, 0, 5, 9, 4))
    options = {}
    k, v = (torch.randn(6, 9, 2, 8, dtype=torch.float64) for _ in range(2))
    ends = torch.full((6,), 9) if form == "dense" else lengths.clone()
    ends[4:] = 0
    unread = torch.arange(9) >= ends[:, None]
    k, v = poisoned(k, unread), poisoned(v, unread)
    if form == "lengths":
        options["kv_lengths"] = lengths
    if form == "jagged":
        kept = torch.arange(9) < lengths[:, None]
        k, v, options["kv_offsets"] = k[kept], v[kept], F.pad(lengths.cumsum(0), (1, 0))
    q = torch.randn(24, 2, 4, 8, dtype=torch.float64)
    return [one.to(dtype) for one in (q, k, v)], options


@each_dtype
@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
def test_attention(form, dtype):
    for users in (MAP, MAP.int(), (torch.rand(24) ** 2 * 4).long()):
        given, options = attention_inputs(form, dtype)
        assert_same(
            lambda *tensors: recfuse.ikbo_attention(*tensors, users, **options),  # noqa: B023
            lambda *tensors: gathered_attention(*tensors, users, **options),  # noqa: B023
            given,
        )


@pytest.mark.parametrize("with_queries", (False, True))
@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
def test_target_attention(form, with_queries):
    """Equal to the gradients of a call whose unread positions are zeros."""
    torch.manual_seed(3)
    layer = TargetAttention(16, 4, kv_heads=2, kdim=6, vdim=5, dtype=torch.float64)
    (_, k, v), options = attention_inputs(form)
    unread = k[..., 0, 0].isnan() | k[..., 0, 0].isinf()
    if with_queries:
        options["x_user_queries"] = torch.randn(6, 3, 16, dtype=torch.float64)
    keys, values = k.flatten(-2)[..., :6], v.flatten(-2)[..., :5]
    if with_queries:  # each user reads its own history
        lengths = options.get("kv_lengths")
        unread = torch.zeros_like(unread)
        if lengths is not None:
            unread = torch.arange(9) >= lengths[:, None]
        keys, values = (
            poisoned(torch.where(unread[..., None], one, one.nan_to_num(0.5, 0.5)), unread)
            for one in (keys, values)
        )
    x_cand = torch.randn(24, 2, 16, dtype=torch.float64)
    found = []
    for clean in (False, True):
        layer.zero_grad()
        history, of_values = (
            torch.where(unread[..., None], 0, one) if clean else one for one in (keys, values)
        )
        history = history.detach().requires_grad_()
        out = layer(x_cand, history, MAP, x_values=of_values, **options)
        out = out if isinstance(out, torch.Tensor) else torch.cat([one.flatten() for one in out])
        out.square().sum().backward()
        found.append([out.detach(), history.grad, *(one.grad for one in layer.parameters())])
    assert all(one.isfinite().all() for one in found[0])
    torch.testing.assert_close(*found)


def test_target_attention_names_itself_in_errors():
    layer = TargetAttention(8, 2)
    x, history = torch.randn(6, 1, 8), torch.randn(3, 5, 8)
    users = torch.arange(6) % 3
    for bad, options, error in (
        (
            users,
            {"kv_lengths": torch.zeros(2, dtype=torch.int64)},
            r"^recfuse\.ikbo_attention\w*: kv_lengths",
        ),
        (users + 1, {}, r"^recfuse\.ikbo_attention\w*: cand_to_user\[2\] is 3"),
        (
            users,
            {"kv_lengths": torch.tensor((1, 9, 1))},
            r"^recfuse\.ikbo_attention\w*: kv_lengths\[1\] is 9",
        ),
        (users.float(), {}, r"^recfuse\.ikbo_attention\w*: cand_to_user"),
        ([0, 1, 2], {}, r"^recfuse\.ikbo_attention\w*: cand_to_user"),
    ):
        with pytest.raises((ValueError, IndexError, TypeError), match=error):
            layer(x, history, bad, **options)
