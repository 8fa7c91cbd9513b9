"""Calls of the IKBO operators on the CPU, to be explained for GPUs; results and tables are never read."""

from __future__ import annotations

from typing import Any

import torch

import recfuse


def linear(
    users: int = 20, candidates: int = 300, m: int = 433, ks: tuple[int, int] = (100, 60), n: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """`recfuse.ikbo_linear` and its arguments."""
    weights = (torch.zeros(m, k, dtype=dtype) for k in ks)
    inputs = (torch.zeros(count, k, n, dtype=dtype) for count, k in zip((users, candidates), ks, strict=True))
    return recfuse.ikbo_linear, *weights, *inputs, torch.randint(users, (candidates,))


def attention(
    users: int = 20, candidates: int = 200, queries: int = 1, positions: int = 100, heads: int = 2,
    dim: int = 64, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """`recfuse.ikbo_attention` and its arguments."""
    keys = torch.zeros(users, positions, heads, dim, dtype=dtype)
    q = torch.zeros(candidates, queries, heads, dim, dtype=dtype)
    return recfuse.ikbo_attention, q, keys, keys.clone(), torch.randint(users, (candidates,))
