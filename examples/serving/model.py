"""A small DLRM, its batches, and the fingerprint of its weights; shared by `export.py` and its checks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ROWS = (40, 1_000, 300, 5_000, 70, 2_000)  # of each table
DENSE, DIM = 4, 16


class DLRM(nn.Module):
    """The names and the shape of facebookresearch/dlrm: `recfuse.swap` fuses the tables of `emb_l`."""

    def __init__(self, seed: int = 0) -> None:
        """Weights depend only on `seed`."""
        super().__init__()
        torch.manual_seed(seed)
        self.bot = nn.Linear(DENSE, DIM)
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for rows in ROWS)
        self.top = nn.Linear((1 + len(ROWS)) * DIM, 1)

    def apply_emb(
        self, lS_o: Tensor, lS_i: Tensor, emb_l: nn.ModuleList, v_W_l: list[Tensor | None]
    ) -> list[Tensor]:
        """Pools each table; `recfuse.swap` replaces the loop of this method by one call."""
        row_weights = [w if w is None else w.gather(0, i) for w, i in zip(v_W_l, lS_i, strict=True)]
        return [
            table(i, o, per_sample_weights=w)
            for table, i, o, w in zip(emb_l, lS_i, lS_o, row_weights, strict=True)
        ]

    def forward(self, dense: Tensor, lS_o: Tensor, lS_i: Tensor) -> Tensor:
        """Probabilities [bags, 1] of dense [bags, 4], offsets [tables, bags], indices [tables, lookups]."""
        pooled = self.apply_emb(lS_o, lS_i, self.emb_l, [None] * len(ROWS))
        return torch.sigmoid(self.top(torch.cat([torch.relu(self.bot(dense)), *pooled], dim=1)))


def batch(bags: int, each: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a random batch of `bags` bags of `each` lookups in every table."""
    random = torch.Generator().manual_seed(seed)
    indices = [torch.randint(rows, (bags * each,), generator=random) for rows in ROWS]
    offsets = torch.arange(0, bags * each, each).repeat(len(ROWS), 1)
    return torch.randn(bags, DENSE, generator=random), offsets, torch.stack(indices)


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Returns a hash of names and bytes, by which a package identifies its weights."""
    text = hashlib.sha256()
    for name in sorted(state):
        text.update(name.encode())
        text.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return text.hexdigest()[:16]
