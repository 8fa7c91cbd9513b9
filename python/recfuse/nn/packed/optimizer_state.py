"""Entries of an optimizer's state of a Parameter, and how rows of several become one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from recfuse.errors import a_type

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Piece(NamedTuple):
    """Rows that a new Parameter takes from an old one."""

    source: int  # which of the old Parameters
    source_row: int
    rows: int
    row: int  # the first in the new Parameter


class Target(NamedTuple):
    """A new Parameter, and what it is made of."""

    parameter: Parameter
    name: str  # as in named_parameters() of the module that owns it
    pieces: list[Piece]


@dataclass(frozen=True)
class Entry:
    """One entry of the state of one old Parameter."""

    value: Any
    kind: str  # "element" (shape of the Parameter), "row" (first dimension its rows), "scalar", or "whole":
    # of a Parameter that has one table before and after, where it may be anything and moves as it is

    def tag(self) -> Hashable:
        """What must be equal in all Parameters that are packed into one."""
        if self.kind == "whole":
            return self.kind
        if not isinstance(self.value, Tensor):
            return self.kind, type(self.value), self.value
        if self.kind == "scalar":
            content: Hashable = (tuple(self.value.shape), *self.value.reshape(-1).tolist())
        else:
            content = (self.value.layout, tuple(self.value.shape[1:]))
        return self.kind, self.value.dtype, self.value.device, content


def kinds_of(value: Any, weight: Tensor) -> list[str]:
    """What an entry of a Parameter's state may be; the first that fits all Parameters is taken."""
    if isinstance(value, _SCALARS):
        return ["scalar"]
    if not isinstance(value, Tensor) or type(value) not in (Tensor, Parameter):
        return []
    same_shape = value.shape == weight.shape
    if value.layout == torch.sparse_coo:
        return ["element"] if same_shape and value.sparse_dim() == 1 else []
    if value.layout != torch.strided:
        return []
    fits = {
        "element": same_shape,
        "row": value.dim() >= 1 and value.shape[0] == weight.shape[0],
        "scalar": value.numel() == 1 and value.dim() <= 1,
    }
    return [kind for kind, fit in fits.items() if fit]


def gathered(target: Target, entries: Any) -> Any:
    """An entry of rows of the old Parameters' ``entries``, zeros between; None where the first has none."""
    parts = [(piece, entries[piece.source]) for piece in sorted(target.pieces, key=lambda p: p.row)]
    first = parts[0][1] if parts else None
    if first is None:
        return None
    value = first.value
    if first.kind == "whole":
        return value
    if first.kind == "scalar":
        return value.clone() if isinstance(value, Tensor) else value
    shape = (target.parameter.shape[0], *value.shape[1:])
    if value.layout == torch.sparse_coo:
        return _gathered_sparse(parts, shape)
    result = value.new_zeros(shape)
    for piece, entry in parts:
        source = entry.value.narrow(0, piece.source_row, piece.rows)
        result.narrow(0, piece.row, piece.rows).copy_(source)
    return result


def _gathered_sparse(parts: Sequence[tuple[Piece, Entry]], shape: tuple[int, ...]) -> Tensor:
    """The sparse rows of several tensors at their new rows; coalesced where all are."""
    rows, values = [], []
    for piece, entry in parts:
        indices = entry.value._indices()
        inside = (indices[0] >= piece.source_row) & (indices[0] < piece.source_row + piece.rows)
        rows.append(indices[:, inside] - piece.source_row + piece.row)
        values.append(entry.value._values()[inside])
    return torch.sparse_coo_tensor(
        torch.cat(rows, dim=1),
        torch.cat(values),
        shape,
        is_coalesced=all(entry.value.is_coalesced() for _, entry in parts),
        check_invariants=False,
    )


def described(value: Any) -> str:
    """A value, for errors."""
    if not isinstance(value, Tensor):
        return a_type(value)
    return f"{a_type(value)} of shape {tuple(value.shape)}, {value.layout}"
