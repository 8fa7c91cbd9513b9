"""The specification of both operators in plain PyTorch, in float64, and how to compare with it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOLING_NAMES = ("sum", "mean", "max")


def _pool(rows: Tensor, mode: str) -> Tensor:
    """[n, dim] -> [dim]; zeros for n = 0. Max keeps the first of equals, and a NaN only if it comes first."""
    if rows.shape[0] == 0:
        return rows.new_zeros(rows.shape[1])
    if mode == "max":
        best = rows[0]
        for row in rows[1:]:
            best = torch.where(row > best, row, best)
        return best
    return rows.sum(0) if mode == "sum" else rows.mean(0)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """[bags, dim] float64, differentiable in weight and per_sample_weights."""
    if input.dim() == 2:
        offsets = torch.arange(input.shape[0]) * input.shape[1]
        include_last_offset = False
        input = input.reshape(-1)
        per_sample_weights = per_sample_weights.reshape(-1) if per_sample_weights is not None else None
    bounds = offsets.tolist() if include_last_offset else [*offsets.tolist(), input.numel()]
    skip = None if padding_idx is None else padding_idx % max(weight.shape[0], 1)
    table = weight.double()
    pooled = []
    for start, end in itertools.pairwise(bounds):
        lookups = torch.arange(start, end)
        if skip is not None:
            lookups = lookups[input[start:end] != skip]
        rows = table[input[lookups].long()]
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[lookups].double()[:, None]
        pooled.append(_pool(rows, mode))
    return torch.stack(pooled) if pooled else table.new_zeros(0, weight.shape[1])


class Feature(NamedTuple):
    """One feature of a fused call."""

    table: int
    mode: str
    padding_idx: int | None


def fused_embedding_bag(
    tables: Sequence[Tensor],
    features: Sequence[Feature],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """[bags, sum of dims] float64, differentiable in tables and per_sample_weights."""
    bags = (offsets.numel() - 1) // len(features)
    columns = [
        embedding_bag(
            indices,
            tables[feature.table],
            offsets[number * bags : (number + 1) * bags + 1],
            feature.mode,
            per_sample_weights,
            True,
            feature.padding_idx,
        )
        for number, feature in enumerate(features)
    ]
    return torch.cat(columns, dim=1)


def tolerance(magnitude: Tensor, lookups: int, dtype: torch.dtype) -> Tensor:
    """Returns the tolerance of a result: float32 sums of up to ``lookups`` terms, one rounding.

    ``magnitude`` is the reference of the absolute values, to which rounding errors of the sum are relative.
    """
    summing = torch.finfo(torch.float32).eps * (lookups + 2) * magnitude
    rounding = torch.finfo(dtype).eps * magnitude + torch.finfo(dtype).smallest_normal
    return summing + rounding


def assert_close_to_reference(actual: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    """Checks elementwise |actual - expected| <= allowed; NaN and infinities must be where the reference
    has them."""
    assert actual.shape == expected.shape, (
        f"shape is {list(actual.shape)}, reference has {list(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    got, want = actual.detach().double(), expected.detach().double()
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs())
    allowed = torch.as_tensor(allowed, dtype=torch.float64, device=error.device).expand_as(error)
    # Written so that a NaN in any of the three is a failure.
    excess = torch.where((error <= allowed) & want.isfinite() | same, 0.0, error - allowed)
    excess = torch.where(excess.isnan(), torch.inf, excess)
    worst = int(excess.argmax())
    if excess.reshape(-1)[worst] > 0:
        place = [int(one) for one in torch.unravel_index(torch.tensor(worst), got.shape)]
        wrong = int((excess > 0).sum())
        raise AssertionError(
            f"{wrong} of {got.numel()} elements are wrong; worst at {place}: "
            f"got {got.reshape(-1)[worst]:.9g}, reference {want.reshape(-1)[worst]:.9g}, "
            f"allowed error {allowed.reshape(-1)[worst]:.3g}"
        )


class Hyper(NamedTuple):
    """Numbers of an optimizer's step."""

    lr: float = 0.1
    weight_decay: float = 0.0
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)


def updated(
    kind: str,
    weight: Tensor,
    states: Sequence[Tensor],
    grad: Tensor,
    looked_up: Tensor,
    step: int = 1,
    hyper: Hyper = Hyper(),  # noqa: B008  (never changes)
) -> tuple[Tensor, list[Tensor]]:
    """Weight [rows, dim] and states after a step of SGD, Adagrad, RowWiseAdagrad or Adam, in float64.

    ``grad``: [rows, dim]; ``looked_up``: [rows], whether a lookup of the row counts. Other rows stay.
    """
    old, g = weight.double(), grad.double() + hyper.weight_decay * weight.double()
    before = [state.double() for state in states]
    if kind == "SGD":
        change, after = g, []
    elif kind == "Adam":
        (b1, b2), (m, v) = hyper.betas, before
        after = [b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g]
        correction = (1 - b2**step) ** 0.5 / (1 - b1**step)
        change = correction * after[0] / (after[1].sqrt() + hyper.eps)
    else:
        square = (g * g).mean(1, keepdim=True) if kind == "RowWiseAdagrad" else g * g
        after = [before[0] + square]
        change = g / (after[0].sqrt() + hyper.eps)
    own = looked_up[:, None]
    kept = [torch.where(own, new, state) for new, state in zip(after, before, strict=True)]
    return torch.where(own, old - hyper.lr * change, old), kept
