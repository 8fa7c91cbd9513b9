"""A DLRM in plain PyTorch (Naumov et al., 2019), with the layout of facebookresearch/dlrm's DLRM_Net:
tables in `emb_l`, pooled by `apply_emb`. Code that works with this model works with that script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import recfuse
from common.checks import difference, largest
from recfuse import timing

BASELINE, CANDIDATE = "nn.EmbeddingBag", "recfuse"
AGAINST = "nn.EmbeddingBag in a loop"
TOLERANCE = 1e-4
"""Sums of float32 in another order; the last layer is a sigmoid."""


class DLRM(nn.Module):
    """Bottom MLP on dense features, a bag of embeddings a table, dot interaction, top MLP, sigmoid.

    rows: rows of each table. dim: embedding dimension, the bottom MLP's last width.
    bottom: widths of the bottom MLP, first the number of dense features.
    top: widths of the top MLP after its input, which follows from the tables; the last is the output.
    """

    def __init__(self, rows: Sequence[int], dim: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        """See the class."""
        super().__init__()
        vectors = len(rows) + 1
        interactions = dim + vectors * (vectors - 1) // 2
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(count, dim, mode="sum", sparse=True) for count in rows)
        self.v_W_l: list[Tensor | None] = [None] * len(rows)
        self.bot_l = self.create_mlp(bottom, last=nn.ReLU())
        self.top_l = self.create_mlp([interactions, *top], last=nn.Sigmoid())
        below_diagonal = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", below_diagonal[0] * vectors + below_diagonal[1], persistent=False)

    @staticmethod
    def create_mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
        """Creates linear layers with ReLU between them and `last` at the end."""
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1], last)

    def apply_mlp(self, x: Tensor, layers: nn.Sequential) -> Tensor:
        """Applies an MLP."""
        return layers(x)

    def apply_emb(
        self, lS_o: Tensor, lS_i: Sequence[Tensor], emb_l: nn.ModuleList, v_W_l: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Pooled embeddings of each table [batch, dim]; lS_o: offsets of each, lS_i: indices of each."""
        pooled = []
        for table, bag in enumerate(emb_l):
            weight = v_W_l[table]
            sample_weights = None if weight is None else weight[lS_i[table]]
            pooled.append(bag(lS_i[table], lS_o[table], per_sample_weights=sample_weights))
        return pooled

    def interact_features(self, x: Tensor, ly: Sequence[Tensor]) -> Tensor:
        """Returns the dense vector and the dot products of all pairs: [batch, dim + pairs]."""
        vectors = torch.cat([x, *ly], 1).view(x.shape[0], -1, x.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([x, products[:, self.pairs]], 1)

    def forward(self, dense_x: Tensor, lS_o: Tensor, lS_i: Sequence[Tensor]) -> Tensor:
        """Probabilities [batch, top[-1]] from dense features, offsets and indices of each table."""
        x = self.apply_mlp(dense_x, self.bot_l)
        ly = self.apply_emb(lS_o, lS_i, self.emb_l, self.v_W_l)
        return self.apply_mlp(self.interact_features(x, ly), self.top_l)


@dataclass
class MiniBatch:
    """Inputs of a call, with the names of facebookresearch/dlrm."""

    dense_x: Tensor  # [batch, dense features] float32
    lS_o: Tensor  # [tables, batch] int64
    lS_i: Tensor  # [tables, batch * lookups] int64


class Staged:
    """DLRM.forward stage by stage: a call returns the seconds of each stage."""

    def __init__(
        self, model: DLRM, device: str | torch.device, wrap: Callable[[Any], Any] = lambda call: call
    ) -> None:
        """`wrap`: a function applied to each stage's function, such as torch.compile."""
        self._model, self._device = model, device
        self._mlp, self._apply_emb = wrap(model.apply_mlp), wrap(model.apply_emb)
        self._interact = wrap(model.interact_features)

    def embeddings(self, batch: MiniBatch) -> list[Tensor]:
        """Returns the pooled embeddings of each table."""
        return self._apply_emb(batch.lS_o, batch.lS_i, self._model.emb_l, self._model.v_W_l)

    def forward(self, batch: MiniBatch, stages: timing.Stages) -> Tensor:
        """Returns the output; adds the seconds of the stages to `stages`."""
        with stages("bottom MLP"):
            x = self._mlp(batch.dense_x, self._model.bot_l)
        with stages("embeddings"):
            ly = self.embeddings(batch)
        with stages("interaction"):
            z = self._interact(x, ly)
        with stages("top MLP"):
            return self._mlp(z, self._model.top_l)

    def __call__(self, batch: MiniBatch) -> timing.Stages:
        """Makes a timed call."""
        stages = timing.Stages(self._device)
        with torch.inference_mode():
            self.forward(batch, stages)
        return stages


def largest_differences(
    candidates: Mapping[str, Staged], batches: Sequence[MiniBatch], baseline: str, device: str | torch.device
) -> tuple[float, float]:
    """Returns the largest differences of any candidate from the baseline: of outputs, and of embeddings
    relative to the largest value."""
    outputs, embeddings = [], []
    with torch.inference_mode():
        for batch in tqdm(batches, desc="checking outputs", leave=False):
            right = candidates[baseline].forward(batch, timing.Stages(device))
            pooled = candidates[baseline].embeddings(batch)
            for candidate in candidates.values():
                outputs.append((candidate.forward(batch, timing.Stages(device)) - right).abs().max())
                embeddings += map(difference, candidate.embeddings(batch), pooled)
    return largest(outputs), largest(embeddings)


def swap_note(report: recfuse.SwapReport) -> str:
    """Returns a summary of the report of recfuse.swap."""
    return (
        f"recfuse.swap: {len(report.replaced)} replaced, {len(report.fused)} fused, {len(report.left)} left; "
        "a list of tables counts once."
    )
