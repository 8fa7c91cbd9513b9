"""Users that no candidate reads, whose features are NaN: calls, and the same by torch's gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from support.ikbo import reference as linear_reference
from support.ikbo_attention import reference as attention_reference


def poisoned(values: Tensor, unread: Any) -> Tensor:
    """Returns a copy with NaN, and infinity in the last, in the unread rows."""
    values = values.clone()
    values[unread] = torch.nan
    if values[unread].numel():
        values[unread].view(-1)[-1] = torch.inf
    return values


def chain_inputs(
    n: int | None, dtype: torch.dtype, index: torch.dtype, device: Any = "cpu"
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, inputs and maps of three levels; unread: vendor 3, whose item 5 is unread, and vendor 4."""
    sizes = ((5, 16), (7, 8), (24, 16))
    maps = [torch.tensor((0, 1, 2, 0, 1, 3, 2)), torch.arange(24) % 5]
    weights = [torch.randn(32, k, dtype=torch.float64) for _, k in sizes]
    inputs = [torch.randn(*(size if n is None else (*size, n)), dtype=torch.float64) for size in sizes]
    inputs[0], inputs[1] = poisoned(inputs[0], slice(3, None)), poisoned(inputs[1], slice(5, None))
    given = [[one.to(dtype).to(device) for one in some] for some in (weights, inputs)]
    return given[0], given[1], [one.to(index).to(device) for one in maps]


def gathered_linear(weights: Sequence[Tensor], inputs: Sequence[Tensor], maps: Sequence[Tensor]) -> Tensor:
    """Every level's rows are gathered for the last level's items, then multiplied."""
    rows = [inputs[-1]]
    path = torch.arange(inputs[-1].shape[0], device=inputs[-1].device)
    for level in reversed(range(len(maps))):
        path = maps[level].long()[path]
        rows.insert(0, inputs[level][path])
    total: Tensor = sum(
        linear_reference([weight], [given], []) for weight, given in zip(weights, rows, strict=True)
    )
    return total


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, users: Tensor, **options: Any) -> Tensor:
    """By torch's operators, user by user, for users with candidates."""
    found: Tensor = attention_reference(q, k, v, users, **options)[0]
    return found


def gradients(call: Callable[..., Tensor], leaves: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
    """Of the leaves, which may be unused."""
    leaves = [one.detach().clone().requires_grad_() for one in leaves]
    out = call(*leaves)
    found = torch.autograd.grad(out, leaves, factors.to(out.dtype), allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(one) if grad is None else grad for one, grad in zip(leaves, found, strict=True)),
    ]


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """Equal outputs and gradients, all finite."""
    with torch.no_grad():
        factors = torch.randn_like(theirs(*leaves), dtype=torch.float64)
    wide = [one.double() for one in leaves]
    unit = torch.finfo(leaves[0].dtype).eps
    pairs = zip(gradients(ours, leaves, factors), gradients(theirs, wide, factors), strict=True)
    for got, want in pairs:
        assert got.isfinite().all() and want.isfinite().all()
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=32 * unit * (1 + largest))
