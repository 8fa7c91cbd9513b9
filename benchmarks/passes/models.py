"""The models: in plain PyTorch, and by hand with recfuse's modules and the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import recfuse


@dataclass
class Problem:
    """A model, its form by hand, and batches."""

    title: str
    model: nn.Module
    by_hand: nn.Module
    batches: list[tuple[Any, ...]]


class Bags(nn.Module):
    """Bags of many tables before one cat."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        """Makes the tables."""
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))

    def forward(self, indices: Tensor) -> Tensor:
        """[tables, batch, lookups] to [batch, tables * dim]."""
        return torch.cat(
            [table(lookups) for table, lookups in zip(self.tables, indices.unbind(), strict=True)], 1
        )


class BagsByHand(nn.Module):
    """The same as one collection."""

    def __init__(self, model: Bags) -> None:
        """Takes over a model's tables."""
        super().__init__()
        self.tables = recfuse.nn.FusedEmbeddingBagCollection.from_embedding_bags(list(model.tables))

    def forward(self, indices: Tensor) -> Tensor:
        """As the model's."""
        tables, batch, lookups = indices.shape
        offsets = torch.arange(tables * batch + 1, device=indices.device) * lookups
        return self.tables(indices.reshape(-1), offsets)  # type: ignore[no-any-return]


class Ranking(nn.Module):
    """A user tower, candidates, linear compression, target attention and a top layer."""

    def __init__(self, dim: int, heads: int, user_rows: int, candidate_rows: int, compressed: int) -> None:
        """Makes the layers."""
        super().__init__()
        self.dim, self.heads = dim, heads
        self.tower = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.compression = nn.Linear(user_rows + candidate_rows, compressed, bias=False)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.top = nn.Sequential(nn.Linear((compressed + 1) * dim, 256), nn.ReLU(), nn.Linear(256, 1))

    def heads_of(self, x: Tensor) -> Tensor:
        """[items, positions, dim] to [items, heads, positions, dim / heads]."""
        return x.view(x.shape[0], -1, self.heads, self.dim // self.heads).transpose(1, 2)

    def forward(self, user: Tensor, history: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        """A score a candidate: [users, ...], [candidates, ...] and a map to [candidates, 1]."""
        users = self.tower(user)[index]  # [B, Ku, dim]
        joined = torch.matmul(self.compression.weight, torch.cat([users, candidate], 1))
        history = history[index]
        keys, values = self.heads_of(self.k(history)), self.heads_of(self.v(history))
        attended = nn.functional.scaled_dot_product_attention(
            self.heads_of(self.q(candidate[:, :1])), keys, values
        )
        return self.top(torch.cat([joined.flatten(1), attended.flatten(1)], 1))  # type: ignore[no-any-return]


class RankingByHand(nn.Module):
    """The same with recfuse's operators."""

    def __init__(self, model: Ranking) -> None:
        """With a model's layers."""
        super().__init__()
        self.model = model

    def forward(self, user: Tensor, history: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        """As the model's."""
        model, rows = self.model, user.shape[1]
        weight = model.compression.weight
        joined = recfuse.ikbo_linear(weight[:, :rows], weight[:, rows:], model.tower(user), candidate, index)
        q, k, v = (
            layer(x).unflatten(-1, (model.heads, model.dim // model.heads))
            for layer, x in ((model.q, candidate[:, :1]), (model.k, history), (model.v, history))
        )
        attended = recfuse.ikbo_attention(q, k, v, index)
        return model.top(torch.cat([joined.flatten(1), attended.flatten(1)], 1))  # type: ignore[no-any-return]


def bags(tables: int, rows: int, dim: int, batch: int, lookups: int, count: int, device: str) -> Problem:
    """Tables of one size."""
    model = Bags(tables, rows, dim).eval()
    by_hand = BagsByHand(model).eval()
    batches = [(torch.randint(0, rows, (tables, batch, lookups), device=device),) for _ in range(count)]
    title = f"bags, {tables} tables of {rows} x {dim}, batch {batch} x {lookups} lookups"
    return Problem(title, model.to(device), by_hand.to(device), batches)


def ranking(users: int, ratio: int, dtype: torch.dtype, count: int, device: str) -> Problem:
    """Users with candidates each."""
    dim, user_rows, candidate_rows, positions = 64, 48, 16, 128
    model = Ranking(dim, 4, user_rows, candidate_rows, 16).eval().to(device, dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    index = torch.arange(users, device=device).repeat_interleave(ratio)
    batches = [
        (
            draw(users, user_rows, dim),
            draw(users, positions, dim),
            draw(users * ratio, candidate_rows, dim),
            index,
        )
        for _ in range(count)
    ]
    title = f"ranking, {users} users with {ratio} candidates each, {str(dtype).removeprefix('torch.')}"
    return Problem(title, model, RankingByHand(model).eval(), batches)
