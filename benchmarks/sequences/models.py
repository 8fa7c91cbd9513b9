"""Two models with histories, in the form that TorchRec and TorchEasyRec build them.

Both look their histories up in an ``EmbeddingCollection`` of TorchRec, take a JaggedTensor for each feature,
pad it by ``to_padded_dense`` and join the features. Sizes are small; the layers are those of the papers:

  DIN   Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018: an MLP of
        [query, history, their difference, their product] gives the weight of each position
  HSTU  Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
        Generative Recommendations", ICML 2024: layers without softmax, whose result is gated
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HISTORIES = ("clicked_items", "clicked_shops")
TARGETS = ("item", "shop")


def tables_of(rows: int, dim: int, features: dict[str, list[str]]) -> Any:
    """TorchRec's module with a table for each entry; raises ImportError without TorchRec."""
    from torchrec import EmbeddingCollection
    from torchrec.modules.embedding_configs import EmbeddingConfig

    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=dim,
                feature_names=names,
            )
            for name, names in features.items()
        ]
    )  # fmt: skip


class DIN(nn.Module):
    """Interest of a target item and shop in the history of both, then a score."""

    def __init__(self, rows: int, dim: int, length: int, hidden: int = 32) -> None:
        """Create the tables, the MLP of the weights and that of the logit."""
        super().__init__()
        pairs = zip(TARGETS, HISTORIES, strict=True)
        self.tables = tables_of(rows, dim, {name: [name, history] for name, history in pairs})
        self.length, width = length, dim * len(TARGETS)
        self.attention = nn.Sequential(nn.Linear(4 * width, hidden), nn.Sigmoid(), nn.Linear(hidden, 1))
        self.top = nn.Sequential(nn.Linear(2 * width, hidden), nn.PReLU(), nn.Linear(hidden, 1))

    def forward(self, features: Any) -> Tensor:
        """The logit of each sample."""
        found = self.tables(features)
        query = torch.cat([found[name].values() for name in TARGETS], -1)
        padded = [found[name].to_padded_dense(self.length) for name in HISTORIES]
        history = torch.cat(padded, -1)
        wide = query.unsqueeze(1).expand_as(history)
        score = self.attention(torch.cat([wide, history, wide - history, wide * history], -1)).squeeze(-1)
        lengths = found[HISTORIES[0]].lengths()
        mask = torch.arange(self.length, device=lengths.device) < lengths.unsqueeze(1)
        score = score.masked_fill(~mask, 0.0)  # as the paper: without a softmax
        interest = torch.bmm(score.unsqueeze(1), history).squeeze(1)
        return self.top(torch.cat([query, interest], -1)).squeeze(-1)


class HSTULayer(nn.Module):
    """Pointwise projection, aggregation over the past, and a gated transformation."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        """Create the layer for histories of `length` positions."""
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.transform = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(2 * length - 1))  # of relative positions
        distance = torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1)
        self.register_buffer("distance", distance + length - 1)
        self.register_buffer("past", distance <= 0)

    def forward(self, given: Tensor, mask: Tensor) -> Tensor:
        """The next state of each position."""
        batch, length, dim = given.shape
        gate, value, query, key = functional.silu(self.project(self.before(given))).chunk(4, -1)
        query, key, value = (
            one.view(batch, length, self.heads, -1).transpose(1, 2) for one in (query, key, value)
        )
        weights = functional.silu(query @ key.mT + self.bias[self.distance]) / length
        weights = weights.masked_fill(~(self.past & mask[:, None, None]), 0.0)
        pooled = (weights @ value).transpose(1, 2).reshape(batch, length, dim)
        return given + self.transform(self.after(pooled) * gate)


class HSTU(nn.Module):
    """A history of items and actions, two layers, and the scores of the target item and shop."""

    def __init__(self, rows: int, dim: int, length: int, layers: int = 2, heads: int = 2) -> None:
        """Create the tables, an embedding of positions and the layers."""
        super().__init__()
        features = {"item": ["item", "clicked_items"], "shop": ["shop", "clicked_shops"]}
        self.tables = tables_of(rows, dim, features)
        self.length = length
        self.positions = nn.Parameter(torch.randn(length, 2 * dim) * 0.02)
        self.layers = nn.ModuleList(HSTULayer(2 * dim, heads, length) for _ in range(layers))

    def forward(self, features: Any) -> Tensor:
        """The score of each sample's target after its history."""
        found = self.tables(features)
        padded = torch.cat([found[name].to_padded_dense(self.length) for name in HISTORIES], -1)
        lengths = found[HISTORIES[0]].lengths()
        mask = torch.arange(self.length, device=lengths.device) < lengths.unsqueeze(1)
        state = padded * self.length**0.5 + self.positions
        for layer in self.layers:
            state = layer(state, mask)
        last = (lengths.clamp(1, self.length) - 1).view(-1, 1, 1).expand(-1, 1, state.shape[2])
        query = torch.cat([found[name].values() for name in TARGETS], -1)
        return (functional.normalize(state.gather(1, last).squeeze(1), dim=-1) * query).sum(-1)


MODELS = {"DIN": DIN, "HSTU": HSTU}


def model_batch(rows: int, samples: int, longest: int, device: torch.device) -> Any:
    """A KeyedJaggedTensor of targets, one a sample, and of histories of 1 to `longest` lookups."""
    from torchrec import KeyedJaggedTensor

    each, lengths = torch.ones(samples, dtype=torch.int64), torch.randint(1, longest + 1, (samples,))
    of_key = {**dict.fromkeys(TARGETS, each), **dict.fromkeys(HISTORIES, lengths)}
    joined = torch.cat(list(of_key.values())).to(device)
    values = torch.randint(rows, (int(joined.sum()),), device=device)
    return KeyedJaggedTensor(
        list(of_key), values, lengths=joined, offsets=functional.pad(joined.cumsum(0), (1, 0)),
        length_per_key=[int(own.sum()) for own in of_key.values()], stride=samples,
    )  # fmt: skip
