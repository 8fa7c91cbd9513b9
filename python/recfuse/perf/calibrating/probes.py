"""Probes: small random DLRMs, timed without a profiler, which show the host's cost of operators."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recfuse.nn import FusedEmbeddingBagList

Batch = tuple[Tensor, list[Tensor], list[Tensor], Tensor]
_HASH = 2654435761


@dataclass(frozen=True)
class Dlrm:
    """Sizes of a DLRM.

    Attributes:
        bottom: widths of the bottom MLP from its input on; the last is ``dim``.
        rows: rows of each table.
        dim: elements of a row.
        top: widths of the top MLP after its input.
        pooling: lookups of a bag, for all tables.
        skew: exponent of the uniform numbers from which rows are drawn; 1: uniform.
        dtype: of parameters and dense inputs.
        sparse: whether tables have sparse gradients.
    """

    bottom: tuple[int, ...]
    rows: tuple[int, ...]
    dim: int
    top: tuple[int, ...]
    pooling: int = 1
    skew: float = 1.0
    dtype: str = "float32"
    sparse: bool = True

    def model(self, device: str = "cpu") -> DlrmModel:
        """Return the model."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with torch.device(device):
                return DlrmModel(self)
        finally:
            torch.set_default_dtype(before)

    def batch(self, size: int, seed: int = 0, device: str = "cpu") -> Batch:
        """Return dense features, offsets, indices and labels."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        dense = torch.randn(size, self.bottom[0], generator=generator).to(dtype)
        offsets = [torch.arange(0, size * self.pooling, self.pooling) for _ in self.rows]
        indices = []
        for rows in self.rows:
            uniform = torch.rand(size * self.pooling, generator=generator, dtype=torch.float64)
            indices.append((uniform**self.skew * rows).long().clamp_(max=rows - 1) * _HASH % rows)
        labels = torch.rand(size, 1, generator=generator).to(dtype)
        lists = ([tensor.to(device) for tensor in tensors] for tensors in (offsets, indices))
        return (dense.to(device), *lists, labels.to(device))


class DlrmModel(nn.Module):
    """The model of facebookresearch/dlrm: bottom MLP, sum bags, dot interaction, top MLP."""

    li: Tensor
    lj: Tensor

    def __init__(self, sizes: Dlrm) -> None:
        """Create the model of the given sizes."""
        super().__init__()
        bags = [nn.EmbeddingBag(rows, sizes.dim, mode="sum", sparse=sizes.sparse) for rows in sizes.rows]
        self.emb_l = nn.ModuleList(bags)
        vectors = len(sizes.rows) + 1
        self.bot_l = _mlp(sizes.bottom, False)
        self.top_l = _mlp((sizes.dim + vectors * (vectors - 1) // 2, *sizes.top), True)
        self.register_buffer(
            "li", torch.tensor([i for i in range(vectors) for _ in range(i)]), persistent=False
        )
        self.register_buffer(
            "lj", torch.tensor([j for i in range(vectors) for j in range(i)]), persistent=False
        )

    def apply_emb(
        self, lS_o: Sequence[Tensor], lS_i: Sequence[Tensor], emb_l: Any, v_W_l: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Pool each table."""
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            sparse_offset_group_batch = lS_o[k]
            E = emb_l[k]
            V = E(sparse_index_group_batch, sparse_offset_group_batch, per_sample_weights=None)
            ly.append(V)
        return ly

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        """Return the probability of a click, ``[batch, 1]``."""
        x = self.bot_l(dense)
        pooled = self.apply_emb(offsets, indices, self.emb_l, [])
        t = torch.cat([x, *pooled], dim=1).view(x.shape[0], -1, x.shape[1])
        z = torch.bmm(t, t.transpose(1, 2))[:, self.li, self.lj]
        return self.top_l(torch.cat([x, z], dim=1))  # type: ignore[no-any-return]


class PooledDlrmModel(nn.Module):
    """The same model with all tables in one call of recfuse."""

    def __init__(self, model: DlrmModel) -> None:
        """Take over the tables of a model."""
        super().__init__()
        self.model = model
        self.tables = FusedEmbeddingBagList(list(model.emb_l))  # type: ignore[arg-type]
        model.emb_l = nn.ModuleList()
        model.apply_emb = self._pool  # type: ignore[method-assign]

    def _pool(self, lS_o: Any, lS_i: Any, emb_l: Any, v_W_l: Any) -> list[Tensor]:
        return self.tables.pool(lS_o, lS_i)

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        """Return the probability of a click, ``[batch, 1]``."""
        return self.model(dense, offsets, indices)  # type: ignore[no-any-return]


def _mlp(widths: Sequence[int], sigmoid_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        last = sigmoid_last and number == len(widths) - 2
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid() if last else nn.ReLU()]
    return nn.Sequential(*layers)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


class Step:
    """Calls of a model: inference, or training steps with an optimizer; batches alternate."""

    def __init__(self, model: nn.Module, batches: Iterable[Batch], optimizer: str | None = None) -> None:
        """Use an optimizer of `OPTIMIZERS`; None: inference."""
        self.model, self.batches, self._turn = model, list(batches), 0
        self.optimizer = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())

    def __call__(self) -> None:
        """Run the step on the next batch."""
        self.run(self.batches[self._turn % len(self.batches)])
        self._turn += 1

    def run(self, batch: Batch) -> None:
        """Run the step on a batch."""
        *inputs, labels = batch
        if self.optimizer is None:
            with torch.no_grad():
                self.model(*inputs)
            return
        self.optimizer.zero_grad()
        loss = F.binary_cross_entropy(self.model(*inputs), labels)
        loss.backward()
        self.optimizer.step()


def random_probe(rng: random.Random, number: int) -> tuple[Dlrm, int, str]:
    """Return a small DLRM, a batch and an optimizer; its kernels are shorter than the host's work."""
    dim = rng.choice((16, 32, 64))
    bottom = (rng.choice((13, 32, 64)), *[rng.choice((16, 32, 64)) for _ in range(rng.randint(0, 3))], dim)
    rows = tuple(rng.choice((100, 1000, 5000)) for _ in range((1, 2, 4, 8, 13, 20, 26, 40)[number % 8]))
    top = (*[rng.choice((16, 32, 64)) for _ in range(rng.randint(1, 4))], 1)
    optimizer = ("sgd", "sgd", "adam", "sgd", "adagrad")[number % 5]
    sparse = optimizer != "adam" and number % 7 != 6
    return (
        Dlrm(bottom, rows, dim, top, rng.choice((1, 2, 4)), sparse=sparse),
        rng.choice((8, 16, 32)),
        optimizer,
    )
