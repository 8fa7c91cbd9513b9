"""On a GPU: users that no candidate reads may be NaN, in every path, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import recfuse
from recfuse.nn import TargetAttention
from support import gpu
from support.ikbo.unread import assert_same, chain_inputs, gathered_attention, gathered_linear, poisoned
from support.ikbo_attention.gpu import HALF_DTYPES

pytestmark = gpu.MARKS

PATHS = ("auto", "decomposed", "aligned", "broadcast", "fused", "small")


def linear_inputs(n: int | None, dtype: torch.dtype, index: torch.dtype) -> tuple[list[Any], list[Any], Any]:
    weights, inputs, _ = chain_inputs(n, torch.float64, index)
    inputs[1] = poisoned(inputs[1], slice(4, None))
    moved = [[one.to(gpu.DEVICE, dtype) for one in some[1:]] for some in (weights, inputs)]
    return moved[0], moved[1], (torch.arange(24) % 4).to(gpu.DEVICE, index)


@pytest.mark.parametrize("index", gpu.INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", (None, 3, 64))
def test_linear(n: int | None, path: str, dtype: torch.dtype, index: torch.dtype) -> None:
    weights, inputs, users = linear_inputs(n, dtype, index)
    try:
        recfuse.ikbo_linear(*weights, *inputs, users, path=path)
    except NotImplementedError:
        pytest.skip("the path does not take the call")
    assert_same(
        lambda *given: recfuse.ikbo_linear(*given, users, path=path),
        lambda *given: gathered_linear(given[:2], given[2:], [users]),
        (*weights, *inputs),
    )


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize("n", (None, 64))
def test_chain(n: int | None, dtype: torch.dtype) -> None:
    weights, inputs, maps = chain_inputs(n, dtype, torch.int64, gpu.DEVICE)
    assert_same(
        lambda *given: recfuse.ikbo_linear_chain(given[:3], given[3:], maps),
        lambda *given: gathered_linear(given[:3], given[3:], maps),
        (*weights, *inputs),
    )


def test_a_bad_user_reads_nothing() -> None:
    weights, inputs, users = linear_inputs(None, torch.float32, torch.int64)
    users[3], users[5] = 8, -1
    weights = [one.requires_grad_() for one in weights]
    recfuse.ikbo_linear(*weights, *inputs, users).sum().backward()
    with pytest.raises(IndexError, match=r"cand_to_user\[(3\] is 8|5\] is -1)"):
        recfuse.check()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in weights)


@HALF_DTYPES
@pytest.mark.parametrize("path", ("packed", "fused"))
@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
@pytest.mark.parametrize("dim", (64, 128))
def test_attention(dim: int, form: str, path: str, dtype: torch.dtype) -> None:
    """Keys of users without candidates are adjacent to keys that are read, in the same tiles."""
    lengths = torch.tensor((70, 3, 0, 65, 70, 4))
    ends = torch.full((6,), 70) if form == "dense" else lengths.clone()
    ends[4:] = 0
    unread = torch.arange(70) >= ends[:, None]
    k, v = (poisoned(torch.randn(6, 70, 2, dim), unread) for _ in range(2))
    options: dict[str, Any] = {}
    if form == "lengths":
        options["kv_lengths"] = lengths.to(gpu.DEVICE)
    if form == "jagged":
        kept = torch.arange(70) < lengths[:, None]
        k, v = k[kept], v[kept]
        options["kv_offsets"] = F.pad(lengths.cumsum(0), (1, 0)).to(gpu.DEVICE)
    given = [one.to(gpu.DEVICE, dtype) for one in (torch.randn(24, 2, 4, dim), k, v)]
    users = (torch.arange(24) % 4).to(gpu.DEVICE)
    try:
        recfuse.ikbo_attention(*given, users, path=path, **options)
    except NotImplementedError:
        pytest.skip("the path does not take the call")
    assert_same(
        lambda *tensors: recfuse.ikbo_attention(*tensors, users, path=path, **options),
        lambda *tensors: gathered_attention(*tensors, users, **options),
        given,
    )


@pytest.mark.parametrize("form", ("dense", "lengths", "jagged"))
def test_target_attention(form: str) -> None:
    layer = TargetAttention(64, 4, device=gpu.DEVICE)
    lengths = torch.tensor((9, 3, 0, 5, 9, 4), device=gpu.DEVICE)
    ends = torch.full_like(lengths, 9) if form == "dense" else lengths.clone()
    ends[4:] = 0
    at = torch.arange(9, device=gpu.DEVICE)
    history = poisoned(torch.randn(6, 9, 64, device=gpu.DEVICE), at >= ends[:, None])
    options: dict[str, Any] = {"kv_lengths": lengths} if form == "lengths" else {}
    if form == "jagged":
        history = history[at < lengths[:, None]]
        options["kv_offsets"] = F.pad(lengths.cumsum(0), (1, 0))
    users = torch.arange(24, device=gpu.DEVICE) % 4
    layer(torch.randn(24, 2, 64, device=gpu.DEVICE), history, users, **options).sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in layer.parameters())
