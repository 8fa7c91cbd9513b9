"""Models with histories: lookups that are padded, joined or used apart."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  # defines the operators
import torch
from torch import Tensor, nn

ROWS = 20


def complete(lengths: Tensor) -> Tensor:
    """Offsets of lengths."""
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)


def pad(rows: Tensor, offsets: Tensor, length: int, value: float = 0.0) -> Tensor:
    return torch.ops.fbgemm.jagged_to_padded_dense(rows, [offsets], [length], value)


def pad_by_torch(rows: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Pad by the operator of nested tensors."""
    return torch.ops.aten._jagged_to_padded_dense_forward(rows, [offsets], [length])


class Padded(nn.Module):
    """Three tables of several dims; the rows of the last are also used apart."""

    def __init__(self, tables: int = 3, sparse: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, 4 + number, sparse=sparse, padding_idx=padding_idx) for number in range(tables)
        )
        self.length = 3

    def forward(self, indices: list[Tensor], lengths: list[Tensor]) -> tuple[Tensor, Tensor]:
        padded = [
            pad(table(own), complete(counts), self.length)
            for table, own, counts in zip(self.tables, indices, lengths, strict=True)
        ]
        return torch.cat(padded, -1) * 2, padded[-1].sum(1)

    def batch(self, bags: int) -> tuple[list[Tensor], list[Tensor]]:
        lengths = [torch.randint(0, 6, (bags,)) for _ in self.tables]
        return [torch.randint(0, ROWS, (int(own.sum()),)) for own in lengths], lengths


class Fixed(nn.Module):
    """Indices ``[batch, tables, length]``: some rows are joined, others used apart."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        self.joined = nn.ModuleList(nn.Embedding(ROWS, 3 + number) for number in range(tables))
        self.apart = nn.ModuleList(nn.Embedding(ROWS, 4) for _ in range(tables))

    def forward(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = [table(indices[:, number]) for number, table in enumerate(self.joined)]
        apart = [table(indices[:, number]) for number, table in enumerate(self.apart)]
        return torch.cat(rows, -1).relu(), torch.stack(apart).amax(0)

    def batch(self, samples: int) -> tuple[Tensor]:
        return (torch.randint(0, ROWS, (samples, len(self.joined), 5)),)
